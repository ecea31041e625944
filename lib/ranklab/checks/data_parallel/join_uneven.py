"""The check of join_uneven, on the library's OverlappedDataParallel."""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.data_parallel.toys import buffers, loss_of, off, rows, weights
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import STUCK, hinted
from ranklab.checks.trial import GROUPS, group_of_mine, is_near, on_ranks, rank_name
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.engine import device
from ranklab.meter import Traffic

IN_GROUP = "Hand model.group on to every collective, with group=model.group."
COUNTED = f"Ranks count inside the group: dist.get_rank(model.group). {IN_GROUP}"
GENERATOR = "It must be a generator: `yield` each batch of this rank."
WAITED_FOR = ("A rank that still steps waits for one that has no batch left. That one must go on "
              "taking part: model.shadow() in each step, until nobody has a batch. And "
              "model.buffers_from must be the same on all ranks. (Rank 0 is a rank: nobody is -1.)")
FAILURES = {
    r"TypeError: object of type '.*' has no len\(\)":
        "A loader may have no length. Ask after each batch: one small all-reduce tells "
    "all ranks how many go on.",
    "RuntimeError: Boolean value of Tensor with .* is ambiguous":
        "A batch may be a tensor, or empty, and is a batch all the same. "
    "Ask whether there is one: `batch is None`, not `if batch`.",
    "TypeError: cannot unpack non-iterable NoneType object":
        "A None was yielded where a batch was expected. A rank "
    "without a batch shadows the step, and yields nothing.",
    "TypeError: ('NoneType' object is not |cannot unpack non-)iterable.*": GENERATOR,
    "RuntimeError: generator raised StopIteration":
        "next(batches, None) gives None when there is no batch left; next(batches) "
    "raises.",
    r"\w+: .*root rank: -1.*":
        "-1 says that nobody goes on. Keep the last result before it: broadcast from "
    "that rank.",
    r"\w+: .*root rank: \d+.*": COUNTED,
    STUCK: WAITED_FOR,
}
LIMIT = 6  # seconds; the usual mistake waits for ever
COUNTS = {1: ((2,), (0,)), 3: ((1, 3, 2), (2, 0, 1)), 4: ((3, 1, 0, 1), (2, 2, 2, 2))}
IN_GROUPS = (1, 1, 2, 0)  # of the four ranks, when 0 is alone, and 1, 2, 3 are a group
AHEAD = 1  # batches that may be taken before they are asked for


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
        seen.append(_join_one(join_uneven, IN_GROUPS[dist.get_rank()], group_of_mine()))
    return seen


def _join_one(join_uneven, count, group=None):
    rank, model = dist.get_rank(), Normed().to(device())
    wrapped = OverlappedDataParallel(model, bucket_cap_bytes=1, group=group)
    optimizer, got, taken = torch.optim.SGD(model.parameters(), 0.1), [], []
    inside, ahead = [], 0

    def batches():  # a generator: like a loader it has no length, and what is taken is gone
        for k in range(count):
            taken.append(k)
            yield k, rows(10 * rank + k)

    with Traffic() as traffic:
        for k, x in join_uneven(batches(), wrapped):
            got.append(k)
            inside.append(wrapped.joining)
            ahead = max(ahead, len(taken) - len(got))
            optimizer.zero_grad()
            loss_of(wrapped, x).backward()
            optimizer.step()
    seen = {"got": got, "weights": weights(model), "buffer": buffers(model)["seen"],
            "sent": sum(op.payload_bytes for op in traffic.ops), "inside": all(inside),
            "ahead": ahead, "after the loop": (wrapped.joining, wrapped.buffers_from)}
    with Traffic() as traffic:
        for _ in join_uneven(iter([torch.zeros(2)]), wrapped):  # a batch may be a tensor
            break  # on all ranks: what a training loop does after its last step
    return seen | {"after a loop that was left by a break": (wrapped.joining, wrapped.buffers_from),
                   "sent early": traffic.calls["broadcast"]}


def _joined_alone(counts, steps, members=range(4), pick=max):
    """(weights, buffer) after that many steps of these ranks, in one process.

    pick  whose buffers count, of the ranks that go on: any will do
    """
    model, seen = Normed(), [torch.zeros(()) for _ in counts]
    optimizer, source = torch.optim.SGD(model.parameters(), 0.1), 0
    for step in range(steps):
        optimizer.zero_grad()
        going_on = [rank for rank, count in enumerate(counts) if step < count]
        source = pick(going_on)
        start = seen[source]
        for rank in going_on:
            model.seen.copy_(start)
            (loss_of(model, rows(10 * members[rank] + step)) / len(counts)).backward()
            seen[rank] = model.seen.clone()
        optimizer.step()
    return weights(model), seen[source]


def check_join_uneven(join_uneven):
    for ranks, of_cases in COUNTS.items():
        with hinted({"hang: .*": COUNTED} | FAILURES if ranks == 4 else FAILURES):
            seen = on_ranks(_join_trial, join_uneven, of_cases, ranks=ranks, timeout=LIMIT)
        for number, counts in enumerate(of_cases):
            _compare_joined([of_rank[number] for of_rank in seen], counts)
    yield "every rank gets all its own batches, in order: 1, 3, 4 ranks, some with none"
    yield "at the end all have the weights that one process has after all steps"
    yield "and the buffers of a rank that went on to the last"
    for members in GROUPS:
        try:
            _compare_joined([seen[rank][-1] for rank in members],
                            [IN_GROUPS[rank] for rank in members], members)
        except Mistake as mistake:
            raise Mistake(f"in the group of ranks {members}, {mistake.what}", COUNTED) from None
    yield "inside a group it meets nobody else"
    for rank, of_rank in enumerate(seen):
        for one, counts in zip(of_rank, of_cases):
            _compare_cost(rank_name(rank, 4), one, max(counts))
            _compare_flags(one)
    yield "one number more travels in a step, and the model once at the end; batches one by one"
    yield "inside model.joining is True; afterwards all is as before, also after a break"


def _compare_joined(seen, counts, members=range(4)):
    case, steps = f"batches of each rank: {', '.join(map(str, counts))}", max(counts)
    for rank, one in enumerate(seen):
        if one["got"] != list(range(counts[rank])):
            hint = ("Yield each batch of this rank once. A rank without one shadows; it does not "
                    "repeat a batch.")
            if len(one["got"]) < counts[rank]:
                hint = "Nobody's batches are thrown away: go on until the last rank has none left."
            raise Mistake(f"{case}: rank {rank} got batches {one['got']}", hint)
    rights = [_joined_alone(counts, steps, members, pick) for pick in (max, min)]
    right, buffer = next((each for each in rights if any(_same(one, each[0]) for one in seen)),
                         rights[0])
    for rank, one in enumerate(seen):
        if not _same(one, right):
            raise Mistake(f"{case}: at the end rank {rank} has other weights than one process has "
                          f"after all {steps} steps", _weights_hint(one, seen, right, counts))
        if not is_near(one["buffer"], buffer):
            raise Mistake(f"{case}: at the end rank {rank} has another buffer than the rank that "
                          "stepped last", "While ranks are over, set model.buffers_from to a rank "
                          "that still steps: its buffers count. And broadcast buffers too at the "
                          "end.")


def _same(one, right):
    return not off(one["weights"], right)


def _weights_hint(one, seen, right, counts):
    if have := [other for other, each in enumerate(seen) if _same(each, right)]:
        return (f"Rank {have[-1]}, which stepped to the end, has the right ones: "
                "broadcast_parameters(model.module, src, model.group) hands them to all.")
    for other, count in enumerate(counts):
        if count < max(counts) and _same(one, _joined_alone(counts, count)[0]):
            return (f"They are those of rank {other}, when its own batches were over. Broadcast "
                    "from a rank that took part in the last step.")
    return ("A rank without a batch adds zeros, by model.shadow(); and the buffers of "
            "`model.buffers_from` count, which must be a rank that still steps.")


def _compare_cost(where, one, steps):
    model = Normed()
    state = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    wanted = steps * (state + 8) + 8 + state  # gradients are as large as parameters
    if one["sent"] > wanted:
        raise Mistake(f"{where} puts {one['sent']:,} bytes into collectives in {steps} steps; "
                      f"{wanted:,} are enough", "In each step the gradients, the buffer, and one "
                      "number that says who goes on; the model's weights once, at the end.")
    if one["ahead"] > AHEAD:
        raise Mistake(f"{where} has taken {one['ahead']} batches before they were asked for",
                      "An epoch need not fit into memory: next(batches, None), once in each step.")


def _compare_flags(one):
    if not one["inside"]:
        raise Mistake("inside the loop model.joining is not True", "Set it before the first "
                      "step: no_sync inside the loop is then an error, not a rank that waits "
                      "for ever.")
    for when, hint in (("after the loop", ""),
                       ("after a loop that was left by a break", " in a `finally`")):
        joining, source = one[when]
        if joining:
            raise Mistake(f"{when} model.joining is still True", f"Set it back{hint}.")
        if source:
            raise Mistake(f"{when} model.buffers_from is still {source}", "Set it back to 0"
                          f"{hint}: in training without join_uneven rank 0's buffers count.")
    if one["sent early"]:
        raise Mistake("after a loop that was left by a break it still broadcasts the model",
                      "The broadcast stands before the `finally`: where a step failed on one rank "
                      "the others would wait there for ever.")
