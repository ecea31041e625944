"""Training in shards, beside one process: gradients of what a rank owns, and all weights."""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import TOLERANCE, explain, group_of_mine, is_near, members_of
from ranklab.checks.zero.toys import ADAMW, SGD, Toy, is_there, loss_of, seeded

# The optimizer; of each backward before a step whether it communicates; how many steps.
WAYS = (ADAMW, (True,), 1), (SGD, (False, True, True), 2)


def train(wrapped_class, in_groups=False, recompute=None, ways=WAYS, **options):
    """Runs on every rank: what compare_training() needs, of all steps of each way."""
    rank = dist.get_rank()
    members = members_of(rank) if in_groups else tuple(range(dist.get_world_size()))
    options |= {"group": group_of_mine()} if in_groups else {}
    return [step for way in ways for step in _steps(
        wrapped_class, rank, members, lambda: Toy(recompute), options, *way)]


def _steps(wrapped_class, rank, members, new_model, options, new_optimizer, pieces, n):
    one = seeded(new_model, members[0])  # ranks begin apart: those of the first rank count
    wrapped = wrapped_class(seeded(new_model, rank), **options)
    ours, ones = wrapped.make_optimizer(new_optimizer), new_optimizer(one.parameters())
    names = {p: name for name, p in wrapped.module.named_parameters()}
    for step in range(n):
        ours.zero_grad()
        ones.zero_grad()
        before = {name: p.detach().clone() for name, p in one.named_parameters()}
        for piece, sync in enumerate(pieces):
            wrapped.sync = sync
            loss_of(wrapped, 100 * step + 10 * piece + rank).backward()
            loss_of(one, 100 * step + 10 * piece + rank).backward()
        own = {name: _copy(p.grad) for name, p in one.named_parameters()}
        ones.zero_grad()
        for piece, r in ((piece, r) for piece in range(len(pieces)) for r in members):
            (loss_of(one, 100 * step + 10 * piece + r) / len(members)).backward()
        mean = {name: _copy(p.grad) for name, p in one.named_parameters()}
        shards = [_shard(bucket, names, mean, own) for bucket in wrapped.buckets
                  if bucket.parameters[0].requires_grad]
        kept = [name for p, name in names.items() if p.grad is not None]
        if any(isinstance(got, str) for _, got, *_ in shards):  # a step would crash
            yield (step, len(pieces)), members, shards, kept, None
            return
        ours.step()
        ones.step()
        got = wrapped.state_dict()
        yield (step, len(pieces)), members, shards, kept, {
            name: tuple(x.detach().cpu().float().clone() for x in (got[name], p, before[name]))
            for name, p in one.named_parameters()}


def _copy(tensor):
    return None if tensor is None else tensor.detach().clone()


def _shard(bucket, names, mean, own):
    """(a name, the shard's gradient, its rank, the right ones of all ranks, this rank's own)"""
    grads = [part.master.grad for part in bucket.parts]
    if any(grad is None for grad in grads):
        got = "None"
    elif not all(map(is_there, grads)):
        got = "memory that was freed"
    else:
        got = torch.cat([bucket.shard.new_zeros(0), *grads]).cpu().float()
    filled, rank = sum(part.place.stop - part.place.start for part in bucket.parts), bucket.rank
    rows = []
    for values in (mean, own):
        flat = torch.cat([values[names[p]].flatten().cpu().float() for p in bucket.parameters])
        flat = nn.functional.pad(flat, (0, bucket.padding))
        rows.append([row[:filled] for row in flat.view(-1, len(bucket.shard))])
    return names[bucket.parameters[0]], got, rank, rows[0], rows[1][rank]


def compare_training(wheres, seen, hint):
    """Raises the Mistake that the steps of all ranks tell: in each step of gradients first.

    `hint` is about what has no other.
    """
    for steps in zip(*seen):
        for where, (number, members, shards, kept, _) in zip(wheres, steps):
            here = _step_name(where, *number)
            for shard in shards:
                _compare_shard(here, len(members), number[1], *shard, hint)
            if kept:
                raise Mistake(f"{here}: the module's own gradient of `{kept[0]}` is still there",
                              "bucket.hand_over() gives the optimizer its gradients, and lets go "
                              "of the module's.")
        for where, (number, *_, weights) in zip(wheres, steps):
            for name, (got, right, before) in weights.items():
                _compare_weight(f"{_step_name(where, *number)}: `{name}`", got, right, before)


def _step_name(where, step, backwards):
    name = f"{where}, step {step + 1}"
    return f"{name} after {backwards} backwards" if backwards > 1 else name


def _compare_shard(where, R, backwards, name, got, rank, right, own, hint):
    where = f"{where}: the optimizer's gradient in the bucket of `{name}`"
    if got == "None":
        raise Mistake(f"{where} is None", "finish() calls bucket.hand_over() for every bucket, "
                      "when all messages have arrived.")
    if isinstance(got, str):
        raise Mistake(f"{where} lies in {got}", "It must not be a view of bucket.flat, because "
                      "that is freed: the mean arrives in a place of its own.")
    others = {f"that of rank {r}'s shard": (other, "Each rank gets its own shard: number "
                                            "bucket.rank of R equal parts of bucket.flat.")
              for r, other in enumerate(right) if r != rank}
    explain(where, got, right[rank], {
        f"the sum, {R} times the mean": (R * right[rank], "Divide bucket.flat by the number of "
                                         "ranks of its group, once."),
        f"the mean divided by {R} again": (right[rank] / R, "Divide once."),
        **{f"this rank's own{divided}": (wrong, "Reduce-scatter bucket.flat into bucket.own, and "
                                         "wait for it.")
           for divided, wrong in (("", own), (f", divided by {R}", own / R))},
        "zeros": (0 * right[rank], "What has arrived never gets there: is the place "
                  "of the mean in bucket.own, and does finish() wait before it hands over?"),
        **others}, hint if backwards == 1 else f"Backwards before one step add up. {hint}")


def _compare_weight(where, got, right, before):
    apart = (got.double() - right.double()).abs()
    stays = apart > TOLERANCE[right.dtype] * right.double().abs().max()
    stale = torch.where(stays, before, got)
    explain(where, got, right, {
        "as before the step": (before, "step_ends() must gather what the owners have stepped."),
        "stepped in part only": (stale, "Each rank has stepped what it owns: all others need it. "
                                 "step_ends() gathers bucket.shard of all ranks into "
                                 "bucket.weights."),
    }, "The gradients were right: each shard goes into its own place of bucket.weights.")


def train_halves(wrapped_class, **options):
    """A step in bfloat16: (the weights, [(name, start, the master's numbers)])."""
    model = seeded(lambda: nn.Linear(5, 3).bfloat16(), 0)
    wrapped = wrapped_class(model, **options)
    optimizer = wrapped.make_optimizer(SGD)
    names = {p: name for name, p in model.named_parameters()}
    wrapped(torch.ones(2, 5).to(next(model.parameters()))).sum().backward()
    optimizer.step()
    masters = [(names[part.parameter], part.start, part.master.detach().cpu())
               for bucket in wrapped.buckets for part in bucket.parts]
    return {name: value.cpu() for name, value in wrapped.state_dict().items()}, masters


def compare_halves(seen):
    """`seen`: of every rank, what train_halves() returned."""
    start = {name: p.detach() for name, p in seeded(
        lambda: nn.Linear(5, 3).bfloat16(), 0).cpu().state_dict().items()}
    right = {name: value.float() for name, value in start.items()}
    for _, masters in seen:
        for name, begin, numbers in masters:
            right[name].view(-1)[begin : begin + len(numbers)] = numbers.float()
    for rank, (got, _) in enumerate(seen):
        for name, value in got.items():
            wanted = right[name].bfloat16()
            if is_near(wanted, start[name]):
                raise Mistake(f"in bfloat16 `{name}` was not stepped", "Is the gradient handed to "
                              "the float32 masters?")
            if not torch.equal(value, wanted):
                raise Mistake(f"in bfloat16 rank {rank} has not what the optimizer has stepped, "
                              f"in `{name}`", "The optimizer steps float32 masters: "
                              "bucket.update_shard() rounds them into the shard, before it is "
                              "gathered.")
