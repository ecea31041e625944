"""The first thing to run on a new cluster: is every rank there, right, and as fast as the others?

    python -m ranklab.projects.ranks --ranks 4
    torchrun --nproc-per-node 8 -m ranklab.projects.ranks
    srun -N 4 --ntasks-per-node 8 python -m ranklab.projects.ranks

Rank 0 prints where each rank runs, whether an all-reduce is right and how long it takes by size,
and it names the ranks that compute slowly or are missing. Exit code 1 when anything is wrong.
"""

import sys

from ranklab.options import number
from ranklab.projects.command import Command, ranks_to_come, refusals, say
from ranklab.projects.ranks import run


@refusals(__package__)
def main(argv=None):
    command = Command(__package__, __doc__)
    command.add_ranks(nodes=True)
    command.add_argument("--slow", type=number(least=0), metavar="RANK",
                         help="emulate: this rank computes slowly")
    command.add_argument("--missing", type=number(least=0), metavar="RANK",
                         help="emulate: this rank does not answer")
    command.add_argument("--limit", type=number(float, above=0, most=86400), default=10,
                         help="seconds for the roll call")
    options, R = command.parse(argv), ranks_to_come
    for name in ("slow", "missing"):
        if (rank := getattr(options, name)) is not None and rank >= R(options.ranks):
            command.error(f"--{name} {rank} is not one of the {R(options.ranks)} ranks")
    found = run(options.ranks, options.nodes, options.slow, options.missing, options.limit)
    say(found["table"],
        *(f"all-reduce {size:>10,} bytes  {seconds * 1e3:8.2f} ms"
          for size, seconds in found["times"]),
        *(found["problems"] or ["all ranks are here, right, and alike"]))
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
