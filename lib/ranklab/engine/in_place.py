"""Ranks that torchrun or srun started, so that the same script runs under python and on a cluster.
"""

import atexit
import os
import re
import subprocess
import sys
from datetime import timedelta

from ranklab.engine import sharing, ship
from ranklab.engine.rank import (
    GROUP_GRACE, _leave_group, backend_and_device, hide_gpus_without_nccl)

SLURM_PORTS = (15000, 20000)  # first port, number of ports: job and step give every node the same
STEPS = 100  # steps of a job, before the ports of the next job begin


def is_started_by_another():
    """Return True on a rank of torchrun, or of srun with several tasks; never in a notebook."""
    kernels = sys.modules.get("ipykernel.kernelapp")  # tools other than notebooks import it as well
    if kernels and kernels.IPKernelApp.initialized():
        return False  # a notebook opened inside an allocation is not a rank of it
    return _is_torchruns() or _is_sruns()


def _is_torchruns():
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def _is_sruns():
    # SLURM_PROCID and SLURM_NTASKS are also set in the sbatch script, which runs once; only srun
    # tells that there is a step.
    return "SLURM_PROCID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def is_main_process():
    """Return True in only one process: the caller of launch, or rank 0 of torchrun or srun."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0


def run(fn, args, ranks, nodes, timeout, rehearse=None, share_gpu=False):
    """Run `fn(*args)` on this rank; return the values of all ranks, on every rank.

    The process group is made in the first call and kept; each call sets its timeout.
    But gloo's send and recv keep the timeout of the first call: torch can't change it.
    """
    import torch.distributed as dist

    if not _is_torchruns():
        os.environ.update(_from_slurm(os.environ))
    world_size = _number("WORLD_SIZE")
    has_nodes = _nodes(world_size)
    # nodes=1 is the default, so here it means any number of nodes.
    for name, argument, count in (("ranks", ranks or world_size, world_size),
                                  ("nodes", nodes if nodes > 1 else has_nodes, has_nodes)):
        if argument != count:
            raise ValueError(f"launch: {name}={argument}, but this job was started with {count} "
                             f"{name}; leave {name}= out, or start the job with as many")
    limit = timedelta(seconds=timeout + GROUP_GRACE)
    if dist.is_initialized():
        dist.distributed_c10d._set_pg_timeout(limit)  # of gloo's collectives, and all of NCCL
    else:
        make_group(rehearse, share_gpu, timeout=limit)
    values = [None] * world_size
    dist.all_gather_object(values, ship.dumps(fn(*args)))
    return ship.values(values)


def _number(name):
    """Return the number in an environment variable that torchrun sets."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        is_set = f"{name} is {os.environ[name]!r}" if name in os.environ else f"{name} is not"
        raise RuntimeError(f"launch: RANK and WORLD_SIZE are set, as by torchrun, but {is_set}; "
                           "start the ranks with torchrun, or unset both") from None


def _nodes(world_size):
    if "GROUP_WORLD_SIZE" in os.environ:
        return _number("GROUP_WORLD_SIZE")
    return -(-world_size // _number("LOCAL_WORLD_SIZE"))  # ranks started by hand


def make_group(rehearse=None, share_gpu=False, **options):
    """Make the default group of torchrun's ranks, or of this process only, until it ends."""
    import torch.distributed as dist

    local, ranks_here = 0, 1
    if "RANK" in os.environ:
        local, ranks_here = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    else:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    rehearse = rehearse or os.environ.get("RANKLAB_REHEARSE")
    share_gpu = sharing.is_wanted(share_gpu)
    placement = backend_and_device(local, ranks_here, rehearse, _sees_its_own_gpus(), share_gpu)
    if local == 0 and not share_gpu:
        _say_if_gpus_are_left(placement["backend"], ranks_here)
    hide_gpus_without_nccl(placement["backend"])
    _let_go_of_groups()
    dist.init_process_group(**placement, **options)
    atexit.register(_leave_group)


def _sees_its_own_gpus():
    """Return True on a rank of srun to which Slurm gave GPUs that the other ranks don't see.

    With --gpus-per-task=1 each task sees one GPU, as number 0 (NVIDIA/deepops issue 1102). Ranks of
    torchrun inside one task all see the task's GPUs.
    """
    is_asked_for = ("SLURM_GPUS_PER_TASK" in os.environ
                    or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", ""))
    return is_asked_for and _is_sruns() and "TORCHELASTIC_RUN_ID" not in os.environ


def _let_go_of_groups():
    """Prevent torch's functions from keeping alive the group that is made next.

    The default group argument in torch.distributed.nn.functional is the group that is up when that
    module is imported, and transformers imports it late. A group that can't be destroyed keeps its
    threads, and a thread that ends during interpreter shutdown aborts the process.
    """
    import torch.distributed.nn.functional  # noqa: F401


def _say_if_gpus_are_left(backend, ranks_here):
    """Print a sentence if the run falls back to the CPU, or to a slower link."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() >= ranks_here:
        return
    if backend == "gloo":
        consequence = "running on the CPU. Each rank must see the GPUs of all"
    else:  # NVIDIA/nccl issue 1066, an answer by NCCL's author
        consequence = ("NCCL may not find the NVLink between GPUs that it can't see, and use a "
                       "slower way")
    print(f"launch: {ranks_here} ranks on this machine see {torch.cuda.device_count()} GPU(s) "
          f"each: {consequence}; with Slurm, ask for --gpus-per-node and leave --gpus-per-task out",
          file=sys.stderr)


def _from_slurm(environ):
    """Return torchrun's variables, derived from srun's."""
    tasks = _counts(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    tasks_here = tasks[int(environ["SLURM_NODEID"])]
    first_port, ports = SLURM_PORTS
    step = int(environ["SLURM_JOB_ID"]) * STEPS + int(environ.get("SLURM_STEP_ID", 0))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_here),
        "GROUP_RANK": environ["SLURM_NODEID"],
        "GROUP_WORLD_SIZE": environ.get("SLURM_STEP_NUM_NODES") or str(len(tasks)),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ),
        "MASTER_PORT": environ.get("MASTER_PORT")
        or str(first_port + step % ports),
    }


def _counts(text):
    """Parse Slurm's "8(x3),4" into a list: [8, 8, 8, 4]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def _first_host(environ):
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    try:
        listing = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True,
                                 text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError("launch: scontrol could not name the first of the nodes "
                           f"{nodes} ({error}); set MASTER_ADDR to it") from None
    return listing.stdout.split()[0]
