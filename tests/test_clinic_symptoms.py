"""Lab 16: each disease shows the symptoms that the Picture says, and no other. All is measured: the
program as it was found against the mended one, both on four ranks.
"""

import inspect
from operator import attrgetter
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.flop_counter import FlopCounterMode

from ranklab.clinic import symptoms
from ranklab.clinic.all_cases import CASES
from ranklab.engine import HangError, launch
from ranklab.meter import MemoryCurve, Traffic

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow, pytest.mark.sweep]
SYMPTOMS = {name: seen for group in symptoms.SYMPTOMS.values() for name, seen in group.items()}
MORE = 1.5  # times the bytes or the work of the mended one is slow
NEAR = {"rtol": 1e-2, "atol": 1e-4, "equal_nan": True}  # sums in another order, and Adam after it
LEAST_GROWTH = 4096  # bytes a step


class Alive(MemoryCurve):
    """The live bytes at its marks alone: to add them up after each op takes a minute."""

    def _after_op(self, func, args, kwargs, result):
        self._see(args, kwargs, result)


class Seen(NamedTuple):
    """What a rank returns, by place, and what it costs."""

    found: dict
    flops: int
    sent_bytes: int
    batches: list  # the targets that it trained on
    alive: list  # bytes after each optimizer step


def run(program, **settings):
    """[Seen of each of four ranks], or None where they hang."""
    def counted():
        batches, usual = [], F.cross_entropy

        def looked(logits, targets, *args, **named):
            if torch.is_grad_enabled():
                batches.append(str(targets.tolist()))
            return usual(logits, targets, *args, **named)

        F.cross_entropy = looked
        register_optimizer_step_post_hook(lambda *_: curve.mark("a step"))
        with (Alive(nn.Identity()) as curve, Traffic() as traffic,
              FlopCounterMode(display=False) as flops):
            result = program(**settings)
        found = {keystr(place): torch.as_tensor(leaf, dtype=torch.float64)
                 for place, leaf in tree_flatten_with_path(result)[0]}
        alive = [point.total for point in curve.points[1:-1]]
        return Seen(found, flops.get_total_flops(), traffic.sent_bytes, batches, alive)
    try:
        return launch(counted, ranks=4, stall=1, preload=["sklearn.datasets"])
    except HangError:
        return None


def alike(a, b):
    """The same numbers, but for rounding."""
    return a.shape == b.shape and torch.allclose(a, b, **NEAR)


def shared(ranks):
    """Places in a result that are alike on all ranks."""
    first, *others = [rank.found for rank in ranks]
    return {place for place, value in first.items()
            if all(place in other and alike(value, other[place]) for other in others)}


def as_one_process(broken, mended):
    """The mended one equals one process. Where a list is longer, weights alone are compared."""
    return all(alike(a.found[place], b.found[place]) for a, b in zip(broken, mended)
               for place in a.found.keys() & b.found.keys()
               if a.found.keys() == b.found.keys() or a.found[place].numel() > 1)


def growth(rank):
    """Bytes by which what lives grows in a step; 0 for split_digits, which has no optimizer."""
    return (rank.alive[-1] - rank.alive[0]) / (len(rank.alive) - 1) if rank.alive else 0


def repeated(ranks):
    """Batches that were trained on before, on any rank."""
    batches = [batch for rank in ranks for batch in rank.batches]
    return len(batches) - len(set(batches))


def measured(case):
    broken, mended = run(case.broken()), run(case.program)
    if broken is None:
        return {symptoms.HANGS}
    is_late = [as_one_process(run(case.broken(), **{name: never}),
                              run(case.program, **{name: never}))
               for name, never in (("stops", ()), ("stop", 0))
               if name in inspect.signature(case.program).parameters]
    shows = {
        symptoms.SLOW: any(max(map(of, broken)) > MORE * max(map(of, mended)) for of in (
            attrgetter("flops"), attrgetter("sent_bytes"))),
        symptoms.RANKS: bool(shared(mended) & {*broken[0].found} - shared(broken)),
        symptoms.PROCESS: not as_one_process(broken, mended),
        symptoms.FINITE: not all(value.isfinite().all() for rank in broken
                              for value in rank.found.values()),
        symptoms.MEMORY: max(growth(a) - growth(b) for a, b in zip(broken, mended)) > LEAST_GROWTH,
        symptoms.TWICE: repeated(broken) > repeated(mended),
        symptoms.RESTART: any(is_late),
    }
    return {sign for sign, is_shown in shows.items() if is_shown}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.disease)
def test_a_disease_shows_these_symptoms(case):
    assert measured(case) == SYMPTOMS[case.disease]


def test_each_disease_has_a_row_and_each_sign_a_disease():
    assert [*SYMPTOMS] == [case.disease for case in CASES]
    assert set().union(*SYMPTOMS.values()) == set(symptoms.COLUMNS)
