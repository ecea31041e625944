"""Training in blocks beside one process: this rank's rows of all gradients."""

import torch.distributed as dist

from ranklab.checks.fsdp.rows import chunk_of
from ranklab.checks.trial import explain, group_of_mine, members_of
from ranklab.checks.zero.toys import ADAMW, SGD, Toy, loss_of, seeded

# The optimizer, and of each backward before a step whether it communicates.
WAYS = (ADAMW, (True,)), (SGD, (False, True, True))


def _toy():
    """Tied, half frozen, uneven; a block is used twice in a row, another one first and last."""
    model = Toy().float()
    model.blocks.append(model.blocks[2])
    return model


def train(block_class, in_group=False, recompute=None):
    """Runs on every rank: [(what, its gradient, the mean over ranks, this rank's own)]."""
    rank, found = dist.get_rank(), []
    members = members_of(rank) if in_group else range(dist.get_world_size())
    group = group_of_mine() if in_group else None
    for new_optimizer, pieces in WAYS[: 1 if recompute or in_group else 2]:
        model, one = seeded(_toy, 0), seeded(_toy, 0)
        model.recompute = recompute
        for module in (*model.blocks[:3], model):
            root = block_class(module, group)
        ours, ones = new_optimizer(model.parameters()), new_optimizer(one.parameters())
        for step in range(2):
            ours.zero_grad()
            own, mean = (_gradients(one, pieces, ranks, step) for ranks in ((rank,), members))
            for piece, root.sync in enumerate(pieces):
                loss_of(model, 100 * step + 10 * piece + rank).backward()
            found += [(f"step {step + 1} after {len(pieces)} backwards: `{name}`", p.grad,
                       mean[name], own[name])
                      for name, p in model.named_parameters() if p.requires_grad]
            ours.step()
            ones.step()
    return found


def _gradients(model, pieces, ranks, step):
    """Those of the mean over ranks, which stay in the model, too."""
    model.zero_grad()
    for piece in range(len(pieces)):
        for rank in ranks:
            (loss_of(model, 100 * step + 10 * piece + rank) / len(ranks)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def explain_rows(where, got, right, own, rank, members):
    """As explain(), for the rank's rows of a mean gradient; `own` is the rank's own, whole."""
    R, place = len(members), list(members).index(rank)
    right, own = (chunk_of(x, R, place) for x in (right, own))
    explain(f"{where}: the gradient", got, right, {
        f"the sum, {R} times the mean": (R * right, "Divide by self.ranks, once."),
        "divided twice": (right / R, "Divide by self.ranks, once."),
        "divided by all 4 ranks": (R * right / 4, "Divide by self.ranks: those of the group."),
        "this rank's own": (own, "Reduce-scatter the gradients of all ranks."),
        f"this rank's own, divided by {R}": (own / R, "Reduce-scatter those of all ranks."),
        "zeros": (0 * right, "p.whole.grad = None once it is in the message, not before."),
    }, "Row r of the message is for rank r: padded_gradient() has a row for each rank, so lay the "
       "parameters beside each other, torch.cat(..., dim=1). Zeros where there is no gradient. "
       "Divide the message: p.whole.grad may have 16 bits.")
