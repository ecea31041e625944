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
    changed: str  # the input that is not what it was
    sent: int
    calls: dict


def inputs(case, rank):
    """(matrix, q, error) of a rank: q is alike on all."""
    n, m, r = case
    generator = torch.Generator().manual_seed(rank)
    matrix, error = (torch.randn(n, m, generator=generator) for _ in range(2))
    q = torch.randn(m, r, generator=torch.Generator().manual_seed(99))
    dtype = torch.float64 if case == DOUBLE else torch.float32
    return matrix.to(dtype), q.to(dtype), error.to(dtype)


def thin(case, rank):
    """The same of a matrix of rank r, and no error: to be found without loss."""
    n, m, r = case
    _, q, error = inputs(case, rank)
    left = torch.randn(n, r, generator=torch.Generator().manual_seed(rank))
    right = torch.randn(r, m, generator=torch.Generator().manual_seed(77))
    return (left @ right).to(q.dtype), q, 0 * error


def poor(case, rank):
    """The same of a matrix of rank 1, whatever r is: all columns of p are alike but for a factor.
    A gradient of one sample is such a matrix."""
    n, m, _ = case
    matrix, _, error = thin((n, m, 1), rank)
    return matrix, inputs(case, rank)[1], error


def nothing(case, rank):
    matrix, q, error = inputs(case, rank)
    return 0 * matrix, q, 0 * error


def three(rank):
    """Three matrices of one shape, each as `inputs` gives one."""
    return [inputs(CASES[0], 10 * rank + i) for i in range(3)]


def all_trials(fn):
    """Runs on every rank: all that four ranks are asked, in one launch."""
    return [trial(fn, thin, False), trial(fn, nothing, False), trial(fn, inputs, True),
            _batch(fn), trial(fn, poor, False)]


def trial(fn, make, grouped):
    """Runs on every rank: [[Seen of two calls in a row] of each case]."""
    group = group_of_mine() if grouped else None
    return [_two_calls(fn, make(case, dist.get_rank()), group) for case in CASES]


def _two_calls(fn, given, group):
    matrix, q, error = (x.to(device()) for x in given)
    first = _seen(fn, matrix, q, error, group)
    return [first, _seen(fn, matrix, first.q.to(device()), first.error.to(device()), group)]


def _seen(fn, matrix, q, error, group=None):
    before = [x.clone() for x in (matrix, q, error)]
    with Traffic() as traffic:
        result = fn(matrix, q, error, group=group)
    changed = [name for name, x, then in zip(("matrix", "q", "error"), (matrix, q, error), before)
               if not torch.equal(x, then)]
    matrix.copy_(before[0])  # for the second call
    approximation, q, error = (x.detach().cpu().clone() for x in result)
    return Seen(approximation, q, error, "".join(changed[:1]), traffic.sent_bytes,
                dict(traffic.calls))


def _batch(fn):
    """Runs on every rank: Seen of three matrices at once, or what went wrong."""
    given = [torch.stack(parts).to(device()) for parts in zip(*three(dist.get_rank()))]
    try:
        return _seen(fn, *given)
    except Exception as error:  # any: .T of three dimensions ends in one or another
        return f"{type(error).__name__}: {error}"


def one_by_one(seen):
    """[Seen of each matrix] of a batch."""
    return [replace(seen, approximation=approximation, q=q, error=error)
            for approximation, q, error in zip(seen.approximation, seen.q, seen.error)]
