"""What this machine is, and what each lab will run on: `ranklab doctor`.

Each part below yields lines to print, and an Advice for whatever would break a lab. Nothing here
changes the machine.
"""

import importlib.metadata
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranklab.basics.machine import cores, gpu_count, memory
from ranklab.course import labs
from ranklab.engine import sharing
from ranklab.engine.report import count_ranks

OLDEST_PYTHON = (3, 11)
MEMORY_NEEDED = 4e9  # bytes: a notebook, its kernel and eight ranks of 0.3 GB
TEMPORARY_NEEDED = 1e9  # bytes: checkpoints of the projects, traces
SHARED_NEEDED = 16e6  # bytes: loader workers pass batches through /dev/shm
SHARED_NEEDED_NCCL = 512e6  # bytes: NCCL's ranks use it as well, and a container's default is 64 MB
SMALL, LARGE = 8, 64 * 10**6  # bytes of the two all-reduces that are timed
# Most labs launch four ranks; these need a different number for their main experiment.
RANKS_OF_LAB = {"01_baseline": 1, "02_collectives": 8, "12_hybrid": 8, "13_planner": 2}


class Advice(str):
    """Something that would break a lab, and what to do about it."""


def doctor() -> int:
    """Print the report; return 1 if something would break a lab, else 0."""
    advice = []
    for title, part in (("machine", machine), ("GPUs", gpus), ("ranks", ranks),
                        ("extras", extras), ("labs", what_labs_run_on)):
        print(title, flush=True)
        for line in part():
            if isinstance(line, Advice):
                advice.append(line)
            print(f"  {'PROBLEM: ' if isinstance(line, Advice) else ''}{line}", flush=True)
    print("\n".join(f"to fix: {line}" for line in advice) or "nothing here would break a lab")
    return int(bool(advice))


def machine():
    """Yield Python, torch, cores, memory and the two temporary places."""
    yield f"system         {platform.system()} {platform.release()}, {platform.machine()}"
    yield f"python         {platform.python_version()}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield Advice(f"Python {platform.python_version()} is older than 3.11: install a newer one, "
                     "then `make lab PYTHON=python3.12`")
    yield from torch_version()
    yield f"cores          {cores()}"
    total, free = memory()
    yield f"memory         {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
    if total < MEMORY_NEEDED:
        yield Advice(f"{total / 1e9:.1f} GB of memory is less than the {MEMORY_NEEDED / 1e9:.0f} "
                     "GB that eight ranks and a notebook need: use a larger machine or container")
    yield from space("temporary", tempfile.gettempdir(), TEMPORARY_NEEDED,
                     "delete what you don't need there, or set TMPDIR to another place")
    if Path("/dev/shm").is_dir():
        minimum = SHARED_NEEDED_NCCL if gpu_count() > 1 else SHARED_NEEDED
        yield from space("shared memory", "/dev/shm", minimum,
                         "in a container start it with --shm-size=2g, else delete old files there")


def torch_version():
    """Yield torch's version, and Advice where it is outside the range in ranklab's own metadata."""
    from packaging.requirements import Requirement

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Advice("torch is not installed: run `make lab`, which installs it")
        return
    yield f"torch          {version}"
    if not _installed("ranklab"):  # its folder is on the path: there is no metadata with a range
        return
    requirement = next(r for r in map(Requirement, importlib.metadata.requires("ranklab"))
                       if r.name == "torch")
    if not requirement.specifier.contains(version, prereleases=True):
        yield Advice(f"torch {version} is outside the tested range {requirement.specifier}: "
                     "run `make lab`, which installs the pinned one")


def space(name, path, minimum, remedy):
    """Yield how much is free at `path`, and Advice when that is less than `minimum` bytes."""
    free = shutil.disk_usage(path).free
    yield f"{name:14} {free / 1e9:.1f} GB free in {path}"
    if free < minimum:
        yield Advice(f"{path} has {free / 1e6:.0f} MB free and labs need {minimum / 1e6:.0f} MB: "
                     f"{remedy}")


def gpus():
    """Yield each GPU, and how the GPUs are linked."""
    count = gpu_count()
    if not count:
        yield "none that torch can use: ranks run on the CPU"
        if shutil.which("nvidia-smi"):
            yield ("this machine has NVIDIA's driver: torch may be the CPU build; "
                   "`make lab TORCH=pip` installs those with CUDA")
        return
    import torch

    for index in range(count):
        one = torch.cuda.get_device_properties(index)
        yield (f"{index}  {one.name}, {one.total_memory / 1e9:.0f} GB, "
               f"compute capability {one.major}.{one.minor}")
    yield sharing_line(count)
    yield from links()


def sharing_line(count):
    """Say whether NCCL can put several ranks on one GPU, and how much memory each would get."""
    import torch

    version = sharing.nccl_version()
    if why := sharing.why_not(version):
        return why
    memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(count))
    try:
        share = memory * sharing.memory_fraction(memory, 4, count)
    except ValueError as error:
        return str(error)
    return (f"4 ranks can share {'it' if count == 1 else 'them'} (NCCL {sharing.dotted(version)}), "
            f"each with {share / 1e9:.1f} GB: {sharing.VARIABLE}=1")


def links():
    """Yield NVIDIA's own table of the links between GPUs, as it is (see its legend)."""
    if not shutil.which("nvidia-smi"):
        return
    try:
        result = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True,
                                timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"links unknown: {error}"
        return
    # The table is underlined with terminal codes, which a file or a notebook would show.
    yield from re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).rstrip().splitlines()


def ranks():
    """Start fresh ranks; yield whether they start and reduce correctly, and how fast."""
    try:
        import torch.distributed as dist

        from ranklab.engine import launch
    except ImportError as error:
        yield Advice(f"ranks can't start: {error}; run `make lab`, which installs what is missing")
        return
    version = sharing.nccl_version()
    nccl = sharing.dotted(version) if version else "not in this build of torch"
    yield f"backends       gloo {'yes' if dist.is_gloo_available() else 'no'}, NCCL {nccl}"
    try:
        started = time.perf_counter()
        results = launch(time_all_reduce, timeout=90)
        one, seconds = results[0], time.perf_counter() - started
        yield (f"launch         {count_ranks(len(results))} with {one['backend']} on "
               f"{one['device']}, {seconds:.1f} s with the first start and the measurements below")
    except Exception as error:  # any error here would break every lab
        yield Advice(f"launch fails: {type(error).__name__}: {error}")
        return
    yield from judge(results)


def judge(results):
    """Yield the measured all-reduce in the columns of nccl-tests; the slowest rank counts."""
    if results[0].get("share", 1) < 1:
        yield "these ranks share a GPU: the times below are of no link"
    wrong = [rank for rank, one in enumerate(results) if not one["right"]]
    if wrong:
        yield Advice(f"all-reduce is wrong on ranks {wrong}: another network card or backend may "
                     "help (GLOO_SOCKET_IFNAME, NCCL_DEBUG=INFO)")
    small, large = (max(one[size] for one in results) for size in (SMALL, LARGE))
    size = len(results)
    algbw = LARGE / large
    yield f"all-reduce     {SMALL} bytes in {small * 1e6:.0f} us (latency)"
    yield (f"               {LARGE / 1e6:.0f} MB in {large * 1e3:.1f} ms: algbw "
           f"{algbw / 1e9:.2f} GB/s, busbw {algbw * 2 * (size - 1) / size / 1e9:.2f} GB/s")


def time_all_reduce():
    """Time a small and a large all-reduce on each rank, and check the result.

    Returns: {bytes: median seconds}, with "right": whether the sums are right, "backend", "device"
             and "share"
    """
    import torch
    import torch.distributed as dist

    from ranklab.engine import device

    size = dist.get_world_size()
    results = {"backend": dist.get_backend(), "device": device().type, "right": True,
               "share": sharing.share_of_gpu()}
    for volume, repeats in ((SMALL, 50), (LARGE, 5)):
        x = torch.ones(volume // 4, device=device())
        results[volume] = statistics.median(_seconds(x) for _ in range(repeats))
        # Every repeat multiplies by the number of ranks; one fresh sum is what can be compared.
        x.fill_(dist.get_rank() + 1)
        dist.all_reduce(x)
        results["right"] &= bool((x == size * (size + 1) / 2).all())
    return results


def _seconds(x):
    """Seconds of one all-reduce of `x`, which is filled with ones before."""
    import torch
    import torch.distributed as dist

    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    x.fill_(1)
    dist.barrier()
    wait()
    started = time.perf_counter()
    dist.all_reduce(x)
    wait()
    return time.perf_counter() - started


def extras():
    """Yield for each optional part "here", or the command that installs it."""
    from packaging.requirements import Requirement

    metadata = importlib.metadata.metadata("ranklab")
    requirements = [Requirement(text) for text in importlib.metadata.requires("ranklab")]
    for extra in metadata.get_all("Provides-Extra") or ():
        names = [r.name for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        missing = [name for name in names if not _installed(name)]
        state = "here"
        if missing:
            state = (f"{', '.join(missing)} missing: "
                     f"python -m pip install -c constraints.txt -e '.[{extra}]'")
        elif "mpi4py" in names and not shutil.which("mpirun"):
            # A Python package can't bring it along, and without it mpi4py does nothing.
            state = "MPI library missing, its cells are skipped: apt install openmpi-bin"
        yield f"{extra:14} {state}"


def _installed(name):
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def what_labs_run_on():
    """Yield for each lab that is written its number of ranks, and their devices."""
    count, share = gpu_count(), sharing.is_wanted()
    for stem in labs.written():
        size = RANKS_OF_LAB.get(stem, 4)
        place = "the CPU (gloo)"
        if size == 1:
            place = "one GPU" if count else "the CPU"
        elif count >= size:
            place = f"{size} GPUs (NCCL)"
        elif count and share:
            place = f"{count} GPU{'s' * (count > 1)}, which they share (NCCL)"
        yield f"{stem:24} {size} {'rank' if size == 1 else 'ranks'} on {place}"
