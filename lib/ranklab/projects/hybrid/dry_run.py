"""One process poses as the first rank of all GPUs: a step of the real code, at full size.

Messages go nowhere, and tensors have a shape and no memory. So a step of 130B takes a minute of one
core, and what it holds and sends is counted, not computed by a formula.
"""

import contextlib
import os
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ranklab.data_parallel import refusals
from ranklab.engine import launch
from ranklab.hybrid import Cluster, Hybrid, layout_memory, layout_traffic, training
from ranklab.meter import MemoryPeak, Traffic
from ranklab.pipeline_parallel import stages
from ranklab.projects.hybrid.compare import AXES
from ranklab.projects.hybrid.sizes import SIZES
from ranklab.projects.hybrid.training import besides, new_model
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
    with posing(layout.ranks):
        mesh, trainer = new_trainer(job, layout)
        before = step(trainer, mesh, job, few)  # makes Adam's moments, too
        trainer.optimizer.zero_grad(set_to_none=True)
        with MemoryPeak(trainer.model, trainer.optimizer, **besides(trainer.parallel)) as memory:
            sent = step(trainer, mesh, job, more)
    left = (many - more) / max(1, more - few)
    return memory.peak, {axis: int(sent[axis] + left * (sent[axis] - before[axis]))
                         for axis in AXES}


def new_trainer(job, layout):
    mesh = layout.new_mesh()
    config = TrainConfig(micro_batch=job.micro_batch, precision=job.precision)
    return mesh, TextTrainer(new_model(job.config, "meta"), None, config,
                             parallel=Hybrid(mesh, layout), progress=False)


def step(trainer, mesh, job, pieces):
    """{axis: bytes sent in a step with so many micro-batches}"""
    tokens = torch.zeros(pieces * job.micro_batch, job.config.n_ctx, dtype=torch.long)
    with Traffic() as traffic:
        trainer.step((tokens, tokens))
    return traffic.by_axis(mesh)


@contextlib.contextmanager
def posing(ranks):
    """This process is rank 0 of so many, of which no other exists; afterwards it has no group.

    From the moment on in which a model gets its memory, it and all tensors get none.
    """
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks)
    with contextlib.ExitStack() as stack:
        def give_memory(*model):  # the split model: a pretended tensor could not leave "meta"
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stages.give_memory(*model)

        stack.enter_context(mock.patch.object(training, "give_memory", give_memory))
        # It reads numbers, and here are none.
        stack.enter_context(mock.patch.object(refusals, "refuse_other_shapes"))
        stack.enter_context(mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks)))
        yield
    dist.destroy_process_group()


def dry_run_report(size, job=None, layout=None):
    """What the first rank holds and sends, predicted and counted, as text.
    size         its name; in SIZES, where there is no job or layout
    """
    job, layout = job or SIZES[size][0], layout or SIZES[size][1]
    memory, sent = dry_run(job, layout)
    said, predicted = layout_memory(job, layout), layout_traffic(job, layout)
    rows = [(name.replace("_", " "), getattr(said, name), getattr(memory, name)) for name in ROWS]
    rows += [(f"sent along {axis}", predicted[axis], sent[axis]) for axis in AXES]
    room = Cluster(layout.ranks).room
    lines = [f"{size} on {layout.ranks} GPUs: {layout}, {job.micro_batches(layout)} micro-batches",
             "", f"{'GB of the first rank':24}{'predicted':>12}{'dry run':>12}"]
    lines += [f"{name:24}{a / 1e9:12,.2f}{b / 1e9:12,.2f}" for name, a, b in rows if a or b]
    word = "fits" if memory.total <= room else "does not fit"
    return "\n".join([*lines, "", f"It {word} in the {room / 1e9:.0f} GB that a GPU has for it."])
