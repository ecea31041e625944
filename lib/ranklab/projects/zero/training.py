"""Train a GPT in one stage of ZeRO after another, and count the costs of each."""

import dataclasses
import functools
import gc
from typing import NamedTuple

from torch.utils.checkpoint import checkpoint

from ranklab.baseline import checkpoint_blocks
from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device
from ranklab.peers.deepspeed_zero import DeepSpeed
from ranklab.projects.authors import authors
from ranklab.projects.command import ranks_to_come
from ranklab.projects.training import Session, fit_counted, median_speed, new_model
from ranklab.projects.zero.config import MODELS, SIZES
from ranklab.projects.zero.costs import Costs, measure, predicted
from ranklab.trainer import History
from ranklab.trainer.text import TextTrainer, text_for
from ranklab.zero import zero_memory
from ranklab.zero.training import STAGES, Zero


class StageResult(NamedTuple):
    """The results of one stage, on rank 0."""

    stage: int
    predicted: Costs  # by the formulas
    costs: Costs | None  # counted; None where the stage had fewer than three steps left to do
    held_out: float | None  # nats per token; None: stopped before the end
    tokens_per_second: float
    history: History
    steps: int  # done


def run(size="laptop", numbers=(0, 1, 2, 3), stages=STAGES, zero_memory=zero_memory,
        path=None, **arguments):
    """Train the model on all ranks, in each of the stages `numbers`; return a dict for `report`.

    stages       {1: class, 2: class, 3: class} for our engine: the library's, or a learner's
    zero_memory  the formula for the row below the counts
    path         a text file of your own
    arguments    fields of Session and of Config
    Raises ValueError as Config.check does.
    """
    session, _, config = Session.divide(arguments, {}, SIZES[size])
    ranks = ranks_to_come(session.ranks)
    config.check(numbers, ranks)
    text, shape = text_for(MODELS[size], config, path)  # read once, for all ranks
    by_stage = session.launch(_train_all, shape, config, numbers, stages, text)[0]
    rows = [StageResult(number, predicted(shape, config, number, ranks, zero_memory), *result)
            for number, result in zip(numbers, by_stage)]
    used = {f"ZeroStage{n}": stages[n] for n in numbers if n and config.engine == "ours"}
    return {"rows": rows, "shape": shape, "config": config, "ranks": ranks, "text": text.name,
            "authors": authors({**used, "zero_memory": zero_memory})}


def _train_all(session, shape, config, numbers, stages, text):
    """Train on each rank in one stage after another; return each StageResult from `costs` on."""
    results = []
    for stage in numbers:
        model = new_model(shape).to(device())
        if config.recompute:
            checkpoint_blocks(model, functools.partial(checkpoint, use_reentrant=False))
        trainer = new_trainer(model, text, config, stage, stages, session.progress)
        if session.resume:
            trainer.resume()
        scores = fit_counted(trainer, functools.partial(measure, trainer, config), session.until)
        history = trainer.history
        results.append((*scores, median_speed(history), history, trainer.steps_done))
        del model, trainer
        gc.collect()  # modules and their hooks refer to each other: else two models are in memory
    return results


def new_trainer(model, text, config, stage, stages, progress):
    """Return a trainer of `model` with config.engine, in this stage of ZeRO."""
    kind, options = TextTrainer, {"offload": config.offload}
    if config.engine == "deepspeed":
        kind = DeepSpeedTrainer
        parallel = DeepSpeed(stage, clip=config.clip, compiled=config.compiled, **options)
        config = dataclasses.replace(config, clip=0.0)  # DeepSpeed does it
    elif stage == 0:
        parallel = DataParallel(equal_parts=True)
    else:
        parallel = Zero(stage, equal_parts=True, stages=stages, **options)
    if config.has_master_weights(stage):
        model.bfloat16()
        in_16_bits = model.loss  # too few for a sum over many targets
        model.loss = lambda head, *rest: in_16_bits(lambda x: head(x).float(), *rest)
        config = dataclasses.replace(config, precision="fp32")  # no autocast
    trainer = kind(model, text, config, device(), parallel=parallel, progress=progress)
    trainer.title = f"{config.engine}, stage {stage}"
    return trainer


class DeepSpeedTrainer(TextTrainer):
    """The loop, with checkpoints in DeepSpeed's format, for the same number of ranks and stage."""

    def save(self):
        if self.loop.checkpoint:
            self.parallel.engine.save_checkpoint(self.loop.checkpoint, f"step-{self.steps_done}",
                                                 {"trained_steps": self.steps_done})

    def resume(self):
        path, state = self.parallel.engine.load_checkpoint(self.loop.checkpoint)
        if path is None:
            raise FileNotFoundError(f"{self.loop.checkpoint} holds no checkpoint of DeepSpeed")
        self.steps_done = state["trained_steps"]
