"""A GPT is trained by one method after the other, and what each costs is counted."""

import gc
import math
import statistics
import time
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab import data
from ranklab.engine import device, launch
from ranklab.meter import Traffic, memory_of
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.parallel import Parallel
from ranklab.projects.command import LAUNCH_LIMIT
from ranklab.projects.tensor_parallel.costs import held_bytes, traffic
from ranklab.projects.tensor_parallel.dtensor import DTensors
from ranklab.projects.tensor_parallel.naive import Naive
from ranklab.tensor_parallel.plan import How
from ranklab.tensor_parallel.training import TensorParallel
from ranklab.text_trainer import TextTrainer, TrainConfig
from ranklab.trainer import History

GPT2 = {"vocab_size": 50257, "n_ctx": 1024, "rotary_base": 10000.0}
MODELS = {"laptop": GPTConfig(n_layer=4, n_head=8, n_embd=96),
          "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768, **GPT2),
          "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600, **GPT2)}  # tp=5: 25 heads
ENGINES = {"one": None, "naive": Naive, "tensor": TensorParallel, "sequence": TensorParallel,
           "dtensor": DTensors}
PARTS = {field.name: field.default for field in fields(How) if callable(field.default)}


@dataclass(frozen=True)
class Settings(TrainConfig):
    """How to train; checked when it is made."""

    sequence_parallel: bool = False  # outside of layers each rank has some tokens
    overlap: bool = False  # weight gradients are computed while those of inputs are added up


LARGE = Settings(steps=100, batch=16, micro_batch=4, lr=3e-4, precision="bf16", eval_batch=64)
SIZES = {"laptop": Settings(steps=40, batch=8, micro_batch=8, eval_batch=32, log_every=1),
         "gpt2": LARGE, "gpt2-xl": LARGE}


class Row(NamedTuple):
    """What one method has shown, on rank 0."""

    method: str
    said: tuple  # bytes held, messages, bytes sent in a step: by formulas in float32
    counted: tuple
    busy: float  # the mean rank's share of the time in which its CPU worked
    history: History
    held_out: float | None  # nats per token; None: stopped before the end


def run(size="laptop", ranks=None, method="tensor", path=None, resume=False, until=None,
        progress=False, timeout=LAUNCH_LIMIT, **changes):  # fmt: skip
    """A GPT is trained on all ranks by each of the methods; returns a dict for `report`.

    method   one of ENGINES, or "all"; sequence is tensor with sequence_parallel=True
    path     a text of your own
    changes  functions: a learner's own copy, reduce, column, row, attention, embed, cross_entropy,
             norm. All others are of Settings: steps=40, overlap=True, ...
    """
    parts = {name: changes.pop(name, ours) for name, ours in PARTS.items()}
    settings, methods = replace(SIZES[size], **changes), list(ENGINES)
    if method != "all":
        methods = [method]
    if settings.checkpoint and method in ("all", "dtensor"):
        raise ValueError(f"method={method!r} keeps no checkpoint: name one, but not dtensor")
    text = data.text_file(path) if path else data.python_text()  # read once, for all ranks
    shape = MODELS[size]
    if text.vocab_size > shape.vocab_size:
        shape = replace(shape, vocab_size=text.vocab_size)
    found = launch(_train_all, shape, settings, methods, parts, text, resume, until, progress,
                   ranks=ranks, timeout=timeout, stream=progress)
    rows = [row._replace(busy=statistics.mean(one[name].busy for one in found if name in one))
            for name, row in found[0].items()]
    return {"rows": rows, "shape": shape, "settings": settings, "ranks": len(found),
            "text": text.name, "own": [name for name in PARTS if parts[name] is not PARTS[name]]}


def _train_all(shape, settings, methods, parts, text, resume, until, progress):
    """On each rank: {method: Row}; that of one process on rank 0 alone, for which all wait."""
    rows = {}
    for method in methods:
        if method != "one" or dist.get_rank() == 0:
            rows[method] = train(shape, settings, method, parts, text, resume, until, progress)
            gc.collect()  # modules and their hooks refer to each other
        dist.barrier()
    return rows


def train(shape, settings, method, parts, text, resume, until, progress):
    """The Row of a training by one method; after it, one more step is counted."""
    settings = replace(settings, sequence_parallel=settings.sequence_parallel or method == "sequence")
    if method == "tensor" and settings.sequence_parallel:
        method = "sequence"
    torch.manual_seed(0)
    parallel = Parallel() if method == "one" else ENGINES[method](
        sequence_parallel=settings.sequence_parallel, overlap=settings.overlap, **parts)
    trainer = CheckedTrainer(GPT(shape), text, settings, device(), parallel=parallel,
                             progress=progress)
    trainer.title = method
    if resume:
        trainer.resume()
    start, worked = time.perf_counter(), time.process_time()
    history = trainer.fit(until)
    busy = (time.process_time() - worked) / (time.perf_counter() - start)
    with Traffic() as sent:
        trainer.step()
    held = memory_of(trainer.model, trainer.optimizer)
    pieces = -(-settings.batch // settings.micro_batch)
    said = (held_bytes(shape, method, parallel.ranks),
            *traffic(shape, settings.batch, parallel.ranks, method, pieces))
    counted = (held.total - held.buffers, sent.sent_messages, sent.sent_bytes)
    return Row(method, said, counted, busy, history, history.held_out.get(settings.steps))


class CheckedTrainer(TextTrainer):
    """TextTrainer; a loss that is no number ends the run on all ranks before it is saved."""

    def log(self, *arguments):
        super().log(*arguments)
        if not math.isfinite(loss := self.history.loss[-1]):
            raise ValueError(f"the loss of step {self.steps_done} is {loss}: train with less than "
                             f"lr={self.loop.lr:g}")


def report(found):
    """What `run` found, as text."""
    settings, shape, rows = found["settings"], found["shape"], found["rows"]
    lines = [
        f"{settings.steps} steps of {settings.batch} x {shape.n_ctx} tokens of {found['text']}, "
        f"{settings.precision}, {found['ranks']} ranks; your own: {', '.join(found['own']) or '-'}",
        f"{'rank 0':10}" + "".join(f"{name:>12}{'formula':>12}" for name in ("bytes held",
                                  "messages", "bytes sent")) + "   busy  tokens/s  apart  held out"]
    for row in rows:
        cells = [f"{n:12,.0f}" for pair in zip(row.counted, row.said) for n in pair]
        apart = max(abs(a - b) for a, b in zip(row.history.loss[:3], rows[0].history.loss))
        lines.append(f"{row.method:10}{''.join(cells)}{row.busy:7.0%}"
                     f"{statistics.median(row.history.speed):10,.0f}{apart:7.0e}"
                     + (f"{row.held_out:10.4f}" if row.held_out else f"{'stopped':>10}"))
    return "\n".join([*lines, f"apart: the first three losses from those of {rows[0].method}."])
