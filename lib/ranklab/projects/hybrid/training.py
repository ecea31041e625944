"""Trains a GPT over data, tensor and pipeline ranks, and logs how busy they are."""

import dataclasses
import functools
from pathlib import Path

import torch

from ranklab import hardware
from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.cluster.exporter import Exported, exporting
from ranklab.engine import device, launch, sharing
from ranklab.engine.in_place import is_started_by_another
from ranklab.expert_parallel import MoEConfig, moe_gpt
from ranklab.hybrid import PARTS, Hybrid
from ranklab.hybrid.counted import counted_step, sent_along
from ranklab.models.gpt import GPT
from ranklab.pipeline_parallel import PipelineExecutor
from ranklab.pipeline_parallel.stages import gpt_costs
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT
from ranklab.projects.hybrid.config import SIZES, with_experts
from ranklab.trainer import PRECISIONS, due
from ranklab.trainer.text import TextTrainer, text_for

# Notebooks of version 1.0 call run(build=..., sync=...).
FIRST_NAMES = {"build": "build_mesh", "parallelize": "parallelize", "sync": "tied_embedding_sync",
               "norm": "mesh_grad_norm"}


def run(size="laptop", layout=None, parts=None, reshard=reshard_checkpoint, resume=False,
        until=None, path=None, shape=None, experts=0, export=None, progress=False,
        timeout=LAUNCH_LIMIT, **changes):  # fmt: skip
    """The model is trained on all ranks of the layout; returns a dict for `report`.

    layout   None: the layout of this size, 2 x 2 x 2 on a laptop
    parts    a learner's own of hybrid.parts.PARTS, {name: function}
    reshard  reshard_checkpoint, or a learner's own
    until    stops after this step
    path     a text of your own
    shape    a GPTConfig; None: the shape of this size
    experts  how many experts each block has; 0: an MLP
    export   a folder: Prometheus finds each rank's metrics by files in it
    changes  of Config: steps=100, micro_batch=1, ...; and of the parts by their first names
    """
    first = {FIRST_NAMES[name]: changes.pop(name) for name in FIRST_NAMES.keys() & changes.keys()}
    its_shape, config, its_own = SIZES[size]
    shape = with_experts(shape or its_shape, experts)
    layout, config = layout or its_own, dataclasses.replace(config, **changes)
    config.refuse_what_does_not_fit(shape, layout)
    text, shape = text_for(shape, config, path)
    learners = first | (parts or {})
    parts = PARTS | learners
    found = launch(_work, shape, text, config, layout, parts, progress, resume and reshard, until,
                   export, timeout=timeout, stream=progress,
                   ranks=None if is_started_by_another() else layout.ranks)
    named = {name: parts[name] for name in (*FIRST_NAMES.values(), *learners)}
    if resume:
        named["reshard_checkpoint"] = reshard
    return {"ranks": found, "shape": shape, "config": config, "layout": layout,
            "authors": authors(named)}


def _work(shape, text, config, layout, parts, progress, reshard, until, export):
    """What this rank has seen, as a dict. It does one more step after the last, to count it."""
    mesh = layout.new_mesh(parts["build_mesh"], config.per_node or None)
    hybrid = Hybrid(mesh, layout, parts=parts)
    trainer = HybridTrainer(new_model(shape, "meta"), text, config, hybrid, progress)
    if reshard:
        trainer.resume(reshard)
    with exporting(trainer, Path(config.checkpoint or "hybrid").name, export):
        history = trainer.fit(until)
    seen = {"loss": history.held_out.get(config.steps), "alone": None, "history": history,
            "steps": trainer.steps_done, "bubbles": trainer.bubbles,
            "shown": trainer.shown() if history.steps else {},
            "layers": [*hybrid.pipeline.layers.values()],
            "parameters": sum(p.numel() for p in trainer.model.parameters())}
    if not trainer.stopped:
        held, traffic = counted_step(trainer)
        seen |= {"held": held, "messages": traffic.sent_messages,
                 "sent": sent_along(traffic, hybrid.mesh)}
    if config.compare and seen["loss"] and hybrid.rank == 0:
        one = TextTrainer(new_model(shape), text, dataclasses.replace(config, checkpoint=None),
                          device(), progress=False)
        seen["alone"] = one.fit().held_out[config.steps]
    return seen


def new_model(shape, where="cpu"):
    """The same GPT on all ranks; on "meta" it has no memory, and never gets any for the whole."""
    torch.manual_seed(0)
    with torch.device(where):
        return moe_gpt(shape) if isinstance(shape, MoEConfig) else GPT(shape)


class HybridTrainer(Exported, TextTrainer):
    """TextTrainer that logs the bubble. A logged step is timed, so it waits for the GPU."""

    def __init__(self, model, text, config, hybrid, progress):
        gpu = device().type == "cuda" and hardware.find(torch.cuda.get_device_name())
        peak = (hybrid.ranks * sharing.share_of_gpu()
                * gpu.peak_flops(PRECISIONS[config.precision])) if gpu else None
        super().__init__(model, text, config, device(), peak_flops=peak, parallel=hybrid,
                         progress=progress)
        self.bubbles = []  # one for each log

    def step(self, batch=None):
        pipeline, is_first = self.parallel.pipeline, not self.history.steps
        timed = is_first or due(self.steps_done + 1, self.loop.log_every)
        pipeline.executor = functools.partial(PipelineExecutor, timed=timed)
        share = super().step(batch)
        self.spans = pipeline.ran.spans if timed else self.spans
        return share

    def log(self, *arguments):
        self.bubbles.append(self.parallel.bubble(self.spans))
        super().log(*arguments)

    @property
    def flops_per_token(self):
        return 3 * sum(gpt_costs(self.shape))  # which knows experts

    def shown(self):
        return {**super().shown(), "bubble": f"{self.bubbles[-1]:.0%}"}
