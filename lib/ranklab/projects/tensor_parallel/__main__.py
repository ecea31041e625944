"""A GPT on real text, split over ranks: naively, tensor-parallel by ours, and by DTensor.

    python -m ranklab.projects.tensor_parallel --ranks 4
    torchrun --nproc-per-node 4 -m ranklab.projects.tensor_parallel --size gpt2 --method tensor \\
        --checkpoint build/tp

--size gpt2-xl has 25 heads: 5 ranks. A checkpoint goes on with any number of ranks.
"""

import sys

from ranklab.projects.command import Command, refusals, say, time_limit
from ranklab.projects.tensor_parallel.training import METHODS, SIZES, report, run


@refusals(__package__)
def main(argv=None):
    command = Command(__package__, __doc__)
    command.add_argument("--size", choices=SIZES, default="laptop", help="of the GPT")
    command.add_argument("--method", choices=("all", *METHODS), default="all",
                         help="how ranks share it; sequence is tensor with --sequence-parallel")
    command.add_ranks()
    command.add_resume()
    command.add_data()
    command.add_fields(SIZES["laptop"], without=["betas"])
    options = command.parse(argv)
    settings = command.config(SIZES[options.size], options)
    say(report(run(options.size, options.ranks, options.method, options.data, options.resume,
                   progress=sys.stderr.isatty(), timeout=time_limit(), **vars(settings))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
