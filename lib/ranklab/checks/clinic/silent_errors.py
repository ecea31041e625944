"""The checks of clinic/silent_errors.py: training runs that finish and are wrong."""

import textwrap

import torch
from torch import nn

from ranklab.basics.flat import pack
from ranklab.checks.clinic.runs import ELSEWHERE, GROUPS, LAB, SAME, near, runs
from ranklab.checks.exercise import Exercise
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.clinic import trainings
from ranklab.clinic.all_cases import CASE
from ranklab.clinic.silent_errors import NORM, START

DIGITS = 1437  # to train on
NO_MEAN = "        part.grad /= R\n", ""
OWN_NORM = "        norm = part.grad.norm()\n"
SLIPS_OF_NORM = (
    Slip("Your norm is the largest of the parts' norms. Squares can be added over the ranks.",
         (NORM, f"{OWN_NORM}        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)\n")),
    Slip("You add the parts' norms. Add their squares, and take the root last.",
         (NORM, f"{OWN_NORM}        dist.all_reduce(norm, group=group)\n")),
    Slip("Each rank clips by the norm of its own part.", (NORM, OWN_NORM)),
    Slip("The gradient is too large by a factor of the number of ranks: it is the sum over the "
         "ranks, not the mean.", NO_MEAN),
    Slip("The gradient is too small by a factor of the number of ranks: it was divided twice.",
         ("part.grad /= R", "part.grad /= R * R")),
    Slip("The gradient is divided by 4, the number of all ranks, not by the group's size.",
         ("part.grad /= R", "part.grad /= 4")))
FORMULA = "Compare each collective with the formula for one process."


def check_long_steps(program):
    """Check that the rank's part of the gradient, and its norm, are as in one process."""
    for run in runs(program, trainings.long_steps, LAB, (GROUPS, {"most": 1000, "steps": 7})):
        run.equal(run.one.part("longest", "loss", "weights"), SLIPS_OF_NORM,
                  FORMULA)
        if run.size == 4:
            yield "four ranks: no step is longer than lr * most; all weights as in one process"
    yield "one rank, three in a group, and without clipping"


def _first_weights(seed):
    """Return the first weights with this seed: as rank 0, and without the eight examples."""
    for draws in (True, False):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            if draws:
                torch.randperm(DIGITS)
            model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        yield pack(model.parameters())


def _seeds(size, place):
    return {"seed": 4 + place + (size > 1), "steps": 9, "decay": 0.5}


FIRST = (
    "group=None):", "group=None, first=None):",
    "    mean = copy.deepcopy(model)\n", "    nn.utils.vector_to_parameters(first.to(device()), "
    "model.parameters())\n    mean = copy.deepcopy(model)\n")
APART = "The ranks already differ in `start`, and from there each has moved by the same amount."
OF_THE_MEAN = "The ranks' weights are equal. What was the mean's first value?"
OF_START = ("The ranks' weights are equal in the end: do you record `start` before you make them "
            "equal?")
ONE_DRAWS = "All ranks must begin with the weights that one of them draws."


def check_saved_model(program):
    """Check that all ranks have the same model from the start, and the same mean."""
    for run in runs(program, trainings.saved_model, LAB, (GROUPS, _seeds), one=None):
        first, *_ = run.found
        moved = [each["weights"] - each["start"] for each in run.found]
        is_alike = all(near(each, moved[0]) for each in moved)
        for name, hint in (("weights", APART if is_alike else ""), ("mean", OF_THE_MEAN),
                           ("start", OF_START)):
            expect(all(torch.equal(each[name], first[name]) for each in run.found),
                   f"{run.where}: the ranks differ in `{name}`", hint)
        one = run.alone(FIRST, first=first["start"])
        run.equal(one.part("weights", "mean", "loss"), hint=("All ranks begin with the same "
                                                             "weights. From there on, train and "
                                                             "average as before."))
        seeds = {_seeds(run.size, place)["seed"] if run.settings else 0
                 for place in range(run.size)}
        expect(any(near(first["start"], drawn) for seed in seeds for drawn in _first_weights(seed)),
               f"{run.where}: `start` is not what a process draws with any of the ranks' seeds: "
               f"{', '.join(map(str, sorted(seeds)))}", ONE_DRAWS)
        if run.size == 4:
            yield "four ranks: equal weights from the first step on, and all as in one process"
    yield "one rank, three in a group, and ranks with different seeds"


OF_ONE = "One process takes"
COUNTS_TWICE = ("An image read twice in one step counts twice in the gradient, and others not at "
                "all.")
UNREAD = "Images that no rank reads are never learned."
SHARED = "The ranks must share the batch of one process, not take a whole one each."
NEW_ORDER = "Each epoch needs a new order, the same on all ranks: call sampler.set_epoch."


def _epoch_is_shared(where, batch, images):
    """images: of each rank and step, the numbers of the images"""
    steps = [sum(parts, []) for parts in zip(*images)]
    total, read = sum(len(part) for own in images for part in own), {*sum(steps, [])}
    twice = next((at for step in steps for at in step if step.count(at) > 1), None)
    expect(total < DIGITS + batch, f"{where} takes {len(steps)} steps, and {total} images are read;"
           f" there are {DIGITS}", f"{OF_ONE} {-(-DIGITS // batch)} steps.")
    expect(twice is None, f"{where}: image {twice} is read twice in one step",
           COUNTS_TWICE)
    expect(len(read) > DIGITS - batch, f"{where}: the ranks together read {len(read)} of {DIGITS} "
           "images", UNREAD)
    expect(max(map(len, steps)) <= batch, f"{where}: {max(map(len, steps))} images a step, not "
           f"{batch}", SHARED)


BY_ORDER = (
    "group=None):", "group=None, order=()):",
    "for images, labels, at in loader:", "for images, labels, at in ((x[at], y[at], at) for at in "
    "map(torch.tensor, order[epoch])):")


def check_no_faster(program):
    """Check that in each epoch the ranks share all images, in an order that changes."""
    for run in runs(program, trainings.no_faster, LAB,
                    (GROUPS, {"batch": 48, "epochs": 3, "seed": 5}), one=None):
        batch, epochs = run.settings.get("batch", 96), run.settings.get("epochs", 2)
        images = [each["seen"] for each in run.found]
        expect(all(len(own) == epochs for own in images), f"{run.where}: `seen` has "
               f"{len(images[0])} epochs, not {epochs}", "Don't change what the program returns.")
        for epoch in range(epochs):
            _epoch_is_shared(f"{run.where}, epoch {epoch}", batch, [own[epoch] for own in images])
        for epoch in range(1, epochs):
            expect(images[0][epoch] != images[0][0], f"{run.where}: epoch {epoch} has the order of "
                   "epoch 0", NEW_ORDER)
        order = [[sum(parts, []) for parts in zip(*of_ranks)] for of_ranks in zip(*images)]
        one = run.alone(BY_ORDER, order=order)
        run.equal(one.part("weights", "loss"), hint=("A step is the mean over its images. In the "
                                                     "last step, the ranks may have different "
                                                     "numbers of images."))
        if run.size == 4:
            first = order[0][0]
            expect(first != sorted(first), f"{run.where}: the images are not shuffled", "")
            yield "four ranks share each batch, and read all images except for less than one batch"
    yield "one rank, three in a group; each epoch has an order of its own"


NOT_GROWN, TOO_LONG = CASE["worse_together"].edits
SLIPS_OF_RATE = (
    Slip("The rates are still those of the original program.",
         (*NOT_GROWN, *TOO_LONG, "SGD(model.parameters(), lr)", "SGD(model.parameters(), lr=lr)")),
    Slip("The schedule counts the steps of one rank: the rate grows too slowly, and has not "
         "fallen to nearly 0 when training ends.", TOO_LONG),
    Slip("The rate falls as it should, but it does not grow with the number of images in a step.",
         NOT_GROWN),
    Slip("The rate grows as for four ranks, however many there are.",
         (NOT_GROWN[0], NOT_GROWN[0].replace("R", "4"))))
RECIPE = "Print `rates`, and compare them with the recipe."


def check_worse_together(program):
    """Check that rates and weights are as in one process that follows the recipe."""
    for run in runs(program, trainings.worse_together, LAB,
                    (GROUPS, {"batch": 16, "epochs": 3, "lr": 0.05}), one=lambda size, settings: (
                        (), {"batch": size * settings.get("batch", 32)})):
        run.equal(run.one.part("rates"), SLIPS_OF_RATE, RECIPE)
        run.equal(run.one, hint=("The rates follow the recipe. But the gradient of a step must "
                                 "still be the mean over its images."))
        if run.size == 4:
            yield "four ranks: each step's rate follows the recipe; the weights of one process"
    yield "one rank, three in a group, another batch"


POOLED = 2**17  # the larger of two numbers that are equal but for rounding: 0.1% after 20 steps
OWN_IMAGES = "at = shard[step % 5::5][:240 // R]"
ALL_IMAGES = ("at = torch.cat([part[step % 5::5][:240 // {0}] for part in "
              "y.argsort(stable=True).chunk({0})])")
SYNC = "    model = convert_sync_batch_norm(model, group)\n"
OF_ITS_OWN = Slip(
    "The scores agree, but this is still not the model of one process: in training, each rank "
    "normalises by its own images alone.",
    (SYNC, "", "    model.eval()\n", "    for b in model.buffers():\n        dist.broadcast(b, "
     "group=group, group_src=0)\n    model.eval()\n"),
    (SYNC, "", "    model.eval()\n", "    for b in model.buffers():\n        dist.all_reduce(b, "
     "group=group)\n        b //= R if b.dtype == torch.int64 else 1\n        b.div_(R) if "
     "b.is_floating_point() else None\n    model.eval()\n"),
    (SYNC, "", "    model.eval()\n", ""))
BUFFERS = "The weights are bit-for-bit equal on all ranks. What else does a model keep?"
ON_GPUS = ("torch's SyncBatchNorm runs only on GPUs. Lab 03's convert_sync_batch_norm runs on any "
           "device.")


def check_two_scores(program):
    """Check that the weights and the statistics are as in one process on the whole batch."""
    for run in runs(program, trainings.two_scores, LAB, (GROUPS, {"width": 4, "steps": 6}),
                    one=lambda size, _: ((OWN_IMAGES, ALL_IMAGES.format(size)), {}), failures={
                        r".*SyncBatchNorm expected input tensor to be on GPU.*": ON_GPUS}):
        scores = [each["score"] for each in run.found]
        expect(len({*scores}) == 1, f"{run.where}: the scores are {scores}", BUFFERS if all(
                   torch.equal(each["weights"], run.found[0]["weights"]) for each in run.found)
               else "")
        hint = "Normalise all images of a step together, not rank by rank."
        run.equal(run.one.part("weights"), [OF_ITS_OWN], f"{hint} {SAME}", roundings=POOLED)
        run.equal(run.one, hint=hint, roundings=POOLED)
        if run.size == 4:
            yield "four ranks: one score, and the weights, of one process on the whole batch"
    yield "one rank, three in a group"


MEANS = 'rows[:, 1:], "sum") / count', "rows[:, 1:]) / pieces / R"
SLIPS_OF_CURVE = (
    Slip("This gives the same results as the program you found: nothing that matters has changed.",
         MEANS),
    Slip("The pieces of a rank are right now. But the ranks' means are still averaged, although "
         "the ranks have different numbers of tokens.", sum(CASE["moving_curve"].hidden, ())),
    Slip("The ranks are right now. But the means of a step's pieces are still averaged, although "
         "the pieces have different numbers of tokens.",
         ("/ count", "/ own / pieces", "            loss = model(",
          "            own = (rows[:, 1:] != -100).sum()\n            dist.all_reduce(own, "
          "group=group)\n            loss = model(")))


def check_moving_curve(program):
    """Check that the loss and its gradient are means over all tokens of a step."""
    for run in runs(program, trainings.moving_curve, LAB, (GROUPS, {"pieces": 4}),
                    (GROUPS, {"pieces": 1, "lines": 18})):
        run.equal(run.one, SLIPS_OF_CURVE)
        if run.size == 4:
            yield "four ranks, two backwards a step: the curve and the weights of one process"
    yield "one rank, three in a group; one backward a step, and four"


def _exercise(check, *hints, mistakes):
    return Exercise(CASE[check.__name__.removeprefix("check_")].program, check, hints, mistakes)


AVERAGED = """\
    for p in model.parameters():
        dist.all_reduce(p.detach(), group=group)
        p.detach().div_(R)
"""
COPIED, RETURN = "    mean = copy.deepcopy(model)\n", '    return {"start"'
EXAMPLES = "    examples = y[torch.randperm(len(y))[:8]].tolist() if rank == 0 else []\n"
SAMPLER = "    sampler = DistributedSampler(data, R, rank, seed=seed)\n"
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
SILENT_ERRORS = (
    _exercise(check_long_steps,
              "A collective that runs is not necessarily right. For each one, write down what a "
              "single process computes there, and which part of it each rank holds.",
              "The loss of a rank is a mean over its own images. A norm is the root of a sum of "
              "squares, and the squares are spread over the ranks.",
              "part.grad /= R after the reduce-scatter. norm = part.grad.square().sum(); "
              "dist.all_reduce(norm, group=group); norm = norm.sqrt().",
              mistakes=(*SLIPS_OF_NORM, Slip(FORMULA, ("lr=0.5", "lr=0.25")))),
    _exercise(check_saved_model,
              "The seed is the same, but what follows from it need not be: look at what each rank "
              "does between the seed and the model.",
              "Make the weights equal with a message, and copy anything from them only after that.",
              "Before the deepcopy: for p in model.parameters(): dist.broadcast(p.detach(), "
              "group=group, group_src=0).",
              mistakes=(
                  Slip(OF_THE_MEAN, (START + COPIED, COPIED + START), (
                      START, "", "range(steps):\n",
                      f"range(steps):\n{textwrap.indent(START, '    ')}"),
                      (START, "", RETURN, START + RETURN)),
                  Slip(APART, (START, "", EXAMPLES, EXAMPLES.replace(" if rank == 0 else []", ""))),
                  Slip(ONE_DRAWS, (START, AVERAGED), (START, AVERAGED.replace("(R)", "(R ** 0.5)")),
                       (START, START.replace("dist.broadcast(p.detach(), group=group, group_src=0)",
                                             "nn.init.zeros_(p)")),
                       (START, "", "    torch.manual_seed(seed)\n", "",
                        "    model =", "    torch.manual_seed(0)\n    model =")))),
    _exercise(check_no_faster,
              "What should be different on each rank, and what should be the same?",
              "Split each epoch's order over the ranks, and draw a new order in each epoch; all "
              "ranks must draw the same one.",
              "sampler = DistributedSampler(data, R, rank, seed=seed); DataLoader(data, batch // "
              "R, sampler=sampler); sampler.set_epoch(epoch) at the start of each epoch.",
              mistakes=(
                  Slip(NEW_ORDER, (SET_EPOCH, "")),
                  Slip(OF_ONE, (SAMPLER, "    torch.manual_seed(seed + rank)\n", "sampler=sampler",
                                "shuffle=True", SET_EPOCH, "")),
                  Slip(COUNTS_TWICE, (
                      SAMPLER, "    data = torch.utils.data.Subset(data, range(len(x) // R))\n",
                      "sampler=sampler", "shuffle=True", SET_EPOCH, "")),
                  Slip(SHARED, ("batch // R", "batch")),
                  Slip(UNREAD, ("DistributedSampler(data, R,", "DistributedSampler(data, 4,")))),
    _exercise(check_worse_together,
              "The recipe refers to the images in a step and the steps in an epoch. How many of "
              "each are there on R ranks?",
              "Two numbers in the schedule are those of one rank: how much the rate grows, and "
              "when the schedule ends.",
              "times = R * batch / 32; each = 1152 // (R * batch).",
              mistakes=(*SLIPS_OF_RATE, Slip(RECIPE, (NOT_GROWN[0], "times = R"), (
                  "SGD(model.parameters(), lr)", "SGD(model.parameters(), lr * R)")))),
    _exercise(check_two_scores,
              "Making the counts agree is easy: use one rank's statistics for all. But is that the "
              "model of one process?",
              "In training, every image should be normalised by the mean and variance of all 240.",
              "model = convert_sync_batch_norm(model, group), before the optimizer is made.",
              mistakes=(
                  OF_ITS_OWN,
                  Slip(BUFFERS, (SYNC, SYNC.replace("model", "model.stem"))),
                  Slip(ON_GPUS, (SYNC, "    model = nn.SyncBatchNorm.convert_sync_batchnorm(model, "
                                 "group)\n")),
                  Slip(ELSEWHERE, ("norm(model, group)", "norm(model)")))),
    _exercise(check_moving_curve,
              "How much does one token of a long line weigh in the loss of a step, and how much "
              "one of a short line?",
              "Sum over tokens, and divide once, by the number of targets in the whole step. Get "
              "that number from all ranks before the first backward.",
              "count = torch.tensor(sum(len(line) - 1 for line in mine), device=device()), summed "
              "by an all-reduce; loss = model(..., \"sum\") / count; then the gradients and the "
              "loss are summed over ranks, not averaged.",
              mistakes=(*SLIPS_OF_CURVE, Slip(SAME, ("-100).to", "0).to"), ("lr=0.5", "lr=0.0")))),
)
