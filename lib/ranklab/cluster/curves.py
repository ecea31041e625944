"""Curves and traces of a run in files, without any server: TensorBoard, W&B, Perfetto.

Each function imports its own packages: tensorboard comes with the extra `cluster`, see
promql.missing; wandb is not part of this course. Tested with wandb 0.31.0 on 2026-11-26, offline.
"""

import gzip
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from ranklab.engine import device


def scalars(history):
    """Return {step: {name: value}} of the History of a Trainer."""
    by_step = {step: {} for step in sorted({*history.steps, *history.held_out})}
    for name in ("loss", "speed", "waits"):
        for step, value in zip(history.steps, getattr(history, name)):
            by_step[step][f"train/{name}"] = value
    for step, value in history.held_out.items():
        by_step[step]["held_out/loss"] = value
    return by_step


def write_scalars(folder, history):
    """Write the History of a Trainer to `folder`, for tensorboard --logdir."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        for step, values in scalars(history).items():
            for name, value in values.items():
                writer.add_scalar(name, value, step)


def read_scalars(folder):
    """Read all scalars in `folder`; return {name: [(step, value)]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)]
            for name in events.Tags()["scalars"]}


def write_wandb(folder, history, project="ranklab"):
    """Write the History of a Trainer for Weights & Biases, offline.

    Returns: the folder for `wandb sync`.
    Raises: ImportError if wandb is not installed.
    """
    import wandb

    run = wandb.init(project=project, dir=folder, mode="offline")
    for step, values in scalars(history).items():
        run.log(values, step=step)
    run.finish()
    return next(Path(folder).glob("wandb/offline-run-*"))


def traced_steps(folder, slow, steps=3, group=None):
    """Trace some steps of matrix products and an all-reduce on this rank with torch.profiler.

    Rank `slow` computes eight times as much. Collective: call it on every rank.
    Returns: the path of rank<r>.json.gz in `folder`, which Perfetto can open.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints when it begins and ends
    rank, x = dist.get_rank(group), torch.randn(256, 256, device=device())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for step in range(steps):
            with torch.profiler.record_function(f"step {step}"):
                for _ in range(200 if rank == slow else 25):
                    x @ x
                dist.all_reduce(x, group=group)
    path = Path(folder) / f"rank{rank}.json.gz"
    profiler.export_chrome_trace(str(path))
    return path


def read_trace(path):
    """Read a trace, the JSON that Perfetto and chrome://tracing read.

    Times are in microseconds; events with "ph": "X" have a start and a duration.
    Returns: (the trace's distributedInfo, its events).
    """
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt") as file:
        trace = json.load(file)
    return trace.get("distributedInfo", {}), trace["traceEvents"]


def waits_in_traces(paths, name=":all_reduce"):
    """Return {rank: seconds in spans of this name}: all others wait for the rank with the least.

    torch names a collective's span "gloo:all_reduce". NCCL's span does not wait on the host: look
    at the kernels instead, whose names begin with "ncclDevKernel".
    """
    waits = {}
    for path in paths:
        info, events = read_trace(path)
        waits[info["rank"]] = sum(event["dur"] for event in events
                                  if event.get("ph") == "X" and event["name"].endswith(name)
                                  and event.get("cat") == "user_annotation") / 1e6
    return dict(sorted(waits.items()))
