"""How fast are the collectives here? nccl-tests' columns, for our algorithms and the backend's.

    python -m ranklab.projects.collectives --ranks 4
    torchrun --nproc-per-node 8 -m ranklab.projects.collectives --max 1G
    mpirun -n 4 python -m ranklab.projects.collectives --mpi
    python -m ranklab.projects.collectives --bench      # our ring against the backend, as a ratio

time is the slowest rank's median; algbw = size / time; busbw = algbw * the load of the busiest
link (2(R-1)/R for all-reduce), which is what to compare with the hardware's bandwidth. As in
nccl-tests, size is the whole tensor: the input of reduce-scatter, the output of all-gather.
"""

import sys

from ranklab.collectives import bus_factor
from ranklab.projects.collectives import bench, links, mpi
from ranklab.projects.collectives.timing import (
    DTYPES, VERBS, Row, figure, run, summary, table,
)
from ranklab.options import comma_list, number, positive
from ranklab.projects.command import Command, refusals, save_figure, say


def size_of(text):
    """ "64K" -> 65536 bytes: powers of two, as in nccl-tests."""
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper())
    value = number(float, above=0)(text[:-1] if scale else text)
    return number(least=1, most=2**40)(int(value * (scale or 1)))


def parse(argv=None):
    command = Command(__package__, __doc__)
    command.add_ranks(nodes=True)
    command.add_argument("--verbs", type=comma_list(choices=VERBS), default=",".join(VERBS),
                         help="which of them, with commas")
    command.add_argument("--sizes", type=comma_list(size_of), default="1K,16K,256K,4M",
                         help="bytes, as 64M, with commas")
    command.add_argument("--max", type=size_of, help="up to this size in steps of 4, from 1K")
    command.add_argument("--type", choices=DTYPES, default="float", help="of the elements")
    command.add_argument("--iters", type=positive, default=5,
                         help="times, of which the median counts")
    command.add_figure("draw time against size in this .svg or .png")
    command.add_argument("--slow-links", action="store_true", help="flat ring against hierarchical")
    command.add_argument("--bench", action="store_true", help="our ring against the backend's")
    command.add_argument("--mpi", action="store_true", help="under mpirun: MPI's own collectives")
    options = command.parse(argv)
    if options.max:
        options.sizes = [4**k * 1024 for k in range(20) if 4**k * 1024 <= options.max]
        if not options.sizes:
            command.error(f"--max {options.max} bytes is less than 1K, the first size")
    if options.figure and ("all_reduce" not in options.verbs or len(options.sizes) < 2):
        command.error("--figure draws all_reduce of two sizes or more: see --verbs, --sizes")
    return options


@refusals(__package__)
def main(argv=None):
    options = parse(argv)
    if options.mpi:
        return print_mpi(options.sizes, options.iters)
    if options.bench:
        say(bench.report([options.ranks] if options.ranks else None))
        return 0
    if options.slow_links:
        say(links.table())
        return 0
    rows = run(options.ranks, options.nodes, options.verbs, options.sizes, options.type,
               options.iters)
    has_fits = "all_reduce" in options.verbs and len(options.sizes) > 1
    say(table(rows), summary(rows) if has_fits else "")
    save_figure(options.figure, lambda: figure(rows))
    return 1 if any(row.wrong for row in rows) else 0


def print_mpi(sizes, iters):
    if not mpi.is_here():
        print(mpi.NO_MPI)
        return 0
    R, rank, rows = mpi.mpi_rows(sizes, iters)
    if rank == 0:
        print(table([Row(verb, name, nbytes, n, "float", t, nbytes / t,
                         nbytes / t * bus_factor(verb, R), wrong)
                     for verb, name, nbytes, n, t, wrong in rows]))
    return 1 if any(row[5] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
