"""A file of records, which several notebooks and terminals change at once without losing any.

It is JSON: one record for each name. Nothing here raises because of the disk: where nothing can be
written, a lab continues, and the records last as long as the process.
"""

import contextlib
import json
import os

from ranklab.basics.files import write_whole

_unwritten = {}  # path -> the records of this process, where its folder can't be written


def load(path, is_good):
    """Load the records at `path` that `is_good` accepts; first set aside whatever else is there."""
    records, is_whole = _read(path, is_good)
    if not is_whole and path not in _unwritten:
        with change(path, is_good) as records:
            pass
    return records


@contextlib.contextmanager
def change(path, is_good):
    """Yield the records for changes; save them when the block ends, whole or not at all."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            wait_for(stack.enter_context(open(path.parent / "lock", "w")))
        except OSError as error:
            records, _ = _read(path, is_good)
            yield records
            _keep_here(path, records, error)
            return
        records, is_whole = _read(path, is_good)
        yield records
        try:
            if not is_whole:
                _set_aside(path, len(records))
            write_whole(path, json.dumps(records, indent=1))
            _unwritten.pop(path, None)
        except OSError as error:
            _keep_here(path, records, error)


def _read(path, is_good):
    """Return (the good records, True when there is nothing else in the file)."""
    pending = _unwritten.get(path, {})
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return dict(pending), True
    except (OSError, ValueError, RecursionError):
        return dict(pending), False
    records = content if isinstance(content, dict) else {}
    good = {name: record for name, record in records.items() if is_good(record)}
    return {**good, **pending}, good == content


def _set_aside(path, count):
    bad = path.with_suffix(".bad.json")
    os.replace(path, bad)
    print(f"({path} could not be read whole: {count} records are kept, the old file is {bad.name})")


def _keep_here(path, records, error):
    _unwritten[path] = records
    print(f"({path.stem} is not kept: {error}. Set RANKLAB_HOME to a folder you can write.)")


def wait_for(lock):
    """Lock the open file `lock`; others that ask for the lock wait until the file is closed."""
    try:
        import fcntl  # not on Windows, where launch is to say so itself
    except ImportError:
        return
    fcntl.flock(lock, fcntl.LOCK_EX)
