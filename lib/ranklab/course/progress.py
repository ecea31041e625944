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


def load() -> dict:
    """What is recorded; nothing where there is no file, or one that can't be read."""
    try:
        records = json.loads(_file().read_text())
        return {name: entry for name, entry in records.items()
                if isinstance(entry["state"], str) and isinstance(entry["tries"], int)}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


def _file():
    return home() / "progress.json"


@contextlib.contextmanager
def change():
    """Inside, the records can be changed; afterwards they are saved, whole or not at all.

    Two notebooks may do so at once. Where nothing can be written, the lab goes on.
    """
    with contextlib.ExitStack() as stack:
        try:
            home().mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(home() / "lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            yield load()
            _not_kept(error)
            return
        records = load()
        yield records
        try:
            new = _file().with_suffix(".new")
            new.write_text(json.dumps(records, indent=1))
            os.replace(new, _file())
        except OSError as error:
            _not_kept(error)


def _not_kept(error):
    print(f"(progress is not kept: {error}. Set RANKLAB_HOME to a folder you can write.)")


def record(name, state):
    """The state of an exercise or prediction is kept; a pass is never lost by a later try."""
    with change() as records:
        entry = records.setdefault(name, {"state": "-", "tries": 0})
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
