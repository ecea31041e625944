"""Run a function on fresh ranks, from a notebook cell, a test or a script.

    results = launch(fn, *args, ranks=4)       # [fn's value on rank 0, rank 1, ...]

Read in this order:

    launcher.py      the one call; decides between fresh ranks and an existing job (torchrun, srun)
    in_place.py      ranks that somebody else started: torchrun, srun
    forkserver.py    the parent's handle on the process that forks ranks
    server.py        that process: has imported torch once, forks, reaps
    rank.py          what happens inside a rank
    sharing.py       several ranks on one GPU, with NCCL
    surroundings.py  how a rank's process differs: no keyboard, the first to be killed
    worker_group.py  the parent's watch over the ranks of one launch: values, failures, time
    rank_handle.py   one rank, as the parent sees it
    output.py        what the ranks print, in order
    stall.py         detects a deadlock early
    waiting.py       a rank answers whether it waits only for other ranks
    verdict.py       which rank caused the failure, and where each one waits
    stack.py         where a rank is, read from its stack
    report.py        error messages: exceptions, lines of code, exit codes
    ship.py          sends functions, arguments and values between processes
    torchrun_command.py  the same script under the real torchrun
    rehearse.py      ranks on the CPU under a GPU's rules
    gpu_tensor.py    the tensors of such ranks, and the rules
    gpu_kernels.py   what single ops, and backward, do differently on a GPU
"""

from ranklab.engine.in_place import is_main_process
from ranklab.engine.launcher import launch
from ranklab.engine.rank import device
from ranklab.engine.report import HangError, RankError
from ranklab.engine.torchrun_command import torchrun

__all__ = ["launch", "device", "torchrun", "is_main_process", "RankError", "HangError"]
