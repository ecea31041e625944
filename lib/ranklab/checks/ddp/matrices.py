"""The matrices that the check of power_sgd hands out, and the calls in which it looks at them."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ranklab.checks.trial import group_of_mine
from ranklab.engine import device
from ranklab.meter import Traffic

CASES = ((12, 8, 2), (7, 15, 3), (9, 5, 1), (6, 6, 4))  # n, m, r
DOUBLE = CASES[2]  # these are float64


@dataclass
class Seen:
    """What one call gave on one rank; everything on the CPU."""

    approximation: torch.Tensor
    q: torch.Tensor
    error: torch.Tensor
    changed: list  # the inputs that are not what they were
    sent: int
    calls: dict

    def results(self):
        return self.approximation, self.q, self.error

    def shapes(self):
        return [tuple(x.shape) for x in self.results()]

    def one_by_one(self):
        """[Seen of each matrix] of a batch."""
        return [replace(self, approximation=approximation, q=q, error=error)
                for approximation, q, error in zip(*self.results())]


def inputs(case, rank, kind="any"):
    """(matrix, q, error) of a rank: q is alike on all. All but "any" have no error; and a matrix is
    "thin", of rank r, so that nothing needs to be lost; "poor", of rank 1, as a gradient of one
    sample: all columns of p are alike but for a factor; or "zero"."""
    n, m, r = case
    draw = torch.Generator().manual_seed(rank)
    matrix, error = (torch.randn(n, m, generator=draw) for _ in range(2))
    q = torch.randn(m, r, generator=torch.Generator().manual_seed(99))
    if kind != "any":
        width = {"thin": r, "poor": 1, "zero": 0}[kind]
        matrix = torch.randn(n, width, generator=draw) @ torch.randn(
            width, m, generator=torch.Generator().manual_seed(77))
        error = torch.zeros(n, m)
    return [x.to(torch.float64 if case == DOUBLE else torch.float32) for x in (matrix, q, error)]


def three(rank):
    """Three matrices of one shape, each as `inputs` gives one."""
    return [inputs(CASES[0], 10 * rank + i) for i in range(3)]


def trial(fn, kinds=("any",)):
    """Runs on every rank: {kind: [[Seen of two calls in a row] of each case]}."""
    return {kind: _of_cases(fn, kind) for kind in kinds}


def trial_of_four(fn):
    """The same on four ranks, of other kinds; in a group; and Seen of three matrices at once, or
    what went wrong."""
    seen = trial(fn, ("thin", "zero", "poor")) | {"group": _of_cases(fn, "any", group_of_mine())}
    together = [torch.stack(parts) for parts in zip(*three(dist.get_rank()))]
    try:
        seen["three"] = _calls(fn, together, times=1)[0]
    except Exception as error:  # any: .T of three dimensions ends in one or another
        seen["three"] = f"{type(error).__name__}: {error}"
    return seen


def _of_cases(fn, kind, group=None):
    return [_calls(fn, inputs(case, dist.get_rank(), kind), group) for case in CASES]


def _calls(fn, given, group=None, times=2):
    """[Seen of each call]: the second one goes on from the q and the error of the first."""
    matrix, q, error = (x.to(device()) for x in given)
    seen = []
    for _ in range(times):
        copies = {"matrix": matrix.clone(), "q": q.clone(), "error": error.clone()}
        with Traffic() as traffic:
            result = fn(*copies.values(), group=group)
        changed = [name for name, then in zip(copies, (matrix, q, error))
                   if not torch.equal(copies[name], then)]
        _, q, error = result = [x.detach().clone() for x in result]
        seen.append(Seen(*(x.cpu() for x in result), changed, traffic.sent_bytes,
                         dict(traffic.calls)))
    return seen
