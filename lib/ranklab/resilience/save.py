"""A checkpoint file that is complete at any moment: written under a temporary name, then renamed.

ranklab.basics.files does the same for text; checkpoint/ does it for the files of many ranks, and
renames their index last.
"""

import os
from pathlib import Path

import torch


def atomic_save(state, path):
    """Save `state` at `path` for torch.load; the file there is always the old one or the new one.

    This holds even if the process is killed during the save, or the power fails: the bytes are on
    the disk (os.fsync) before the name changes, and then the new name is on the disk as well
    (os.fsync of the folder).
    Write in the folder of `path`, because another folder may be on another disk.
    After a save no temporary file is left there, not even from an earlier save that was killed,
    and no file is open.
    One process at a time saves to a path. Others may save to other paths in the same folder.
    path: a str or a Path, perhaps only "name.pt".
    Raises: the error of a full disk, or of a state that can't be pickled; the folder is as before.
    Lab: 14
    """
    path = Path(path)
    # In the same folder, because a rename can't cross file systems. The same name each time, so
    # that the next save overwrites the leftovers of a killed one.
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
