"""A GPT is trained through a pipeline; then its messages, memory and times are looked at."""

import dataclasses
import functools
import statistics

import torch

from ranklab import pipeline_parallel as pp
from ranklab.engine import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT
from ranklab.pipeline_parallel.emulated import SleepingStage
from ranklab.pipeline_parallel.stages import gpt_costs
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.projects.authors import authors
from ranklab.projects.clock import wait_for_all
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.pipeline_parallel.config import SIZES
from ranklab.text_trainer import TextTrainer, text_for

SECONDS = 0.03  # that the forward of a mean stage sleeps


def run(size="laptop", ranks=4, schedule=pp.one_f_one_b_schedule, executor=pp.PipelineExecutor,
        split=pp.split_stages, path=None, resume=False, until=None, progress=False,
        timeout=LAUNCH_LIMIT, **changes):  # fmt: skip
    """The model is trained on all ranks; returns a dict for `report`.

    schedule, executor, split  a learner's own will do: see PipelineParallel
    path     a text of your own
    changes  of Config: steps=100, micro_batches=4, slow_stage=2, ...
    """
    shape, config = SIZES[size]
    config = dataclasses.replace(config, **changes)
    text, shape = text_for(shape, config, path)
    plan = schedule(ranks_to_come(ranks), config.micro_batches)  # refuses what it cannot do
    layers = split(gpt_costs(shape), len(pp.places(plan)))
    if config.slow_stage >= len(layers):
        raise ValueError(f"slow_stage={config.slow_stage} is not one of the {len(layers)} stages")
    parts = {"schedule": schedule, "split": split, "executor": executor}
    found = launch(_work, shape, config, text, plan, layers, parts, resume, until, progress,
                   ranks=ranks, timeout=timeout, stream=progress)
    return {"ranks": found, "shape": shape, "config": config, "plan": plan, "layers": layers,
            "authors": authors(parts)}


def _work(shape, config, text, plan, layers, parts, resume, until, progress):
    """On each rank: the model is trained, and looked at."""
    config = dataclasses.replace(config, micro_batch=config.batch // config.micro_batches)
    parallel = PipelineParallel(**parts)
    trainer = new_trainer(shape, text, config, parallel, progress)
    if resume:
        trainer.resume()
    loss, alone = trainer.fit(until).held_out.get(config.steps), None
    if config.compare and loss and parallel.rank == 0:
        config = dataclasses.replace(config, checkpoint=None)
        alone = new_trainer(shape, text, config).fit().held_out[config.steps]
    return {"loss": loss, "alone": alone, "steps": trainer.steps_done,
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "asleep": asleep(parallel, plan, stage_costs(shape, layers), config.slow_stage),
            **watch(trainer, plan)}


def new_trainer(shape, text, config, parallel=None, progress=False):
    torch.manual_seed(0)
    with torch.device("meta" if parallel else "cpu"):  # a rank has memory for its own layers
        model = GPT(shape)
    return TextTrainer(model, text, config, device(), parallel=parallel, progress=progress)


def stage_costs(shape, layers):
    """FLOPs of each stage's forward."""
    return [sum(gpt_costs(shape)[layer] for layer in of_stage) for of_stage in layers]


def asleep(parallel, plan, costs, slow_stage):
    """The spans of this rank in a real run of the schedule `plan` whose stages sleep."""
    seconds = [SECONDS / statistics.mean(costs) * cost for cost in costs]
    if slow_stage >= 0:
        seconds[slow_stage] *= 2
    last, x = len(costs) - 1, torch.ones(1, device=device())
    stages = {stage: SleepingStage(*[seconds[stage]] * 3, parallel.queue, stage == last)
              for stage in parallel.stages}
    runner = parallel.executor(stages, last, torch.empty_like, None, parallel.queue, timed=True)
    wait_for_all()
    runner.run(plan, [(x, x)] * (1 + max(action.micro_batch for action in plan[0])))
    return runner.spans


def watch(trainer, plan):
    """The trainer has done one more step; a dict with its spans, and with (counted, said) of
    messages, bytes, and activations kept.
    """
    parallel = trainer.parallel

    class Watched(parallel.executor):
        most = 0

        def forward(self, action):
            super().forward(action)
            self.most = max(self.most, len(self.activations) + len(self.weight_queue.pending))

    parallel.executor = functools.partial(Watched, timed=True)
    wait_for_all()
    with Traffic() as traffic:
        trainer.step()
    sent = [op.sent_bytes for op in traffic.ops if op.name == "send"]
    messages = sum(entry.kind[0] == "S" for entry in pp.with_messages(plan)[parallel.rank])
    size = trainer.loop.micro_batch * trainer.n_ctx * parallel.width * parallel.dtype.itemsize
    copies = [p.nbytes for p in parallel.copies]
    return {"spans": parallel.ran.spans, "messages": (len(sent), messages + len(copies)),
            "bytes": (sum(sent), messages * size + sum(copies)),
            "kept": (parallel.ran.most, pp.in_flight_activations(plan)[parallel.rank])}
