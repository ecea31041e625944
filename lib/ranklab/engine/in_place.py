"""Ranks that others started: torchrun, or srun. So one script serves python and a cluster."""

import atexit
import os
import re
import subprocess
import sys
from datetime import timedelta

from ranklab.engine import ship
from ranklab.engine.rank import GROUP_GRACE, _leave_group, backend_and_device

SLURM_PORTS = (15000, 20000)  # first port, how many: the job's id chooses one, alike on every node


def is_started_by_another():
    """True on a rank of torchrun, or of srun with more than one task; never in a notebook."""
    kernels = sys.modules.get("ipykernel.kernelapp")  # also imported by tools that are no notebook
    if kernels and kernels.IPKernelApp.initialized():
        return False  # a notebook opened inside an allocation is not a rank of it
    return _is_torchruns() or _is_sruns()


def _is_torchruns():
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def _is_sruns():
    # SLURM_PROCID and SLURM_NTASKS are set in the script of sbatch too, which runs once; of a step
    # only srun tells.
    return "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def is_main_process():
    """True in one process only: the one that calls launch, or rank 0 under torchrun or srun."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0


def run(fn, args, ranks, timeout):
    """`fn(*args)` has run on this rank; returns the values of all ranks, on every rank.

    The process group is made at the first call and kept.
    """
    import torch.distributed as dist

    if not _is_torchruns():
        os.environ.update(_from_slurm(os.environ))
    world_size = int(os.environ["WORLD_SIZE"])
    if ranks not in (None, world_size):
        raise ValueError(f"launch: ranks={ranks}, but this job was started with {world_size} "
                         "ranks; leave ranks= out, or start as many")
    if not dist.is_initialized():
        make_group(timeout=timedelta(seconds=timeout + GROUP_GRACE))
    mine = ship.dumps(fn(*args))
    everybodys = [None] * world_size
    dist.all_gather_object(everybodys, mine)
    return [ship.loads(value) for value in everybodys]


def make_group(**options):
    """The default group is up until this process ends: of torchrun's ranks, or of it alone."""
    import torch.distributed as dist

    local, ranks_here = 0, 1
    if "RANK" in os.environ:
        local, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    else:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    chosen = backend_and_device(local, ranks_here)
    if local == 0:
        _say_if_gpus_are_left(chosen["backend"], ranks_here)
    _let_go_of_groups()
    dist.init_process_group(**chosen, **options)
    atexit.register(_leave_group)


def _let_go_of_groups():
    """No function of torch's will keep the group alive that is made next.

    Those of torch.distributed.nn.functional have the group that is up when they are defined as a
    default; transformers imports them late. A group that nobody can destroy has threads, and one
    that ends while the interpreter does aborts the process.
    """
    import torch.distributed.nn.functional  # noqa: F401


def _say_if_gpus_are_left(backend, ranks_here):
    """A run that falls back on the CPU does so with a sentence, not in silence."""
    import torch

    if backend == "gloo" and torch.cuda.is_available():
        print(f"launch: {ranks_here} ranks on this machine see {torch.cuda.device_count()} GPU(s): "
              "running on the CPU. Each rank must see the GPUs of all; with Slurm, ask for "
              "--gpus-per-node and leave --gpus-per-task out", file=sys.stderr)


def _from_slurm(environ):
    """torchrun's variables, from srun's."""
    tasks = _each(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    tasks_here = tasks[int(environ["SLURM_NODEID"])]
    first_port, ports = SLURM_PORTS
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_here),
        "GROUP_RANK": environ["SLURM_NODEID"],
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ),
        "MASTER_PORT": environ.get("MASTER_PORT")
        or str(first_port + int(environ["SLURM_JOB_ID"]) % ports),
    }


def _each(counts):
    """Slurm's "8(x3),4" as a list: [8, 8, 8, 4]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def _first_host(environ):
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    try:
        asked = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True,
                               text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError("launch: scontrol could not name the first of the nodes "
                           f"{nodes} ({error}); set MASTER_ADDR to it") from None
    return asked.stdout.split()[0]
