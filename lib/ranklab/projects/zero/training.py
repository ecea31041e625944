"""A GPT is trained in one stage of ZeRO after the other, and what each costs is counted."""

import dataclasses
import functools
import gc
from typing import NamedTuple

import torch
import torch.distributed as dist
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
from ranklab.projects.zero.measure import UNKNOWN, Costs, measure, predicted
from ranklab.text_trainer import text_for
from ranklab.trainer import History
from ranklab.zero import zero_memory
from ranklab.zero.training import STAGES


class Row(NamedTuple):
    """What one stage has shown, on rank 0."""

    stage: int
    said: Costs  # by the formulas
    costs: Costs  # counted; UNKNOWN where it had no two steps left to do
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
    changes      of Settings: engine="deepspeed", steps=100, ...
    """
    settings = dataclasses.replace(SIZES[size], **changes)
    if settings.checkpoint and len(numbers) > 1:
        raise ValueError(f"checkpoint={settings.checkpoint!r} is that of one stage: name it")
    if settings.offload and 0 in numbers:
        raise ValueError(f"offload={settings.offload!r} needs stage 1, 2 or 3: name them")
    refuse_ranks(settings, ranks_to_come(ranks))
    text, shape = text_for(MODELS[size], settings, path)  # read once, for all ranks
    found = launch(_train_all, shape, settings, numbers, stages, zero_memory, text, resume, until,
                   progress, ranks=ranks, timeout=timeout, stream=progress)[0]
    used = {f"ZeroStage{n}": stages[n] for n in numbers if n and settings.engine == "ours"}
    return {**found, "authors": authors({**used, "zero_memory": zero_memory})}


def refuse_ranks(settings, ranks):
    """Raises ValueError where a rank would have fewer rows than another: in stage 3 all must call
    the model as often.
    """
    for name in ("batch", "eval_batch"):
        if getattr(settings, name) % ranks:
            raise ValueError(f"{ranks} ranks must divide {name}={getattr(settings, name)}")


def _train_all(shape, settings, numbers, stages, zero_memory, text, resume, until, progress):
    """On each rank: all stages, one after the other; returns what `run` does."""
    rows, ranks = [], dist.get_world_size()
    for stage in numbers:
        torch.manual_seed(0)
        model = GPT(shape).to(device())
        if settings.recompute:
            checkpoint_blocks(model, functools.partial(checkpoint, use_reentrant=False))
        trainer = new_trainer(model, text, settings, stage, stages, progress)
        said = predicted(shape, settings, stage, ranks, zero_memory)
        rows.append(Row(stage, said, *train(trainer, settings, resume, until)))
        del model, trainer
        gc.collect()  # modules and their hooks refer to each other: else two models are in memory
    window = data.held_out_batch(text.held_out, settings.eval_batch, shape.n_ctx)
    bigram = data.bigram_loss(text.train, *window, text.vocab_size)
    return {"rows": rows, "shape": shape, "settings": settings, "ranks": ranks, "text": text.name,
            "bigram": bigram}


def train(trainer, settings, resume, until):
    """The trainer has done its steps; returns all of a Row but the first two."""
    if resume:
        trainer.resume()
    costs = UNKNOWN
    if min(until or settings.steps, settings.steps) - trainer.steps_done > 2:
        trainer.step()  # makes the optimizer's state, and shows stage 3 the order of its units
        costs = measure(trainer, settings)
    history = trainer.fit(until)
    held_out = history.held_out.get(settings.steps)
    if held_out is None and not trainer.stopped:
        held_out = trainer.evaluate()
    return costs, median_speed(history), history, trainer.steps_done, held_out
