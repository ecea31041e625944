"""Train a GPT by one method after another, and count the costs of each."""

import gc
import itertools
import math
import statistics
import time
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.basics.options import option
from ranklab.engine import device
from ranklab.engine.report import count_ranks
from ranklab.meter import Traffic, memory_of
from ranklab.meter.text import lined_up
from ranklab.models.gpt import GPTConfig
from ranklab.peers.dtensor import DTensors
from ranklab.pipeline_parallel.actions import Action
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.projects.authors import authors
from ranklab.projects.command import ranks_to_come
from ranklab.projects.runner import OnRanks, OnText, Resumed
from ranklab.projects.tensor_parallel.costs import held_bytes, traffic
from ranklab.projects.training import Session, must_divide, new_model
from ranklab.tensor_parallel.plan import TPConfig
from ranklab.tensor_parallel.training import TensorParallel
from ranklab.trainer import PRECISIONS, History
from ranklab.trainer.parallel import Parallel
from ranklab.trainer.text import TextTrainer, TrainConfig, text_for

GPT2 = {"vocab_size": 50257, "n_ctx": 1024, "rotary_base": 10000.0}
MODELS = {"laptop": GPTConfig(n_layer=4, n_head=8, n_embd=96),
          "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768, **GPT2),
          "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600, **GPT2)}  # 25 heads: 5 ranks
METHODS = ("one", "naive", "tensor", "sequence", "dtensor")
PARTS = {field.name: field.default for field in fields(TPConfig) if callable(field.default)}


@dataclass(frozen=True)
class Config(TrainConfig):
    """The training settings, validated when created."""

    sequence_parallel: bool = option(False, "outside of layers each rank has some tokens")
    overlap: bool = option(False, "compute weight gradients while those of inputs are added up")


LARGE = Config(steps=100, batch=16, micro_batch=4, lr=3e-4, precision="bf16", eval_batch=64)
SIZES = {"laptop": Config(steps=30, batch=8, micro_batch=8, eval_batch=32, log_every=1),
         "gpt2": LARGE, "gpt2-xl": LARGE}


@dataclass(frozen=True)
class Options(OnRanks, Resumed, OnText):
    """The command's options besides Config's."""

    size: str = option("laptop", "of the GPT", SIZES)
    method: str = option("all", "how ranks share it; sequence is tensor with --sequence-parallel",
                         ("all", *METHODS))

    def settings(self):
        return SIZES[self.size]


class Row(NamedTuple):
    """The results of one method, on rank 0."""

    method: str
    predicted: tuple  # bytes held, messages and bytes sent in a step, by formulas
    counted: tuple
    busy: float  # share of the time in which the CPU worked, mean over ranks
    history: History
    held_out: float | None  # nats per token; None: stopped before the end


def run(size="laptop", method="tensor", path=None, **arguments):
    """Train a GPT on all ranks by each of the methods; return a dict for `report`.

    method     one of METHODS, or "all"; sequence is tensor with sequence_parallel=True
    path       a text file of your own
    arguments  fields of Session and Config; a learner's functions for PARTS
    """
    session, parts, config = Session.divide(arguments, PARTS, SIZES[size])
    methods = METHODS if method == "all" else (method,)
    refuse(method, methods, config, MODELS[size], ranks_to_come(session.ranks))
    text, shape = text_for(MODELS[size], config, path)  # read once, for all ranks
    results = session.launch(_train_all, methods, shape, config, parts, text)
    return {"rows": results[0], "shape": shape, "config": config, "ranks": len(results),
            "text": text.name, "authors": authors(parts)}


def refuse(method, methods, config, shape, R):
    """Raise ValueError for settings that can't work, before anything is launched."""
    by_tokens = config.sequence_parallel or "sequence" in methods
    if not set(methods) <= set(METHODS):
        raise ValueError(f"method={method!r} must be all or one of {', '.join(METHODS)}")
    if config.checkpoint and method in ("all", "dtensor"):
        raise ValueError(f"method={method!r} keeps no checkpoint: name one, but not dtensor")
    if set(methods) - {"one", "naive"}:
        must_divide(R, n_head=shape.n_head)
    if by_tokens and shape.n_ctx % R:
        raise ValueError(f"{R} ranks must divide the {shape.n_ctx} tokens of a sequence")
    if "naive" in methods and R > shape.n_layer:
        raise ValueError(f"{R} ranks are more than n_layer={shape.n_layer}: each needs a layer")
    TPConfig(None, by_tokens, config.overlap)  # refuses both


def _train_all(session, methods, *arguments):
    """Return the Rows on each rank; the method "one" trains on rank 0 while the others wait."""
    rows = []
    for method in methods:
        if method != "one" or dist.get_rank() == 0:
            rows.append(train(session, method, *arguments))
            gc.collect()  # modules and their hooks refer to each other
        dist.barrier()
    return rows


def train(session, method, shape, config, parts, text):
    """Train by one method and count one more step; return a Row."""
    parallel = new_parallel(method, config, parts)
    trainer = TextTrainer(new_model(shape), text, config, device(), parallel=parallel,
                          progress=session.progress)
    start, worked = time.perf_counter(), time.process_time()
    history = session.fit(trainer)
    busy = torch.tensor([time.process_time() - worked], device=device())
    busy = parallel.gather(busy).mean().item() / (time.perf_counter() - start)
    with Traffic() as step:
        trainer.step()
    held = memory_of(trainer.model, trainer.optimizer)
    R, pieces = parallel.ranks, -(-config.batch // config.micro_batch)
    predicted = (held_bytes(shape, method, R),
                 *traffic(shape, config.batch, R, method, pieces,
                          config.sequence_parallel or method == "sequence",
                          leaving=PRECISIONS[config.precision].itemsize))
    counts = held.total - held.buffers, step.sent_messages, step.sent_bytes
    return Row(method, predicted, counts, busy, history, history.held_out.get(config.steps))


def new_parallel(method, config, parts):
    if method == "one":
        return Parallel()
    if method == "naive":
        return PipelineParallel(schedule=one_by_one)
    engine = DTensors if method == "dtensor" else TensorParallel
    sequence = config.sequence_parallel or method == "sequence"
    return engine(sequence_parallel=sequence, overlap=config.overlap, **parts)


def one_by_one(ranks, micro_batches):
    """Return the naive split as a schedule: one rank works at a time.

    Each micro-batch goes through all ranks and back, before the next one begins.
    """
    return tuple(tuple(Action(kind, rank, m) for m in range(micro_batches) for kind in "FB")
                 for rank in range(ranks))


def report(results):
    """Format the results of `run` as text."""
    config, rows, table = results["config"], results["rows"], []
    for row in rows:
        losses, speeds = row.history.loss[:3], row.history.speed or [0]  # none after the end
        gap = max((abs(a - b) for a, b in zip(losses, rows[0].history.loss)), default=0)
        costs = itertools.chain(*zip(row.counted, row.predicted))
        table.append((row.method, *(f"{cost:,.0f}" for cost in costs), f"{row.busy:.0%}",
                      f"{statistics.median(speeds):,.0f}", f"{gap:.0e}",
                      f"{row.held_out or math.nan:.3f}"))
    return "\n".join([
        f"{config.steps} steps of {config.batch} x {results['shape'].n_ctx} tokens of "
        f"{results['text']}, {config.precision}, {count_ranks(results['ranks'])}",
        f"{results['authors']}\n",
        lined_up(("bytes", "held", "formula", "messages", "formula", "sent", "formula", "busy",
                  "tokens/s", "apart", "loss"), table),
        "held, sent: on rank 0, sent in a step; busy: computing; apart: the first three",
        f"losses from those of {rows[0].method}; loss: held out, nats."])
