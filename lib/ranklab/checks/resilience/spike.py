"""loss_spike: losses of a small real run, and made-up ones, whose right answer is known."""

import argparse
import functools
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ranklab.checks.prover import Must, Proof, Slip, Stage, Traced
from ranklab.checks.resilience.edge import edge
from ranklab.resilience import loss_spike

GO, SKIP, BACK = "go on", "skip", "roll back"
INF, NAN = math.inf, math.nan


class Run(NamedTuple):
    """Losses without a spike: at each step the answer must be "go on"."""

    name: str
    losses: Callable

    def __str__(self):
        return self.name


class Case(NamedTuple):
    """Losses, the last of which is to be judged, and the right answer.

    begin  a function without arguments, whose losses come first
    """

    name: str
    begin: Callable
    end: tuple
    right: str
    options: dict = {}

    def __str__(self):
        return self.name


def noisy(steps, level=3.0, noise=0.02, seed=0, fall=0.0):
    """Draw losses around level + fall x the fraction of steps left."""
    random = torch.Generator().manual_seed(seed)
    fraction = torch.linspace(1, 0, steps, dtype=torch.float64)
    return (level + fall * fraction + noise * torch.randn(steps, generator=random)).tolist()


@functools.cache
def real_losses(steps=1000, rows=128, letters=128):
    """Train a small real model; return the losses.

    It predicts each letter of Python's argparse.py from the previous letter.
    """
    codes = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    codes = codes.long().clamp(max=letters - 1)
    random = torch.Generator().manual_seed(0)
    table = torch.zeros(letters, letters, requires_grad=True)
    losses, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # others may use the cores
    for _ in range(steps):
        at = torch.randint(len(codes) - 1, (rows,), generator=random)
        loss = F.cross_entropy(table[codes[at]], codes[at + 1])
        gradient, = torch.autograd.grad(loss, table)
        with torch.no_grad():
            table -= 20 * gradient
        losses.append(loss.item())
    torch.set_num_threads(threads)
    return losses


def _normal(around=3.0, spread=0.1):
    """Return 300 losses, of which any 64 in a row are quantiles of a normal distribution."""
    distribution = NormalDist(around, spread)
    return [distribution.inv_cdf((i * 37 % 64 + 0.5) / 64) for i in range(300)]


def calm():
    return noisy(300)


def fallen():
    return noisy(600, fall=7.0)


def level():
    return [3.0] * 100


def fell():
    return [6.0] * 30 + [3.0] * 11


def rose():
    return [3.0] * 30 + [6.0] * 10


def below():
    return [-3.0] * 100


def small():
    return [loss / 1000 for loss in calm()]


def spiky():
    losses = calm()
    losses[250], losses[262], losses[275], losses[285] = 9.0, 12.0, 8.0, 9.5
    return losses


def gaps():
    losses = spiky()
    losses[270], losses[280] = NAN, INF
    return losses


def half():
    return [*calm()[:250], *[NAN, 3.01] * 24, 3.0, 3.0]


def _see_alarms(fn, run):
    losses = run.losses()
    words = {step: fn(losses[:step]) for step in range(1, len(losses) + 1)}
    yield {"the list of steps that do not go on": Must(
        [f"step {step}: {word}" for step, word in words.items() if word != GO][:8], [])}


def _see(fn, case):
    label = next(label for label, cases in CASES.items() if case in cases)
    losses = [*case.begin(), *case.end]
    before = repr(losses)
    word = fn(losses, **case.options)
    yield {label: Must(Traced(word, lambda *_: _bound(fn, case)), case.right),
           "`losses` afterwards": Must("as before" if repr(losses) == before else "changed",
                                       "as before")}


def _bound(fn, case):
    """Return the last loss from which on it does not go on: a wrong word has many reasons."""
    return edge(lambda loss: fn([*case.begin(), *case.end[:-1], loss], **case.options) == GO,
                -100, 100)


QUIET = (
    Run("falling from 10 to 3", functools.partial(noisy, 300, fall=7.0, noise=0.1)),
    Run("losses about 0.2, with 15% of noise", functools.partial(noisy, 400, level=0.2, noise=0.03,
                                                                 seed=3)),
    Run("the first steps", lambda: [11.0, 10.9, 12.5, 10.0, 9.0, 9.9, 8.0, 7.0]),
)
REAL = (Run("a real run of 1,000 steps", real_losses),)
FAR = (
    Case("a loss of 4 after 300 about 3", calm, (4.0,), SKIP),
    Case("back at 3 after a loss of 4", calm, (4.0, 3.0), GO),
    Case("a loss of 1 after 300 about 3", calm, (1.0,), GO),
    Case("from 10 down to 3, then 8", fallen, (8.0,), SKIP),
    Case("a loss of 0.004 after 300 about 0.003", small, (0.004,), SKIP),
    Case("5 standard deviations above", _normal, (3.5,), GO),
    Case("7 standard deviations above", _normal, (3.7,), SKIP),
    Case("6.2 standard deviations above", _normal, (3.62,), SKIP),
)
CALM = (
    Case("losses of 3, then 3.02", level, (3.02,), GO),
    Case("losses of -3, then -2.98", below, (-2.98,), GO),
    Case("losses of 3, then 3.1", level, (3.1,), SKIP),
    Case("losses of -3, then -2.9", below, (-2.9,), SKIP),
    Case("the 20th is 4, after 19 about 3", lambda: calm()[:19], (4.0,), GO),
    Case("the 21st is 4, after 20 about 3", lambda: calm()[:20], (4.0,), SKIP),
)
HIDDEN = (
    Case("four great spikes, and then 4", spiky, (4.0,), SKIP),
    Case("NaN some steps ago, then 4", gaps, (4.0,), SKIP),
    Case("NaN in half of the steps, then 4", half, (4.0,), SKIP),
    Case("NaN some steps ago, then 3", gaps, (3.0,), GO),
    *(Case(f"a loss of {bad} after 300 about 3", calm, (bad,), SKIP) for bad in (NAN, INF, -INF)),
    *(Case(f"the very first is {bad}", list, (bad,), SKIP) for bad in (NAN, INF, -INF)),
)
STAYS = (
    Case("4 and 4 after 300 about 3", calm, (4.0, 4.0), SKIP),
    Case("4, 4 and 4 after 300 about 3", calm, (4.0,) * 3, BACK),
    Case("five times 4 after 300 about 3", calm, (4.0,) * 5, BACK),
    Case("4, NaN and 5 after 300 about 3", calm, (4.0, NAN, 5.0), BACK),
    Case("the first three are NaN", list, (NAN,) * 3, BACK),
    Case("4, 3, 4, 4 after 300 about 3", calm, (4.0, 3.0, 4.0, 4.0), SKIP),
    Case("NaN, NaN and then 3, after 300 about 3", calm, (NAN, NAN, 3.0), GO),
)
NARROW = {"window": 21, "patience": 1, "limit": 1e-6}  # one loss more or less turns its median
OPTIONS = (
    Case("patience=5, four of 4", calm, (4.0,) * 4, SKIP, {"patience": 5}),
    Case("patience=5, five of 4", calm, (4.0,) * 5, BACK, {"patience": 5}),
    Case("patience=1, a loss of 4", calm, (4.0,), BACK, {"patience": 1}),
    Case("limit=100, a loss of 4", calm, (4.0,), GO, {"limit": 100.0}),
    Case("window=700: from 10 to 3, then 8", fallen, (8.0,), GO, {"window": 700}),
    Case("window=8, patience=6, six of 4", calm, (4.0,) * 6, BACK, {"window": 8, "patience": 6}),
    Case("window=21, patience=1: 6 for long, 11 times 3, then 4", fell, (4.0,), BACK, NARROW),
    Case("window=21, patience=1: 3 for long, 10 times 6, then 4", rose, (4.0,), BACK, NARROW),
)
CASES = {"what it says": FAR, "what it says of calm losses": CALM,
         "what it says near spikes and NaN": HIDDEN, "what it says of some in a row": STAYS,
         "what it says with these arguments": OPTIONS}
USUAL = "losses[-window - patience:-patience]"
FINITE = f"[x for x in {USUAL} if math.isfinite(x)]"
SPREAD = "1.4826 * statistics.median(abs(x - middle) for x in usual)"
BOUND = "middle + max(limit * spread, 0.01 * abs(middle))"
BAD = "not math.isfinite(x) or x > bound"
JUDGED = "[not math.isfinite(x) or x > bound for x in losses[-patience:]]"
ENOUGH = "len(losses) > 20 and usual"
LAST = "all(is_bad) and len(is_bad) == patience"
ROBUST = ("Earlier spikes are among these losses, and they pull up the mean and the standard "
          "deviation. Take the median, and the median distance from it.")
NOT_FINITE = ("A loss that is not finite says nothing about what is usual: leave it out before you "
              "take medians.")
FLOOR = "The spread of calm losses is almost 0: a rise of up to 1% of abs(middle) is not a spike."
SPIKE = Proof(
    loss_spike,
    Stage("no false alarm in the first steps, on falling, calm and noisy losses", _see_alarms,
          QUIET, note=("None of these losses is a spike: they are falls, noise, or among the first "
                       "20 losses.")),
    Stage(dict(zip((
        "one loss far above the last ones is skipped; a low one, or a return, goes on",
        "among calm losses, 1% more is not a spike; none of the first 20 is",
        "earlier spikes do not hide a new one; a loss that is not finite is skipped",
        "a spike that stays for `patience` steps is rolled back",
        "patience, window and limit are taken as given"), zip(CASES))), _see,
        sum(CASES.values(), ())),
    Stage("no false alarm in 1,000 steps of a real run", _see_alarms, REAL),
    mistakes=(
        Slip(ROBUST, (SPREAD, "statistics.pstdev(usual)"),
             ("statistics.median(usual)", "statistics.fmean(usual)"),
             ("statistics.median(usual)", "statistics.fmean(usual)", SPREAD,
              "statistics.pstdev(usual)")),
        Slip("This looks at all losses. Only the last `window` steps count: a loss that was usual "
             "long ago is a spike now.", (USUAL, "losses[:-patience]")),
        Slip("Far from what? Measure from the median of the usual losses, not from the last one.",
             (BOUND, BOUND.replace("middle + max", "usual[-1] + max"))),
        Slip("A few losses don't show the usual spread: take the `window` losses before the ones "
             "being judged.", (USUAL, "losses[-patience - 1:-patience]"),
             (USUAL, "losses[-patience - 4:-patience]")),
        Slip("The losses being judged are among the usual ones here. The usual ones must end "
             "before the last `patience`: a spike must not set its own standard.",
             (USUAL, "losses[-window:]"),
             (USUAL, "losses[-window - 1:-1]"),
             (USUAL, "losses[-window - patience + 1:len(losses) - patience + 1]")),
        Slip("The usual losses end too early here: they are those right before the last "
             "`patience`.", (USUAL, "losses[-window - patience - 1:-patience - 1]"),
             (USUAL, "losses[-2 * window - patience:-window - patience]")),
        Slip("A fixed factor ignores how noisy the losses are. Let the losses' own spread decide "
             "how far is far.", (BOUND, "1.5 * middle"), (BOUND, "1.2 * middle"),
             (BOUND, "2 * middle")),
        Slip("Don't use a fixed number: the losses' own spread tells you what is far.",
             (BOUND, "middle + 0.5"), (BOUND, "middle + max(limit * spread, 1.0)"),
             (BOUND, "middle + 1.0")),
        Slip("Neither the distance between quartiles nor the median distance is a standard "
             "deviation: 1.4826 times the median distance is.",
             (SPREAD, "(lambda q: q[2] - q[0])(statistics.quantiles([*usual, usual[0]], n=4))"),
             (SPREAD, SPREAD.removeprefix("1.4826 * "))),
        Slip("For calm losses the bound is 1% above the middle, no higher: max(limit * spread, "
             "0.01 * abs(middle)).",
             (BOUND, "middle + limit * max(spread, 0.01 * abs(middle))"),
             (BOUND, BOUND.replace("0.01", "0.1")),
             (ENOUGH, "len(losses) > 20 and usual and max(usual) > min(usual)")),
        Slip("The 1% is not added to the spread: take the larger of the two.",
             (BOUND, "middle + limit * spread + 0.01 * abs(middle)")),
        Slip("Losses can be negative: use 1% of abs(middle).",
             (BOUND, BOUND.replace("abs(middle)", "middle")),
             (BOUND, "max(middle + limit * spread, 1.01 * middle)")),
        Slip(FLOOR, (BOUND, "middle + limit * spread")),
        Slip("Only the first 20 losses are too few to judge: start with the 21st.",
             (ENOUGH, "len(losses) > 16 and usual"), (ENOUGH, "len(losses) >= 20 and usual"),
             (ENOUGH, "len(losses) > window and usual"), (ENOUGH, "len(losses) > 21 and usual"),
             (ENOUGH, "len(losses) > 24 and usual")),
        Slip("Among the first 20 losses every finite one is good, because they fall steeply.",
             (ENOUGH, "usual")),
        Slip("`limit` is an argument, 6 by default: multiply the spread by it.",
             (BOUND, BOUND.replace("limit", "2.0")), (BOUND, BOUND.replace("limit", "3.0")),
             (BOUND, BOUND.replace("limit", "6.0"))),
        Slip("A loss that is not finite is never good: use math.isfinite. (A comparison with NaN "
             "is False.)", (BAD, "x > bound")),
        Slip("-inf is not finite either: use math.isfinite.",
             (BAD, "math.isnan(x) or x > bound or x == math.inf")),
        Slip("Even among the first 20 losses, only finite ones are good.",
             (BAD, "len(losses) > 20 and (not math.isfinite(x) or x > bound)")),
        Slip("A low loss is good: only a loss far above the usual ones is a spike.",
             (BAD, "not math.isfinite(x) or abs(x - middle) > bound - middle",
              "bound = math.inf", "middle, bound = 0.0, math.inf")),
        Slip(NOT_FINITE, (FINITE, USUAL)),
        Slip("Roll back only after `patience` bad losses: in the first steps there are fewer "
             "losses.",
             (LAST, "all(is_bad)")),
        Slip("Roll back only if all of the last `patience` losses in a row are bad.",
             (LAST, "sum(is_bad) > 1"), (LAST, "sum(is_bad) >= patience - 1"),
             (JUDGED, JUDGED.replace("-patience", "-2 * patience"), LAST,
              "sum(is_bad) >= patience")),
        Slip("The last loss decides: if it is good, the run has recovered.",
             ("    if not is_bad[-1]:\n", "    if not any(is_bad):\n")),
        Slip("After `patience` bad losses in a row, skipping has not helped: roll back.",
             ('return "roll back" if', 'return "skip" if')),
        Slip("Skip a first spike: roll back only if it stays.",
             (f'"roll back" if {LAST} else "skip"', '"roll back"')),
        Slip("The three answers are \"go on\", \"skip\" and \"roll back\".",
             ('return "go on"', "return None"), ('else "skip"', 'else "skip it"'),
             ('"roll back" if', '"rollback" if'), ('return "go on"', "return True")),
        Slip("This rolls back one step late: `patience` bad losses in a row are enough.",
             (JUDGED, JUDGED.replace("-patience", "-patience - 1"),
              LAST, "all(is_bad) and len(is_bad) > patience")),
        Slip("`patience` is an argument.", (JUDGED, JUDGED.replace("-patience", "-3"),
                                            LAST, "all(is_bad) and len(is_bad) == 3")),
        Slip("`window` is an argument.", (USUAL, "losses[-64 - patience:-patience]")),
        Slip("Your function changes `losses`: only read slices of it.",
             ("    usual = ", "    losses[:] = losses[-window - patience:]\n    usual = "),
             ("    usual = ", "    losses[:-1] = [x for x in losses[:-1] if math.isfinite(x)]\n"
              "    usual = ")),
    ), hints=(
        "How do you find the usual loss, if some of the last losses are spikes or NaN?",
        "Take the median of the `window` losses before the ones you judge, and 1.4826 times the "
        "median distance from it, which equals the standard deviation if there are no spikes. "
        "Judge the last `patience` losses by these.",
        "usual = finite losses[-window - patience:-patience]; bound = middle + max(limit * spread, "
        "0.01 * abs(middle)); bad = [not math.isfinite(x) or x > bound for x in losses["
        "-patience:]]",
    ))
