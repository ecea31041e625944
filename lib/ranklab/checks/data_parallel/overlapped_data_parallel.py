"""The check of OverlappedDataParallel: right on every kind of model, and under way in time."""

import torch
import torch.distributed as dist

from ranklab.checks.data_parallel.backwards import (
    branches_trial, compare_branches, compare_error, compare_nested, nested_trial,
)
from ranklab.checks.data_parallel.events import (
    Sent, compare_events, compare_order, events_and_order,
)
from ranklab.checks.data_parallel.no_sync import in_pieces
from ranklab.checks.data_parallel.toys import (
    gradients, loss_of, mean_gradients, off, rows, toy, weights,
)
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import LEFT, MISMATCH, hinted
from ranklab.checks.trial import explain, group_of_mine, members_of, on_ranks, rank_name
from ranklab.data_parallel import no_sync

LIMIT = 8  # seconds: several of the usual mistakes leave ranks waiting
FAILURES = {
    "ValueError: .* got two gradients in one backward.*":
        "bucket.missing must be full again when the next backward "
    "begins: finish() sets it back to all of bucket.parameters.",
    "AttributeError: 'NoneType' object has no attribute 'wait'":
        "all_reduce returns None without async_op=True; with it, a "
    "handle to wait for.",
    LEFT: "A rank waits for an all-reduce that another one does not call. All call it for every "
    "bucket, in the same order, once in each backward.",
}
LEFT_WAITING = ("Ranks use different branches here, and the other ranks wait for each bucket: "
                "finish() must launch all buckets that are left, whatever is missing in them, and "
                "wait for all, before it raises. With find_unused_parameters all ranks then call "
                "used_anywhere(), also those that miss nothing.")
WITH_BRANCHES = {
    "ValueError: .* got no gradient on rank .*":
        "With find_unused_parameters that is no error: raise only where "
    "self.find_unused_parameters is False.",
    "hang: .*": LEFT_WAITING, MISMATCH: LEFT_WAITING,
}


def _steps_trial(wrapped_class):
    """Two steps of the toy, whose replicas begin differently; then pieces under `sync = False`."""
    rank, R, model = dist.get_rank(), dist.get_world_size(), toy(dist.get_rank())
    wrapped = wrapped_class(model, bucket_cap_bytes=200)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    places, seen = {p.data_ptr() for p in model.parameters()}, []
    for step, set_to_none in enumerate((True, False)):
        optimizer.zero_grad(set_to_none=set_to_none)
        before = weights(model)
        with Sent() as sent:
            loss_of(wrapped, rows(10 * step + rank)).backward()
        changed = any(not torch.equal(w, before[name]) for name, w in weights(model).items())
        seen.append({
            "got": gradients(model), "own": mean_gradients(model, [(rows(10 * step + rank),)]),
            "right": mean_gradients(model, [(rows(10 * step + r),) for r in range(R)]),
            "weights": changed or any(x.data_ptr() in places for x in sent.tensors),
            "ends": sent.ends,
            "messages": (len(sent.tensors), sum(x.nbytes for x in sent.tensors)),
            "wanted": (len(wrapped.buckets), sum(b.flat.nbytes for b in wrapped.buckets)),
            "asked": any(x.dtype == torch.int32 for x in sent.tensors),  # used_anywhere()
            "works": len(wrapped.works), "waits": list(wrapped.waiting) == wrapped.buckets,
            "no copy": wrapped.waiting is wrapped.buckets,
        })
        if seen[-1]["no copy"]:  # the next backward would empty both
            return seen, None
        optimizer.step()
    return seen, in_pieces(wrapped, no_sync)


def check_OverlappedDataParallel(wrapped_class):
    for ranks in (1, 3):
        with hinted(FAILURES):
            seen = on_ranks(_steps_trial, wrapped_class, ranks=ranks, timeout=LIMIT)
        for rank, (steps, _) in enumerate(seen):
            for number, step in enumerate(steps):
                _compare_step(step, f"{rank_name(rank, ranks)}, step {number + 1}", ranks)
    yield "gradients are the mean over ranks, on 1 and 3 ranks: tied, used twice, two types"
    yield "also after zero_grad(set_to_none=False); frozen ones stay without; weights are unchanged"
    for rank, (steps, _) in enumerate(seen):
        _compare_messages(rank_name(rank, 3), steps[1])
    yield "one all-reduce for each bucket, all gradients once; then all is as before"
    for rank, (_, pieces) in enumerate(seen):
        _compare_pieces(rank_name(rank, 3), pieces)
    yield "with sync=False nothing is sent, and the next backward averages what has added up"
    with hinted(FAILURES):
        seen = on_ranks(_on_two, wrapped_class, ranks=2, timeout=LIMIT)
    for both, _, _ in seen:
        for where, (events, buckets) in zip(("", "with find_unused_parameters, "), both):
            compare_events(where, events, buckets)
    yield "buckets leave, in their order, while backward goes on; waits come at the end"
    for rank, (_, order, _) in enumerate(seen):
        compare_order(rank_name(rank, 2), *order)
    yield "right too where ranks are ready in different orders, and none leaves too late"
    for rank, (_, _, nested) in enumerate(seen):
        compare_nested(rank_name(rank, 2), *nested)
    yield "a checkpoint's backward inside the backward; two gradients of one parameter are an error"
    with hinted(FAILURES | WITH_BRANCHES):
        seen = on_ranks(_branches_and_group, wrapped_class, ranks=4, timeout=LIMIT)
    for rank, ((steps, _), _) in enumerate(seen):
        for step in steps:
            compare_branches(rank_name(rank, 4), *step)
    yield "find_unused_parameters: no gradient counts as zeros; unused everywhere stays None"
    for rank, ((_, (said, is_ready)), _) in enumerate(seen):
        compare_error(rank, said, is_ready)
    yield "without it, a missing gradient is an error in that backward, and nobody hangs"
    for rank, (_, (got, right)) in enumerate(seen):
        _compare_in_group(members_of(rank), off(got, right))
    yield "inside a group it meets nobody else"


def _compare_step(step, where, ranks):
    not_waited, handles, divided = step["ends"]
    for is_so, what, hint in (
        (step["no copy"], "after backward self.waiting is self.buckets itself",
         "self.waiting must be a copy: list(self.buckets)."),
        (step["weights"], "the weights travel, or change in backward",
         "The hook gets the parameter, not its gradient: what travels is bucket.flat, where "
         "bucket.gather() has put parameter.grad."),
        (not_waited, f"nobody has waited for {not_waited} of {handles} all-reduces when "
         "backward() returns",
         "In finish(), wait() for every handle: until then a gradient may be half summed."),
        (divided, f"{divided} buckets were divided while they travelled",
         "Until wait() returns the message is being read and written: divide bucket.flat before "
         "its all-reduce."),
    ):
        if is_so:
            raise Mistake(f"{where}: {what}", hint)
    for name, right in step["right"].items():
        got, own = step["got"][name], step["own"][name]
        if right is not None:
            _compare_gradient(f"{where}: the gradient of `{name}`", got, right, own, ranks)
        elif got is not None:
            raise Mistake(f"{where}: `{name}` is frozen, and now has a gradient",
                          "Only what is in the buckets takes part.")
    if step["works"] or not step["waits"]:
        raise Mistake(f"{where}: after backward self.works holds {step['works']} handles, and "
                      f"self.waiting {'all' if step['waits'] else 'not all'} buckets", "finish() "
                      "must leave self.works empty, or it grows, and self.waiting full.")


def _compare_gradient(where, got, right, own, ranks):
    hint = ("Does the bucket leave only when nothing of it is missing, after bucket.gather(), and "
            "is it divided once?")
    if got is None:
        hint = ("bucket.gather() makes gradients views of the bucket: call it before the bucket "
                "leaves.")
    explain(where, got, right, {
        f"the sum, {ranks} times the mean": (
            right * ranks, "Divide bucket.flat by the number of ranks."),
        f"the mean divided by {ranks} again": (right / ranks, "Divide once."),
        "this rank's own": (own, "Call bucket.gather() and then all-reduce bucket.flat, in place, "
                            "when bucket.missing is empty; and finish() waits for all."),
    }, hint)


def _compare_messages(where, step):
    (messages, sent), (buckets, wanted) = step["messages"], step["wanted"]
    if step["asked"]:
        raise Mistake(f"{where} calls used_anywhere() without find_unused_parameters", "It is a "
                                                    "message "
                      "of its own in every step: ask only with find_unused_parameters.")
    if (messages, sent) != (buckets, wanted):
        raise Mistake(f"{where}: {messages} all-reduces of {sent:,} bytes in a step; {buckets} "
                      f"buckets hold {wanted:,} bytes", "Each bucket travels once, whole: "
                      "all-reduce bucket.flat when nothing of it is missing any more.")


def _compare_pieces(where, seen):
    if seen["inside"]:
        raise Mistake(f"{where}: with sync=False, {seen['inside']} all-reduces in backward",
                      "Look at self.sync first in the hook: when it is False do nothing.")
    hint = "With sync=False the hook must leave everything as it is: bucket.missing too."
    if seen["after"] != seen["buckets"]:
        raise Mistake(f"{where}: after backwards with sync=False the next one sends "
                      f"{seen['after']} all-reduces, for {seen['buckets']} buckets", hint)
    for name in off(seen["mean"], seen["right mean"]):
        raise Mistake(f"{where}: after backwards with sync=False and one with, the gradient of "
                      f"`{name}` is not the mean of the ranks' sums", f"{hint} The next "
                      "bucket.gather() takes all that has added up in parameter.grad.")


def _compare_in_group(members, wrong):
    if wrong:
        raise Mistake(f"in the group of ranks {members} the gradient of `{wrong[0]}` is not the "
                      "mean of theirs", "Hand self.group on to every collective, and divide by its "
                      "size: dist.get_world_size(self.group).")


def _on_two(wrapped_class):
    return *events_and_order(wrapped_class), nested_trial(wrapped_class)


def _branches_and_group(wrapped_class):
    seen = branches_trial(wrapped_class)
    rank, group = dist.get_rank(), group_of_mine()
    wrapped = wrapped_class(toy(rank), bucket_cap_bytes=200, group=group)
    right = mean_gradients(wrapped.module, [(rows(r),) for r in members_of(rank)])
    loss_of(wrapped, rows(rank)).backward()
    return seen, (gradients(wrapped.module), right)
