"""A training run on every rank beside one process; all three stages are checked by it."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import (
    explain, group_of_mine, hinted, is_near, members_of, on_ranks, rank_name,
)
from ranklab.checks.zero.toys import ADAMW, SGD, Toy, loss_of, must_be_there, seeded
from ranklab.engine import device



def _in_bfloat16(recompute):
    return Toy(recompute).bfloat16()


# The model, the optimizer, whether each backward before a step communicates, and how many steps.
WAYS = (
    (Toy, ADAMW, (True,), 1),
    (Toy, SGD, (False, True), 1),
    (functools.partial(Toy, order=(0, 1, 2, 3, 0)), SGD, (False, True, True), 2),
    (_in_bfloat16, functools.partial(torch.optim.SGD, lr=10), (True,), 1),
)
EXPERTS = (functools.partial(Toy, order=None), ADAMW, (True,), 2),


def on_all_ranks(comparisons, *args, ranks, failures):
    """All comparisons(*args) hold on that many ranks; else a Mistake, with the hint of `failures`.

    comparisons  a generator of (function, its arguments...); the function may raise a Mistake
    """
    with hinted(failures):
        for mistake in on_ranks(_first_mistake, comparisons, args, ranks=ranks):
            if mistake:
                raise mistake


def _first_mistake(comparisons, args):
    """All ranks end where the first one has a Mistake; returns it, or None."""
    for compare, *what in comparisons(*args):
        mistake = None
        try:
            compare(*what)
        except Mistake as error:
            mistake = error
        failed = torch.tensor(float(mistake is not None), device=device())
        dist.all_reduce(failed)
        if failed:
            return mistake


def train(wrapped_class, new_watch, ways=WAYS, in_groups=False, recompute=None, options=(),
          make_optimizer=lambda wrapped, new_optimizer: wrapped.make_optimizer(new_optimizer)):
    """Runs on every rank: what to compare, for on_all_ranks."""
    rank, ranks, options = dist.get_rank(), dist.get_world_size(), dict(options)
    members, where = range(ranks), rank_name(rank, ranks)
    if in_groups:
        members, options["group"] = members_of(rank), group_of_mine()
        where = f"in the group of ranks {members}, rank {rank}"
    if recompute:
        where = f"{where}, {recompute} checkpoint"
    for new_model, new_optimizer, pieces, steps in ways:
        # Ranks begin apart: the weights of the first one count.
        one = OneProcess(seeded(lambda: new_model(None), members[0]), new_optimizer)
        wrapped = wrapped_class(seeded(lambda: new_model(recompute), rank), **options)
        optimizer = make_optimizer(wrapped, new_optimizer)
        for step in range(steps):
            here = f"{where}, step {step + 1}"
            yield from _step(here, wrapped, optimizer, one, new_watch, pieces, members, 100 * step)
        with torch.no_grad(), new_watch(wrapped) as watch:
            loss_of(wrapped, 0)
            watch.forward_ends()
        yield watch.after_forward, f"{where}, without gradients"


def _step(where, wrapped, optimizer, one, new_watch, pieces, members, seed):
    rank, once = dist.get_rank(), 1 - 1 / len(members)
    optimizer.zero_grad()
    for piece, sync in enumerate(pieces):
        wrapped.sync = sync
        with new_watch(wrapped) as watch:
            loss = loss_of(wrapped, seed + 10 * piece + rank)
            watch.forward_ends()
            loss.backward()
        yield watch.after_backward, where if sync else f"{where}, with sync=False", once, sync
    each = {r: one.gradients([seed + 10 * piece + r for piece in range(len(pieces))])
            for r in members}
    mean = [_mean(gradients) for gradients in zip(*each.values())]
    where = f"{where} after {len(pieces)} backwards" if len(pieces) > 1 else where
    yield compare_gradients, where, wrapped, mean, each[rank]
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    with new_watch(wrapped) as watch:
        optimizer.step()
    one.step(mean)
    yield watch.after_step, where, once
    yield compare_weights, where, wrapped.state_dict(), one.model, before


def _mean(gradients):
    """None is no gradient: it counts as zeros, where another rank has one."""
    there = [gradient for gradient in gradients if gradient is not None]
    return sum(there) / len(gradients) if there else None


class OneProcess:
    """The oracle: one process, with masters in float32 or better."""

    def __init__(self, model, new_optimizer):
        self.model, self.trained = model, [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
                        for p in self.trained]
        self.optimizer = new_optimizer(self.masters)

    def gradients(self, seeds):
        """Of the sum of these batches' losses."""
        found = torch.autograd.grad(sum(loss_of(self.model, seed) for seed in seeds), self.trained,
                                    allow_unused=True)
        return [gradient if gradient is None else gradient.to(master)
                for gradient, master in zip(found, self.masters)]

    def step(self, gradients):
        for master, master.grad in zip(self.masters, gradients):
            pass
        self.optimizer.step()
        for p, master in zip(self.trained, self.masters):
            p.data.copy_(master)


def compare_gradients(where, wrapped, mean, own):
    """Each rank's optimizer has the mean gradient of its shard, and none where no rank has one."""
    names = {p: name for name, p in wrapped.module.named_parameters() if p.requires_grad}
    mean, own = dict(zip(names, mean)), dict(zip(names, own))
    for bucket in wrapped.buckets:
        for part in bucket.parts if bucket.parameters[0] in names else ():
            here = f"{where}: the optimizer's gradient of `{names[part.parameter]}`"
            _compare_none(here, part.master.grad, mean[part.parameter], own[part.parameter])
        if name := names.get(bucket.parameters[0]):
            _compare_shard(f"{where}: the optimizer's gradient in the bucket of `{name}`", bucket,
                           _rows(bucket, mean), _rows(bucket, own)[bucket.rank])


def _compare_none(where, got, mean, own):
    if got is None and mean is not None:
        raise Mistake(f"{where} is None", "finish() calls bucket.hand_over() for every bucket, "
                      "when all messages have arrived." if own is not None else "Another rank has "
                      "used it: super().finish() has given those parameters a gradient. Hand them "
                      "to hand_over(): {p for p in bucket.parameters if p.grad is not None}.")
    if got is not None and mean is None:
        raise Mistake(f"{where} is there, and no rank has used it", "No rank has used it: "
                      "hand_over() only those that have p.grad, or weight decay and momentum will "
                      "move it.")


def _rows(bucket, gradients):
    """The gradients of each rank's shard, without what only fills this rank's."""
    flat = [torch.zeros_like(p.flatten()) if gradients[p] is None else gradients[p].flatten()
            for p in bucket.parameters]
    filled = sum(len(part.master) for part in bucket.parts)
    flat = nn.functional.pad(torch.cat(flat).to(_dtype(bucket.shard)), (0, bucket.padding))
    return flat.view(-1, len(bucket.shard))[:, :filled]


def _dtype(tensor):
    """As exact as the tensor is: where it has 64 bits, its layer's input came from 32."""
    return torch.float32 if tensor.dtype == torch.float64 else tensor.dtype


def _compare_shard(where, bucket, right, own):
    grads, R = [part.master.grad for part in bucket.parts], len(right)
    must_be_there(filter(torch.is_tensor, grads),
                  "the optimizer's gradient lies in memory that was freed")
    got = [torch.zeros_like(part.master) if grad is None else grad
           for grad, part in zip(grads, bucket.parts)]
    got = torch.cat([bucket.shard.new_zeros(0), *got]).to(_dtype(bucket.shard))
    ring = "Reduce-scatter bucket.flat into bucket.own, and wait for it."
    explain(where, got, right[bucket.rank], {
        f"the sum, {R} times the mean": (R * right[bucket.rank], "Divide bucket.flat by the "
                                         "number of ranks of its group, once."),
        f"the mean divided by {R} again": (right[bucket.rank] / R, "Divide once."),
        "this rank's own": (own, ring), f"this rank's own, divided by {R}": (own / R, ring),
        "zeros": (0 * own, "What has arrived never gets there: is the place of the mean in "
                  "bucket.own, and does finish() wait before it hands over?"),
        **{f"that of rank {r}'s shard": (other, "Each rank gets its own shard: number bucket.rank "
                                         "of R equal parts of bucket.flat.")
           for r, other in enumerate(right)},
    }, "Where is the mean written, and does bucket.hand_over() read it there, when all messages "
       "have arrived? Backwards before one step add up; so do two uses of one parameter.")


def compare_weights(where, got, model, before):
    """All ranks have all weights of `model`, the one process's."""
    for name, right in model.named_parameters():
        seen, right, old = (x.to(_dtype(x)) for x in (got[name], right, before[name]))
        stale = torch.where(torch.isclose(seen, right, rtol=1e-3), seen, old)
        wide = right.itemsize >= 4
        advice = ("step_ends() gathers bucket.shard of all ranks into bucket.weights: each rank "
                  "has stepped what it owns, and all others need it." if wide else
                  "The optimizer steps float32 masters: bucket.update_shard() rounds them into the "
                  "shard, before it is gathered.")
        explain(f"{where}: `{name}`", seen, right, {
            "as before the step": (old, advice),
            "stepped in part only": (stale, advice),
        }, "The gradients were right: each shard goes into its own place of bucket.weights.")
