"""How a mended program is held against one process: in the lab's settings and in hidden ones.

The mend must be one of the cause: so the hidden settings have the same disease at another place.
"""

from functools import partial

import torch

from ranklab.checks.beside import GROUPINGS, expect, located, on_groups
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import STUCK
from ranklab.data.images import digits
from ranklab.engine import device

LAB = "as in the lab", {}
SAME = "Only the cause is to be mended: data, sizes, optimizer and what is returned stay."
FAILURES = {STUCK: "All ranks must make the same calls. A rank that leaves something out still "
            "goes through each collective, and adds zeros."}


def _trial(program, ranks, situations, look, right):
    for where, keywords in situations:
        got = program(**keywords, **ranks.keywords)
        yield partial(located, f"{ranks}, {where}", _looked, got, look, right, ranks, keywords)


def _looked(got, look, right, ranks, keywords):
    due = right(ranks, **keywords)
    expect(isinstance(got, dict) and due.keys() <= got.keys(), f"it returns {str(got)[:60]}",
           f"Return a dict of {', '.join(due)}, as it was.")
    got = {name: as_double(value) for name, value in got.items()}
    due = {name: as_double(value) for name, value in due.items()}
    look(got, due, ranks, **keywords)


def checked(program, situations, look, right):
    return on_groups(_trial, program, situations, look, right, failures=FAILURES,
                     groupings=GROUPINGS[:2])


def as_double(value):
    return torch.as_tensor(value).detach().cpu().double()


def is_near(got, due, tolerance=1e-4):
    return got.shape == due.shape and not _apart(got, due, tolerance).any()


def _apart(got, due, tolerance):
    """Where they differ by more than this part of the largest number."""
    most = due.abs().max().clamp(min=1e-3) if due.numel() else 1.0
    return ~((got - due).abs() <= tolerance * most).flatten()  # NaN is apart


def equal(name, got, due, hint, tolerance=1e-4):
    """A Mistake says where they differ first."""
    got, due = got[name], due[name]
    expect(got.shape == due.shape, f"{name}: {got.numel()} numbers, not {due.numel()}", SAME)
    if len(at := _apart(got, due, tolerance).nonzero()):
        at = int(at[0])
        raise Mistake(f"{name}: {got.flatten()[at]:.4g} at {at}, and one process has "
                      f"{due.flatten()[at]:.4g}", hint)


def train_data(rows=None):
    images = digits()
    return images.train.flatten(1)[:rows].to(device()), images.train_labels[:rows].to(device())


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
