"""Files that are whole at any moment: written beside their place, then renamed."""

import contextlib
import os
from pathlib import Path


def part_of(path):
    """Return where this process writes what will be the file at `path`."""
    return Path(path).with_name(f".{Path(path).name}.{os.getpid()}.part")


@contextlib.contextmanager
def whole_file(path):
    """Give a path to write to in the block; after it, rename that file to `path`.

    An error, or the end of the process, leaves the old file.
    """
    part = part_of(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path, text):
    """Write `text` to the file at `path`; an interrupted write leaves the old file."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")
