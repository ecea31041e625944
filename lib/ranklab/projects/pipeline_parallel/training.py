"""A GPT is trained through a pipeline; then its messages, memory and times are looked at."""

import dataclasses

import torch
import torch.distributed as dist

from ranklab import data
from ranklab.engine import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT
from ranklab.pipeline_parallel import (
    PipelineExecutor, in_flight_activations, one_f_one_b_schedule, split_stages, with_messages,
)
from ranklab.pipeline_parallel.stages import gpt_costs
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.projects.clock import wait_for_all
from ranklab.projects.command import LAUNCH_LIMIT
from ranklab.projects.pipeline_parallel.config import SIZES
from ranklab.projects.pipeline_parallel.monitor import asleep
from ranklab.text_trainer import TextTrainer


def run(size="laptop", ranks=4, schedule=one_f_one_b_schedule, executor=PipelineExecutor,
        split=split_stages, resume=False, until=None, progress=False, timeout=LAUNCH_LIMIT,
        **changes):  # fmt: skip
    """The model is trained on all ranks; returns a dict for `report`.

    schedule, executor, split  a learner's own will do: see PipelineParallel
    changes  of Settings: steps=100, micro_batches=4, slow_stage=2, ...
    """
    shape, settings = SIZES[size]
    settings = dataclasses.replace(settings, **changes)
    text = data.python_text()  # read once, for all ranks
    found = launch(_work, shape, settings, text, schedule, executor, split, resume, until, progress,
                   ranks=ranks, timeout=timeout, stream=progress)
    return {"ranks": found, "shape": shape, "settings": settings, "text": text.name,
            "schedule": schedule}


def _work(shape, settings, text, schedule, executor, split, resume, until, progress):
    """What this rank has, has learnt, sends, keeps, and when it is busy."""
    plan = schedule(dist.get_world_size(), settings.micro_batches)  # refuses what it cannot do
    parallel = PipelineParallel(None, schedule, split, executor)
    rows = settings.batch // settings.micro_batches
    trainer = new_trainer(shape, text, dataclasses.replace(settings, micro_batch=rows), parallel,
                          progress)
    if resume:
        trainer.resume()
    loss, alone = trainer.fit(until).held_out.get(settings.steps), None
    if settings.compare and loss and parallel.rank == 0:
        whole = dataclasses.replace(settings, micro_batch=settings.batch, checkpoint=None)
        alone = new_trainer(shape, text, whole).fit().held_out[settings.steps]
    layers = split(gpt_costs(shape), len(parallel.place))
    costs = [sum(gpt_costs(shape)[layer] for layer in of_stage) * (1 + (stage == settings.slow_stage))
             for stage, of_stage in enumerate(layers)]
    return {"layers": layers, "place": parallel.place, "loss": loss, "alone": alone,
            "steps": trainer.steps_done, "asleep": asleep(plan, executor, costs),
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            **watch(trainer, plan)}


def new_trainer(shape, text, settings, parallel=None, progress=False):
    torch.manual_seed(0)
    with torch.device("meta" if parallel else device()):  # a rank has memory for its own layers
        model = GPT(shape)
    return TextTrainer(model, text, settings, device(), parallel=parallel, progress=progress)


def watch(trainer, plan):
    """The trainer has done two more steps; the spans of one, and (said, counted) of messages,
    bytes, and activations kept.
    """
    parallel, made = trainer.parallel, []

    class Watched(parallel.executor):
        def __init__(self, *how):
            super().__init__(*how, timed=True)
            self.most, self.at_first = 0, made.append(self)

        def forward(self, action):
            super().forward(action)
            self.most = max(self.most, len(self.kept) + len(self.weight_queue.waiting))

    with Traffic() as traffic:
        trainer.step()
    parallel.executor = Watched
    wait_for_all()
    trainer.step()
    sent = [op.sent_bytes for op in traffic.ops if op.name == "send"]
    messages = sum(entry.kind[0] == "S" for entry in with_messages(plan)[parallel.rank])
    size = trainer.loop.micro_batch * trainer.n_ctx * parallel.width * parallel.dtype.itemsize
    copies = [p.nbytes for p in parallel.copies]
    return {"spans": made[0].spans, "messages": (messages + len(copies), len(sent)),
            "bytes": (messages * size + sum(copies), sum(sent)),
            "kept": (in_flight_activations(plan)[parallel.rank], made[0].most)}
