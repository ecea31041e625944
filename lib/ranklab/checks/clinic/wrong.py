"""The checks of the wrong trainings: they equal one process, also in another situation.

wrong_runs.py runs and compares; wrong_oracles.py is the one process; wrong_causes.py asks why.
"""

from functools import partial

import torch

from ranklab.checks.beside import expect
from ranklab.checks.clinic import wrong_oracles as one_process
from ranklab.checks.clinic.wrong_causes import PREDICTIONS_OF_WRONG
from ranklab.checks.clinic.wrong_runs import AS_FOUND, POOLED, equal, near, runs
from ranklab.checks.exercise import Exercise
from ranklab.clinic.wrong import CASES

__all__ = ["PREDICTIONS_OF_WRONG", "WRONG"]

DIGITS = 1437  # to train on

def check_long_steps(program):
    """The rank's part of the gradient, and its norm, are those of one process."""
    for where, R, given, found in runs(program, {"most": 1000, "steps": 7}):
        right = partial(one_process.long_steps, R, **given)
        equal(where, found, right, {
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
        alike = all(near(each, moved[0]) for each in moved)
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


def _epoch_is_shared(where, batch, seen):
    """seen: of each rank and step, the numbers of the images"""
    steps = [sum(parts, []) for parts in zip(*seen)]
    total, read = sum(len(part) for own in seen for part in own), {*sum(steps, [])}
    twice = next((at for step in steps for at in step if step.count(at) > 1), None)
    expect(total < DIGITS + batch, f"{where} takes {len(steps)} steps, and {total} images are read;"
           f" there are {DIGITS}", f"One process takes {-(-DIGITS // batch)} steps.")
    expect(twice is None, f"{where}: image {twice} is read twice in one step", "Then its gradient "
           "counts twice, and others not at all.")
    expect(len(read) > DIGITS - batch, f"{where}: the ranks together read {len(read)} of {DIGITS} "
           "images", "What no rank reads is never learned.")
    expect(max(map(len, steps)) <= batch, f"{where}: {max(map(len, steps))} images a step, not "
           f"{batch}", "The step of one process is shared by the ranks.")


def check_no_faster(program):
    """In each epoch the ranks share all images, in an order that changes."""
    for where, R, given, found in runs(program, {"batch": 48, "epochs": 3, "seed": 5}):
        batch, epochs = given.get("batch", 96), given.get("epochs", 2)
        seen = [each["seen"] for each in found]
        expect(all(len(own) == epochs for own in seen), f"{where}: `seen` has {len(seen[0])} "
               f"epochs, not {epochs}", "Keep what the program returns.")
        for epoch in range(epochs):
            _epoch_is_shared(f"{where}, epoch {epoch}", batch, [own[epoch] for own in seen])
        for epoch in range(1, epochs):
            expect(seen[0][epoch] != seen[0][0], f"{where}: epoch {epoch} has the order of epoch "
                   "0", "Each epoch is shuffled anew, on all ranks alike: sampler.set_epoch.")
        order = [sum(parts, []) for epoch in range(epochs)
                 for parts in zip(*(own[epoch] for own in seen))]
        equal(where, found, partial(one_process.no_faster, order), {}, "Averaged as before, a step "
              "is that of one process on the images of all ranks.")
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


def _exercise(check, *hints):
    case, = (case for case in CASES if case.name == check.__name__[len("check_"):])
    return Exercise(case.program, check, hints)


WRONG = (
    _exercise(check_long_steps,
              "A collective that runs is not one that is right. Write down for each what one "
              "process computes there, and what the ranks hold of it.",
              "The loss of a rank is a mean over its own images. A norm is the root of a sum of "
              "squares, and the squares are spread over the ranks.",
              "part.grad /= R after the reduce-scatter. norm = part.grad.square().sum(); "
              "dist.all_reduce(norm, group=group); norm = norm.sqrt()."),
    _exercise(check_saved_model,
              "The seed is the same, and what follows from it need not be: look at what each rank "
              "does between the seed and the model.",
              "Make the weights equal by a message, and everything that is copied from them after.",
              "Before the deepcopy: for p in model.parameters(): dist.broadcast(p.detach(), "
              "group=group, group_src=0)."),
    _exercise(check_no_faster,
              "What should be different on each rank, and what should be the same?",
              "Divide the order of an epoch over the ranks, and draw a new order in each epoch; "
              "all ranks must draw the same one.",
              "sampler = DistributedSampler(data, R, rank, seed=seed); DataLoader(data, batch // "
              "R, sampler=sampler); sampler.set_epoch(epoch) at the start of each epoch."),
    _exercise(check_worse_together,
              "The recipe speaks of the images of a step and of the steps of an epoch. How many "
              "are they on R ranks?",
              "Two numbers of the schedule are those of one rank: by how much it grows, and when "
              "it ends.",
              "times = R * batch / 32; each = 1152 // (R * batch)."),
    _exercise(check_two_scores,
              "To make the counts agree is easy: one rank's statistics for all. Is that the model "
              "of one process?",
              "In training every image should be normalised by mean and variance of all 240.",
              "model = convert_sync_batch_norm(model, group), before the optimizer is made."),
    _exercise(check_moving_curve,
              "How much does one token of a long line weigh in the loss of a step, and how much "
              "one of a short line?",
              "Sum over tokens, and divide once, by the number of targets in the whole step. Ask "
              "all ranks for it before the first backward.",
              "count = torch.tensor(sum(len(line) - 1 for line in mine), device=device()), summed "
              "by an all-reduce; loss = model(..., \"sum\") / count; then the gradients and the "
              "loss are summed over ranks, not averaged."),
)
