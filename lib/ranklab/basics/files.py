"""Files that are complete at any moment: written next to their final path, then renamed."""

import contextlib
import os
from pathlib import Path


def part_of(path):
    """Return the temporary path at which this process writes the future file `path`."""
    return Path(path).with_name(f".{Path(path).name}.{os.getpid()}.part")


@contextlib.contextmanager
def whole_file(path):
    """Yield a temporary path to write to; after the block, rename that file to `path`.

    If the block raises or the process dies, the old file stays.
    """
    part = part_of(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path, text):
    """Write `text` to the file at `path`; if the write is interrupted, the old file stays."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")
