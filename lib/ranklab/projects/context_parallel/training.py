"""Train a GPT on long sequences over all ranks; report its memory, bytes and losses."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab.basics.options import option
from ranklab.context_parallel import (
    ContextParallel, TokenShard, context_attention, ring_bytes, ulysses_attention, ulysses_bytes,
    zigzag_shard,
)
from ranklab.data import held_out_batch
from ranklab.data.text import END
from ranklab.engine.report import count_ranks
from ranklab.mesh import build_mesh
from ranklab.meter import SavedActivations
from ranklab.models.gpt import GPTConfig
from ranklab.projects.authors import authors
from ranklab.projects.command import ranks_to_come
from ranklab.projects.runner import Drawn, OnRanks, OnText, Resumed
from ranklab.projects.training import Session, large_gpt, new_model, sent_in_a_step, trained_alone
from ranklab.trainer.text import TrainConfig, text_for

METHODS = ("ring", "ulysses", "both")
PARTS = {"attention": context_attention, "trade": ulysses_attention, "shard": zigzag_shard}
SHARE = 8  # a rank's memory budget is what 1/SHARE of the sequence needs, and a quarter more


@dataclass(frozen=True)
class Config(TrainConfig):
    """The training settings, validated when created. The defaults suit a laptop."""

    steps: int = 80
    lr: float = 6e-3
    batch: int = 16  # long sequences
    micro_batch: int = 16
    eval_batch: int = option(64, "held-out sequences")
    method: str = option("ring", "of attention; both: Ulysses in pairs, a ring between them",
                         METHODS)
    documents: bool = option(False, "no token sees past the beginning of its file")
    compare: bool = option(True, "rank 0 trains on short windows, too")


SIZES = {  # the long sequence; a rank is allowed an eighth of it
    "laptop": (GPTConfig(n_ctx=128, n_head=8), Config()),
    "gpt2": (large_gpt(n_ctx=65536, n_layer=12, n_head=12, n_embd=768, rotary_base=500_000.0),
             Config(steps=200, batch=1, micro_batch=1, eval_batch=8, lr=6e-4, precision="bf16",
                    compare=False)),
}


@dataclass(frozen=True)
class Options(OnRanks, Resumed, OnText, Drawn):
    """The command's options besides Config's."""

    size: str = option("laptop", "of the GPT", SIZES)

    def settings(self):
        return SIZES[self.size][1]


@dataclass(frozen=True)
class Outcome:
    """The results of all ranks together."""

    shape: GPTConfig
    config: Config
    authors: str
    ranks: tuple  # of each rank: {"saved": bytes, "sent": bytes a step, "predicted": bytes}
    steps: int
    losses: dict  # {name: held-out nats}
    by_position: dict  # {name: [(position, held-out nats)]}, in parts of a rank's budget
    saved_short: int  # bytes of activations of one short window in one process


def run(size="laptop", ranks=None, path=None, **arguments):
    """Train the model on all ranks (8 without torchrun); return an Outcome.

    path       a text file of your own
    arguments  fields of Session and Config; a learner's functions for PARTS: see TokenShard
    Raises ValueError if the ranks do not divide the sequence or, with ulysses, the heads.
    """
    ranks = ranks or ranks_to_come(SHARE)
    shape, config = SIZES[size]
    session, parts, config = Session.divide({"ranks": ranks} | arguments, PARTS, config)
    text, shape = text_for(shape, config, path)
    parts["shard"](shape.n_ctx, ranks)  # refuses now what it would refuse on all ranks
    columns = columns_of(config.method, ranks)
    if shape.n_head % columns:
        raise ValueError(f"{columns} ranks that trade heads must divide n_head={shape.n_head}")
    costs, outcomes = zip(*session.launch(_work, shape, config, text, parts, columns))
    return Outcome(shape, config, authors(parts), costs, **outcomes[0])


def columns_of(method, ranks):
    """Return how many ranks exchange heads with each other; rings join these groups."""
    if method == "both" and ranks % 2:
        raise ValueError(f"ranks={ranks} must be even for both: they trade heads in pairs")
    return {"ring": 1, "ulysses": ranks, "both": 2}[method]


def _work(session, shape, config, text, parts, columns):
    """Train the model on each rank, and measure it.

    Returns: (costs of this rank, the last fields of an Outcome: rank 0 has all of them)
    """
    mesh = build_mesh({"ring": dist.get_world_size() // columns, "ulysses": columns})
    tokens = TokenShard(mesh.group("ring"), mesh.group("ulysses") if columns > 1 else None,
                        end=END[0] if config.documents else None, **parts)
    trainer = session.train(new_model(shape), text, config, ContextParallel(tokens=tokens))
    steps, saved_short = trainer.steps_done, 0
    costs = {"saved": saved_bytes(trainer), "predicted": predicted_bytes(mesh, shape, config),
             "sent": sent_in_a_step(trainer, "send", "all_to_all")}  # without gradients
    curves = {"long": by_position(trainer, tokens, trainer.held_out_batch())}
    if config.compare and dist.get_rank() == 0:
        short = train_on_windows(shape, text, config)
        saved_short = saved_bytes(short)
        curves["short windows"] = by_position(short, None, windows(text, shape, config))
    return costs, {"steps": steps, "saved_short": saved_short,
                   "by_position": {name: parts_of(curve) for name, curve in curves.items()},
                   "losses": {name: curve.mean().item() for name, curve in curves.items()}}


def train_on_windows(shape, text, config):
    """Return the trainer of one process that trained on as many tokens, in windows of 1/SHARE."""
    batches = {name: getattr(config, name) * SHARE for name in ("batch", "micro_batch")}
    return trained_alone(new_model(replace(shape, n_ctx=shape.n_ctx // SHARE)), text,
                         replace(config, **batches))


# --- measurements ---------------------------------------------------------------------------------

def saved_bytes(trainer):
    """Return the bytes saved for backward of one sequence on this rank."""
    x, y = (tokens[:1].to(trainer.device) for tokens in trainer.next_batch())
    with SavedActivations(trainer.model) as tensors:
        trainer.loss_sum(x, y)
    return tensors.bytes


def predicted_bytes(mesh, shape, config):
    """Return the bytes of attention's messages in a step, by the formulas.

    With both methods, the ring passes what a pair of ranks holds.
    """
    rows, columns = mesh.axes.values()
    heads, width = shape.n_head, 4 if config.precision == "fp32" else 2
    ring = ring_bytes(shape.n_ctx, heads // columns, shape.head_size, rows, width)
    traded = ulysses_bytes(shape.n_ctx // rows, heads, heads, shape.head_size, columns, width)
    return (ring + traded) * config.batch * shape.n_layer


def windows(text, shape, config):
    """Return the held-out sequences, cut into consecutive windows of 1/SHARE."""
    batch = held_out_batch(text.held_out, config.eval_batch, shape.n_ctx)
    return [tokens.reshape(-1, shape.n_ctx // SHARE) for tokens in batch]


@torch.no_grad()
def by_position(trainer, tokens, batch):
    """Return the mean loss at each position of the long sequences, (T,), equal on all ranks."""
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
    """Return [(the middle of a part, its mean loss)] of SHARE parts."""
    return [((2 * i + 1) * len(curve) / (2 * SHARE), part.mean().item())
            for i, part in enumerate(curve.chunk(SHARE))]


# --- the report -----------------------------------------------------------------------------------

def report(outcome):
    """Format the Outcome as text."""
    shape, config, ranks = outcome.shape, outcome.config, outcome.ranks
    peak = max(result["saved"] for result in ranks)
    lines = [f"{outcome.steps} steps of {config.batch} x {shape.n_ctx} tokens on "
             f"{count_ranks(len(ranks))}, by {config.method}", outcome.authors,
             "a rank sends for attention in a step: counted {sent:,} bytes, "
             "said {predicted:,}".format(**ranks[0]),
             f"a sequence of {shape.n_ctx} tokens keeps for backward, on the fullest rank: "
             f"{peak:,} bytes"]
    if config.compare:
        budget = outcome.saved_short * 5 // 4
        lines += [f"one process keeps {outcome.saved_short:,} bytes of {shape.n_ctx // SHARE} "
                  f"tokens. With a budget of {budget:,}, a quarter more, the long sequence "
                  + ("fits" if peak <= budget else "does not fit")]
    middles = [middle for middle, _ in outcome.by_position["long"]]
    lines += ["\nheld-out nats per token, by position",
              f"{'':14}" + "".join(f"{middle:8.0f}" for middle in middles) + "     mean"]
    lines += [f"{name:14}" + "".join(f"{loss:8.3f}" for _, loss in points)
              + f"{outcome.losses[name]:9.3f}" for name, points in outcome.by_position.items()]
    if config.compare:
        gaps = [short - long for (_, long), (_, short) in zip(*outcome.by_position.values())]
        lines.append(f"trained on long sequences, it is better by {gaps[0]:.3f} nats in the first "
                     f"part, where both see as much, and by {gaps[-1]:.3f} in the last")
    return "\n".join(lines)


def figure(outcome):
    """Draw the loss by position."""
    from ranklab.plots.context_parallel import by_position  # here: needs matplotlib

    return by_position(outcome.by_position)
