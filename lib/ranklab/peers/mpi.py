"""The same verbs in MPI, with mpi4py, if an MPI library is installed."""

import os
import shutil
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import torch

NO_MPI = "MPI is not here: apt install openmpi-bin libopenmpi-dev, and pip install 'ranklab[mpi]'."
# By default Open MPI refuses more processes than cores, and root, a container's usual user.
OPEN_MPI = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def is_here():
    """Return True if mpi4py and mpirun are both installed; import nothing."""
    return bool(find_spec("mpi4py") and shutil.which("mpirun"))


def mpirun(ranks, *arguments):
    """Run `mpirun -n ranks python *arguments`; return its output, or a hint what to install."""
    if not is_here():
        return NO_MPI
    result = subprocess.run(["mpirun", "-n", str(ranks), sys.executable, *arguments], timeout=120,
                            capture_output=True, text=True, env={**os.environ, **OPEN_MPI})
    return result.stdout if result.returncode == 0 else f"mpirun failed: {result.stderr.strip()}"


def measure(sizes, iters, expected):
    """Measure the verbs, in every process under mpirun.

    expected: (verb, the input of each rank, ranks, rank) -> the right result
    Returns: [(verb, bytes, elements, seconds, wrong elements, ranks)] on rank 0; [] on the others.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    R, rank, rows = world.Get_size(), world.Get_rank(), []
    for size in sizes:
        n = max(size // 4 // R, 1) * R

        def x_of(r, n=n):
            return (torch.arange(n) % 7 + r % 3).to(torch.float32)

        x = x_of(rank).numpy()
        for verb, call in _calls(world, x, R, rank).items():
            right = expected(verb, x_of, R, rank).numpy()
            out = x.copy() if verb == "broadcast" else np.empty_like(right)
            times = []
            for _ in range(iters + 1):
                world.Barrier()
                start = time.perf_counter()
                call(out)
                times.append(time.perf_counter() - start)
            slowest = world.allreduce(statistics.median(times[1:]), MPI.MAX)
            wrong = world.allreduce(int((out != right).sum()), MPI.SUM)
            rows.append((verb, n * 4, n, slowest, wrong, R))
    return rows if rank == 0 else []


def _calls(world, x, R, rank):
    """Return {verb: a function that fills the array it is given}."""
    return {
        "all_reduce": lambda out: world.Allreduce(x, out),
        "reduce_scatter": lambda out: world.Reduce_scatter_block(x, out),
        "all_gather": lambda out: world.Allgather(np.array_split(x, R)[rank], out),
        "broadcast": lambda out: world.Bcast(out, 0),
        "all_to_all": lambda out: world.Alltoall(x, out),
    }
