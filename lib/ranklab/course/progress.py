"""What the learner has done, kept in $RANKLAB_HOME/progress.json (default: .ranklab/)."""

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path

from ranklab.course import labs


def home() -> Path:
    """The folder of the learner's own records: $RANKLAB_HOME, or .ranklab/ beside labs/."""
    if "RANKLAB_HOME" in os.environ:
        return Path(os.environ["RANKLAB_HOME"]).expanduser()
    return (labs.repository() or Path.cwd()) / ".ranklab"


def load(file="progress.json") -> dict:
    """What is recorded; empty where nothing is, or where the file can't be read."""
    try:
        return json.loads((home() / file).read_text())
    except (OSError, ValueError):
        return {}


@contextlib.contextmanager
def change(file="progress.json"):
    """Inside, the recorded dict can be changed; afterwards it is saved, whole or not at all."""
    with _locked() as writable:
        records = load(file)
        yield records
        if writable:
            new = home() / f"{file}.new"
            new.write_text(json.dumps(records, indent=1))
            os.replace(new, home() / file)


@contextlib.contextmanager
def _locked():
    """Inside, nobody else changes the records: two notebooks may record at once.

    False, and one sentence, where the folder can't be written: the lab goes on.
    """
    try:
        home().mkdir(parents=True, exist_ok=True)
        lock = open(home() / "lock", "w")
    except OSError as error:
        print(f"(progress is not kept: {error}. Set RANKLAB_HOME to a folder you can write.)")
        yield False
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


def record(name, state):
    """The state of an exercise or prediction is kept; a pass is never lost by a later try."""
    with change() as records:
        entry = records.setdefault(name, {"state": state, "tries": 0})
        entry["tries"] += 1
        if entry["state"] != "passed":
            entry["state"] = state
            entry["when"] = time.strftime("%Y-%m-%d %H:%M")


def status() -> str:
    """A table: each written lab, its exercises and predictions, and where the learner stands."""
    records, lines = load(), []
    for stem in labs.written():
        checks = labs.checks_of(stem)
        names = [item.name for item in (*checks.EXERCISES, *checks.PREDICTIONS)]
        passed = sum(records.get(name, {}).get("state") == "passed" for name in names)
        lines.append(f"{stem:24} {passed:2} of {len(names)}")
        for name in names:
            entry = records.get(name, {"state": "-", "tries": 0})
            tries = f"{entry['tries']} tries" if entry["tries"] else ""
            lines.append(f"    {name:28} {entry['state']:16} {tries}".rstrip())
    return "\n".join(lines)
