"""What each rank says of itself, and what is wrong with it: the project of lab 00."""

import os
import platform
import socket
import statistics
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from ranklab.engine import device, launch
from ranklab.engine.report import rank_names
from ranklab.projects.clock import finish

SIZES = (8, 8_000, 800_000, 16_000_000)  # bytes of the all-reduces that are timed
SLOW = 1.5  # times the median: named


@dataclass(frozen=True)
class Rank:
    """What one rank says of itself, and what it measured."""

    rank: int
    node: int
    local_rank: int
    host: str
    device: str
    torch: str
    right: bool  # its all-reduce gave the sum
    compute_s: float  # its own time for a fixed matrix product
    link_s: float  # for a message from the rank before it


def roll_call(limit_s=10):
    """Every rank has answered; rank 0 returns the ranks that are here.

    Through the group's store and not by a collective, which could only hang.
    error  RuntimeError on rank 0 that names the ranks missing after `limit_s` seconds
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
    call = store.add(f"roll call/of {rank}", 1)  # each call of the roll has keys of its own
    store.set(f"roll call/{call}/{rank}", "here")
    if rank != 0:
        return None
    end, here = time.monotonic() + limit_s, set()
    while len(here) < size and time.monotonic() < end:
        here |= {r for r in range(size) if store.check([f"roll call/{call}/{r}"])}
        time.sleep(0.01)
    if missing := sorted(set(range(size)) - here):
        raise RuntimeError(f"{rank_names(missing)} of {size} did not answer the roll call within "
                           f"{limit_s:g} s; {rank_names(sorted(here))} did")
    return sorted(here)


def all_reduce_is_right(n=1000):
    """True when the sum over ranks came out right, element by element. Returned on each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = (rank + 1) * torch.arange(n, device=device(), dtype=torch.int64)
    dist.all_reduce(x)
    right = size * (size + 1) // 2 * torch.arange(n, device=device())
    return torch.equal(x, right)


def timed(fn, repeats=5, pick=statistics.median, pause_s=0.0):
    """The median time of `fn()` in seconds, or what `pick` makes of them; with the GPU's work."""
    seconds = []
    for _ in range(repeats + 1):
        time.sleep(pause_s)
        start = time.perf_counter()
        fn()
        finish()
        seconds.append(time.perf_counter() - start)
    return pick(seconds[1:])  # the first one also connects and allocates


def all_reduce_times(sizes=SIZES):
    """[(bytes, seconds)] of all-reduces of these sizes, as this rank sees them."""
    rows = []
    for size in sizes:
        x = torch.ones(size // 4, device=device())
        rows.append((x.nbytes, timed(lambda x=x: dist.all_reduce(x))))
    return rows


def compute_time(width=384, late_s=0.0):
    """This rank's own time for a fixed matrix product; `late_s` emulates a slow machine.

    The best of twenty over half a second: other programs have their share of all in a row, but
    hardly of each.
    """
    a = torch.ones(width, width, device=device())
    return timed(lambda: (a @ a, time.sleep(late_s)), repeats=20, pick=min, pause_s=0.02)


def link_time(n_bytes=2_000_000):
    """The time of a message from the rank before this one, all at once around the ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return 0.0
    out, into = (torch.ones(n_bytes // 4, device=device()) for _ in range(2))

    def shift():
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, out, (rank + 1) % size),
                dist.P2POp(dist.irecv, into, (rank - 1) % size)]):
            work.wait()

    return timed(shift)


def inspect_rank(slow=None, missing=None, limit_s=10):
    """What this rank has to say: (Rank, all-reduce times). `slow`, `missing`: emulate a fault."""
    rank = dist.get_rank()
    if rank == missing:
        time.sleep(limit_s + 2)  # alive, but not at the roll call: like a rank stuck in its loader
    roll_call(limit_s)
    me = Rank(
        rank=rank, node=int(os.environ["GROUP_RANK"]), local_rank=int(os.environ["LOCAL_RANK"]),
        host=socket.gethostname(), device=_device_name(), torch=torch.__version__,
        right=all_reduce_is_right(),
        compute_s=compute_time(late_s=0.05 if rank == slow else 0.0), link_s=link_time())
    return me, all_reduce_times()


def _device_name():
    here = device()
    return torch.cuda.get_device_name(here) if here.type == "cuda" else platform.machine() + " CPU"


def problems(ranks):
    """One sentence for each thing that is wrong: sums, versions, slow ranks, slow links."""
    found = [f"rank {r.rank} on {r.host}: its all-reduce is wrong" for r in ranks if not r.right]
    if len({r.torch for r in ranks}) > 1:
        found.append("torch differs: " + ", ".join(f"rank {r.rank} {r.torch}" for r in ranks))
    median = statistics.median(r.compute_s for r in ranks)
    found += [f"rank {r.rank} on {r.host} computes {r.compute_s / median:.1f} times as long as "
              "the median rank: every step waits for it"
              for r in ranks if r.compute_s > SLOW * median and r.compute_s - median > 0.01]
    return found


def table(ranks):
    """Who lives where, as text."""
    head = f"{'rank':>4} {'node':>4} {'local':>5}  {'host':16} {'device':22} {'sum':5} " \
           f"{'compute':>9} {'link in':>9}"
    lines = [f"{r.rank:4} {r.node:4} {r.local_rank:5}  {r.host[:16]:16} {r.device[:22]:22} "
             f"{'right' if r.right else 'WRONG':5} {r.compute_s * 1e3:6.1f} ms "
             f"{r.link_s * 1e3:6.1f} ms" for r in ranks]
    return "\n".join([head, *lines])


def run(ranks=None, nodes=1, slow=None, missing=None, limit_s=10):
    """The inspection is done; returns {"ranks", "times", "problems"}."""
    seen = launch(inspect_rank, slow, missing, limit_s, ranks=ranks, nodes=nodes,
                  timeout=limit_s + 60)
    everybody = [rank for rank, _ in seen]
    return {"ranks": [asdict(r) for r in everybody], "table": table(everybody),
            "times": seen[0][1], "problems": problems(everybody)}
