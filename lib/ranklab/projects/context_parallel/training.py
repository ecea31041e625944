"""A GPT is trained on long sequences over all ranks; then its memory, bytes and losses are seen."""

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab.context_parallel import (
    ContextParallel, TokenShard, context_attention, ring_bytes, ulysses_attention, ulysses_bytes,
    zigzag_shard,
)
from ranklab.data import held_out_batch
from ranklab.data.text import END
from ranklab.engine import device, launch
from ranklab.mesh import build_mesh
from ranklab.meter import SavedActivations, Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects.authors import authors
from ranklab.projects.command import LAUNCH_LIMIT, ranks_to_come
from ranklab.projects.context_parallel.config import SHARE, SIZES, Config
from ranklab.trainer.parallel import Parallel
from ranklab.trainer.text import TextTrainer, text_for


@dataclass(frozen=True)
class Found:
    """What all ranks have seen together."""

    shape: GPTConfig
    config: Config
    authors: str
    ranks: list  # of each rank: {"kept": bytes, "sent": bytes a step, "said": bytes}
    steps: int
    losses: dict  # {name: held-out nats}
    by_position: dict  # {name: [(position, held-out nats)]}, in parts of a rank's budget
    kept_short: int  # bytes of activations of one short window in one process


def run(size="laptop", ranks=8, attention=context_attention, trade=ulysses_attention,
        shard=zigzag_shard, path=None, resume=False, until=None, progress=False,
        timeout=LAUNCH_LIMIT, **changes):  # fmt: skip
    """The model is trained on all ranks; returns a Found.

    attention, trade, shard  a learner's own will do: see TokenShard
    path     a text of your own
    changes  of Config: steps=100, method="ulysses", ...
    error    ValueError where the ranks do not divide the sequence or, by ulysses, the heads
    """
    shape, config = SIZES[size]
    config = dataclasses.replace(config, **changes)
    text, shape = text_for(shape, config, path)
    R = ranks_to_come(ranks)
    shard(shape.n_ctx, R)  # refuses now what it would refuse on all ranks
    columns = columns_of(config.method, R)
    if shape.n_head % columns:
        raise ValueError(f"{columns} ranks that trade heads must divide n_head={shape.n_head}")
    parts = {"attention": attention, "trade": trade, "shard": shard}
    found = launch(_work, shape, config, text, parts, columns, resume, until, progress,
                   ranks=ranks, timeout=timeout, stream=progress)
    first = found[0].pop("first")
    return Found(shape, config, authors(parts), found, **first)


def columns_of(method, R):
    """How many ranks trade heads with each other; the others are in a ring."""
    if method == "both" and R % 2:
        raise ValueError(f"ranks={R} must be even for both: they trade heads in pairs")
    return {"ring": 1, "ulysses": R, "both": 2}[method]


def _work(shape, config, text, parts, columns, resume, until, progress):
    """On each rank: the model is trained, and looked at."""
    mesh = build_mesh({"ring": dist.get_world_size() // columns, "ulysses": columns})
    tokens = TokenShard(mesh.group("ring"), mesh.group("ulysses") if columns > 1 else None,
                        end=END[0] if config.documents else None, **parts)
    trainer = new_trainer(shape, text, config, ContextParallel(tokens=tokens), progress)
    if resume:
        trainer.resume()
    trainer.fit(until)
    steps = trainer.steps_done
    seen = {"kept": kept(trainer), "said": said(mesh, shape, config)} | sent(trainer)
    curves = {"long": by_position(trainer, tokens, trainer.held_out_batch())}
    first = {"steps": steps, "losses": dict.fromkeys(curves), "kept_short": 0}
    if config.compare and dist.get_rank() == 0:
        short = alone(shape, text, config)
        first["kept_short"] = kept(short)
        curves["short windows"] = by_position(short, None, held_out(text, shape, config))
    if dist.get_rank() == 0:
        first["by_position"] = {name: parts_of(curve) for name, curve in curves.items()}
        first["losses"] = {name: curve.mean().item() for name, curve in curves.items()}
        seen["first"] = first
    return seen


def new_trainer(shape, text, config, parallel, progress=False):
    torch.manual_seed(0)
    return TextTrainer(GPT(shape), text, config, device(), parallel=parallel, progress=progress)


def alone(shape, text, config):
    """The trainer of one process that has learned as many tokens, in windows of 1/SHARE."""
    shape = dataclasses.replace(shape, n_ctx=shape.n_ctx // SHARE)
    batches = {name: getattr(config, name) * SHARE for name in ("batch", "micro_batch")}
    config = dataclasses.replace(config, checkpoint=None, **batches)
    trainer = new_trainer(shape, text, config, Parallel())
    trainer.fit()
    return trainer


# --- what is looked at ----------------------------------------------------------------------------

def kept(trainer):
    """Bytes that one sequence keeps for backward on this rank."""
    x, y = trainer.next_batch()
    x, y = x[:1].to(trainer.device), y[:1].to(trainer.device)
    with SavedActivations(trainer.model) as saved:
        trainer.loss_sum(x, y)
    return saved.bytes


def sent(trainer):
    """{"sent": bytes that attention's messages have in one step}; gradients are left out."""
    with Traffic() as traffic:
        trainer.step()
    of_attention = [op for op in traffic.ops if op.name in ("send", "all_to_all")]
    return {"sent": sum(op.sent_bytes for op in of_attention)}


def said(mesh, shape, config):
    """The same bytes by the formulas: for both, a ring of what a pair of ranks holds."""
    rows, columns = mesh.axes.values()
    heads, width = shape.n_head, 4 if config.precision == "fp32" else 2
    ring = ring_bytes(shape.n_ctx, heads // columns, shape.head_size, rows, width)
    traded = ulysses_bytes(shape.n_ctx // rows, heads, heads, shape.head_size, columns, width)
    return (ring + traded) * config.batch * shape.n_layer


def held_out(text, shape, config):
    """The held-out sequences, cut into windows of 1/SHARE that follow on each other."""
    whole = held_out_batch(text.held_out, config.eval_batch, shape.n_ctx)
    return [part.reshape(-1, shape.n_ctx // SHARE) for part in whole]


@torch.no_grad()
def by_position(trainer, tokens, batch):
    """(T,): the mean loss at each position of the long sequences, alike on all ranks."""
    x, y = (t.to(trainer.device) for t in batch)
    trainer.model.eval()
    losses = F.cross_entropy(trainer.model(x).float().flatten(0, 1), y.flatten(), reduction="none")
    trainer.model.train()
    losses = losses.view(trainer.config.eval_batch, -1).mean(0)
    if tokens is None:
        return losses.cpu()
    whole = losses.new_zeros(tokens.tokens)
    whole[tokens.positions] = losses
    dist.all_reduce(whole)
    return whole.cpu()


def parts_of(curve):
    """[(the middle of a part, its mean loss)] of SHARE parts."""
    return [((2 * i + 1) * len(curve) / (2 * SHARE), part.mean().item())
            for i, part in enumerate(curve.chunk(SHARE))]
