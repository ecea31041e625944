"""What each rank reports about itself, and what is wrong with it: the project of lab 00."""

import os
import platform
import socket
import statistics
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from ranklab.basics.options import number, option
from ranklab.engine import device, launch
from ranklab.engine.report import rank_names
from ranklab.projects.authors import authors
from ranklab.projects.clock import finish
from ranklab.projects.command import ranks_to_come
from ranklab.projects.runner import OnNodes
from ranklab.ranks import ring_shift, roll_call

SIZES = (8, 8_000, 800_000, 16_000_000)  # bytes of the all-reduces that are timed
SLOW = 1.5  # times the median: named
PARTS = {"roll_call": roll_call, "ring_shift": ring_shift}  # those that may be a learner's


@dataclass(frozen=True)
class Rank:
    """One rank's report about itself, and its measurements."""

    rank: int
    node: int
    local_rank: int
    host: str
    device: str
    torch: str
    right: bool  # its all-reduce gave the sum
    compute_s: float  # its own time for a fixed matrix product
    link_s: float  # for a message from the rank before it


@dataclass(frozen=True)
class Options(OnNodes):
    """The command's options."""

    slow: int | None = option(None, "emulate: this rank computes slowly", kind=number(least=0))
    missing: int | None = option(None, "emulate: this rank does not answer", kind=number(least=0))
    limit_s: float = option(10, "seconds for the roll call", flag="limit",
                            kind=number(float, above=0, most=86400))


def answer_the_roll(limit_s=10, roll_call=roll_call):
    """Wait until every rank has called, for `limit_s` seconds at most.

    Raises RuntimeError with the missing ranks, on each rank that has called.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    call = store.add(f"roll call/of {rank}", 1)  # each call of the roll has keys of its own
    missing = roll_call(dist.PrefixStore(f"roll call/{call}", store), rank, size, limit_s)
    if not missing:
        return
    callers = sorted(set(range(size)) - set(missing))
    if rank != callers[0]:
        time.sleep(1)  # one rank speaks, and ends the job for all
    raise RuntimeError(f"{rank_names(missing)} of {size} did not answer the roll call within "
                       f"{limit_s:g} s; {rank_names(callers)} did")


def all_reduce_is_right(n=1000):
    """Return whether the sum over ranks is correct on this rank, in every element."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = (rank + 1) * torch.arange(n, device=device(), dtype=torch.int64)
    dist.all_reduce(x)
    right = size * (size + 1) // 2 * torch.arange(n, device=device())
    return torch.equal(x, right)


def timed(fn, repeats=5, pick=statistics.median, pause_s=0.0):
    """Return the median time of `fn()` in seconds, or another `pick`, including the GPU's work."""
    seconds = []
    for _ in range(repeats + 1):
        time.sleep(pause_s)
        start = time.perf_counter()
        fn()
        finish()
        seconds.append(time.perf_counter() - start)
    return pick(seconds[1:])  # the first one also connects and allocates


def all_reduce_times(sizes=SIZES):
    """Return [(bytes, seconds)] of all-reduces of these sizes, as measured on this rank."""
    rows = []
    for size in sizes:
        x = torch.ones(size // 4, device=device())
        rows.append((x.nbytes, timed(lambda x=x: dist.all_reduce(x))))
    return rows


def compute_time(width=384, late_s=0.0):
    """Return this rank's own time for a fixed matrix product; `late_s` emulates a slow machine.

    The best of twenty over half a second: another program may slow some of them down, but not all.
    """
    a = torch.ones(width, width, device=device())
    return timed(lambda: (a @ a, time.sleep(late_s)), repeats=20, pick=min, pause_s=0.02)


def link_time(n_bytes=2_000_000, ring_shift=ring_shift):
    """Return the time of a message from the previous rank, while all ranks send around the ring."""
    x = torch.ones(n_bytes // 4, device=device())
    return timed(lambda: ring_shift(x)) if dist.get_world_size() > 1 else 0.0


def inspect_rank(slow, missing, limit_s, n_bytes, roll_call, ring_shift):
    """Return (Rank, all-reduce times) of this rank; `slow` and `missing` emulate a fault."""
    rank = dist.get_rank()
    if rank == missing:
        time.sleep(limit_s + 2)  # alive, but not at the roll call: like a rank stuck in its loader
    answer_the_roll(limit_s, roll_call)
    result = Rank(
        rank=rank, node=int(os.environ["GROUP_RANK"]), local_rank=int(os.environ["LOCAL_RANK"]),
        host=socket.gethostname(), device=_device_name(), torch=torch.__version__,
        right=all_reduce_is_right(),
        compute_s=compute_time(late_s=0.05 if rank == slow else 0.0),
        link_s=link_time(n_bytes, ring_shift))
    return result, all_reduce_times()


def _device_name():
    chip = device()
    return torch.cuda.get_device_name(chip) if chip.type == "cuda" else platform.machine() + " CPU"


def problems(ranks):
    """Return a sentence for each thing that is wrong: sums, versions, slow ranks."""
    faults = [f"rank {r.rank} on {r.host}: its all-reduce is wrong" for r in ranks if not r.right]
    if len({r.torch for r in ranks}) > 1:
        faults.append("torch differs: " + ", ".join(f"rank {r.rank} {r.torch}" for r in ranks))
    median = statistics.median(r.compute_s for r in ranks)
    faults += [f"rank {r.rank} on {r.host} computes {r.compute_s / median:.1f} times as long as "
               "the median rank: every step waits for it"
               for r in ranks if r.compute_s > SLOW * median and r.compute_s - median > 0.01]
    return faults


def table(ranks):
    """Return as text where each rank runs."""
    lines = [f"{'rank':>4} {'node':>4} {'local':>5}  {'host':16} {'device':22} {'sum':5} "
             f"{'compute':>9} {'link in':>9}"]
    lines += [f"{r.rank:4} {r.node:4} {r.local_rank:5}  {r.host[:16]:16} {r.device[:22]:22} "
              f"{'right' if r.right else 'WRONG':5} {r.compute_s * 1e3:6.1f} ms "
              f"{r.link_s * 1e3:6.1f} ms" for r in ranks]
    return "\n".join(lines)


def report(results):
    """Format the results of `run` as text."""
    times = [f"all-reduce {size:>10,} bytes  {seconds * 1e3:8.2f} ms"
             for size, seconds in results["times"]]
    verdict = results["problems"] or ["all ranks are here, right, and alike"]
    return "\n".join([results["table"], *times, *verdict])


def run(ranks=None, nodes=1, slow=None, missing=None, limit_s=10, n_bytes=2_000_000, **functions):
    """Inspect all ranks; return {"ranks", "table", "times", "problems"}.

    n_bytes    size of the message over each link
    functions  a learner's own roll_call, ring_shift
    """
    for name, rank in (("slow", slow), ("missing", missing)):
        if rank is not None and rank >= ranks_to_come(ranks):
            raise ValueError(f"--{name} {rank} is not one of the {ranks_to_come(ranks)} ranks")
    parts = PARTS | functions
    results = launch(inspect_rank, slow, missing, limit_s, n_bytes, *parts.values(), ranks=ranks,
                     nodes=nodes, timeout=limit_s + 60)
    rows = [rank for rank, _ in results]
    return {"ranks": [asdict(row) for row in rows], "table": f"{authors(parts)}\n{table(rows)}",
            "times": results[0][1], "problems": problems(rows)}
