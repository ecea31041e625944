"""Count what a rank holds and sends in a step: in a run, and in a dry run of any size."""

import torch
import torch.distributed as dist

from ranklab.engine import device, launch
from ranklab.expert_parallel.dispatch import AllToAll, Sent
from ranklab.expert_parallel.layer import layers_of
from ranklab.fsdp.shards import sharded_modules
from ranklab.hybrid.training import Hybrid
from ranklab.mesh import build_mesh
from ranklab.meter import MemoryPeak, Traffic, posing, without_memory
from ranklab.models.gpt import GPT
from ranklab.trainer.text import TextTrainer, TrainConfig


def counted_step(trainer, batch=None):
    """Run one step of the trainer; return (peak Memory of the step, Traffic) of this rank.

    Gradient buckets count as well, and with zero=3 everything that is gathered for a while.
    Collective: call it on every rank.
    """
    hybrid = trainer.parallel
    if hybrid.layout.zero < 3:
        buffers = {"communication": [bucket.flat for bucket in hybrid.data.replica.buckets]}
    else:
        blocks = sharded_modules(hybrid.pipeline.model)
        buffers = {"gathered": lambda: [(block.gathered, [(p.whole, p.whole.grad)
                                                          for p in block.parameters])
                                        for block in blocks]}
    trainer.optimizer.zero_grad(set_to_none=True)
    peak = MemoryPeak(trainer.model, trainer.optimizer, **buffers)
    with Traffic() as traffic, peak:
        trainer.step(batch)
    return peak.peak, traffic


def sent_along(traffic, mesh):
    """Return {axis: bytes sent}.

    Gradients that travel along several axes together count as data.
    """
    nbytes = traffic.by_axis(mesh)
    nbytes["data"] += sum(n for axes, n in nbytes.items() if " x " in axes and
                          {*axes.split(" x ")} <= {"data", "expert", "context"})
    return {axis: nbytes[axis] for axis in sorted(mesh.axes)}


def dry_run(job, layout):
    """Return (peak Memory of a step, {axis: bytes sent in a step}) of the first rank.

    One process plays the first rank: messages go nowhere, and tensors have a shape but no memory.
    So a step of a 130B model takes a minute on one core. It runs two short steps: the first fills
    the pipeline once, the second twice. Later micro-batches hold nothing more, and each of them
    sends as much as each extra micro-batch of the second step.
    """
    return launch(dry_run_on_one_rank, job, layout, ranks=1, timeout=600)[0]


def dry_run_on_one_rank(job, layout):
    """Do the work of dry_run, on the only rank of a job."""
    pieces = job.micro_batches(layout)
    first, second = min(layout.pp, pieces), min(2 * layout.pp, pieces)  # of the two short steps
    config = TrainConfig(micro_batch=job.micro_batch, precision=job.precision)
    with posing(layout.ranks) as stack:
        hybrid = PretendingHybrid(layout.new_mesh(build_mesh, layout.ranks), layout)
        hybrid.stack = stack
        if hybrid.data.context:  # now, because only real numbers show which scores are masked
            hybrid.data.context.length = job.config.n_ctx
            hybrid.data.context.set_visible(job.config.n_ctx, device())
        with torch.device("meta"):
            model = GPT(job.config)
        trainer = TextTrainer(model, None, config, device(), parallel=hybrid, progress=False)
        trainer.to_device = lambda x: x.to(device())  # there is no memory to pin
        with Traffic() as traffic:  # the first step also makes Adam's moments
            trainer.step(_batch(job.on_a_rank(layout), first))
        first_bytes = sent_along(traffic, hybrid.mesh)
        memory, traffic = counted_step(trainer, _batch(job.on_a_rank(layout), second))
    steps_left = (pieces - second) / max(1, second - first)  # each sends the second's extra bytes
    return memory, {axis: int(n + steps_left * (n - first_bytes[axis]))
                    for axis, n in sent_along(traffic, hybrid.mesh).items()}


class PretendingHybrid(Hybrid):
    """A Hybrid whose tensors have no memory from `materialize` on.

    A tensor without memory could not leave the device "meta", so this starts after materializing.
    """

    def materialize(self, model):
        for layer in layers_of(model):
            layer.dispatch = even_dispatch
        self.stack.enter_context(without_memory())
        super().materialize(model)


def even_dispatch(x, chosen, n_experts, group=None):
    """Dispatch tokens as dispatch_tokens does, for tensors without values.

    All experts are chosen equally often.
    """
    R, k = dist.get_world_size(group), chosen.shape[1]
    counts = torch.zeros(n_experts, dtype=torch.long, device=x.device)
    dist.all_to_all_single(torch.empty_like(counts), counts, group=group)
    rank_rows, local_experts = chosen.numel() // R, n_experts // R
    order = chosen.flatten().argsort(stable=True)[: R * rank_rows]
    rows = AllToAll.apply(x[order // k], R * [rank_rows], R * [rank_rows], group)
    by_expert = torch.arange(len(rows), device=x.device)
    counts = [len(range(e, len(rows), local_experts)) for e in range(local_experts)]
    return rows[by_expert], Sent(order, R * [rank_rows], R * [rank_rows], by_expert, counts)


def _batch(job, pieces):
    """Return a batch of `pieces` micro-batches."""
    tokens = torch.zeros(pieces * job.micro_batch, job.config.n_ctx, dtype=torch.long)
    return tokens, tokens
