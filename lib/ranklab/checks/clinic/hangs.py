"""The checks of clinic/hangs.py; slowdowns.py has those of the last two programs."""

from functools import partial
from itertools import product

from ranklab.checks.clinic.runs import FOUR, GROUPS, PAIRS, SAME, near, runs, traffic_and
from ranklab.checks.clinic.slowdowns import SLOWDOWNS
from ranklab.checks.exercise import Exercise
from ranklab.checks.failures import MISMATCH, STUCK
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.clinic import hangs

EVERYWHERE = FOUR, GROUPS, PAIRS


# --- train_with_owners ----------------------------------------------------------------------------

OWNERS = {"steps": 6, "images": 200}, {"steps": 4, "images": 20, "width": 7, "seed": 3}
IN_LINE = ("All ranks wait in broadcast. Let each rank print what it sends, or for which rank it "
           "waits, just before it does.")
FEWER_COUNTS = ("The ranks do not make the same calls in the same order. Look at both loops: the "
                "one that sends weights, and the one over the digits. With 20 images a rank does "
                "not see every digit.")
OWNERS_FAILURES = {r"hang: broadcast(, broadcast)*": IN_LINE, "hang: .*all_reduce.*": FEWER_COUNTS}
AS_OWNED = "Every rank must hold each parameter with its owner's values."
KEPT_ONCE = "Only the owner of a parameter keeps its momentum."
OWN_BATCH = "torch.arange(16 * step, 16 * step + 16, device=device()) % len(y)"
ALL_BATCHES = ("torch.cat([own[torch.arange(16 * step, 16 * step + 16) % len(own)] for own in "
               "(torch.arange(rank, len(y), {0}) for rank in range({0}))])")
SLIPS_OF_OWNERS = (
    Slip("The weights are still the initial ones: nothing has been learned.",
         ("lr=0.05", "lr=0.0")),
    Slip("The sums mix different digits, because the k-th call is for a different digit on each "
         "rank. Which digits does each rank's dict hold, in which order?",
         ("in range(10)", "in dict.fromkeys([*right, *range(10)])")),
    Slip("The counts are still this rank's own: nothing from the other ranks has been added.",
         ("dist.all_reduce(count, group=group)", "pass")))


def _momentum(optimizer):
    """Return how many momentum elements an optimizer keeps on this rank."""
    return sum(value.numel() for state in optimizer.state.values()
               for name, value in state.items() if name == "momentum_buffer")


def check_train_with_owners(program):
    for run in runs(program, hangs.train_with_owners, *product(EVERYWHERE, OWNERS),
                    one=lambda size, _: ((OWN_BATCH, ALL_BATCHES.format(size)), {}),
                    watch=partial(traffic_and, _momentum), failures=OWNERS_FAILURES):
        run.awaited()
        expect(all(near(result["weights"], run.found[0]["weights"]) for result in run.found),
               f"{run.where}: the ranks differ in `weights`",
               AS_OWNED)
        run.equal(run.one.part("weights"), SLIPS_OF_OWNERS)
        run.equal(run.one.part("right"), SLIPS_OF_OWNERS)
        total, once = (sum(result.watched.of_optimizers for result in of)
                       for of in (run.found, [run.one]))
        expect(total <= once, f"{run.where}: the ranks together keep {total:,} numbers of "
               f"momentum, and one process {once:,}", KEPT_ONCE)
    yield "it ends, on 1, 2, 3 and 4 ranks, also where a rank does not see every digit"
    yield "weights and counts are those of one process; each momentum is kept once"


# --- train_on_a_grid ------------------------------------------------------------------------------

ONE_ORDER = ("All ranks must use the groups in the same order. This finishes with gloo but is not "
             "safe on GPUs, as torch's new_group and NCCL's guide say.")
WRITER = "Replica r's norms must be logged only by its rank number r % tensor."
ALL_WAIT = ("Which group does each rank use first, which rank does it wait for there, and where "
            "does that rank wait?")


# By the number of ranks, 1 to 4, so many are a replica.
GRIDS = [lambda size, _, tensor=tensor, own=own: own | {"tensor": tensor[size - 1]}
         for tensor, own in (((1, 2, 3, 2), {"steps": 4, "width": 36}),
                             ((1, 1, 1, 4), {"steps": 3, "width": 24, "seed": 2}))]


def _groups_in_order(run, place, tensor):
    """Return for each all-reduce of a rank whether it is in its row or its column."""
    first = place // tensor * tensor
    row = run.members[first:first + tensor]
    return ["rows" if op.group == row else "columns" for op in run.found[place].watched.ops
            if op.name == "all_reduce"]


def _one_replica(size, settings):
    """Return the edits by which one replica takes the batches of all."""
    of_all = 16 * size // settings["tensor"]
    return ("start = 16", f"start = {of_all}",
            "x[start:start + 16]", f"x[start:start + {of_all}]",
            "y[start:start + 16]", f"y[start:start + {of_all}]"), {"tensor": 1}


def _as_on_a_grid(run, tensor):
    """Return each rank's part of the training run in one replica."""
    first, second = run.one["weights"]
    for place in range(run.size):
        replica, shard = divmod(place, tensor)
        yield {"weights": [first.chunk(tensor, 0)[shard], second.chunk(tensor, 1)[shard]],
               "log": run.one["log"] if shard == replica % tensor else []}


def check_train_on_a_grid(program):
    orders = []
    for run in runs(program, hangs.train_on_a_grid, *product(EVERYWHERE, GRIDS), one=_one_replica,
                    failures={STUCK: ALL_WAIT}):
        run.awaited()
        tensor = run.settings["tensor"]
        rights = [*_as_on_a_grid(run, tensor)]
        for place, right in enumerate(rights):
            logged = len(run.found[place]["log"]), len(right["log"])
            expect(logged[0] == logged[1], f"{run.at(place)}: {logged[0]} norms are logged, not "
                   f"{logged[1]}", WRITER)
        run.equal(rights)
        orders += [(run.at(place), *(_groups_in_order(run, each, tensor) for each in (place, 0)))
                   for place in range(run.size)]
    yield "it ends, with replicas of 1, 2, 3 and 4 ranks"
    yield "weights and logs are those of one process, each log on its own rank"
    for name, calls, first in orders:
        expect(calls == first, f"{name} calls {', '.join(calls[:6])}, ...; the first rank "
               f"{', '.join(first[:6])}, ...", ONE_ORDER)
    yield "all ranks use the two groups in the same order"


# --- train_until_good -----------------------------------------------------------------------------

GOOD = {"steps": 30, "good": 0.65}, {"steps": 24, "batch": 1, "good": 0.55, "seed": 1}
ONE_LESS = ("The ranks do not make the same calls. What decides whether a rank makes a call? "
            "There may be two such places.")
ALL_DECIDE = ("`good` is a share of all held-out digits: add up the right ones over all ranks, "
              "then decide.")
EVERY_CALL = ("A step's mean is over the clear scans of all ranks. A rank without one contributes "
              "zeros: if it skips the call, its next scans join the others' previous step.")
ONE_DECIDES = Slip(
    f"It stops at the step in which a first rank is good enough by itself. {ALL_DECIDE}",
    ("seen = torch.stack([right, torch.tensor(len(held_y), device=device())])",
     "seen = (right >= good * len(held_y)).long()", "seen[0] >= good * seen[1]", "seen > 0"))


def check_train_until_good(program):
    for run in runs(program, hangs.train_until_good, *product(EVERYWHERE, GOOD),
                    one=lambda size, settings: ((), {"batch": size * settings.get("batch", 4)}),
                    failures={STUCK: ONE_LESS, MISMATCH: ONE_LESS}):
        run.awaited()
        steps, batch = run.found[0]["steps"], run.size * run.settings.get("batch", 4)
        as_far = run.one if steps == run.one["steps"] else run.alone(
            batch=batch, steps=steps, good=2)
        run.equal(as_far.part("weights"), hint=EVERY_CALL)
        run.equal(run.one.part("steps"), [ONE_DECIDES], ALL_DECIDE)
    yield "it ends on all ranks at the same step as in one process: on 1, 2, 3 and 4 ranks"
    yield "weights are those of one process, also where one rank, or every rank, has no clear scan"


OWNERS_CASE, GRID_CASE, GOOD_CASE, *_ = hangs.CASES
SENDS = ("        for name in weights:\n            dist.broadcast(weights[name].data, group_src="
         "owner[name], group=group)\n")
REDUCED = "dist.reduce(weights[name].grad, group_dst=owner[name], group=group)"
GRADIENTS = """for part in parts:
            dist.all_reduce(part.grad, group=columns)"""
BEGIN = "[dist.all_reduce(part.grad, group=columns, async_op=True) for part in parts]"
DECIDES = "seen[0] >= good * seen[1]"
HANGS = (
    Exercise(hangs.train_with_owners, check_train_with_owners, mistakes=(
        *SLIPS_OF_OWNERS,
        Slip(IN_LINE, OWNERS_CASE.edits[0]),
        Slip(FEWER_COUNTS, OWNERS_CASE.edits[1]),
        Slip(AS_OWNED, (SENDS, "")),
        Slip(KEPT_ONCE, ("for name in mine]", "for name in weights]", REDUCED,
                         "dist.all_reduce(weights[name].grad, group=group)", SENDS, "")),
    ), hints=(
        "For each loop with a call in it: what does its order depend on, and is that the same on "
        "all ranks?",
        "There are two such loops. In one the order depends on what a rank owns, in the other on "
        "what it has seen, and it may not have seen every digit.",
        "for name in weights, on all ranks; for digit in range(10), with right.get(digit, 0).")),
    Exercise(hangs.train_on_a_grid, check_train_on_a_grid, mistakes=(
        Slip(ALL_WAIT, GRID_CASE.edits[0]),
        Slip(WRITER, ("replica % tensor, []", "0, []")),
        Slip(ONE_ORDER, (GRADIENTS, f"works = [] if writes else {BEGIN}", "log.append(size)\n",
                         f"log.append(size)\n            works = {BEGIN}\n        for work in "
                         "works:\n            work.wait()\n")),
        Slip(SAME, ("- 0.1 *", "- 0.0 *")),
    ), hints=(
        "Write down for ranks 0 to 3 which group each one uses first after backward, and which "
        "rank it waits for there.",
        "All ranks need the norm. Let all of them compute it at the same place.",
        "All-reduce the gradients, then size = norm() on every rank, and then "
        "`if writes: log.append(size)`.")),
    Exercise(hangs.train_until_good, check_train_until_good, mistakes=(
        ONE_DECIDES,
        Slip(ONE_LESS, GOOD_CASE.edits[0], GOOD_CASE.edits[1]),
        Slip(ALL_DECIDE, (DECIDES, "False"), (DECIDES, "2 * seen[0] >= good * seen[1]")),
        Slip(EVERY_CALL, ("clear = ", "clear = (x[now] != 9).all(dim=1)  # ")),
    ), hints=(
        "Which lines end a step, or the loop, before its calls are made? What do they depend on?",
        "A rank with no clear scan contributes zeros and a count of 0. All ranks decide together "
        "when to stop.",
        "Leave out the `continue`: the sum over no scans is 0, and so is its gradient. All-reduce "
        "[right, len(held_y)], and compare the two sums.")),
    *SLOWDOWNS,
)
