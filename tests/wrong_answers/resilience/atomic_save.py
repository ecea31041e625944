"""Lab 14: checkpoints that are torn, lost or left behind."""

import io
import os
import shutil
import tempfile
from pathlib import Path

import torch
from mutants import mutant

from ranklab.resilience import atomic_save

BESIDE = 'part = path.with_name(f".{path.name}.part")'
FLUSH = "            file.flush()  # from Python's buffer to the system\n"
FSYNC = "            os.fsync(file.fileno())  # from the system to the disk\n"
AFTER = ("    folder = os.open(path.parent, os.O_RDONLY)\n    try:\n        os.fsync(folder)\n"
         "    finally:\n        os.close(folder)\n")
RENAME = "        os.replace(part, path)\n"
MORE = {"io": io, "shutil": shutil, "tempfile": tempfile}

WRONG = [mutant(atomic_save, *edits, says=says, called=called, **MORE)
         for *edits, says, called in (
    (BESIDE, "part = path", "written over in place|torn", "in_place"),
    (BESIDE, 'part = path.with_suffix(".tmp")', "at once", "with_suffix"),
    (BESIDE, 'part = path.with_name("checkpoint.part")', "at once", "one_name_for_all"),
    (BESIDE, 'part = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")',
     "and saved again: the folder has", "a_new_name_each_time"),
    (BESIDE, 'part = path.with_name(f".{path.name}.{os.getpid()}.part")',
     "and saved again: the folder has", "name_of_the_process"),
    (BESIDE, "part = Path(tempfile.mkdtemp(), path.name)", "from another folder", "another_folder"),
    (FLUSH, "", "torch.save(state, file)", "torch.save(state, whole := io.BytesIO())\n"
     "            whole.seek(0)\n            shutil.copyfileobj(whole, file, 1000)",
     "bytes are there at os.fsync", "not_flushed"),
    (FSYNC, "", "the file is never synced", "not_synced"),
    (FSYNC, "", RENAME, f"{RENAME}        with open(path, 'rb') as done:\n"
     "            os.fsync(done.fileno())\n", "synced after it was renamed", "synced_later"),
    (AFTER, "", "the folder is never synced", "folder_not_synced"),
    (AFTER, "", RENAME, AFTER.replace("\n    ", "\n        ").replace("    f", "        f", 1)
     + RENAME, "synced before the name changes", "folder_synced_before"),
    (RENAME, "        path.unlink(missing_ok=True)\n        os.rename(part, path)\n",
     "killed before os.rename.* not there", "removed_first"),
    (RENAME, "        shutil.copyfile(part, path)\n        part.unlink()\n",
     "written over in place", "copied"),
    ("        part.unlink(missing_ok=True)\n", "        pass\n", "full .*the folder has",
     "left_after_an_error"),
    ("        part.unlink(missing_ok=True)\n        raise\n",
     "        part.unlink(missing_ok=True)\n        return\n", "nothing is raised",
     "silent"),
    ("torch.save(state, file)", "torch.save(dict(state), file)", "raised", "dicts_only"),
    (AFTER, "    os.fsync(os.open(path.parent, os.O_RDONLY))\n", "8 more files are open",
     "folder_left_open"),
    ("    path = Path(path)\n", "", "path may be a str", "path_only"),
)]


def atomic_save__cleans_up_all(state, path):
    """at once"""
    path = Path(path)
    for old in path.parent.glob("*.part"):
        old.unlink()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except Exception:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
