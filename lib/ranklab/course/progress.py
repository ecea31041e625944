"""What the learner has done, kept in $RANKLAB_HOME/progress.json (default: .ranklab/)."""

import os
import time
from pathlib import Path

from ranklab.course import labs, records

FILE = "progress.json"
# Of an exercise or prediction. "hints" counts those shown; "cell" is the text that passed; "reason"
# and "advice" are the check's words on the last try that failed.
NEW = {"state": "-", "tries": 0}


def home() -> Path:
    """Return the folder of the learner's own records: $RANKLAB_HOME, or .ranklab/ next to labs/."""
    if "RANKLAB_HOME" in os.environ:
        return Path(os.environ["RANKLAB_HOME"]).expanduser()
    return (labs.repository() or Path.cwd()) / ".ranklab"


def load(folder: Path | None = None) -> dict:
    """Return the records by name; empty where there is no file.

    folder  whose progress.json is read; by default home()
    """
    return records.load((folder or home()) / FILE, _is_good)


def change():
    """Open the records for changes in a `with` block; save them when the block ends."""
    return records.change(home() / FILE, _is_good)


def _is_good(entry):
    return (isinstance(entry, dict) and isinstance(entry.get("state"), str)
            and isinstance(entry.get("tries"), int) and isinstance(entry.get("hints", 0), int)
            and all(isinstance(entry.get(key, ""), str) for key in ("cell", "reason", "advice")))


def record(name, state, cell="", reason="", advice=""):
    """Record the state of an exercise or prediction; a later failed try never undoes a pass.

    cell    the text of the cell that passed
    reason  why the try failed, in a line; advice: the hint of the check about that mistake
    """
    with change() as known:
        entry = known.setdefault(name, dict(NEW))
        entry["tries"] += 1
        if entry["state"] != "passed":
            entry |= {"state": state, "when": time.strftime("%Y-%m-%d %H:%M"),
                      "reason": reason, "advice": advice}
        if cell:
            entry["cell"] = cell
