"""A GPT is trained through a pipeline; then its messages, memory and times are looked at."""

import dataclasses
import statistics

import torch
import torch.distributed as dist

from ranklab import meter
from ranklab import pipeline_parallel as pp
from ranklab.engine import device, launch
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
    changes  of Settings: steps=100, micro_batches=4, slow_stage=2, ...
    """
    shape, settings = SIZES[size]
    settings = dataclasses.replace(settings, **changes)
    text, shape = text_for(shape, settings, path)
    plan = schedule(ranks_to_come(ranks), settings.micro_batches)  # refuses what it cannot do
    stages = len(pp.places(plan))
    split(gpt_costs(shape), stages)
    if settings.slow_stage >= stages:
        raise ValueError(f"slow_stage={settings.slow_stage} is not one of the {stages} stages")
    found = launch(_work, shape, settings, text, (schedule, split, executor), resume, until,
                   progress, ranks=ranks, timeout=timeout, stream=progress)
    parts = {"schedule": schedule, "PipelineExecutor": executor, "split_stages": split}
    return {"ranks": found, "shape": shape, "settings": settings, "plan": plan,
            "authors": authors(parts)}


def _work(shape, settings, text, parts, resume, until, progress):
    """On each rank: the model is trained, and looked at."""
    schedule, split, _ = parts
    plan = schedule(dist.get_world_size(), settings.micro_batches)
    settings = dataclasses.replace(settings, micro_batch=settings.batch // settings.micro_batches)
    parallel = PipelineParallel(None, *parts)
    trainer = new_trainer(shape, text, settings, parallel, progress)
    if resume:
        trainer.resume()
    loss, alone = trainer.fit(until).held_out.get(settings.steps), None
    if settings.compare and loss and parallel.rank == 0:
        settings = dataclasses.replace(settings, checkpoint=None)
        alone = new_trainer(shape, text, settings).fit().held_out[settings.steps]
    layers = split(gpt_costs(shape), len(parallel.place))
    return {"layers": layers, "loss": loss, "alone": alone, "steps": trainer.steps_done,
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "asleep": asleep(parallel, plan, stage_costs(shape, layers), settings.slow_stage),
            **watch(trainer, plan)}


def new_trainer(shape, text, settings, parallel=None, progress=False):
    torch.manual_seed(0)
    with torch.device("meta" if parallel else "cpu"):  # a rank has memory for its own layers
        model = GPT(shape)
    return TextTrainer(model, text, settings, device(), parallel=parallel, progress=progress)


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
    """The trainer has done two more steps; a dict with the spans of one, and with (counted, said)
    of messages, bytes, and activations kept.
    """
    parallel, made, most = trainer.parallel, [], 0

    class Watched(parallel.executor):
        def __init__(self, *how):
            super().__init__(*how, timed=True)
            made.append(self)

        def forward(self, action):
            nonlocal most
            super().forward(action)
            most = max(most, len(self.kept) + len(self.weight_queue.waiting))

    with meter.Traffic() as traffic:
        trainer.step()
    parallel.executor = Watched
    wait_for_all()
    trainer.step()
    sent = [op.sent_bytes for op in traffic.ops if op.name == "send"]
    messages = sum(entry.kind[0] == "S" for entry in pp.with_messages(plan)[parallel.rank])
    size = trainer.loop.micro_batch * trainer.n_ctx * parallel.width * parallel.dtype.itemsize
    copies = [p.nbytes for p in parallel.copies]
    return {"spans": made[0].spans, "messages": (len(sent), messages + len(copies)),
            "bytes": (sum(sent), messages * size + sum(copies)),
            "kept": (most, pp.in_flight_activations(plan)[parallel.rank])}
