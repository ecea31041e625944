"""A GPT is trained over data, tensor and pipeline ranks; what its steps cost is logged."""

import dataclasses
import functools
from dataclasses import dataclass, field

import torch

from ranklab import hardware
from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.engine import device, launch
from ranklab.engine.in_place import is_started_by_another
from ranklab.fsdp.hooks import sharded_modules
from ranklab.hybrid import Hybrid, mesh_grad_norm, parallelize
from ranklab.mesh import build_mesh
from ranklab.meter import MemoryPeak, Traffic
from ranklab.models.gpt import GPT
from ranklab.pipeline_parallel import PipelineExecutor, tied_embedding_sync
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT
from ranklab.projects.hybrid.config import refuse_what_does_not_fit, usual
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
    changes  of Settings: steps=100, micro_batch=1, ...
    """
    shape, settings, its_own = usual(size)
    layout, settings = layout or its_own, dataclasses.replace(settings, **changes)
    refuse_what_does_not_fit(shape, settings, layout)
    text, shape = text_for(shape, settings, path)
    found = launch(_work, shape, text, settings, layout, build, (parallelize, sync, norm), progress,
                   resume and reshard, until, timeout=timeout, stream=progress,
                   ranks=None if is_started_by_another() else layout.ranks)
    parts = {"build_mesh": build, "parallelize": parallelize, "tied_embedding_sync": sync,
             "mesh_grad_norm": norm, **({"reshard_checkpoint": reshard} if resume else {})}
    return {"ranks": found, "shape": shape, "settings": settings, "layout": layout,
            "authors": authors(parts)}


def _work(shape, text, settings, layout, build, parts, progress, reshard, until):
    """On each rank: what it has seen."""
    mesh = layout.new_mesh(build, settings.per_node or None)
    hybrid = Hybrid(mesh, layout, *parts)
    trainer = HybridTrainer(new_model(shape, "meta"), text, settings, hybrid, progress)
    if reshard:
        trainer.resume(reshard)
    loss, alone = trainer.fit(until).held_out.get(settings.steps), None
    if settings.compare and loss and hybrid.rank == 0:
        settings = dataclasses.replace(settings, checkpoint=None)
        one = TextTrainer(new_model(shape), text, settings, device(), progress=False)
        alone = one.fit().held_out[settings.steps]
    return {"loss": loss, "alone": alone, "steps": trainer.steps_done, "history": trainer.history,
            "place": mesh.coordinates(), "layers": [*hybrid.pipeline.layers.values()],
            "parameters": sum(p.numel() for p in trainer.model.parameters())}


def new_model(shape, where="cpu"):
    """The same GPT on all ranks; on "meta" it has no memory yet, and never has it for the whole."""
    torch.manual_seed(0)
    with torch.device(where):
        return GPT(shape)


@dataclass
class HybridHistory(History):
    """Also, at each log, how ranks wait and what they hold; and what one step of this one costs."""

    bubble: list = field(default_factory=list)
    mfu: list = field(default_factory=list)  # 0: the device's peak is not known
    peak: list = field(default_factory=list)  # bytes; 0: not known yet
    held: dict = field(default_factory=dict)  # category of Memory -> bytes, where they are most
    sent: dict = field(default_factory=dict)  # axis of the mesh -> bytes


class HybridTrainer(TextTrainer):
    """TextTrainer that knows what a layout costs: it shows it, and writes it for TensorBoard.

    A step that is logged is timed, since a GPU must be waited for. The second one of a run is
    counted, since that makes it slow; in the first one Adam has no state.
    """

    def __init__(self, model, text, settings, hybrid, progress):
        gpu = device().type == "cuda" and hardware.find(torch.cuda.get_device_name())
        peak = hybrid.ranks * gpu.peak_flops(PRECISIONS[settings.precision]) if gpu else None
        super().__init__(model, text, settings, device(), peak_flops=peak, parallel=hybrid,
                         progress=progress)
        self.history, self.board, self.counted = HybridHistory(), None, None
        if settings.tensorboard and hybrid.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # here: the package may be missing

            self.board = SummaryWriter(settings.tensorboard)

    def step(self, batch=None):
        is_first, pipeline = not self.history.steps, self.parallel.pipeline
        timed = is_first or due(self.steps_done + 1, self.loop.log_every)
        pipeline.executor = functools.partial(PipelineExecutor, timed=timed)
        counts = not (is_first or self.counted)
        share = self.counted_step(batch) if counts else super().step(batch)
        if timed:
            self.spans = pipeline.ran.spans
        return share

    def counted_step(self, batch):
        """A step, after which the history has what it holds and sends."""
        peak = MemoryPeak(self.model, self.optimizer, **besides(self.parallel))
        with Traffic() as traffic, peak:
            share = super().step(batch)
        self.history.held = dataclasses.asdict(peak.peak) | {"total": peak.peak_bytes}
        self.history.sent = dict(traffic.by_axis(self.parallel.mesh))
        self.counted = self.steps_done
        return share

    def after_step(self, share, is_last, stop, clock, bar):
        super().after_step(share, is_last, stop, clock, bar)
        if self.steps_done == self.counted:  # its time says nothing of speed
            clock.restart(self.steps_done)

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
        history, is_gpu = self.history, self.device.type == "cuda"
        history.bubble.append(self.bubble())
        history.peak.append(
            torch.cuda.max_memory_allocated() if is_gpu else history.held.get("total", 0))
        super().log(*arguments)
        rate = self.flops_per_token * history.speed[-1]
        history.mfu.append(rate / self.peak_flops if self.peak_flops else 0.0)
        self.tell({name: getattr(history, name)[-1]
                   for name in ("loss", "speed", "bubble", "mfu", "peak")}
                  | {f"memory/{name}": n for name, n in history.held.items()}
                  | {f"sent/{axis}": n for axis, n in history.sent.items()})

    def evaluate(self):
        loss = super().evaluate()
        self.tell({"held out": loss})
        return loss

    def shown(self):
        return {**super().shown(), "bubble": f"{self.history.bubble[-1]:.0%}",
                "peak": f"{self.history.peak[-1] / 1e6:,.0f} MB"}

    def tell(self, numbers):
        """They are in TensorBoard's folder, at this step; by rank 0."""
        if self.board:
            for name, number in numbers.items():
                self.board.add_scalar(name, number, self.steps_done)
            self.board.flush()


def besides(hybrid):
    """What MemoryPeak is told of: buckets of gradients; with zero=3 what is whole for a while."""
    if hybrid.layout.zero < 3:
        return {"communication": [bucket.flat for bucket in hybrid.data.replica.buckets]}
    blocks = sharded_modules(hybrid.pipeline.model)
    return {"gathered": lambda: [(block.gathered, [(p.whole, p.whole.grad)
                                                   for p in block.parameters]) for block in blocks]}
