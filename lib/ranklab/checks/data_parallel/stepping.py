"""Checks of no_sync and join_uneven, on the library's OverlappedDataParallel."""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.data_parallel.replicas import two_groups
from ranklab.checks.data_parallel.toys import far, gradients, loss_of, rows, toy, weights
from ranklab.course.exercise import Mistake, on_ranks
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.engine import device
from ranklab.meter import Traffic

IN_GROUP = "Hand model.group on to every collective, with group=model.group."
LIMIT = 6  # seconds; the usual mistake in join_uneven waits for ever


# --- no_sync ------------------------------------------------------------------------------------

def _no_sync_trial(no_sync):
    model, rank = toy(0), dist.get_rank()
    wrapped, R = OverlappedDataParallel(model, cap_bytes=200), dist.get_world_size()
    seen = {"sync": []}
    with Traffic() as traffic:
        with no_sync(wrapped):
            for piece in range(2):
                loss_of(wrapped, rows(10 * rank + piece)).backward()
            seen["sync"].append(wrapped.sync)
    seen["inside"], seen["local"] = traffic.calls["all_reduce"], gradients(model)
    seen["sync"].append(wrapped.sync)
    with Traffic() as traffic:
        loss_of(wrapped, rows(10 * rank + 2)).backward()
    seen["after"], seen["mean"] = traffic.calls["all_reduce"], gradients(model)
    seen["buckets"] = len(wrapped.buckets)
    seen["right local"] = _sums([10 * rank + piece for piece in range(2)], 1)
    seen["right mean"] = _sums([10 * r + piece for r in range(R) for piece in range(3)], R)
    with no_sync(wrapped):
        with no_sync(wrapped):
            pass
        seen["nested"] = wrapped.sync
    try:
        with no_sync(wrapped):
            raise KeyError("a step that fails")
    except KeyError:
        seen["failed"] = wrapped.sync
    else:
        seen["failed"] = "swallowed"
    return seen


def _sums(seeds, ranks):
    """The gradients of the sum of the losses, over the number of ranks, in one process."""
    model = toy(0)
    for seed in seeds:
        (loss_of(model, rows(seed)) / ranks).backward()
    return gradients(model)


def check_no_sync(no_sync):
    for ranks in (1, 3):
        try:
            seen = on_ranks(_no_sync_trial, no_sync, ranks=ranks)
        except Mistake as mistake:
            raise Mistake(mistake.what, _no_sync_hint(mistake)) from None
        for rank, one in enumerate(seen):
            _compare_no_sync(one, f"rank {rank} of {ranks}")
    yield "inside, nothing is sent, and gradients add up on their own rank"
    yield "the next backward outside averages the sums, once, on 1 and 3 ranks"
    if one["nested"] is not False:
        raise Mistake("after an inner no_sync the outer one is over too", "Put back what `sync` "
                      "was before, which need not be True.")
    yield "one inside another changes nothing"
    if one["failed"] == "swallowed":
        raise Mistake("an error raised inside disappears", "Leave errors alone: try and finally, "
                      "no except.")
    if one["failed"] is not True:
        raise Mistake("after an error inside, `sync` is still False: nothing is averaged any more",
                      "What follows `yield` is skipped when the block fails: put it into a "
                      "`finally`.")
    yield "it ends also when the step inside fails"


def _no_sync_hint(mistake):
    if "context manager protocol" in mistake.what or "__enter__" in mistake.what:
        return ("`with` needs a context manager: put @contextlib.contextmanager above the "
                "function, and a `yield` where the block runs.")
    return mistake.hint


def _compare_no_sync(one, where):
    if one["inside"]:
        hint = "model.sync must be False while the block runs: the hooks look at it."
        if one["sync"][0] is False:
            hint = "no_sync itself sends nothing: the next backward averages what has added up."
        raise Mistake(f"{where}: {one['inside']} all-reduces inside", hint)
    for name, right in one["right local"].items():
        if right is not None and (one["local"][name] is None or far(one["local"][name], right)):
            raise Mistake(f"{where}: inside, the gradient of `{name}` is not the sum of its two "
                          "backwards", "Leave the gradients alone: autograd adds them up.")
    if one["sync"][1] is not True or not one["after"]:
        raise Mistake(f"{where}: after the block nothing is sent either",
                      "Switch `sync` back on after the yield.")
    if one["after"] != one["buckets"]:
        raise Mistake(f"{where}: {one['after']} all-reduces after the block, for {one['buckets']} "
                      "buckets", "The next backward sends each bucket once; no_sync sends nothing.")
    for name, right in one["right mean"].items():
        if right is not None and far(one["mean"][name], right):
            raise Mistake(f"{where}: after the block the gradient of `{name}` is not the mean of "
                          "the ranks' sums", "Leave the gradients alone: the next backward adds "
                          "its own to what is there, and averages the whole.")


# --- join_uneven --------------------------------------------------------------------------------

COUNTS = {1: ((2,), (0,)), 3: ((1, 3, 2), (2, 0, 2)), 4: ((3, 1, 0, 1), (2, 2, 2, 2))}
IN_GROUPS = (0, 1, 2, 0)  # of the four ranks, when 0 and 2 are a group, and 1 and 3


class Normed(nn.Module):
    """With a buffer that each forward changes, and that the loss sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.detach().mean() + 1
        return self.layer(x) * self.seen


def _join_trial(join_uneven, of_cases):
    seen = [_join_one(join_uneven, counts[dist.get_rank()]) for counts in of_cases]
    if dist.get_world_size() == 4:
        seen.append(_join_one(join_uneven, IN_GROUPS[dist.get_rank()], two_groups()))
    return seen


def _join_one(join_uneven, count, group=None):
    rank, model = dist.get_rank(), Normed().to(device())
    wrapped = OverlappedDataParallel(model, cap_bytes=1, group=group)
    optimizer, got = torch.optim.SGD(model.parameters(), 0.1), []
    with Traffic() as traffic:
        # A generator: like a loader it has no length, and what is taken is gone.
        for seed, x in join_uneven(((10 * rank + k, rows(10 * rank + k)) for k in range(count)),
                                   wrapped):
            got.append(seed % 10)
            optimizer.zero_grad()
            loss_of(wrapped, x).backward()
            optimizer.step()
    extra = [op.payload_bytes for op in traffic.ops if op.name == "all_reduce"]
    return got, weights(model), model.seen.item(), sum(extra), wrapped.joining


def _joined_alone(counts, steps, members=range(4)):
    """(weights, buffer) after so many steps of these ranks, in one process."""
    model, buffers = Normed(), [torch.zeros(()) for _ in counts]
    optimizer, source = torch.optim.SGD(model.parameters(), 0.1), 0
    for step in range(steps):
        optimizer.zero_grad()
        going_on = [rank for rank, count in enumerate(counts) if step < count]
        source = max(going_on)
        start = buffers[source]
        for rank in going_on:
            model.seen.copy_(start)
            (loss_of(model, rows(10 * members[rank] + step)) / len(counts)).backward()
            buffers[rank] = model.seen.clone()
        optimizer.step()
    return weights(model), buffers[source].item()


def check_join_uneven(join_uneven):
    for ranks, of_cases in COUNTS.items():
        try:
            seen = on_ranks(_join_trial, join_uneven, of_cases, ranks=ranks, timeout=LIMIT)
        except Mistake as mistake:
            raise Mistake(mistake.what, _join_hint(mistake)) from None
        for number, counts in enumerate(of_cases):
            _compare_joined([of_rank[number] for of_rank in seen], counts)
    yield "every rank gets all its own batches, in order: 1, 3, 4 ranks, some with none"
    yield "at the end all have the weights that one process has after all steps"
    yield "and the buffers of a rank that went on to the last"
    for rank, of_rank in enumerate(seen):
        _compare_joined_group(rank, *of_rank[-1])
    yield "inside a group it meets nobody else"


def _join_hint(mistake):
    if "has no len" in mistake.what:
        return ("A loader may have no length. Ask after each batch: all ranks tell each other who "
                "goes on, in one small all-reduce.")
    if "not iterable" in mistake.what or "cannot unpack" in mistake.what:
        return "It must be a generator: `yield` each batch of this rank."
    if "root rank" in mistake.what or "on 4 ranks it does not" in mistake.what:  # not on 3
        return f"Ranks count inside the group: dist.get_rank(model.group). {IN_GROUP}"
    if "does not end" in mistake.what or "onnection" in mistake.what:
        return ("A rank that still steps waits for one that has no batch left. That one must go "
                "on taking part: model.shadow() in each step, until nobody has a batch.")
    return mistake.hint


def _compare_joined(seen, counts):
    case = f"batches of each rank: {', '.join(map(str, counts))}"
    for rank, (got, _, _, _, _) in enumerate(seen):
        if got == list(range(counts[rank])):
            continue
        if len(got) < counts[rank]:
            hint = "Nobody's batches are thrown away: go on until the last rank has none left."
        else:
            hint = "Yield each batch of this rank once. A rank without one shadows; it does not "\
                   "repeat a batch."
        raise Mistake(f"{case}: rank {rank} got batches {got}", hint)
    right, buffer = _joined_alone(counts, max(counts))
    early, _ = _joined_alone(counts, counts[0])
    for rank, (_, values, got_buffer, _, joining) in enumerate(seen):
        last = max(r for r in range(len(counts)) if counts[r] == max(counts))
        for name, value in right.items():
            if not far(values[name], value):
                continue
            if not far(seen[last][1][name], value):
                hint = (f"Rank {last}, which stepped to the end, has the right ones: "
                        "broadcast_parameters(model.module, src, model.group) hands them to all.")
            elif not far(values[name], early[name]):
                hint = ("They are those of rank 0, when its own batches were over. Broadcast from "
                        "a rank that took part in the last step.")
            else:
                hint = ("A rank without a batch adds zeros, by model.shadow(); and the buffers of "
                        "`model.buffers_from` count, which must be a rank that still steps.")
            raise Mistake(f"{case}: at the end rank {rank} has other weights than one process has "
                          f"after all {max(counts)} steps", hint)
        if abs(got_buffer - buffer) > 1e-4:
            raise Mistake(f"{case}: at the end rank {rank} has another buffer than the rank that "
                          "stepped last", "While ranks are over, set model.buffers_from to a rank "
                          "that still steps: its buffers count. And broadcast buffers too at the "
                          "end.")
        if joining:
            raise Mistake("after the loop model.joining is still True",
                          "Set it back in a `finally`.")


def _compare_joined_group(rank, got, values, got_buffer, _, joining):
    members = (rank % 2, rank % 2 + 2)
    counts = [IN_GROUPS[member] for member in members]
    right, buffer = _joined_alone(counts, max(counts), members)
    if (got != list(range(IN_GROUPS[rank])) or abs(got_buffer - buffer) > 1e-4
            or any(far(values[name], value) for name, value in right.items())):
        raise Mistake(f"in the group of ranks {members[0]} and {members[1]}, with {counts[0]} and "
                      f"{counts[1]} batches, rank {rank} ends with other weights than one process",
                      f"{IN_GROUP} And ranks count inside it: dist.get_rank(model.group).")
