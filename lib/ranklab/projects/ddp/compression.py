"""What does compression cost in quality? One GPT, trained with every hook: bytes beside loss.

Plain SGD with clipping, so that a hook's damage is seen: Adam divides much of it away. The text is
the source of Python's library, the loss is of files that nobody trained on.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ranklab.collectives import bus_factor
from ranklab.data import batch_at, held_out_batch, python_text
from ranklab.ddp import (
    PowerSGD, TopK, compress_bf16_hook, compress_fp16_hook, compress_to_budget, power_sgd,
    top_k_compress,
)
from ranklab.engine import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects.authors import authors

MODEL = GPTConfig(n_layer=1, n_embd=32, n_ctx=32)
BATCH, LR, WARM_UP, CLIP = 16, 0.3, 10, 1.0  # BATCH: sequences on each rank
HELD_OUT = 64  # sequences


class Row(NamedTuple):
    """One line of the table."""

    name: str
    sent: int  # bytes that a rank sends in a step, at the end of training
    loss: float  # nats per byte of held-out text


def hooks(half=compress_fp16_hook, top_k=top_k_compress, low_rank=power_sgd,
          budget=compress_to_budget):
    """{name: function that makes (state, hook)}; None: DDP's own all-reduce.

    half, top_k, low_rank, budget  a learner's own will do
    """
    named = {
        "float32": None,
        "fp16": lambda: (None, half),
        "bf16": lambda: (None, compress_bf16_hook),
        "top-k 1%": lambda: (TopK(0.01, compress=top_k), TopK.hook),
        "top-k 1%, no feedback": lambda: (TopK(0.01, None, False, top_k), TopK.hook),
        "top-k 0.1%": lambda: (TopK(0.001, compress=top_k), TopK.hook),
        "budget of 0.1%": lambda: ({}, budget),
    }
    for rank in (1, 4):
        for feedback in (True, False):
            name = f"PowerSGD {rank}" + ("" if feedback else ", no feedback")
            named[name] = lambda r=rank, f=feedback: (
                PowerSGD(r, error_feedback=f, approximate=low_rank), PowerSGD.hook)
    named["PowerSGD 1 (torch)"] = torch_power_sgd
    return named


def torch_power_sgd():
    """torch's own, from the third step on: before that it can't keep errors.

    Its callbacks start collectives of their own. Under gloo they run on several threads, so that
    with more than one bucket ranks may start them in different orders, and crash: here is one.
    """
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


def compare(names=None, ranks=2, steps=50, seed=0, **mine):
    """[Row of each hook] after `steps` steps from the same weights, on the same batches.

    mine   a learner's functions: see hooks
    error  a name that is not in hooks(); fewer than 3 steps
    """
    known = hooks(**mine)
    names = list(names or known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"hook {unknown[0]!r} is not one of {', '.join(known)}")
    if steps < 3:
        raise ValueError(f"steps={steps} must be at least 3: torch's PowerSGD begins in the third")
    made = {name: known[name] for name in names}
    return launch(train_with_each, made, steps, seed, ranks=ranks, timeout=600)[0]


def train_with_each(made, steps, seed):
    """On a rank: [Row of each] of {name: function that makes (state, hook), or None}."""
    text = python_text()
    return [train(name, make, text, steps, seed) for name, make in made.items()]


def train(name, make, text, steps, seed, group=None):
    """On a rank: the Row of one hook."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(seed)
    gpt = GPT(MODEL).to(device())
    # Buffers are rotary angles, alike on all ranks: DDP would broadcast them in every step.
    model = DistributedDataParallel(gpt, process_group=group, forward_sync_buffers=False)
    state, hook = make() if make else (None, None)
    if hook:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / WARM_UP)
        batch = batch_at(text.train, step, BATCH * R, MODEL.n_ctx, seed)
        x, y = (tokens[rank::R].to(device()) for tokens in batch)
        traffic = Traffic()
        with traffic if step == steps - 1 else nullcontext():  # it slows down what it counts
            model(x, y).backward()
        clip_grad_norm_(gpt.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        window = held_out_batch(text.held_out, HELD_OUT, MODEL.n_ctx)
        loss = gpt(*(tokens.to(device()) for tokens in window)).item()
    return Row(name, sent_bytes(traffic, state, R), loss)


def sent_bytes(traffic, state, R):
    """Counted; but torch's PowerSGD sends from threads that the meter is not in, and tells."""
    if not isinstance(state, powerSGD_hook.PowerSGDState):
        return traffic.sent_bytes
    _, _, numbers = state.compression_stats()
    steps = state.iter - state.start_powerSGD_iter
    return round(bus_factor("all_reduce", R) * 4 * numbers / steps)


def table(rows, **mine):
    """`rows` as text; `less` is against the first of them. `mine` are the functions of compare."""
    lines = [f"{'gradients as':24}{'bytes sent a step':>20}{'less':>9}{'held-out loss':>16}"]
    lines += [f"{row.name:24}{row.sent:20,}{rows[0].sent / row.sent:8.1f}x{row.loss:16.3f}"
              for row in rows]
    if mine:
        lines.append(authors({function.__name__: function for function in mine.values()}))
    return "\n".join(lines)
