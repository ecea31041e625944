"""The check of loss_spike: losses of a real small run, and given ones."""

import argparse
import functools
import math
from pathlib import Path
from statistics import NormalDist

import torch
import torch.nn.functional as F

from ranklab.checks.beside import expect
from ranklab.checks.trial import called_with

GO, SKIP, BACK = "go on", "skip", "roll back"
ROBUST = ("Earlier spikes are among the losses, and they pull up a mean and a standard deviation. "
          "Take the median, and the median distance from it.")
FAR = "It is above the losses of the last steps by more than `limit` times their spread."
FEW = "There are too few losses to judge: each finite one is good."
STAYS = "Skipping has not helped `patience` times in a row: roll back."
THREE, EACH = "`patience` is 3.", "Each is the last of three."
IN_A_ROW = "Only those one after the other."
COUNTS = STAYS, THREE, EACH, IN_A_ROW
NAN = "A loss that is not finite is never good, and says nothing about what is usual: leave it out."


def noisy(steps, level=3.0, noise=0.02, seed=0, fall=0.0):
    """Losses around level + fall x the part that is left."""
    random = torch.Generator().manual_seed(seed)
    left = torch.linspace(1, 0, steps, dtype=torch.float64)
    return (level + fall * left + noise * torch.randn(steps, generator=random)).tolist()


@functools.cache
def real_losses(steps=1000, rows=128, letters=128):
    """Losses of a small real training: each letter of Python's argparse.py, from the one before."""
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
    """300 losses, of which each 64 in a row are a normal distribution's quantiles."""
    found = NormalDist(around, spread)
    return [found.inv_cdf((i * 37 % 64 + 0.5) / 64) for i in range(300)]


def _says(loss_spike, case, losses, right, hint, **more):
    given = [*losses]
    with called_with(case):
        found = loss_spike(given, **more)
    if GO not in (found, right):  # it sees the spike: what it counts is wrong
        hint = hint if hint in COUNTS else ""
    expect(found in (GO, SKIP, BACK), f"{case}: it returns {found!r}", '"go on", "skip" or '
           '"roll back".')
    expect(found == right, f'{case}: it says "{found}", not "{right}"', hint)
    expect(repr(given) == repr(losses), f"{case}: `losses` is changed", "Look at slices.")


def _quiet(loss_spike):
    """No alarm at any step of these."""
    for case, losses, hint in (
        ("falling from 10 to 3", noisy(300, fall=7.0, noise=0.1), "A fall is no spike."),
        ("losses about 0.2, with 15% of noise", noisy(400, level=0.2, noise=0.03, seed=3), "Noise "
         "is no spike: measure its spread. In noisy losses a few percent more is not far."),
        ("the first steps", [11.0, 10.9, 12.5, 10.0, 9.0, 9.9, 8.0, 7.0], FEW),
        ("a real run of 1,000 steps", real_losses(), "Its noise is about normal: of a thousand "
         "steps some are 3 deviations above. `limit` is 6."),
    ):
        for step in range(1, len(losses) + 1):
            _says(loss_spike, f"{case}, step {step}", losses[:step], GO,
                  FEW if step <= 20 else hint)


def _cases():
    """{what then holds: [(case, losses, right, hint, keywords), ...]}"""
    calm, fallen, normal, level = noisy(300), noisy(600, fall=7.0), _normal(), [3.0] * 100
    before, inf, nan = noisy(300), math.inf, math.nan
    before[250], before[262], before[275], before[285] = 9.0, 12.0, 8.0, 9.5
    gaps = [nan if i == 270 else inf if i == 280 else x for i, x in enumerate(before)]
    half = [*calm[:250], *[nan, 3.01] * 24, 3.0, 3.0]
    return {
        "one loss far above the last ones is skipped; a low one, or a return, goes on": [
            ("a loss of 4 after 300 about 3", [*calm, 4.0], SKIP, FAR),
            ("back at 3 after a loss of 4", [*calm, 4.0, 3.0], GO, "It has "
             "recovered: the last loss decides."),
            ("a loss of 1", [*calm, 1.0], GO, "Low is good."),
            ("from 10 down to 3, then 8", [*fallen, 8.0], SKIP, "8 was usual long ago: the last "
             "`window` losses count."),
            ("a loss of 0.004 after 300 about 0.003", [x / 1000 for x in [*calm, 4.0]], SKIP, "No "
             "fixed number: the losses' own spread tells you what is far."),
            ("5 standard deviations above", [*normal, 3.5], GO, ""),
            ("7 standard deviations above", [*normal, 3.7], SKIP, "")],
        "of calm losses 1% more is no spike; of the first 20 none is": [
            ("losses of 3, then 3.02", [*level, 3.02], GO, "A spread of 0: up to 1% more is none."),
            ("losses of -3, then -2.98", [-3.0] * 100 + [-2.98], GO, "1% of abs(middle)."),
            ("losses of 3, then 3.1", [*level, 3.1], SKIP, "A spread of 0: more than 1% is a "
             "spike, too. Don't divide by it."),
            ("the 20th is 4", [*calm[:19], 4.0], GO, FEW),
            ("the 21st is 4", [*calm[:20], 4.0], SKIP, "Only the first 20 are accepted.")],
        "earlier spikes hide no new one; a loss that is not finite is skipped": [
            ("four great spikes, and then 4", [*before, 4.0], SKIP, ROBUST),
            ("NaN some steps ago, then 4", [*gaps, 4.0], SKIP, NAN),
            ("NaN in half of the steps, then 4", [*half, 4.0], SKIP, NAN),
            ("NaN some steps ago, then 3", [*gaps, 3.0], GO, NAN),
            *((f"a loss of {bad}", [*calm, bad], SKIP, NAN) for bad in (nan, inf, -inf)),
            *((f"the very first is {bad}", [bad], SKIP, NAN) for bad in (nan, inf, -inf))],
        "a spike that stays for `patience` steps is rolled back": [
            ("4 and 4", [*calm, 4.0, 4.0], SKIP, THREE),
            ("4, 4 and 4", [*calm, *[4.0] * 3], BACK, STAYS),
            ("five times 4", [*calm, *[4.0] * 5], BACK, EACH),
            ("4, NaN and 5", [*calm, 4.0, nan, 5.0], BACK, STAYS),
            ("the first three are NaN", [nan] * 3, BACK, STAYS),
            ("4, 3, 4, 4", [*calm, 4.0, 3.0, 4.0, 4.0], SKIP, IN_A_ROW),
            ("NaN, NaN and then 3", [*calm, nan, nan, 3.0], GO, "It has recovered.")],
        "patience, window and limit are taken as given": [
            ("patience=5, four of 4", [*calm, *[4.0] * 4], SKIP, STAYS, {"patience": 5}),
            ("patience=5, five of 4", [*calm, *[4.0] * 5], BACK, STAYS, {"patience": 5}),
            ("patience=1, a loss of 4", [*calm, 4.0], BACK, STAYS, {"patience": 1}),
            ("limit=100, a loss of 4", [*calm, 4.0], GO, "`limit` is given.", {"limit": 100.0}),
            ("window=700: 10 to 3, then 8", [*fallen, 8.0], GO, "As given.", {"window": 700})],
    }


def check_loss_spike(loss_spike):
    _quiet(loss_spike)
    yield "no false alarm in 1,000 steps of a real run, on falling, calm and noisy losses"
    for holds, cases in _cases().items():
        for case, losses, right, hint, *more in cases:
            _says(loss_spike, case, losses, right, hint, **(more[0] if more else {}))
        yield holds
