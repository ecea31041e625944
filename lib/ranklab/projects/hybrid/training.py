"""A GPT is trained over data, tensor and pipeline ranks; how busy they are is logged."""

import dataclasses
import functools
from dataclasses import dataclass, field

import torch

from ranklab import hardware
from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.engine import device, launch
from ranklab.engine.in_place import is_started_by_another
from ranklab.fsdp.shards import sharded_modules
from ranklab.hybrid import Hybrid, mesh_grad_norm, parallelize
from ranklab.mesh import build_mesh
from ranklab.meter import MemoryPeak, Traffic
from ranklab.models.gpt import GPT
from ranklab.pipeline_parallel import PipelineExecutor, tied_embedding_sync
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT
from ranklab.projects.hybrid.config import usual
from ranklab.text_trainer import TextTrainer, text_for
from ranklab.trainer import PRECISIONS, History, due


def run(size="laptop", layout=None, build=build_mesh, parallelize=parallelize,
        sync=tied_embedding_sync, norm=mesh_grad_norm, reshard=reshard_checkpoint, resume=False,
        until=None, path=None, progress=False, timeout=LAUNCH_LIMIT, **changes):  # fmt: skip
    """The model is trained on all ranks of the layout; returns a dict for `report`.

    layout   None: the one of this size, 2 x 2 x 2 on a laptop
    build, parallelize, sync, norm, reshard  a learner's own will do
    until    a step to stop after
    path     a text of your own
    changes  of Config: steps=100, micro_batch=1, ...
    """
    shape, config, its_own = usual(size)
    layout, config = layout or its_own, dataclasses.replace(config, **changes)
    config.refuse_what_does_not_fit(shape, layout)
    text, shape = text_for(shape, config, path)
    found = launch(_work, shape, text, config, layout, build, (parallelize, sync, norm), progress,
                   resume and reshard, until, timeout=timeout, stream=progress,
                   ranks=None if is_started_by_another() else layout.ranks)
    parts = {"build_mesh": build, "parallelize": parallelize, "tied_embedding_sync": sync,
             "mesh_grad_norm": norm, **({"reshard_checkpoint": reshard} if resume else {})}
    return {"ranks": found, "shape": shape, "config": config, "layout": layout,
            "authors": authors(parts)}


def _work(shape, text, config, layout, build, parts, progress, reshard, until):
    """On each rank: what it has seen. After the last step one more is counted."""
    hybrid = Hybrid(layout.new_mesh(build, config.per_node or None), layout, *parts)
    trainer = HybridTrainer(new_model(shape, "meta"), text, config, hybrid, progress)
    if reshard:
        trainer.resume(reshard)
    loss, alone = trainer.fit(until).held_out.get(config.steps), None
    seen = {"loss": loss, "steps": trainer.steps_done, "history": trainer.history,
            "layers": [*hybrid.pipeline.layers.values()],
            "parameters": sum(p.numel() for p in trainer.model.parameters())}
    if not trainer.stopped:
        seen |= trainer.costs()
    if config.compare and loss and hybrid.rank == 0:
        one = TextTrainer(new_model(shape), text, dataclasses.replace(config, checkpoint=None),
                          device(), progress=False)
        alone = one.fit().held_out[config.steps]
    return seen | {"alone": alone}


def new_model(shape, where="cpu"):
    """The same GPT on all ranks; on "meta" it has no memory yet, and never has it for the whole."""
    torch.manual_seed(0)
    with torch.device(where):
        return GPT(shape)


@dataclass
class HybridHistory(History):
    """Also, at each log, how ranks wait."""

    bubble: list = field(default_factory=list)
    mfu: list = field(default_factory=list)  # 0: the device's peak is not known


class HybridTrainer(TextTrainer):
    """TextTrainer that shows how a layout keeps its ranks busy, and writes it for TensorBoard.

    A step that is logged is timed, since a GPU must be waited for.
    """

    def __init__(self, model, text, config, hybrid, progress):
        gpu = device().type == "cuda" and hardware.find(torch.cuda.get_device_name())
        peak = hybrid.ranks * gpu.peak_flops(PRECISIONS[config.precision]) if gpu else None
        super().__init__(model, text, config, device(), peak_flops=peak, parallel=hybrid,
                         progress=progress)
        self.history, self.board = HybridHistory(), None
        if config.tensorboard and hybrid.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # here: the package may be missing

            self.board = SummaryWriter(config.tensorboard)

    def step(self, batch=None):
        pipeline, is_first = self.parallel.pipeline, not self.history.steps
        timed = is_first or due(self.steps_done + 1, self.loop.log_every)
        pipeline.executor = functools.partial(PipelineExecutor, timed=timed)
        share = super().step(batch)
        self.spans = pipeline.ran.spans if timed else self.spans
        return share

    def bubble(self):
        """The part of the ranks' time in which they compute nothing, in the last timed step.

        No clocks are compared: the first stage begins first, and ends last. (With zero bubble
        schedules it may end earlier: a flush is not counted then, as in their papers.)
        """
        busy = sum(span.end - span.start for span in self.spans)
        mine = torch.tensor([busy, self.spans[-1].end - self.spans[0].start], dtype=torch.float64)
        busy, times = self.parallel.gather(mine.to(self.device)).T
        return (1 - busy.mean() / times.max()).item()

    def log(self, *arguments):
        history = self.history
        history.bubble.append(self.bubble())
        super().log(*arguments)
        rate = self.flops_per_token * history.speed[-1]
        history.mfu.append(rate / self.peak_flops if self.peak_flops else 0.0)
        self.tell({name: getattr(history, name)[-1] for name in ("loss", "speed", "bubble", "mfu")})

    def evaluate(self):
        loss = super().evaluate()
        self.tell({"held out": loss})
        return loss

    def shown(self):
        return {**super().shown(), "bubble": f"{self.history.bubble[-1]:.0%}"}

    def costs(self):
        """One more step is done; {"held": Memory at its peak, "sent": {axis: bytes}, "allocated":
        the most bytes that a GPU's allocator has had}.
        """
        allocated = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        held, sent = counted_step(self)
        self.tell({f"memory/{name}": n for name, n in dataclasses.asdict(held).items()}
                  | {f"sent/{axis}": n for axis, n in sent.items()})
        return {"held": held, "sent": sent, "allocated": allocated}

    def tell(self, numbers):
        """They are in TensorBoard's folder, at this step; by rank 0."""
        if self.board:
            for name, number in numbers.items():
                self.board.add_scalar(name, number, self.steps_done)
            self.board.flush()


def counted_step(trainer, batch=None):
    """A step is done; (Memory at its peak, {axis: bytes sent}) of this rank.

    Buckets of gradients count as well, and with zero=3 what is whole for a while.
    """
    hybrid = trainer.parallel
    if hybrid.layout.zero < 3:
        more = {"communication": [bucket.flat for bucket in hybrid.data.replica.buckets]}
    else:
        blocks = sharded_modules(hybrid.pipeline.model)
        more = {"gathered": lambda: [(block.gathered, [(p.whole, p.whole.grad)
                                                       for p in block.parameters])
                                     for block in blocks]}
    trainer.optimizer.zero_grad(set_to_none=True)
    peak = MemoryPeak(trainer.model, trainer.optimizer, **more)
    with Traffic() as traffic, peak:
        trainer.step(batch)
    return peak.peak, dict(traffic.by_axis(hybrid.mesh))
