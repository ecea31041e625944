"""The checks of ZeroStage1 and ZeroStage2: equal to one process, and what is sent and held."""

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import hinted, is_near, members_of, on_ranks, rank_name
from ranklab.checks.zero.toys import (
    ADAMW, SGD, Experts, Messages, Toy, is_there, loss_of, seeded,
)
from ranklab.checks.zero.training import (
    compare_halves, compare_training, train, train_halves,
)
from ranklab.engine import device
from ranklab.meter import Traffic

CAP = 200  # bytes: several buckets
IN_GROUPS = ((SGD, (True,), 1),)
LIMIT = 8  # seconds
WAITS = "A rank waits for a message that another does not send: all make the same calls."
FAILURES = {
    "begins with memory that was freed": "Free the buckets before this one, which have arrived: "
    "self.buckets[: self.buckets.index(bucket)]. This one is still to be sent.",
    "freed while its message": "First super().finish(), which waits for all; then free.",
    "storage of size 0": "bucket.own must not be a view of bucket.flat, because that is freed: "
    "the mean arrives in a place of its own.",
    "object has no attribute 'wait'": "reduce() returns the handle: async_op=True makes one.",
    "does not end": WAITS, "onnection": WAITS, "killed": WAITS,
}
PLACE = ("Where is the mean written, and does bucket.hand_over() read it there? finish() first "
         "calls super().finish(), which waits for all messages.")


def in_groups():
    """What a Mistake calls the four ranks of group_of_mine()."""
    return [f"in the group of ranks {members_of(rank)}, rank {rank}" for rank in range(4)]


def _trial(wrapped_class):
    counted = _count(wrapped_class)  # the first, because it sees what was freed too early
    return train(wrapped_class, cap_bytes=CAP), train_halves(wrapped_class), counted


def _count(wrapped_class):
    """What travels and what is whole, in a step with two backwards."""
    wrapped, whole = wrapped_class(seeded(Toy, 0), cap_bytes=CAP), []
    optimizer, buckets = wrapped.make_optimizer(ADAMW), wrapped.buckets

    def note():
        whole.append(sum(is_there(bucket.flat) for bucket in buckets))

    with Messages(note) as messages, Traffic() as backward:
        loss_of(wrapped, 0).backward()
        gradients = [part.master.grad for bucket in buckets for part in bucket.parts]
        gradients = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                     for x in gradients if x is not None}
        loss_of(wrapped, 1).backward()
    missing, left = messages.missing(), sum(is_there(bucket.flat) for bucket in buckets)
    with Messages() as in_step, Traffic() as step:
        optimizer.step()
    return {"backward": backward.sent_bytes, "step": step.sent_bytes, "most": messages.most,
            "missing": missing + in_step.missing(), "whole": max(whole), "left": left,
            "gradients": sum(gradients.values()), "buckets": len(buckets),
            "shards": sum(bucket.shard.nbytes for bucket in buckets),
            "flats": sum(bucket.flat.nbytes for bucket in buckets)}


def _experts_trial(wrapped_class):
    """({name: (weights after a step, right, before)}, whether a missing gradient is an error)."""
    rank, R = dist.get_rank(), dist.get_world_size()
    one, before = seeded(Experts, 0), seeded(Experts, 0).state_dict()
    wrapped = wrapped_class(seeded(Experts, 0), cap_bytes=40, find_unused=True)
    ours, ones = wrapped.make_optimizer(SGD), SGD(one.parameters())
    x = torch.arange(3.0).to(device())
    for r in range(R):
        (one(x, which=r).sum() / R).backward()
    wrapped(x, which=rank).sum().backward()
    used = [part.master.grad is not None for bucket in wrapped.buckets for part in bucket.parts
            if part.parameter in set(wrapped.module.experts[2].parameters())]
    ours.step()
    ones.step()
    got = wrapped.state_dict()
    weights = {name: (got[name].cpu(), p.detach().cpu(), before[name].cpu())
               for name, p in one.named_parameters()}
    try:
        wrapped_class(seeded(Experts, 0))(x, which=0).sum().backward()
    except ValueError:
        return weights, any(used), True
    return weights, any(used), False


def check_ZeroStage1(wrapped_class):
    yield from _same_for_both(wrapped_class)


def check_ZeroStage2(wrapped_class):
    yield from _same_for_both(wrapped_class, _compare_memory)


def _same_for_both(wrapped_class, compare_memory=None):
    for ranks in (3, 1):
        with hinted(FAILURES):
            seen = on_ranks(_trial, wrapped_class, ranks=ranks, timeout=LIMIT)
        where = [rank_name(rank, ranks) for rank in range(ranks)]
        for rank, (*_, counted) in enumerate(seen):
            _compare_waits(where[rank], counted)
        compare_training(where, [steps for steps, *_ in seen], PLACE)
        for rank, (*_, counted) in enumerate(seen):
            if compare_memory:
                compare_memory(where[rank], counted)
        compare_halves([halves for _, halves, _ in seen])
        for rank, (*_, counted) in enumerate(seen):
            _compare_traffic(rank_name(rank, ranks), ranks, counted)
    yield "after backward each rank has the mean gradient of its shard, on 1 and 3 ranks"
    yield "after a step all weights are those of one process: AdamW, SGD with momentum"
    yield "several backwards before a step, with and without no_sync; tied, frozen, two types"
    yield "in bfloat16 float32 masters are stepped, and rounded for all ranks"
    yield "(R-1)/R of the gradients travel in backward, (R-1)/R of the parameters in step()"
    if compare_memory:
        yield "two buckets of gradients are whole at most; in the end 1/R of them is left"
    with hinted(FAILURES):
        seen = on_ranks(_experts_trial, wrapped_class, ranks=2, timeout=LIMIT)
    for rank, found in enumerate(seen):
        _compare_experts(rank_name(rank, 2), *found)
    yield "find_unused: what another rank has used is stepped, what none has used is not"
    with hinted(FAILURES | {"": "Hand bucket.group on to every collective, with group=group, and "
                            "divide by its size."}):
        seen = on_ranks(train, wrapped_class, True, None, IN_GROUPS, ranks=4, timeout=LIMIT)
        compare_training(in_groups(), seen, "")
    yield "inside a group it meets nobody else"


def _compare_waits(where, counted):
    if counted["missing"]:
        raise Mistake(f"{where}: nobody has waited for {counted['missing']} messages",
                      "Wait for every handle. In step_ends() leave async_op out, or wait() before "
                      "the forward can read the weights.")
    if counted["most"] > 1:
        raise Mistake(f"{where}: {counted['most']} buckets are on their way at a time",
                      "reduce() first waits for those before: while self.works: "
                      "self.works.pop().wait(). A message under way may hold a copy of its bucket.")


def _compare_traffic(where, ranks, counted):
    once = counted["flats"] * (ranks - 1) / ranks
    for when, sent, right, hint in (
            ("two backwards", counted["backward"], 2 * once, "A reduce-scatter of bucket.flat, "
             "once in each backward: the mean of a shard goes to its owner and to nobody else."),
            ("the step", counted["step"], once, "An all-gather of the shards, once for each "
             "bucket.")):
        if is_near(sent, right):
            continue
        if is_near(sent, 2 * right):
            hint = ("That is twice as much: an all-reduce sends every mean to every rank, and "
                    "only the owner needs it. dist.reduce_scatter_single.")
        raise Mistake(f"{where}: {when} sent {sent:,.0f} bytes; {right:,.0f} are enough, of "
                      f"{counted['flats']:,} bytes of gradients", hint)


def _compare_memory(where, counted):
    if counted["left"]:
        raise Mistake(f"{where}: after backward {counted['left']} of {counted['buckets']} buckets "
                      "are whole", "finish() frees the gradients of all buckets, when the "
                      "optimizer has its part: self.free_gradients(self.buckets).")
    if counted["whole"] > 2:
        raise Mistake(f"{where}: {counted['whole']} of {counted['buckets']} buckets are whole at a "
                      "time", "When a bucket leaves, those before it have arrived: free them, "
                      "self.buckets[: self.buckets.index(bucket)].")
    if counted["gradients"] > counted["shards"]:
        raise Mistake(f"{where}: the optimizer's gradients take {counted['gradients']:,} bytes, "
                      f"its shards {counted['shards']:,}", "A place as large as the shard: "
                      "torch.empty_like(bucket.shard).")


def _compare_experts(where, weights, is_handed, is_error):
    for name, (got, right, before) in weights.items():
        if is_near(got, right):
            continue
        hint = ("Another rank has used it: super().finish() has given those parameters a gradient. "
                "Hand them to hand_over(): {p for p in bucket.parameters if p.grad is not None}.")
        if is_near(right, before):
            hint = "No rank has used it: its gradient stays None, and it is not stepped."
        what = "was not stepped" if is_near(got, before) else "is not that of one process"
        raise Mistake(f"{where}, find_unused: `{name}` {what}", hint)
    if is_handed:
        raise Mistake(f"{where}, find_unused: an expert that no rank has used has a gradient",
                      "No rank has used it: hand_over() only those that have p.grad, or weight "
                      "decay and momentum will move it.")
    if not is_error:
        raise Mistake(f"{where}: a parameter without a gradient is no error", "Without find_unused "
                      "super().finish() raises; let it.")
