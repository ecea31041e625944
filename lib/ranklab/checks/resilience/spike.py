"""The check of loss_spike: losses of a real small run, and given ones."""

import argparse
import functools
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from ranklab.checks.beside import expect

GO, SKIP, BACK = "go on", "skip", "roll back"
ROBUST = ("Spikes that came before are among the losses: a mean and a standard deviation are drawn "
          "up by them. Take the median, and the median distance from it.")
NAN = "A loss that is not finite is never good, and says nothing of what is usual: leave it out."


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


def _never(loss_spike, case, losses, hint):
    for step in range(1, len(losses) + 1):
        found = loss_spike(losses[:step])
        expect(found == GO, f'{case}, step {step}: it says "{found}", not "{GO}"', hint)


def _says(loss_spike, case, losses, right, hint, **more):
    given = [*losses]
    found = loss_spike(given, **more)
    expect(found in (GO, SKIP, BACK), f"{case}: it returns {found!r}", '"go on", "skip" or '
           '"roll back".')
    expect(found == right, f'{case}: it says "{found}", not "{right}"', hint)
    expect(repr(given) == repr(losses), f"{case}: `losses` is changed", "Look at slices.")


def _one(loss_spike):
    far = "Above what the losses of the last steps are, by more than `limit` times their spread."
    calm = noisy(300)
    _says(loss_spike, "a loss of 4 after 300 about 3", [*calm, 4.0], SKIP, far)
    _says(loss_spike, "back at 3 after a loss of 4", [*calm, 4.0, 3.0], GO, "It has recovered: the "
          "last loss decides.")
    _says(loss_spike, "a loss of 1", [*calm, 1.0], GO, "Low is good.")
    fallen = noisy(600, fall=7.0)
    _says(loss_spike, "from 10 down to 3, then 8", [*fallen, 8.0], SKIP, "8 was usual long ago: "
          "the last `window` losses count.")
    scaled = [x / 1000 for x in calm]
    _says(loss_spike, "a loss of 0.004 after 300 about 0.003", [*scaled, 0.004], SKIP, "No fixed "
          "number: what is far is told by the losses' own spread.")


def _no_alarm(loss_spike):
    _never(loss_spike, "falling from 10 to 3", noisy(300, fall=7.0, noise=0.1), "A fall is no "
           "spike.")
    wild = noisy(400, level=0.2, noise=0.03, seed=3)
    _never(loss_spike, "losses about 0.2, with 15% of noise", wild, "Noise is no spike: measure "
           "its spread. A part more than before is not far in noisy losses.")
    _says(loss_spike, "losses of 3, then 3.02", [3.0] * 100 + [3.02], GO, "A spread of 0: up to "
          "1% more is no spike.")
    _says(loss_spike, "losses of 3, then 4", [3.0] * 100 + [4.0], SKIP, "A spread of 0: more than "
          "1% is a spike, too. Don't divide by it.")
    _never(loss_spike, "the first steps", [11.0, 10.9, 12.5, 10.0, 9.0, 9.9, 8.0, 7.0], "There are "
           "too few to know: each finite one is good.")
    _never(loss_spike, "a real run of 1,000 steps", real_losses(), "Its noise is about normal: of "
           "a thousand steps some are 3 deviations above. `limit` is 6.")


def _earlier(loss_spike):
    calm = noisy(300)
    before = noisy(300)
    before[250], before[262], before[275], before[285] = 9.0, 12.0, 8.0, 9.5
    _says(loss_spike, "four great spikes, and then 4", [*before, 4.0], SKIP, ROBUST)
    before[270], before[280] = math.nan, math.inf
    _says(loss_spike, "NaN some steps ago, then 4", [*before, 4.0], SKIP, NAN)
    half = [*calm[:250], *[math.nan, 3.01] * 24, 3.0, 3.0]
    _says(loss_spike, "NaN in half of the steps, then 4", [*half, 4.0], SKIP, NAN)
    _says(loss_spike, "NaN some steps ago, then 3", [*before, 3.0], GO, NAN)
    for bad in (math.nan, math.inf, -math.inf):
        _says(loss_spike, f"a loss of {bad}", [*calm, bad], SKIP, NAN)
        _says(loss_spike, f"the very first is {bad}", [bad], SKIP, NAN)


def _staying(loss_spike):
    calm = noisy(300)
    stays = "Skipping has not helped `patience` times, one after the other: roll back."
    _says(loss_spike, "4 and 4", [*calm, 4.0, 4.0], SKIP, "`patience` is 3.")
    _says(loss_spike, "4, 4 and 4", [*calm, 4.0, 4.0, 4.0], BACK, stays)
    _says(loss_spike, "4, NaN and 5", [*calm, 4.0, math.nan, 5.0], BACK, stays)
    _says(loss_spike, "the first three are NaN", [math.nan] * 3, BACK, stays)
    _says(loss_spike, "4, 3, 4, 3, 4", [*calm, 4.0, 3.0, 4.0, 3.0, 4.0], SKIP, "Only those one "
          "after the other count.")
    _says(loss_spike, "NaN, NaN and then 3", [*calm, math.nan, math.nan, 3.0], GO, "It has "
          "recovered.")
    _says(loss_spike, "patience=5, four of 4", [*calm] + [4.0] * 4, SKIP, stays, patience=5)
    _says(loss_spike, "patience=5, five of 4", [*calm] + [4.0] * 5, BACK, stays, patience=5)
    _says(loss_spike, "patience=1, a loss of 4", [*calm, 4.0], BACK, stays, patience=1)


def _settings(loss_spike):
    calm, fallen = noisy(300), noisy(600, fall=7.0)
    _says(loss_spike, "limit=100, a loss of 4", [*calm, 4.0], GO, "`limit` is an argument.",
          limit=100.0)
    _says(loss_spike, "window=700: from 10 down to 3, then 8", [*fallen, 8.0], GO, "`window` is an "
          "argument.", window=700)


def check_loss_spike(loss_spike):
    _one(loss_spike)
    yield "one loss far above the last ones is skipped; a low one, or a return, goes on"
    _no_alarm(loss_spike)
    yield "no false alarm in 1,000 steps of a real run, on falling, calm and noisy losses"
    _earlier(loss_spike)
    yield "earlier spikes hide no new one; a loss that is not finite is skipped"
    _staying(loss_spike)
    yield "what stays for `patience` steps is rolled back"
    _settings(loss_spike)
    yield "window and limit are taken as given"
