"""Parts that train one GPT by a kind of parallelism, and by one process: losses and the norms of
gradients agree. (AdamW would hide it in the losses if all gradients were twice too large.)
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parts import LeftOut
from ranklab.context_parallel import ContextParallel, TokenShard
from ranklab.data import python_text
from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device, launch
from ranklab.fsdp import Precision, fill_shards
from ranklab.fsdp.training import FullyShard
from ranklab.hybrid import parse_layout
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.peers.deepspeed_zero import DeepSpeed
from ranklab.peers.dtensor import DTensors
from ranklab.peers.fsdp2 import Fsdp2, fill
from ranklab.pipeline_parallel import (
    gpipe_schedule, interleaved_schedule, one_f_one_b_schedule, zero_bubble_schedule)
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.projects.hybrid.compare import compare
from ranklab.tensor_parallel.training import TensorParallel
from ranklab.trainer.parallel import Parallel
from ranklab.trainer.text import TextTrainer, TrainConfig
from ranklab.zero.training import Zero

STEPS = 3
# Relative. In float32 the orders of sums alone differ, but AdamW's first steps are
# signs of gradients, and a gradient that is nearly 0 may have either.
TOLERANCE = 2e-4
LIMIT = 50  # seconds of a launch


@dataclass(frozen=True)
class Way:
    """One kind of parallelism.

    parallel  () -> the Parallel of this rank
    fill      (model, rows): the shards of a model without numbers get theirs; None: it has them
    """

    parallel: Any
    fill: Any = None


def shape_for(job):
    """Return a GPT that 8 ranks can cut: heads, width, tokens; four layers, or two for each rank.
    """
    small = GPTConfig(n_layer=max(4, 2 * job["ranks"]), n_head=8, n_embd=64, n_ctx=64)
    return small if job["rehearsal"] else replace(small, n_embd=512, n_ctx=256)


def config_for(job):
    rows = 2 * job["ranks"]  # each a micro-batch: as many as any schedule wants
    return TrainConfig(steps=STEPS, batch=rows, micro_batch=1, lr=1e-3, warmup=1, eval_batch=rows)


def agree(job, ways, **changes):
    """Return {name: largest relative difference}; all ways, and one process, train alike.

    ways     {name: Way}
    changes  of the TrainConfig
    Raises: AssertionError with the numbers that differ.
    """
    shape, config = shape_for(job), replace(config_for(job), **changes)
    text = python_text()
    expected = launch(train, Way(Parallel), text, shape, config, ranks=1, timeout=LIMIT)[0]
    shown, wrong = {}, []
    for name, way in ways.items():
        ranks = launch(train, way, text, shape, config, ranks=job["ranks"], timeout=LIMIT)
        print(name, ranks, expected, flush=True)
        apart = max(abs(number - right) / right for rank in ranks
                    for number, right in zip(rank, expected, strict=True))
        shown[name] = f"{apart:.1e}"
        if not apart <= TOLERANCE:
            wrong.append(f"{name}: losses and norms {ranks[0]}, by one process {expected}")
    assert not wrong, "\n".join(wrong)
    return shown


def train(way, text, shape, config):
    """Return on each rank the mean loss of each step, over all ranks; then the gradients' norms,
    if the trainer clips.
    """
    trainer, losses, norms = new_trainer(way, text, shape, config), [], []
    parallel = trainer.parallel
    norm_of = parallel.grad_norm

    def recorded(parameters):
        norm = norm_of(parameters)
        norms.append(norm.item())
        return norm

    parallel.grad_norm = recorded
    for _ in range(STEPS):
        shares = parallel.gather(torch.stack([trainer.step().double()]))
        losses.append(parallel.total_of([share.item() for share in shares]))
    return losses + norms


def new_trainer(way, text, shape, config):
    """Make a trainer of the same GPT, whatever the way."""
    torch.manual_seed(0)
    model = whole = GPT(shape)
    if way.fill:
        with torch.device("meta"):
            model = GPT(shape)
    trainer = TextTrainer(model, text, config, device(), parallel=way.parallel(), progress=False)
    if way.fill:
        numbers = whole.state_dict()
        way.fill(model, lambda name, shape, first, stop: numbers[name][first:stop].to(device()))
        for module in model.modules():
            if hasattr(module, "reset_buffers"):
                module.reset_buffers()
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(device()))
    return trainer


def blocks_of(model):
    return model.blocks.values()


fully_shard = Way(FullyShard, fill_shards)
fsdp2 = Way(partial(Fsdp2, precision=Precision(), offload=False, blocks=blocks_of), fill)
zero_stage_3 = Way(partial(Zero, 3, equal_parts=True))
tensor_parallel = Way(partial(TensorParallel, sequence_parallel=False))
dtensors = Way(partial(DTensors, sequence_parallel=False))


def ddp(model, group=None):
    return DistributedDataParallel(model, process_group=group)


def data(job):
    return agree(job, {"data parallel": Way(DataParallel),
                       "torch's DDP": Way(partial(DataParallel, wrap=ddp))})


def zero(job):
    return agree(job, {f"ZeRO-{stage}": Way(partial(Zero, stage, equal_parts=True))
                       for stage in (1, 2, 3)})


def fsdp(job):
    return agree(job, {"FSDP": fully_shard, "torch's FSDP2": fsdp2})


def tensor(job):
    return agree(job, {
        "tensor": tensor_parallel,
        "tensor with sequence": Way(partial(TensorParallel, sequence_parallel=True)),
        "torch's DTensor": dtensors,
        "DTensor with sequence": Way(partial(DTensors, sequence_parallel=True))})


def pipeline(job):
    schedules = {"GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule,
                 "interleaved": partial(interleaved_schedule, virtual=2),
                 "zero bubble": zero_bubble_schedule}
    return agree(job, {name: Way(partial(PipelineParallel, schedule=schedule))
                       for name, schedule in schedules.items()})


def context(job):
    return agree(job, {
        "ring attention": Way(ContextParallel),
        "Ulysses": Way(lambda: ContextParallel(tokens=TokenShard(None, dist.group.WORLD)))})


def mesh(job):
    """Return a held-out loss of lab 12's own trainer after two steps."""
    layouts = {2: ("2x1x1,zero", "1x2x1,sp", "1x1x2"),
               8: ("2x2x2,sp,zero", "2x1x1,cp=2,zero", "4x1x2")}
    chosen = layouts.get(job["ranks"], ("2x2x1,sp,zero", "2x1x2,zero", "1x2x2,sp", "2x1x1,cp=2"))
    rows = compare([parse_layout(text) for text in chosen], progress=False)
    rows += compare([parse_layout("2x1x1,ep=2")], experts=4, progress=False)
    shown, wrong, alone = {}, [], None
    for row in rows:
        alone = row["loss"] if row["name"] == "1 x 1 x 1" else alone
        apart = abs(row["loss"] - alone) / alone
        shown[row["name"]] = f"{apart:.1e}"
        if not apart <= TOLERANCE:
            wrong.append(f"{row['name']}: loss {row['loss']}, by one process {alone}")
    assert not wrong, "\n".join(wrong)
    return shown


def deepspeed(job):
    if not find_spec("deepspeed"):
        raise LeftOut("deepspeed is not installed")
    os.environ.pop("RANKLAB_REHEARSE", None)  # it knows no GPU that is pretended: plain CPU
    return agree(job, {f"DeepSpeed's ZeRO-{stage}": Way(partial(DeepSpeed, stage))
                       for stage in (1, 2, 3)}, clip=0.0)  # it would clip by itself
