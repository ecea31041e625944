"""A training run on every rank beside one process; all three stages are checked by it."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import expect, located, on_groups
from ranklab.checks.trial import explain
from ranklab.checks.zero.toys import ADAMW, SGD, Toy, loss_of, must_be_there, seeded


def _in_bfloat16(recompute):
    return Toy(recompute).bfloat16()


# The model, the optimizer, whether each backward before a step communicates, and how many steps.
RUNS = (
    (Toy, ADAMW, (True,), 1),
    (Toy, SGD, (False, True), 1),
    (partial(Toy, order=(0, 1, 2, 3, 0)), SGD, (False, True, True), 2),
    (_in_bfloat16, partial(torch.optim.SGD, lr=10), (True,), 1),
)
EXPERTS = (partial(Toy, order=None), ADAMW, (True,), 2),
DIVIDE = "Divide bucket.flat by the number of ranks of its group, once."
SCATTER = "Reduce-scatter bucket.flat into bucket.shard_grad, and wait for it."
# What a stage leaves wrong breaks what comes after it.
on_ranks_together = partial(on_groups, at_once=True)


def train(wrapped_class, ranks, new_watch, options=(), runs=RUNS, recompute=None,
          make_optimizer=None):
    """A trial, for on_ranks_together; returns the last (model, optimizer).

    make_optimizer  (wrapped, new_optimizer); the model's own by default
    """
    rank, members, options = dist.get_rank(), ranks.members, dict(options) | ranks.keywords
    where = f"{ranks}, {recompute} checkpoint" if recompute else str(ranks)
    make_optimizer = make_optimizer or wrapped_class.make_optimizer
    for new_model, new_optimizer, pieces, steps in runs:
        # Ranks begin apart: the weights of the first one count.
        one = OneProcess(seeded(lambda: new_model(None), members[0]), new_optimizer)
        wrapped = wrapped_class(seeded(lambda: new_model(recompute), rank), **options)
        optimizer = make_optimizer(wrapped, new_optimizer)
        for step in range(steps):
            yield from _step(f"{where}, step {step + 1}", wrapped, optimizer, one, new_watch,
                             pieces, members, 100 * step)
        wrapped.eval()
        with torch.no_grad(), new_watch(wrapped) as watch:
            loss_of(wrapped, 0)
            watch.forward_ends()
        yield partial(located, f"{where}, eval() without gradients", watch.after_forward)
    return wrapped, optimizer


def _step(where, wrapped, optimizer, one, new_watch, pieces, members, seed):
    rank = dist.get_rank()
    optimizer.zero_grad()
    for piece, sync in enumerate(pieces):
        wrapped.sync = sync
        with new_watch(wrapped) as watch:
            loss = loss_of(wrapped, seed + 10 * piece + rank)
            watch.forward_ends()
            loss.backward()
        here = where if sync else f"{where}, with sync=False"
        yield partial(located, here, watch.after_backward, sync)
    own, mean = (one.gradients([seed + 10 * piece + r for piece in range(len(pieces)) for r in its],
                               len(its)) for its in ([rank], members))
    where = f"{where} after {len(pieces)} backwards" if len(pieces) > 1 else where
    yield partial(located, where, _compare_gradients, wrapped, mean, own, len(members))
    before = {name: p.detach().clone() for name, p in one.model.named_parameters()}
    with new_watch(wrapped) as watch:
        optimizer.step()
    one.step(mean)
    yield partial(located, where, watch.after_step)
    yield partial(located, where, _compare_weights, wrapped.state_dict(), one.model, before)


class OneProcess:
    """The oracle: one process, with masters in float32 or better."""

    def __init__(self, model, new_optimizer):
        self.model, self.trained = model, [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
                        for p in self.trained]
        self.optimizer = new_optimizer(self.masters)

    def gradients(self, seeds, ranks):
        """Of the sum of these batches' losses over `ranks`; None where no batch has used it."""
        of_each = [torch.autograd.grad(loss_of(self.model, seed), self.trained, allow_unused=True)
                   for seed in seeds]
        there = [[gradient.to(master) for gradient in its if gradient is not None]
                 for master, *its in zip(self.masters, *of_each)]
        return [sum(its) / ranks if its else None for its in there]

    def step(self, gradients):
        for master, gradient in zip(self.masters, gradients):
            master.grad = gradient
        self.optimizer.step()
        for p, master in zip(self.trained, self.masters):
            p.data.copy_(master)


def _compare_gradients(wrapped, mean, own, ranks):
    """This rank's optimizer has the mean gradient of its shard, and none where no rank has one."""
    trained = [(name, p) for name, p in wrapped.module.named_parameters() if p.requires_grad]
    rights = {p: (name, *both) for (name, p), *both in zip(trained, mean, own)}
    for part in (part for bucket in wrapped.buckets for part in bucket.parts):
        if part.parameter in rights:
            name, *both = rights[part.parameter]
            of_shard = slice(part.start, part.start + len(part.master))
            both = [x if x is None else x.flatten()[of_shard].to(part.parameter)
                    for x in both]
            _compare_gradient(f"the optimizer's gradient of `{name}`", part.master.grad, *both,
                              ranks)


def _compare_gradient(where, got, mean, own, ranks):
    if mean is None:
        return expect(got is None, f"{where} is there, and no rank has used it", "No rank has used "
                      "it: pass set_optimizer_gradients() only parameters that have p.grad, or "
                      "weight decay and momentum will move this one.")
    expect(got is not None, f"{where} is None", "finish() calls bucket.set_optimizer_gradients() "
           "for every bucket, when all messages have arrived." if own is not None else "Another "
           "rank has used it: super().finish() has given those parameters a gradient. Pass them to "
           "set_optimizer_gradients(): {p for p in bucket.parameters if p.grad is not None}.")
    must_be_there([got], "the optimizer's gradient lies in memory that was freed")
    own = 0 * mean if own is None else own
    explain(where, got.to(mean), mean, {
        f"the sum, {ranks} times the mean": (ranks * mean, DIVIDE),
        f"the mean divided by {ranks} again": (mean / ranks, DIVIDE),
        "this rank's own": (own, SCATTER),
        f"this rank's own, divided by {ranks}": (own / ranks, SCATTER),
        "zeros": (0 * mean, "What has arrived never gets there: is the place of the mean in "
                  "bucket.shard_grad, and does finish() wait before it passes it on?"),
    }, "Each rank gets its own shard, number bucket.rank of R equal parts of bucket.flat, added to "
       "what the backwards before have left.", through=torch.float32)


def _compare_weights(state, model, before):
    """This rank has all weights of `model`, the one process's."""
    for name, right in model.named_parameters():
        seen, right, old = (x.detach().to(right) for x in (state[name], right, before[name]))
        stale = torch.where(torch.isclose(seen, right, rtol=1e-3), seen, old)
        explain(f"`{name}`", seen, right, {"not stepped, or in part only": (
            stale, "step_ends() gathers bucket.shard of all ranks into bucket.weights: each rank "
            "has stepped what it owns, and all others need it." if right.itemsize >= 4 else
            "The optimizer steps float32 masters: bucket.update_shard() rounds them into the "
            "shard, before it is gathered.")},
            "The gradients were right: each shard goes into its own place of bucket.weights.",
            through=torch.float32)
