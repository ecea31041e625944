"""What is imported before a fork is left alone by the collector, and lies in huge pages."""

import ctypes
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ranklab.engine.cheap_forks import HUGE, MADV_COLLAPSE

PROGRAM = """
import gc
from pathlib import Path
from ranklab.engine.cheap_forks import cheap_forks

with cheap_forks():
    assert not gc.isenabled()
    kept = [[n] for n in range(400_000)]
print(gc.isenabled(), gc.get_freeze_count() > 400_000, kept == [[n] for n in range(400_000)])
print(Path("/proc/self/smaps_rollup").read_text())
"""


def can_collapse():
    """True where this kernel puts memory into huge pages when asked."""
    memory = mmap.mmap(-1, 2 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    page = ctypes.c_void_p(-(-first // HUGE) * HUGE)
    ctypes.memset(page, 1, HUGE)
    return ctypes.CDLL(None).madvise(page, ctypes.c_size_t(HUGE), MADV_COLLAPSE) == 0


def test_the_collector_lets_what_came_inside_be_and_goes_on():
    printed = subprocess.run([sys.executable, "-c", PROGRAM.partition("print(Path")[0]],
                             capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed == "True True True\n"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists() or not can_collapse(),
                    reason="needs Linux 6.1 with huge pages")
def test_its_memory_lies_in_huge_pages():
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True,
                             timeout=60, check=True).stdout
    whole, huge = (int(re.search(rf"{name}: +(\d+) kB", printed)[1])
                   for name in ("Anonymous", "AnonHugePages"))
    assert huge > whole / 8, f"{huge:,} of {whole:,} kB"
