"""The first parts: what this machine is, and how fast its ranks add up."""

import importlib.metadata
import platform

from ranklab.course import doctor
from ranklab.engine import device, launch, sharing
from ranklab.projects.collectives import timing

PACKAGES = "torch", "numpy", "deepspeed", "transformers", "nbval"


def machine(job):
    """Report versions, GPUs and their links; start ranks and check that they add up rightly."""
    version = sharing.nccl_version()
    shown = {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES},
             "NCCL": sharing.dotted(version) if version else "none"}
    for part in (doctor.machine, doctor.gpus, doctor.ranks):
        print(part.__name__)
        for line in part():
            print(f"  {line}")
            assert "launch fails" not in line, line
    first = launch(seen, ranks=job["ranks"])[0]
    assert first["sum"] == job["ranks"] * (job["ranks"] + 1) / 2, first
    return {**shown, "backend": first["backend"], **gpus(job)}


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def gpus(job):
    import torch

    return {f"GPU {index}": f"{about.name}, {about.total_memory / 1e9:.1f} GB"
            for index in range(job["gpus"]) for about in [torch.cuda.get_device_properties(index)]}


def seen():
    """Return on each rank the backend of its tensors, and a sum."""
    import torch
    import torch.distributed as dist

    x = torch.full((1,), dist.get_rank() + 1.0, device=device())
    dist.all_reduce(x)
    return {"backend": str(dist.get_backend_config()), "sum": x.item()}


def all_reduce(job):
    """Measure busbw in GB/s of each algorithm at each size; no element may be wrong."""
    sizes = [8, 2**20] if job["rehearsal"] else [8, 2**10, 2**20, 2**26, 2**28]
    rounds = 3 if job["rehearsal"] else 10
    rows = timing.run(job["ranks"], 1, ["all_reduce"], sizes, "float", rounds)
    wrong = [row for row in rows if row.wrong]
    assert not wrong, wrong
    return {f"{row.algorithm}, {row.size:,} bytes":
            f"{row.time * 1e6:.0f} us, busbw {row.busbw / 1e9:.2f} GB/s" for row in rows}
