"""Several ranks on one GPU, with NCCL: its rules are real then, its speed and memory are not.

NCCL supports it since 2.30.3, "experimental" in its user guide (env, NCCL_MULTI_RANK_GPU_ENABLE).
Each rank has its own channels, and each channel is a block of threads (a CTA). If the GPU does not
have enough SMs or memory for all ranks at once, NCCL hangs. According to the guide, two ranks fit
with NCCL's defaults; here each rank gets fewer channels, so that more ranks fit. Sums inside the
switch (NVLS) are not available to ranks that share.
"""

import ctypes
import os
from collections.abc import Mapping

VARIABLE = "RANKLAB_SHARE_GPU"
RANKS_HERE = "RANKLAB_RANKS_ON_GPU"  # in the environment of a rank that shares
OLDEST = 2, 30, 3
WHEEL = "2.30.7"  # on PyPI, for CUDA 12 and 13
CTAS = 8  # of all ranks on a GPU together, for one communicator
OUTSIDE = 0.8e9  # bytes per rank that torch does not count: CUDA's context, NCCL's buffers
CAUSE_OF_HANG = ("Ranks share a GPU here, and NCCL hangs, too, where it has not enough SMs or "
                 "memory for all of them: take fewer ranks, or set NCCL_MAX_CTAS=1.")


def is_wanted(share_gpu=False, environ: Mapping = os.environ):
    """Return whether ranks may share a GPU, by launch's argument or the environment variable.

    Raises: ValueError if RANKLAB_SHARE_GPU is neither 1 nor 0.
    """
    value = environ.get(VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 1 (ranks share a GPU) or 0, got {value!r}")
    return bool(share_gpu) or value == "1"


def variables(ranks, gpus, environ: Mapping = os.environ):
    """Return NCCL's environment for `ranks` on `gpus`; a user's own limit on channels stays.

    NCCL reads it when the first communicator is made.
    """
    fewer = {} if "NCCL_MAX_CTAS" in environ else {"NCCL_MAX_CTAS": str(ctas(ranks, gpus))}
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0",
            RANKS_HERE: str(ranks_on_a_gpu(ranks, gpus)), **fewer}


def share_of_gpu():
    """Return the fraction of a GPU that this rank has: 1, or less if ranks share it."""
    return 1 / int(os.environ.get(RANKS_HERE, 1))


def ctas(ranks, gpus):
    """Return how many channels a rank gets."""
    return max(1, CTAS // ranks_on_a_gpu(ranks, gpus))


def ranks_on_a_gpu(ranks, gpus):
    """Return how many ranks the fullest GPU has."""
    return -(-ranks // gpus)


def memory_fraction(total, ranks, gpus):
    """Return the share of a GPU's `total` bytes that torch may take on each rank.

    Raises: ValueError if nothing would be left for tensors.
    """
    per_gpu = ranks_on_a_gpu(ranks, gpus)
    left = total / per_gpu - OUTSIDE
    if left <= 0:
        raise ValueError(f"{per_gpu} ranks can't share a GPU of {total / 1e9:.1f} GB: each takes "
                         f"{OUTSIDE / 1e9:.1f} GB before its first tensor; take fewer ranks")
    return left / total


def nccl_version():
    """Return the version of the NCCL loaded in this process, such as (2, 30, 7), or None.

    Not torch.cuda.nccl.version(), which is the version of the headers that torch was built with.
    """
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    code = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):  # built into torch
        return tuple(torch.cuda.nccl.version())
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def refuse_old_nccl(version=None):
    """Refuse an NCCL that can't put several ranks on a GPU.

    Raises: RuntimeError with what to install.
    """
    if why := why_not(version or nccl_version()):
        raise RuntimeError(why)


def why_not(version):
    """Return why this NCCL can't put several ranks on a GPU, and what to install; "" if it can."""
    if version is not None and version >= OLDEST:
        return ""
    if version is None:
        return ("ranks can't share a GPU: this build of torch has no NCCL; "
                "`make lab TORCH=pip` installs one that has")
    return (f"ranks can't share a GPU: NCCL {dotted(version)} is here, and {dotted(OLDEST)} or "
            f"newer can: {install_line()}, or torch 2.14, which brings it")


def install_line():
    """Return the pip command for an NCCL that can share, for the CUDA version of torch."""
    import torch

    cuda = (torch.version.cuda or "13").partition(".")[0]
    return f"pip install --no-deps nvidia-nccl-cu{cuda}=={WHEEL}"


def dotted(version):
    return ".".join(map(str, version))


def prepare(gpu, ranks, gpus):
    """Make this process a rank that shares `gpu`; call this before its first communicator.

    Raises: RuntimeError if NCCL is too old, ValueError if the GPU is too small.
    """
    import torch

    refuse_old_nccl()
    os.environ.update(variables(ranks, gpus))
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.set_per_process_memory_fraction(memory_fraction(total, ranks, gpus), gpu)
