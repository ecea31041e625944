"""A checkpoint file that is whole at any moment: written beside its place, then renamed.

ranklab.files has the same for text; checkpoint/ has it for the files of many ranks, whose index is
renamed into place last.
"""

import os
from pathlib import Path

import torch


def atomic_save(state, path):
    """The file at `path` holds `state`, for torch.load; at any moment it is the old one or the new.

    Also when the process is killed in the middle, or when the power fails: the bytes are on the
    disk (os.fsync) before the name is changed, and then the name is, too (os.fsync of the folder).
    It is written in the folder of `path`, for another may be another disk. After a save nothing
    else is left there, not even of a save that was killed before, and no file is open.
    One process at a time saves to a path; others save to other paths of the same folder meanwhile.
    path   a str or a Path, also "name.pt" alone
    error  a full disk, a state that can't be pickled: raised, and the folder is as it was
    lab    14
    """
    path = Path(path)
    # In the same folder: a rename to another file system would copy. The same name each time: the
    # next save writes over what a killed one has left.
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()  # from Python's buffer to the system
            os.fsync(file.fileno())  # from the system to the disk
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
