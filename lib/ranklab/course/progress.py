"""What the learner has done, kept in $RANKLAB_HOME/progress.json (default: .ranklab/)."""

import os
import time
from pathlib import Path

from ranklab.course import labs, records

# Of an exercise or prediction. "hints" counts those shown; "cell" is the text that passed.
NEW = {"state": "-", "tries": 0}


def home() -> Path:
    """The folder of the learner's own records: $RANKLAB_HOME, or .ranklab/ beside labs/."""
    if "RANKLAB_HOME" in os.environ:
        return Path(os.environ["RANKLAB_HOME"]).expanduser()
    return (labs.repository() or Path.cwd()) / ".ranklab"


def load() -> dict:
    """What is recorded, by name; nothing where there is no file."""
    return records.load(_file(), _is_good)


def change():
    """Inside, the records can be changed; afterwards they are saved."""
    return records.change(_file(), _is_good)


def _file():
    return home() / "progress.json"


def _is_good(entry):
    return (isinstance(entry, dict) and isinstance(entry.get("state"), str)
            and isinstance(entry.get("tries"), int) and isinstance(entry.get("hints", 0), int)
            and isinstance(entry.get("cell", ""), str))


def record(name, state, cell=""):
    """Keep the state of an exercise or prediction; a pass is never lost by a later try.

    cell  the text of the cell that passed
    """
    with change() as known:
        entry = known.setdefault(name, dict(NEW))
        entry["tries"] += 1
        if entry["state"] != "passed":
            entry["state"] = state
            entry["when"] = time.strftime("%Y-%m-%d %H:%M")
        if cell:
            entry["cell"] = cell
