"""The time of collectives on real ranks, ours and the backend's: the project of lab 02."""

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab import collectives as ours
from ranklab.basics.options import comma_list, number, option, positive
from ranklab.engine import device, launch
from ranklab.peers import mpi
from ranklab.projects.authors import authors_of, by_learner
from ranklab.projects.clock import finish, wait_for_all
from ranklab.projects.runner import Drawn, OnNodes, Shown

DTYPES = {"float": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}
BUILT = {  # what lab 02 builds: {verb: {algorithm: its function in ranklab.collectives}}
    "all_reduce": {"ring": "ring_all_reduce", "recursive_doubling": "recursive_doubling",
                   "server": "parameter_server", "hierarchical": "hierarchical_all_reduce"},
    "reduce_scatter": {"ring": "ring_reduce_scatter"},
    "all_gather": {"ring": "ring_all_gather"},
    "broadcast": {"tree": "tree_broadcast"},
    "all_to_all": {"any_lengths": "all_to_all_v"},
}
VERBS = tuple(BUILT)


def size_of(text):
    """Parse a size in bytes: "64K" is 65536, by powers of two, as in nccl-tests."""
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper())
    value = number(float, above=0)(text[:-1] if scale else text)
    return number(least=1, most=2**40)(int(value * (scale or 1)))


@dataclass(frozen=True)
class Options(OnNodes, Drawn):
    """The command's options."""

    verbs: tuple = option(VERBS, "which of them, with commas", kind=comma_list(choices=VERBS))
    sizes: tuple = option((2**10, 2**14, 2**18, 2**22), "bytes, as 64M, with commas",
                          kind=comma_list(size_of))
    max: int | None = option(None, "up to this size in steps of 4, from 1K", kind=size_of)
    kind: str = option("float", "of the elements", DTYPES, flag="type")
    iters: int = option(5, "times, of which the median counts", kind=positive)
    mpi: bool = option(False, "under mpirun: MPI's own collectives")

    def __post_init__(self):
        super().__post_init__()
        if not self.all_sizes():
            raise ValueError(f"--max {self.max} bytes is less than 1K, the first size")
        if self.figure and ("all_reduce" not in self.verbs or len(self.all_sizes()) < 2):
            raise ValueError("--figure draws all_reduce of two sizes or more: see --verbs, --sizes")

    def all_sizes(self):
        """Return the sizes in bytes."""
        if not self.max:
            return self.sizes
        return [4**k * 1024 for k in range(20) if 4**k * 1024 <= self.max]


class Row(NamedTuple):
    """One line of the table."""

    verb: str
    algorithm: str
    size: int  # bytes
    count: int  # elements
    type: str
    time: float  # seconds
    wrong: int  # elements that are not what they should be, over all ranks
    ranks: int
    of_learner: bool = False  # by a learner's function

    @property
    def algbw(self):
        """Bytes per second."""
        return self.size / self.time

    @property
    def busbw(self):
        return self.algbw * ours.bus_factor(self.verb, self.ranks)


def algorithms(verb, nodes, groups, functions):
    """Return {name: function from the whole tensor x to this rank's result} for a verb.

    x has R equal parts.
    """
    R, rank = dist.get_world_size(), dist.get_rank()

    def backend(x):
        n = x.numel() // R if verb == "reduce_scatter" else x.numel()
        out = x.clone() if verb in ("all_reduce", "broadcast") else x.new_empty(n)
        fill = {"all_reduce": lambda: dist.all_reduce(out),
                "reduce_scatter": lambda: dist.reduce_scatter_single(out, x),
                "all_gather": lambda: dist.all_gather_single(out, x.tensor_split(R)[rank]),
                "broadcast": lambda: dist.broadcast(out, 0),
                "all_to_all": lambda: dist.all_to_all_single(out, x)}
        fill[verb]()
        return out

    ways = {name: functions.get(each, getattr(ours, each)) for name, each in BUILT[verb].items()}
    if verb == "all_reduce":
        hierarchical = ways.pop("hierarchical")
        if nodes > 1:
            ways["hierarchical"] = lambda x: hierarchical(x, *groups)
    elif verb == "all_gather":
        ring = ways["ring"]
        ways["ring"] = lambda x: ring(x.tensor_split(R)[rank])
    elif verb == "all_to_all":
        any_lengths = ways["any_lengths"]
        ways = {"pairs": lambda x: ours.all_to_all(x.view(R, -1)).flatten(),
                "any_lengths": lambda x: torch.cat(list(any_lengths([*x.tensor_split(R)])))}
    return {**ways, dist.get_backend(): backend}


def expected(verb, x_of, R, rank):
    """Compute this rank's correct result without any message."""
    if verb == "broadcast":
        return x_of(0)
    if verb == "all_gather":
        return torch.cat([x_of(r).tensor_split(R)[r] for r in range(R)])
    if verb == "all_to_all":
        return torch.cat([x_of(r).tensor_split(R)[rank] for r in range(R)])
    whole = sum(x_of(r) for r in range(R))
    return whole if verb == "all_reduce" else whole.tensor_split(R)[rank]


def measure(verbs, sizes, kind, iters, nodes, functions):
    """Time the verbs and check their results, as this rank sees them.

    Returns: [(verb, algorithm, bytes, elements, median seconds, wrong elements)]
    """
    R, rank, dtype = dist.get_world_size(), dist.get_rank(), DTYPES[kind]
    groups = ours.node_groups(R // nodes) if nodes > 1 else ()
    rows = []
    for verb in verbs:
        table = algorithms(verb, nodes, groups, functions)
        for size in sizes:
            n = max(size // dtype.itemsize // R, 1) * R

            def x_of(r, n=n):  # whole numbers, exact in bfloat16 too
                return (torch.arange(n, device=device()) % 7 + r % 3).to(dtype)

            x, right = x_of(rank), expected(verb, x_of, R, rank)
            seconds, wrong = _interleaved(table, x, right, iters)
            rows += [(verb, name, n * dtype.itemsize, n, seconds[name], wrong[name])
                     for name in table]
    return rows


def _interleaved(table, x, right, iters):
    """Run all in turn, `iters` times; return ({name: median seconds}, {name: wrong elements})."""
    times, wrong = {name: [] for name in table}, {}
    for _ in range(iters + 1):
        for name, fn in table.items():
            wait_for_all()
            start = time.perf_counter()
            result = fn(x)
            finish()
            times[name].append(time.perf_counter() - start)
            wrong[name] = int((result.flatten() != right.flatten()).sum())
    return {name: statistics.median(each[1:]) for name, each in times.items()}, wrong


def run(ranks=None, nodes=1, verbs=VERBS, sizes=(2**10, 2**16, 2**22), kind="float", iters=5,
        **functions):  # fmt: skip
    """Time the verbs on real ranks; return the rows of the table.

    A row has the time of the slowest rank, and the number of wrong elements over all ranks.
    functions: a learner's own, by the library's names: ring_all_reduce=..., all_to_all_v=...
    Raises: TypeError for an unknown function, ValueError for an unknown verb
    """
    if unknown := functions.keys() - {name for of_verb in BUILT.values() for name in
                                      of_verb.values()}:  # fmt: skip
        raise TypeError(f"no function here is called {min(unknown)}")
    if unknown := [verb for verb in verbs if verb not in VERBS]:
        raise ValueError(f"verb {unknown[0]!r} is not one of {', '.join(VERBS)}")
    by_rank = launch(measure, verbs, sizes, kind, iters, nodes, functions, ranks=ranks, nodes=nodes,
                     timeout=600)
    learner_names, rows = by_learner(functions), []
    for of_ranks in zip(*by_rank):
        verb, algorithm, nbytes, count = of_ranks[0][:4]
        seconds, wrong = max(row[4] for row in of_ranks), sum(row[5] for row in of_ranks)
        rows.append(Row(verb, algorithm, nbytes, count, kind, seconds, wrong, len(by_rank),
                        BUILT[verb].get(algorithm) in learner_names))
    return rows


def by_mpi(sizes, iters):
    """Time MPI's collectives under mpirun; return the rows on rank 0, and none on the others."""
    return [Row(verb, "mpi", nbytes, count, "float", *measured)
            for verb, nbytes, count, *measured in mpi.measure(sizes, iters, expected)]


def table(rows):
    """Return `rows` as nccl-tests prints them, with the algorithm in front.

    The last line says whose functions ran.
    """
    head = (f"{'# verb':17}{'algorithm':19}{'size':>11}{'count':>11}{'type':>9}"
            f"{'time':>10}{'algbw':>8}{'busbw':>8}{'#wrong':>7}\n"
            f"{'#':36}{'(B)':>11}{'(elements)':>11}{'':>9}{'(us)':>10}{'(GB/s)':>8}{'(GB/s)':>8}")
    lines = [f"  {r.verb:15}{r.algorithm:19}{r.size:11}{r.count:11}{r.type:>9}"
             f"{r.time * 1e6:10.1f}{gb(r.algbw):>8}{gb(r.busbw):>8}{r.wrong:7}" for r in rows]
    used = {BUILT[r.verb][r.algorithm]: r.of_learner for r in rows if r.algorithm in BUILT[r.verb]}
    names = authors_of([name for name in used if used[name]], used)  # of mpirun's rows: nothing
    return "\n".join(filter(None, [head, *lines, names])) if rows else ""


def gb(rate):
    """Format bytes per second as GB/s with three digits.

    Small messages are so slow that three decimals would show 0.000.
    """
    return f"{rate / 1e9:.3g}" if rate >= 1e6 else f"{rate / 1e9:.5f}"


def all_reduces(rows):
    """Return {algorithm: [(size, time)]} of all-reduce on our own ranks, without MPI's rows."""
    points = defaultdict(list)
    for row in rows:
        if row.verb == "all_reduce" and row.algorithm != "mpi":
            points[row.algorithm].append((row.size, row.time))
    return points


def measured_crossover(lines):
    """Find the size above which the ring's fitted line is below doubling's.

    Returns: bytes; None if one of the two always wins
    """
    (a_ring, b_ring), (a_doubling, b_doubling) = lines["ring"], lines["recursive_doubling"]
    if a_ring <= a_doubling or b_ring >= b_doubling:
        return None
    return (a_ring - a_doubling) / (b_doubling - b_ring)


def summary(rows):
    """Return the fits and the crossover, in sentences; "" where there is nothing to fit."""
    lines = {name: ours.fit_alpha_beta(*zip(*points)) for name, points in all_reduces(rows).items()
             if len(points) > 1}
    if not lines:
        return ""
    text = [f"all_reduce by {name}: {a * 1e6:.0f} us + size / ({1e-9 / b:.3f} GB/s)" if b > 0 else
            f"all_reduce by {name}: no fit, larger was not slower; take larger sizes or more iters"
            for name, (a, b) in lines.items()]
    crossing = measured_crossover(lines)
    text.append(f"crossover, by these fits: the ring above {crossing / 1e6:.3g} MB, doubling below"
                if crossing else "crossover: none by these fits, one of the two always wins")
    return "\n".join(text)


def figure(rows):
    """Draw time against size for all-reduce: points as measured, lines as fitted."""
    from ranklab.plots import collectives as plots  # here: the only line that needs matplotlib

    points, lines, curves = {}, {}, {}
    for name, pairs in all_reduces(rows).items():
        sizes, times = points[name] = list(zip(*pairs))
        a, b = lines[name] = ours.fit_alpha_beta(sizes, times)
        fine = [sizes[0] * (sizes[-1] / sizes[0]) ** (i / 60) for i in range(61)]
        curves[name] = fine, [a + b * n for n in fine]
    return plots.time_against_size(points, curves, measured_crossover(lines))


def benchmark(options, _):
    """Show the table and the fits; the exit code is 1 if a sum is wrong."""
    sizes, iters = options.all_sizes(), options.iters
    if options.mpi and not mpi.is_here():
        return mpi.NO_MPI
    rows = by_mpi(sizes, iters) if options.mpi else run(
        options.ranks, options.nodes, options.verbs, sizes, options.kind, iters)
    return Shown("\n".join([table(rows), summary(rows)]).strip(), lambda: figure(rows),
                 int(any(row.wrong for row in rows)))
