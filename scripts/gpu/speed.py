"""Parts about memory and time. Without a GPU they only show that they run."""

import math
import statistics
import time
from dataclasses import replace

import torch

import equal
from ranklab import hardware
from ranklab.engine import device, launch
from ranklab.planner import Model, Plan, step_time
from ranklab.planner.machine import machine
from ranklab.projects.baseline.training import run
from ranklab.trainer.text import text_for

# (size, sequences of a micro-batch, compiled): what is worth most comes first
TRAININGS = (("124m", 16, False), ("124m", 16, True), ("1.5b", 8, True), ("350m", 16, True),
             ("774m", 8, True), ("1.5b", 8, False), ("350m", 16, False), ("774m", 8, False))
STEPS, LOG_EVERY = 8, 2  # the first stretch warms up; the middle one of the others counts
MFU_SECONDS = 110  # after which no training begins


def mfu(job):
    """Measure MFU and peak memory of lab 01's training in bf16, beside formula and planner."""
    trainings = [("laptop", 12, False)] if job["rehearsal"] else TRAININGS
    where = "cpu" if job["rehearsal"] else "cuda"
    started, shown = time.monotonic(), {}
    for size, micro_batch, compiled in trainings:
        if time.monotonic() - started > MFU_SECONDS:
            break
        name = f"{size}, {'compiled' if compiled else 'eager'}"
        try:
            found = run(size, where, compile=compiled, progress=False, steps=STEPS, warmup=1,
                        log_every=LOG_EVERY, batch=2 * micro_batch, micro_batch=micro_batch,
                        eval_batch=micro_batch)
        except torch.OutOfMemoryError:
            shown[name] = f"does not fit with {micro_batch} sequences"
        else:
            assert math.isfinite(found["held_out"]), f"{name}: the loss is {found['held_out']}"
            shown[name] = words(found, compiled, where)
            del found
        print(name, shown[name], flush=True)
        if where == "cuda":
            torch.cuda.empty_cache()
    return shown


def words(found, compiled, where):
    """Say MFU, memory and time of a step; by formula and planner, too."""
    config, shape = found["config"], found["shape"]
    tokens = config.batch * shape.n_ctx
    text = f"MFU {found['mfu']:.1%}, {1e3 * tokens / found['tokens_per_second']:.0f} ms a step"
    said, counted = found["memory"].get("total", (None, None))
    if counted:
        text += f", {counted / 1e9:.1f} GB at the peak ({said / 1e9:.1f} by formula)"
    if where == "cuda" and (seconds := planned(shape, config, compiled)):
        text += f", planner {1e3 * seconds:.0f} ms"
    return text


def planned(shape, config, compiled):
    """Return the planner's seconds of a step; None where it does not know this GPU."""
    known = hardware.find(torch.cuda.get_device_name())
    try:
        here = machine(known.name)
    except (ValueError, AttributeError):
        return None
    model = Model(shape.n_layer, shape.n_embd, shape.n_head, 4 * shape.n_embd, shape.vocab_size,
                  tied=True)
    plan = Plan(sequence=shape.n_ctx, micro_batch=config.micro_batch, hides=(), fused=compiled,
                micro_batches=config.batch // config.micro_batch, tool="ours")
    return step_time(model, plan, here).total


def sharded(job):
    """Time a step by ours and by torch's own, on the same ranks, in turn."""
    shape = equal.shape_for(job)
    shape = shape if job["rehearsal"] else replace(shape, n_embd=1024, n_ctx=512)
    config = replace(equal.config_for(job), steps=100, micro_batch=2)
    text, shape = text_for(shape, config)
    ways = {"ZeRO-3": equal.zero_stage_3, "FSDP": equal.fully_shard, "FSDP2": equal.fsdp2,
            "tensor": equal.tensor_parallel, "DTensor": equal.dtensors}
    seconds = launch(in_turn, ways, text, shape, config, ranks=job["ranks"], timeout=80)[0]
    shown = {name: f"{1e3 * value:.1f} ms" for name, value in seconds.items()}
    for ours, theirs in (("ZeRO-3", "FSDP2"), ("FSDP", "FSDP2"), ("tensor", "DTensor")):
        shown[f"{ours} / {theirs}"] = f"{seconds[ours] / seconds[theirs]:.2f}"
    return shown


def in_turn(ways, text, shape, config, rounds=5):
    """Return {name: median seconds of a step}, one step of each way in turn."""
    trainers = {name: equal.new_trainer(way, text, shape, config) for name, way in ways.items()}
    seconds = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, trainer in trainers.items():
            started = time.perf_counter()
            trainer.step().item()  # a GPU has finished the forward ...
            if device().type == "cuda":
                torch.cuda.synchronize()  # ... and now the step
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}
