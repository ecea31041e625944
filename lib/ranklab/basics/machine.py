"""The cores, memory and GPUs of this machine that this process may use."""

import os
from pathlib import Path

import psutil


def cores():
    """Count the cores that this process may use, within a container's limit."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = _cgroup("cpu.max")
    if limit and limit[0] != "max":
        usable = min(usable, max(1, int(limit[0]) // int(limit[1])))
    return usable


def memory():
    """Return (total, free) bytes of memory, within a container's limit."""
    machine = psutil.virtual_memory()
    limit = _cgroup("memory.max")
    total = machine.total
    if limit and limit[0] != "max":
        total = min(total, int(limit[0]))
    return total, min(machine.available, total)


def _cgroup(file):
    """Return the words of a control-group file, or None without one (macOS, old kernels)."""
    try:
        return Path("/sys/fs/cgroup", file).read_text().split()
    except OSError:
        return None


def gpu_count():
    """Count the GPUs that torch can use."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
