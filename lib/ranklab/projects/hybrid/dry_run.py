"""One process poses as the first rank of all GPUs: a step of the real code, at full size.

Messages go nowhere, and tensors have a shape and no memory. So a step of 130B takes a minute of one
core, and what it holds and sends is counted, not computed by a formula.
"""

import torch

from ranklab.engine import device, launch
from ranklab.hybrid import Cluster, Hybrid, layout_memory, layout_traffic
from ranklab.mesh import build_mesh
from ranklab.meter import Traffic
from ranklab.projects.dry_run import posing, table, without_memory
from ranklab.projects.hybrid.compare import AXES
from ranklab.projects.hybrid.sizes import SIZES
from ranklab.projects.hybrid.training import counted_step, new_model
from ranklab.text_trainer import TextTrainer, TrainConfig

ROWS = ("parameters", "gradients", "optimizer_state", "buffers", "gathered_parameters",
        "communication_buffers", "activations", "total")


def dry_run(job, layout):
    """(Memory at the peak of a step, {axis: bytes sent in a step}) of the first rank.

    Two short steps are run, which fill the pipeline once and twice. Later micro-batches hold
    nothing more, and each sends what one of the second step sent more than the first step did.
    """
    return launch(_dry_run, job, layout, ranks=1, timeout=600)[0]


def _dry_run(job, layout):
    many = job.micro_batches(layout)
    few, more = min(layout.pp, many), min(2 * layout.pp, many)
    with posing(layout.ranks) as stack:
        trainer = new_trainer(job, layout, stack)
        with Traffic() as traffic:  # the first step makes Adam's moments, too
            trainer.step(batch_of(job, few))
        before = traffic.by_axis(trainer.parallel.mesh)
        held, sent = counted_step(trainer, batch_of(job, more))
    left = (many - more) / max(1, more - few)
    return held, {axis: int(sent.get(axis, 0) + left * (sent.get(axis, 0) - before[axis]))
                  for axis in AXES}


def batch_of(job, pieces):
    """So many micro-batches."""
    tokens = torch.zeros(pieces * job.micro_batch, job.config.n_ctx, dtype=torch.long)
    return tokens, tokens


class PretendingHybrid(Hybrid):
    """Hybrid whose tensors have no memory from `materialize` on: a pretended tensor could not leave
    the device "meta".
    """

    def materialize(self, model):
        self.stack.enter_context(without_memory())
        super().materialize(model)


class PretendingTrainer(TextTrainer):
    """TextTrainer that pins nothing: a pretended tensor has no memory to pin."""

    def to_device(self, x):
        return x.to(self.device)


def new_trainer(job, layout, stack):
    hybrid = PretendingHybrid(layout.new_mesh(build_mesh, layout.ranks), layout)
    hybrid.stack = stack
    config = TrainConfig(micro_batch=job.micro_batch, precision=job.precision)
    return PretendingTrainer(new_model(job.config, "meta"), None, config, device(),
                             parallel=hybrid, progress=False)


def dry_run_report(size, job=None, layout=None):
    """What the first rank holds and sends, predicted and counted, as text.
    size         its name; in SIZES, where there is no job or layout
    """
    job, layout = job or SIZES[size][0], layout or SIZES[size][1]
    memory, sent = dry_run(job, layout)
    said, predicted = layout_memory(job, layout), layout_traffic(job, layout)
    rows = [(name, getattr(said, name), getattr(memory, name)) for name in ROWS]
    rows += [(f"sent along {axis}", predicted[axis], sent[axis]) for axis in AXES]
    budget = Cluster(layout.ranks).memory_budget
    fits = "fits" if memory.total <= budget else "does not fit"
    return "\n".join([
        f"{size} on {layout.ranks} GPUs: {layout}, {job.micro_batches(layout)} micro-batches", "",
        table("GB of the first rank", [row for row in rows if any(row[1:])]), "",
        f"It {fits} in the {budget / 1e9:.0f} GB that a GPU has for it."])
