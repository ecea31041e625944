"""Print what a test on four ranks costs, and a notebook's cell on four ranks; by us and by others.

A part of `make bench`. What is not installed is left out: expecttest (torch's test classes import
it), ipyparallel, jupyter-distributed. Each round runs all ways in turn; nothing is asserted.
"""
import asyncio
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from jupyter_client.manager import start_new_kernel

ROUNDS = 3
TESTS = """
import pytest, torch, torch.distributed as dist

def mean():
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x)
    assert x == 6

def spawned(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    mean()
    dist.destroy_process_group()

def test_ranks_first(ranks):
    ranks(mean)

def test_ranks_later(ranks):
    ranks(mean)

@pytest.mark.ranks(4)
def test_ranks_mark():
    mean()

def test_spawn(tmp_path):
    torch.multiprocessing.spawn(spawned, (str(tmp_path / "store"),), nprocs=4)
"""
FRESH_EACH = TESTS + """
from torch.testing._internal.common_distributed import MultiProcessTestCase

class TestEach(MultiProcessTestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_MultiProcessTestCase(self):
        spawned(self.rank, self.file_name)
"""
KEPT = TESTS.partition("def spawned")[0] + """
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class TestKept(MultiProcContinuousTest):
    world_size = 4

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_1_MultiProcContinuousTest_first(self):
        mean()

    def test_2_MultiProcContinuousTest_later(self):
        mean()

    def test_3_MultiProcContinuousTest_last(self):
        mean()
"""
IMPORTS = "import torch, torch.distributed as dist"
SUM = "x = torch.ones(1)\ndist.all_reduce(x)\nx"
GROUP = IMPORTS + """
dist.init_process_group("gloo", store=dist.FileStore({!r}, 4), rank={}, world_size=4)
"""


def is_here(module):
    here = importlib.util.find_spec(module) is not None
    if not here:
        print(f"{module} is not installed: what needs it is left out")
    return here


def tests(folder, text):
    """Run pytest once; return {name of the test: its seconds, with what is set up for it}."""
    path, report = Path(folder, "test_cost.py"), Path(folder, "report.xml")
    path.write_text(text)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "ranklab.pytest_plugin",
                           "-p", "no:cacheprovider", f"--junitxml={report}", path],
                          cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout)
    return {case.get("name"): float(case.get("time"))
            for case in ElementTree.parse(report).iter("testcase")}


def cells_of(first, later):
    """Return a kernel's seconds for its first cell with a sum of four ranks, and for one more sum.
    """
    manager, client = start_new_kernel(stderr=subprocess.DEVNULL)
    try:
        client.execute_interactive(IMPORTS, timeout=60)
        return [timed(client, first), timed(client, later)]
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def timed(client, cells):
    started = time.perf_counter()
    for cell in cells:
        reply = client.execute_interactive(cell, timeout=120, output_hook=lambda message: None)
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{cell}\n{reply['content']}")
    return time.perf_counter() - started


def by_ranks(store):
    return cells_of(["%load_ext ranklab", f"%%ranks 4\n{SUM}"], [f"%%ranks 4\n{SUM}"])


def by_ipyparallel(store):
    start = "import ipyparallel\nipyparallel.Cluster(n=4, log_level=50).start_and_connect_sync()"
    group = GROUP.format(store, "rank")
    start += "[:].scatter('rank', range(4), flatten=True).get()"
    return cells_of([start, f"%%px\n{group}{SUM}"], [f"%%px\n{SUM}"])


def by_jupyter_distributed(store):
    return asyncio.run(_in_a_group())


async def _in_a_group():
    from jupyter_distributed.kernel_group import DistributedKernelGroup

    group, seconds = DistributedKernelGroup(4), []
    try:
        for cell in (f"{IMPORTS}\ndist.init_process_group('gloo')\n{SUM}", SUM):
            started = time.perf_counter()
            await group.start()
            done = await group.execute(cell)
            seconds.append(time.perf_counter() - started)
            if "tensor([4.])" not in str(done):
                raise RuntimeError(f"{cell}\n{done}")
    finally:
        await group.shutdown()
    return seconds


def main():
    ways = {"%%ranks": by_ranks}
    files = [FRESH_EACH, KEPT] if is_here("expecttest") else [TESTS]
    if is_here("ipyparallel"):
        ways["ipyparallel"] = by_ipyparallel
    if is_here("jupyter_distributed"):
        ways["jupyter-distributed"] = by_jupyter_distributed
    of_tests, of_cells = {}, {}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            for file in files:
                for name, seconds in tests(folder, file).items():
                    of_tests.setdefault(name, []).append(seconds)
            for name, way in ways.items():
                of_cells.setdefault(name, []).append(way(f"{folder}/{name}"))
    print(f"a test of one all-reduce on 4 ranks, median of {ROUNDS}; load {os.getloadavg()[0]:.1f}")
    for name, seconds in of_tests.items():
        print(f"    {name:42} {statistics.median(seconds):7.2f} s")
    print("a notebook's cells: the first all-reduce of 4 ranks, with all that starts; a later one")
    for name, seconds in of_cells.items():
        first, later = map(statistics.median, zip(*seconds))
        print(f"    {name:42} {first:7.2f} s {later:7.2f} s")


if __name__ == "__main__":
    main()
