"""Files that are whole at any moment: written beside their place, then renamed."""

import contextlib
import os
from pathlib import Path


def part_of(path):
    """Where this process writes what will be the file at `path`."""
    return Path(path).with_name(f".{Path(path).name}.{os.getpid()}.part")


@contextlib.contextmanager
def whole_file(path):
    """The path to write to in the block; after it `path` is that file.

    An error, or the end of the process, leaves what was there.
    """
    part = part_of(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path, text):
    """The file at `path` holds `text`; an interrupted write leaves what was there."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")
