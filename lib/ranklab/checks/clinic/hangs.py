"""The checks of clinic/hangs.py: the mended program beside one process, on 1, 2, 3 and 4 ranks.

    causes.py  the cause as a Prediction
    slow.py    the last two programs, whose bytes and tokens are counted
"""

import torch
import torch.nn.functional as F

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.clinic.causes import cause_of
from ranklab.checks.clinic.slow import EXERCISES_SLOW, PREDICTIONS_SLOW
from ranklab.checks.exercise import Exercise
from ranklab.checks.failures import MISMATCH, STUCK
from ranklab.clinic import hangs
from ranklab.data import digits
from ranklab.meter import Traffic

PRELOAD = "sklearn.datasets",
START = "They are those of the start: nothing has been learned."


def _flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


# --- train_with_owners ----------------------------------------------------------------------------

OWNERS = {"steps": 6, "images": 200}, {"steps": 4, "images": 20, "width": 7, "seed": 3}
ACROSS = ("The k-th call of each rank is for another digit: which digits, in which order, has each "
          "rank's dict?")
OWNERS_FAILURES = {
    r"hang: broadcast(, broadcast)*": "All wait in the same line, and each for another rank: let "
    "each rank print what it sends or waits for, before it does.",
    "hang: .*all_reduce.*": "The counts have one size, so a rank has made fewer calls than the "
    "others. With 20 images a rank does not see every digit.",
}


def _owners_alone(ranks, steps, images, width=32, seed=0):
    data = digits()
    x, y = data.train.flatten(1)[:images], data.train_labels[:images]
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(),
                                torch.nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start = _flat(model.parameters())
    for step in range(steps):
        batches = [torch.arange(rank, images, ranks) for rank in range(ranks)]
        batch = torch.cat([own[torch.arange(16 * step, 16 * step + 16) % len(own)]
                           for own in batches])
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    right = F.one_hot(y, 10) * (model(x).argmax(dim=1) == y)[:, None]
    counts = [right[rank::ranks].sum(0) for rank in range(ranks)]
    orders = [list(dict.fromkeys([*y[rank::ranks].tolist(), *range(10)])) for rank in range(ranks)]
    return _flat(model.parameters()), start, counts, orders


def _across(counts, orders, rank):
    """What a rank gets where the k-th calls of all are added up: first the digits that it saw."""
    found = torch.zeros(10, dtype=torch.int64)
    for digits_now in zip(*orders):
        found[digits_now[rank]] = sum(count[digit] for count, digit in zip(counts, digits_now))
    return found


def _owners_trial(program, ranks):
    alone = [_owners_alone(ranks.size, **settings) for settings in OWNERS]

    def call(turn):
        found = program(**OWNERS[turn], **ranks.keywords)
        right = torch.tensor([found["right"].get(digit, 0) for digit in range(10)])
        return {"weights": _flat(found["weights"].values()), "right": right}

    def correct(turn):
        weights, _, counts, _ = alone[turn]
        return {"weights": [weights] * ranks.size, "right": [sum(counts)] * ranks.size}

    def slips(name, turn):
        _, start, counts, orders = alone[turn]
        if name == "weights":
            return {"that of the start": (start, START)}
        return {"added up over different digits": (_across(counts, orders, ranks.index), ACROSS)}

    yield from beside(str(ranks), ranks, call, correct, slips=slips,
                      own=lambda turn: {"right": alone[turn][2][ranks.index]},
                      advice=lambda name: "Each rank must have each parameter as its owner has it.")


def check_train_with_owners(program):
    on_groups(_owners_trial, program, failures=OWNERS_FAILURES, preload=PRELOAD, timeout=20)
    yield "it ends, on 1, 2, 3 and 4 ranks, also where a rank does not see every digit"
    yield "weights and counts are those of one process"


# --- train_on_a_grid ------------------------------------------------------------------------------

WAYS = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 4)}  # ranks: `tensor` in both turns
GRID = {"steps": 4, "width": 36}, {"steps": 3, "width": 24, "seed": 2}
ONE_ORDER = ("All ranks take the groups in one order. This one ends with gloo, and on GPUs it is "
             "not safe: torch's new_group says so, and NCCL's guide.")
WRITER = "Replica r's norms are logged by its rank number r % tensor, and by no other."
ALL_WAIT = ("All wait. Which group does each rank call first, for whom does it wait there, and "
            "where does that rank wait?")


def _grid_alone(ranks, tensor, steps, width, seed=0):
    data, log = digits(), []
    x, y = data.train.flatten(1), data.train_labels
    torch.manual_seed(seed)
    first, second = ((torch.randn(shape) / 8).requires_grad_()
                     for shape in ((width, 64), (10, width)))
    size = 16 * ranks // tensor
    for step in range(steps):
        batch = slice(size * step, size * step + size)
        loss = F.cross_entropy((x[batch] @ first.T).relu() @ second.T, y[batch])
        gradients = torch.autograd.grad(loss, (first, second))
        log.append(_flat([first, second]).norm().item())
        with torch.no_grad():
            for weight, gradient in zip((first, second), gradients):
                weight.mul_(min(1, 6 / log[-1])).sub_(0.1 * gradient)
    return first.detach(), second.detach(), torch.tensor(log)


def _grid_trial(program, ranks):
    ways, orders = WAYS[ranks.size], []
    alone = [_grid_alone(ranks.size, tensor, **GRID[turn]) for turn, tensor in enumerate(ways)]

    def call(turn):
        with Traffic() as traffic:
            found = program(tensor=ways[turn], **GRID[turn], **ranks.keywords)
        first = ranks.index // ways[turn] * ways[turn]
        row = ranks.members[first:first + ways[turn]]
        orders.append(["rows" if op.group == row else "columns" for op in traffic.ops
                       if op.name == "all_reduce"])
        return {"weights": _flat(found["weights"]), "log": torch.tensor(found["log"])}

    def correct(turn):
        tensor, (first, second, log) = ways[turn], alone[turn]
        parts = [_flat([first.chunk(tensor, 0)[shard], second.chunk(tensor, 1)[shard]])
                 for shard in range(tensor)]
        writes = [rank % tensor == rank // tensor % tensor for rank in range(ranks.size)]
        return {"weights": [parts[rank % tensor] for rank in range(ranks.size)],
                "log": [log if each else log[:0] for each in writes]}

    def slips(name, turn):
        log = alone[turn][2]
        return {"that of a rank that writes": (log, WRITER), "empty": (log[:0], WRITER)} if (
            name == "log") else {}

    yield from beside(str(ranks), ranks, call, correct, slips=slips)
    yield lambda: (str(ranks), ranks.members[0], orders)


def check_train_on_a_grid(program):
    notes = on_groups(_grid_trial, program, failures={STUCK: ALL_WAIT}, preload=PRELOAD,
                      timeout=20)
    yield "it ends, with replicas of 1, 2, 3 and 4 ranks"
    yield "weights and logs are those of one process, each log on its own rank"
    for of_rank in notes:
        for grouping, (name, first, orders) in enumerate(of_rank):
            for mine, of_first in zip(orders, notes[first][grouping][-1]):
                expect(mine == of_first, f"{name} calls {', '.join(mine[:6])}, ...; the first rank "
                       f"{', '.join(of_first[:6])}, ...", ONE_ORDER)
    yield "all ranks take the two groups in one order"


# --- train_until_good -----------------------------------------------------------------------------

GOOD = {"steps": 30, "good": 0.65}, {"steps": 24, "batch": 1, "good": 0.55, "seed": 1}
ONE_LESS = ("A rank has made fewer calls than the others. On what does it depend whether a rank "
            "makes a call? There may be two places.")
GOOD_FAILURES = {STUCK: ONE_LESS, MISMATCH: ONE_LESS}
ALL_DECIDE = "`good` of all held-out digits: add up what is right on all ranks, then decide."
EVERY_CALL = ("A step's mean is over the scans that are left, of all ranks. A rank without one "
              "has a sum of zeros to give: if it leaves out the call, its next scans are added to "
              "others' scans of the step before.")


def _good_alone(ranks, steps, good, batch=4, seed=0):
    """[weights] after each step, [is each rank's own share good?], and where to stop."""
    data, weights, own, stop = digits(), [], [], None
    x, held = data.train.flatten(1), data.held_out.flatten(1)
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 10)
    for step in range(1, steps + 1):
        now = torch.cat([torch.arange(rank, len(x), ranks)[batch * (step - 1):batch * step]
                         for rank in range(ranks)])
        now = now[x[now].mean(dim=1) > 0]
        loss = F.cross_entropy(model(x[now]), data.train_labels[now], reduction="sum")
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(model.parameters(), gradients):
                weight -= 0.1 * gradient / max(len(now), 1)
            right = (model(held).argmax(dim=1) == data.held_out_labels).float()
        own.append([float(right[rank::ranks].mean()) >= good for rank in range(ranks)])
        weights.append(_flat(model.parameters()).clone())
        stop = stop or (step if right.mean() >= good else None)
    return weights, own, stop or steps


def _good_trial(program, ranks):
    alone, taken = [_good_alone(ranks.size, **settings) for settings in GOOD], []

    def call(turn):
        found = program(**GOOD[turn], **ranks.keywords)
        taken.append(found["steps"])
        return {"weights": _flat(found["weights"]), "steps": torch.tensor(found["steps"])}

    def correct(turn):  # first whether the weights are those of as many steps
        weights, _, stop = alone[turn]
        return {"weights": [weights[taken[turn] - 1]] * ranks.size,
                "steps": [torch.tensor(stop)] * ranks.size}

    def slips(name, turn):
        first = [next((k for k, is_good in enumerate(own, 1) if is_good), None)
                 for own in zip(*alone[turn][1])]
        named = {"where the first rank is good": min(filter(None, first), default=None),
                 "where rank 0 of the group is good": first[0], "where each rank is or was good":
                 None if None in first else max(first), "the last that is allowed":
                 GOOD[turn]["steps"]}
        return {what: (torch.tensor(step), ALL_DECIDE) for what, step in named.items()
                if step and name == "steps"}

    yield from beside(str(ranks), ranks, call, correct, slips=slips,
                      advice={"weights": EVERY_CALL, "steps": ALL_DECIDE}.get)


def check_train_until_good(program):
    on_groups(_good_trial, program, failures=GOOD_FAILURES, preload=PRELOAD, timeout=20)
    yield "it ends on all ranks at one step, that of one process: on 1, 2, 3 and 4 ranks"
    yield "weights are those of one process, also where a rank, or all, have no clear scan"


HANGS = (
    Exercise(hangs.train_with_owners, check_train_with_owners, hints=(
        "For each loop with a call in it: what does its order depend on, and is that the same on "
        "all ranks?",
        "There are two such loops. In one the order depends on what a rank owns, in the other on "
        "what it has seen, and it may not have seen all.",
        "for name in weights, on all ranks; for digit in range(10), with right.get(digit, 0).")),
    Exercise(hangs.train_on_a_grid, check_train_on_a_grid, hints=(
        "Write down for ranks 0 to 3 which group each calls first after backward, and for whom it "
        "waits there.",
        "All ranks need the norm. Let all take it at the same place.",
        "All-reduce the gradients, then size = norm() on every rank, and then "
        "`if writes: log.append(size)`.")),
    Exercise(hangs.train_until_good, check_train_until_good, hints=(
        "Which lines end a step, or the loop, before its calls are made? What do they look at?",
        "A rank with no clear scan gives zeros and the count 0. When to stop, all decide together.",
        "Leave out the `continue`: the sum over no scans is 0, and so is its gradient. All-reduce "
        "[right, len(held_y)], and compare the two sums.")),
    *EXERCISES_SLOW,
)

OWNERS_CASE, GRID_CASE, GOOD_CASE = hangs.CASES[:3]
PREDICTIONS_OF_HANGS = (
    cause_of(
        OWNERS_CASE,
        "until it stands still each rank has made 4 reduces, and is in its first broadcast",
        "the first tensors that they send are of other sizes because they are other tensors: name "
        "by name the sizes are the same on all ranks",
        "there is one group, that of all ranks",
        "all ranks have slept for a second, and none of them uses its core",
        hint="All wait in one line. Let each rank print, before it, `name` and `owner[name]`.",
        why="Rank r begins with the parameter that it owns: four senders, and nobody receives."),
    cause_of(
        GRID_CASE,
        "by group the calls are the same, in the same order, on all of its ranks; print them",
        "in a step each rank makes two calls in its row, and two in its column",
        "with width=32 each rank has 16 rows of the one matrix and 16 columns of the other",
        "the report names a line for each of the four ranks, and none has returned",
        hint="The report says where each rank waits. In which group, and for which rank?",
        why="0 waits in a row for 1, 1 in a column for 3, 3 in a row for 2, 2 in a column for 0."),
    cause_of(
        GOOD_CASE,
        "there is one call in a step, so there is no order",
        "the rank that is gone has returned its weights",
        "there is one group, that of all ranks",
        "the rank that is missed has returned: it will not come",
        hint="Which rank has returned? Let each rank print its step and what it has called so far.",
        why="A rank without a clear scan leaves out a call, one that is content leaves the loop."),
    *PREDICTIONS_SLOW,
)
