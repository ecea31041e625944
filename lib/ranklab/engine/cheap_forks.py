"""Make forks of this process cheap: they copy fewer page-table entries, and touch fewer pages."""

import contextlib
import ctypes
import gc
import re
import sys
from pathlib import Path

MADV_COLLAPSE = 25  # <linux/mman.h>, since Linux 6.1
HUGE = 1 << 21  # bytes of a huge page, on x86 and on ARM with pages of 4 KiB


@contextlib.contextmanager
def cheap_forks():
    """Make modules imported inside the block slow down later forks as little as possible.

    The garbage collector never visits them: the import takes a fifth less time, and a collection in
    a fork copies none of their pages. On Linux their memory is in huge pages: a fork copies one
    table entry for each, not 512, which halves the system time of a rank (23 ms to 11 ms).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if sys.platform == "linux":
            _into_huge_pages()


def _into_huge_pages():
    """Move our own memory into huge pages, if the kernel has enough; nothing depends on it."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        region = re.match(r"(\w+)-(\w+) rw-p \w+ 00:00 0 +(\[heap\])?$", line)
        if region:
            first, end = -(-int(region[1], 16) // HUGE), int(region[2], 16) // HUGE
            for page in range(first, end):
                libc.madvise(ctypes.c_void_p(page * HUGE), ctypes.c_size_t(HUGE), MADV_COLLAPSE)
