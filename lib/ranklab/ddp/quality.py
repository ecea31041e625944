"""What does it cost in quality to send less? One GPT, trained in several ways.

With hooks, training uses plain SGD with clipping, to show a hook's damage: Adam divides much of it
away. Trainers such as DiLoCo have an AdamW of their own on each rank. The text is the source of
Python's standard library; the loss is on held-out files.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ranklab.data import batch_at, held_out_batch, python_text
from ranklab.engine import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig

MODEL = GPTConfig(n_layer=1, n_embd=32, n_ctx=32)
BATCH, LR, WARM_UP, CLIP = 16, 0.3, 10, 1.0  # BATCH: sequences on each rank
HELD_OUT = 64  # sequences


class Quality(NamedTuple):
    """The result of training with one hook."""

    name: str
    sent: int  # bytes that a rank sends in a step, at the end of training
    loss: float  # nats per byte of held-out text


def compare_hooks(hooks, ranks=2, steps=50, seed=0):
    """Train with each hook for `steps` steps, from the same weights and on the same batches.

    hooks: {name: function that makes (state, hook), or None for DDP's own all-reduce}
    Returns: a list with the Quality of each hook.
    """
    return launch(train_with_each, hooks, steps, seed, ranks=ranks, timeout=600)[0]


def train_with_each(hooks, steps, seed, group=None):
    """Train with each hook, on a rank that is already launched; list the Quality of each.

    hooks: {name: function that makes (state, hook), or None}
    """
    text = python_text()
    return [Quality(name, *_train(make, text, steps, seed, group)) for name, make in hooks.items()]


def _train(make, text, steps, seed, group):
    """Train with one hook; return (bytes that this rank sends in the last step, held-out loss)."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(seed)
    gpt = GPT(MODEL).to(device())
    # The buffers are rotary angles, equal on all ranks; DDP would broadcast them in every step.
    model = DistributedDataParallel(gpt, process_group=group, forward_sync_buffers=False)
    if make:
        model.register_comm_hook(*make())
    optimizer, traffic = torch.optim.SGD(model.parameters()), Traffic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / WARM_UP)
        batch = batch_at(text.train, step, BATCH * R, MODEL.n_ctx, seed)
        x, y = (tokens[rank::R].to(device()) for tokens in batch)
        with traffic if step == steps - 1 else nullcontext():  # counting slows the step down
            model(x, y).backward()
        clip_grad_norm_(gpt.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return traffic.sent_bytes, _held_out_loss(gpt, text)


@torch.no_grad()
def _held_out_loss(gpt, text):
    window = held_out_batch(text.held_out, HELD_OUT, MODEL.n_ctx)
    return gpt(*(tokens.to(device()) for tokens in window)).item()


class Progress(NamedTuple):
    """A training run, at each of its measurements."""

    name: str
    steps: list
    sent: list  # bytes that a rank has sent
    loss: list  # nats per byte of held-out text


def compare_trainers(trainers, ranks=2, steps=96, measure=16, seed=0, lr=3e-3):
    """Train in each way, from the same weights and on the same batches; list the Progress of each.

    trainers: {name: function of this rank's AdamW that makes an object with step(), or None for
        DDP}
    measure: steps between two measurements of the held-out loss.
    """
    return launch(_train_in_each_way, trainers, steps, measure, seed, lr, ranks=ranks,
                  timeout=600)[0]


def _train_in_each_way(trainers, steps, measure, seed, lr):
    text, results = python_text(), []
    for name, make in trainers.items():
        rank, R = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        gpt = GPT(MODEL).to(device())
        model = gpt if make else DistributedDataParallel(gpt, forward_sync_buffers=False)
        inner = torch.optim.AdamW(gpt.parameters(), lr)
        trainer, progress = make(inner) if make else inner, Progress(name, [], [], [])
        sent = 0
        for step in range(1, steps + 1):
            batch = batch_at(text.train, step, BATCH * R, MODEL.n_ctx, seed)
            with Traffic() as traffic:
                model(*(tokens[rank::R].to(device()) for tokens in batch)).backward()
                trainer.step()
            sent += traffic.sent_bytes
            inner.zero_grad()
            if step % measure == 0:
                for column, value in zip(progress[1:], (step, sent, _held_out_loss(gpt, text))):
                    column.append(value)
        results.append(progress)
    return results
