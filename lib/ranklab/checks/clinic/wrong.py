"""The checks of the clinic's wrong trainings: the same in one process, also in another situation."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import expect
from ranklab.checks.clinic import wrong_oracles as one_process
from ranklab.checks.exercise import Exercise, Mistake, Prediction
from ranklab.checks.trial import GROUPS, on_ranks
from ranklab.clinic.wrong import CASES

FOUR = ((0, 1, 2, 3),)
NEAR = 1e-3  # of the largest number: these are float32 trainings, and the slips are far larger
POOLED = 1e-2  # the larger of two numbers that are equal but for rounding: 0.1% after 20 steps
AS_FOUND = "That is the program as it was found: nothing that counts has changed."
ELSEWHERE = ("The four ranks of the lab were right. Here the ranks are others, and so are the "
             "settings: what holds for four alone, or for these settings, or without `group`?")


def runs(program, *settings):
    """(where, R, settings, what each rank returns): on four ranks as the lab does it, then with
    each of the other `settings` in a group of one and one of three. Of each rank, where a tuple.
    """
    cases = [(members, given) for number, given in enumerate(({}, *settings))
             for members in (GROUPS if number else FOUR)]
    seen = on_ranks(_on_rank, program, cases, ranks=4)
    for number, (members, given) in enumerate(cases):
        where = f"rank {members[0]} alone" if len(members) == 1 else f"ranks {members}"
        told = ", ".join(f"{name}={value}" for name, value in given.items())
        yield (f"{where}{told and ' with ' + told}", len(members), given,
               [seen[rank][number] for rank in members])


def _on_rank(program, cases):
    """What the program returns here, in each of the cases; None where this rank has no part."""
    rank, made = dist.get_rank(), {members: dist.new_group(members) for members in GROUPS}
    found = []
    for members, given in cases:
        mine = {name: value[rank] if isinstance(value, tuple) else value
                for name, value in given.items()}
        group = {"group": made[members]} if members in made else {}
        found.append(program(**mine, **group) if rank in members else None)
    return found


def equal(where, found, right, slips, hint, near=NEAR):
    """All ranks have found what right() is; else a Mistake names the number and, where one slip
    gives all numbers that are found, the slip.

    slips  {hint: what right(**these) gives instead}
    """
    with one_process.one_thread():
        _equal(where, found, right, right(), slips, hint, near)


def _equal(where, found, oracle, right, slips, hint, near):
    for rank, mine in enumerate(found):
        wrong = next((name for name in right if not _near(mine[name], right[name], near)), None)
        if wrong:
            made = {advice: oracle(**settings) for advice, settings in slips.items()}
            known = [advice for advice, values in made.items() if all(_near(mine[name], values[name], near) for name in values)
                     and not all(_near(right[name], values[name], near) for name in values)]
            what = f"{where}: {wrong} {_told(mine[wrong], right[wrong])}"
            if found[0] is not mine:
                what += f", on number {rank} of them"
            elsewhere = "" if where.endswith("(0, 1, 2, 3)") else ELSEWHERE
            raise Mistake(what, known[0] if known else elsewhere or hint)


def _near(got, right, near):
    got, right = (torch.as_tensor(each).double() for each in (got, right))
    return got.shape == right.shape and bool((got - right).abs().max() <= near * right.abs().max())


def _told(got, right):
    got, right = (torch.as_tensor(each).double().flatten() for each in (got, right))
    if got.shape != right.shape:
        return f"are {len(got)} numbers, and in one process {len(right)}"
    at = int((got - right).abs().nan_to_num(torch.inf).argmax())
    number = f" [{at}]" if len(right) > 1 else ""
    return f"{number} is {got[at]:.4g}, and in one process {right[at]:.4g}".strip()


def check_long_steps(program):
    """The rank's part of the gradient, and its norm, are those of one process."""
    for where, R, given, found in runs(program, {"most": 1e9, "steps": 7}):
        right = partial(one_process.long_steps, R, **given)
        equal(where, found, right, {
            AS_FOUND: dict(times=R, norm="largest"),
            "The norm is the largest of the parts' norms. Squares can be added over the ranks.":
                dict(norm="largest"),
            "The parts' norms are added. Their squares can be; the root comes last.":
                dict(norm="sum"),
            "Each rank clips by the norm of its own part.": dict(norm="each its own"),
            f"The gradient is {R} times too large: a sum over the ranks, where the mean is due.":
                dict(times=R),
            f"The gradient is {R} times too small: divided twice.": dict(times=1 / R),
            "The gradient is divided by the number of all ranks, 4.": dict(times=R / 4),
        }, "Compare each collective with the formula of one process.")
        if R == 4:
            yield "four ranks: no step is longer than lr * most; all weights as in one process"
    yield "one rank, three in a group, and without clipping"


def check_saved_model(program):
    """All ranks have one model, from the start; its mean too."""
    for where, _, given, found in runs(program, {"seed": (4, 5, 6, 7), "steps": 9, "decay": 0.5}):
        moved = [each["weights"] - each["start"] for each in found]
        alike = all(_near(each, moved[0], NEAR) for each in moved)
        for name, hint in (("weights", "From `start` on they have moved alike." if alike else ""),
                           ("mean", "Their weights are equal. What was the mean's first value?"),
                           ("start", "Their weights are equal in the end: is `start` taken "
                            "before they are made so?")):
            expect(all(torch.equal(each[name], found[0][name]) for each in found),
                   f"{where}: the ranks differ in `{name}`", hint)
        given = {name: value for name, value in given.items() if name != "seed"}
        equal(where, found, partial(one_process.saved_model, found[0]["start"], **given), {},
              "All begin alike. From there on train and average as before.")
        if len(found) == 4:
            start = found[0]["start"]
            expect(start.abs().max() > 0.1 and start.unique().numel() > 1000,
                   f"{where}: `start` is no model with random weights", "Keep its initialisation.")
            yield "four ranks: equal weights from the first step on, and all as in one process"
    yield "one rank, three in a group, and ranks with different seeds"


def check_no_faster(program):
    """In each epoch the ranks share all images, in an order that changes."""
    n = 1437
    for where, R, given, found in runs(program, {"batch": 48, "epochs": 3, "seed": 5}):
        batch, epochs = given.get("batch", 96), given.get("epochs", 2)
        seen = [each["seen"] for each in found]
        expect(all(len(own) == epochs for own in seen), f"{where}: `seen` has {len(seen[0])} "
               f"epochs, not {epochs}", "Keep what the program returns.")
        for epoch in range(epochs):
            steps = [sum(parts, []) for parts in zip(*(own[epoch] for own in seen))]
            read = {at for step in steps for at in step}
            total = sum(len(part) for own in seen for part in own[epoch])
            most, expected = max(map(len, steps)), -(-n // batch)
            twice = next((at for step in steps for at in step if step.count(at) > 1), None)
            expect(total < n + batch, f"{where}: epoch {epoch} takes {len(steps)} steps, and "
                   f"{total} images are read; there are {n}", "One process takes "
                   f"{expected} steps.")
            expect(twice is None, f"{where}: image {twice} is read twice in one step", "Then its "
                   "gradient counts twice, and others not at all.")
            expect(len(read) > n - batch, f"{where}: in epoch {epoch} the ranks together read "
                   f"{len(read)} of {n} images", "What no rank reads is never learned.")
            expect(most <= batch, f"{where}: {most} images a step, not {batch}", "The step of one "
                   "process is shared by the ranks.")
        for epoch in range(1, epochs):
            expect(seen[0][epoch] != seen[0][0], f"{where}: epoch {epoch} has the order of epoch "
                   "0", "Each epoch is shuffled anew, on all ranks alike: sampler.set_epoch.")
        order = [sum(parts, []) for epoch in range(epochs)
                 for parts in zip(*(own[epoch] for own in seen))]
        equal(where, found, partial(one_process.no_faster, order), {}, "Averaged as before, a step is that "
              "of one process on the images of all ranks.")
        if R == 4:
            expect(order[0] != sorted(order[0]), f"{where}: the images are not shuffled", "")
            yield "four ranks: each image on one of them, in as many steps as one process takes"
    yield "one rank, three in a group; each epoch has an order of its own"


def check_worse_together(program):
    """Rates and weights are those of one process that follows the recipe."""
    for where, R, given, found in runs(program, {"batch": 16, "epochs": 3, "lr": 0.05}):
        for each in found:
            each["rates"] = torch.tensor(each["rates"])
        right = partial(one_process.worse_together, R, **given)
        equal(where, found, right, {
            AS_FOUND: dict(grown=1, known=1),
            "The rate grows as it should. But it has not fallen to nearly 0 when the training "
            "ends: its schedule counts the steps of one rank.": dict(known=1),
            "The rate falls as it should. But it does not grow with the images of a step.":
                dict(grown=1),
            "It grows for four ranks, whatever their number is.": dict(grown=4),
        }, "Print `rates`, and hold them against the recipe.")
        if R == 4:
            yield "four ranks: each step's rate as the recipe has it; the weights of one process"
    yield "one rank, three in a group, another batch"


def check_two_scores(program):
    """The weights and the statistics are those of one process on the whole batch."""
    for where, R, given, found in runs(program, {"width": 4, "steps": 6}):
        scores = [each["score"] for each in found]
        expect(len({*scores}) == 1, f"{where}: the scores are {scores}", "The weights are equal "
               "on all ranks, to the bit. What else does a model keep?"
               if all(torch.equal(each["weights"], found[0]["weights"]) for each in found) else "")
        right = partial(one_process.two_scores, R, **given)
        equal(where, found, right, {
            "The scores agree, and yet it is not the model of one process: in training each rank "
            "still normalises its images by themselves.": dict(of_its_own=True)},
            "All images of a step are normalised together.", POOLED)
        if R == 4:
            yield "four ranks: one score, and the weights, of one process on the whole batch"
    yield "one rank, three in a group"


def check_moving_curve(program):
    """The loss and its gradient are means over all tokens of a step."""
    for where, R, given, found in runs(program, {"pieces": 4}, {"pieces": 1, "lines": 18}):
        right = partial(one_process.moving_curve, R, **given)
        equal(where, found, right, {
            AS_FOUND: dict(mean_of=("rank", "piece")),
            "The pieces of a rank are right now. But the ranks have different numbers of tokens, "
            "and their means are averaged.": dict(mean_of=("rank",)),
            "The ranks are right now. But the pieces of a step have different numbers of tokens, "
            "and their means are averaged.": dict(mean_of=("piece",)),
        }, "How much does one token weigh in the loss of a step? It should not matter where it is.")
        if R == 4:
            yield "four ranks, two backwards a step: the curve and the weights of one process"
    yield "one rank, three in a group; one backward a step, and four"


def exercise(case, check, *hints):
    return Exercise(case.program, check, hints)


def cause(case, hint, why, *against):
    """The Prediction of a case's cause; `against`: what speaks against the others, in their order"""
    numbers = [case.choices.index(wrong) + 1 for wrong in case.causes[1:]]
    return Prediction(f"clinic_{case.name}_cause", str(case.cause), lambda: case.cause,
                      mistakes=dict(zip(numbers, against, strict=True)), why=why, tolerance=0,
                      hint=hint)


STEPS, SAVED, FASTER, WORSE, SCORES, CURVE = CASES
