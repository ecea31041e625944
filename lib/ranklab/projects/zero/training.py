"""A GPT is trained in one stage of ZeRO after the other, and what each costs is counted."""

import dataclasses
import functools
import gc
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from ranklab import data
from ranklab.baseline import checkpoint_blocks
from ranklab.engine import device, launch
from ranklab.models.gpt import GPT
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.costs import median_speed
from ranklab.projects.zero.config import MODELS, SIZES
from ranklab.projects.zero.engines import new_trainer
from ranklab.projects.zero.measure import Costs, measure, predicted
from ranklab.text_trainer import text_for
from ranklab.trainer import History
from ranklab.zero import zero_memory
from ranklab.zero.training import STAGES


class Row(NamedTuple):
    """What one stage has shown, on rank 0."""

    stage: int
    said: Costs  # by the formulas
    costs: Costs  # counted; only None where the stage had no two steps left to do
    tokens_per_second: float
    history: History
    steps: int  # done
    held_out: float | None  # nats per token; None: stopped before the end


def run(size="laptop", numbers=(0, 1, 2, 3), stages=STAGES, zero_memory=zero_memory, ranks=None,
        path=None, resume=False, until=None, progress=False, timeout=LAUNCH_LIMIT,
        **changes):  # fmt: skip
    """The model is trained on all ranks, in each of the stages `numbers`; returns a dict.

    stages       {1: class, 2: class, 3: class} for our engine: a learner's own will do
    zero_memory  the formula that stands beside what is counted
    path         a text of your own
    changes      of Config: engine="deepspeed", steps=100, ...
    error        ValueError where a rank would have fewer rows than another: in stage 3 all ranks
                 must call the model as often
    """
    config, count = dataclasses.replace(SIZES[size], **changes), ranks_to_come(ranks)
    if config.checkpoint and len(numbers) > 1:
        raise ValueError(f"checkpoint={config.checkpoint!r} is that of one stage: name it")
    if config.offload and 0 in numbers:
        raise ValueError(f"offload={config.offload!r} needs stage 1, 2 or 3: name them")
    for name in ("batch", "eval_batch"):
        if getattr(config, name) % count:
            raise ValueError(f"{count} ranks must divide {name}={getattr(config, name)}")
    text, shape = text_for(MODELS[size], config, path)  # read once, for all ranks
    shown = launch(_train_all, shape, config, numbers, stages, text, resume, until, progress,
                   ranks=ranks, timeout=timeout, stream=progress)[0]
    rows = [Row(number, predicted(shape, config, number, count, zero_memory), *of_stage)
            for number, of_stage in zip(numbers, shown)]
    window = data.held_out_batch(text.held_out, config.eval_batch, shape.n_ctx)
    used = {f"ZeroStage{n}": stages[n] for n in numbers if n and config.engine == "ours"}
    return {"rows": rows, "shape": shape, "config": config, "ranks": count, "text": text.name,
            "bigram": data.bigram_loss(text.train, *window, text.vocab_size),
            "authors": authors({**used, "zero_memory": zero_memory})}


def _train_all(shape, config, numbers, stages, text, resume, until, progress):
    """On each rank: all stages, one after the other; of each all of a Row but the first two."""
    shown = []
    for stage in numbers:
        torch.manual_seed(0)
        model = GPT(shape).to(device())
        if config.recompute:
            checkpoint_blocks(model, functools.partial(checkpoint, use_reentrant=False))
        trainer = new_trainer(model, text, config, stage, stages, progress)
        if resume:
            trainer.resume()
        costs = Costs(*[None] * len(Costs._fields))
        if min(until or config.steps, config.steps) - trainer.steps_done > 2:
            trainer.step()  # makes the optimizer's state, and shows stage 3 the order of its units
            costs = measure(trainer, config)
        history = trainer.fit(until)
        held_out = history.held_out.get(config.steps)
        if held_out is None and not trainer.stopped:
            held_out = trainer.evaluate()
        shown.append((costs, median_speed(history), history, trainer.steps_done, held_out))
        del model, trainer
        gc.collect()  # modules and their hooks refer to each other: else two models are in memory
    return shown
