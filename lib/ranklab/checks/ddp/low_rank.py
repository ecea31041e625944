"""The check of power_sgd, against a projection that is worked out in one process."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ranklab.collectives import node_groups
from ranklab.course.exercise import Mistake, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

CASES = ((12, 8, 2), (7, 15, 3), (9, 5, 1), (6, 6, 4))  # n, m, r


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
    return matrix, torch.randn(m, r, generator=torch.Generator().manual_seed(99)), error


def thin(case, rank):
    """The same of a matrix of rank r, and no error: to be found without loss."""
    n, m, r = case
    _, q, error = inputs(case, rank)
    left = torch.randn(n, r, generator=torch.Generator().manual_seed(rank))
    return left @ torch.randn(r, m, generator=torch.Generator().manual_seed(77)), q, 0 * error


def nothing(case, rank):
    matrix, q, error = inputs(case, rank)
    return 0 * matrix, q, 0 * error


def trial(fn, make, grouped):
    """Runs on every rank: [[Seen of two calls in a row] of each case]."""
    group = node_groups(2)[1] if grouped else None
    return [_two_calls(fn, make(case, dist.get_rank()), group) for case in CASES]


def _two_calls(fn, given, group):
    matrix, q, error = (x.to(device()) for x in given)
    seen = []
    for _ in range(2):
        before = [x.clone() for x in (matrix, q, error)]
        with Traffic() as traffic:
            result = fn(matrix, q, error, group=group)
        changed = [name for name, x, then in zip(("matrix", "q", "error"), (matrix, q, error),
                                                 before) if not torch.equal(x, then)]
        approximation, q, error = (x.detach().clone() for x in result)
        matrix = before[0]
        seen.append(Seen(approximation.cpu(), q.cpu(), error.cpu(), "".join(changed[:1]),
                         traffic.sent_bytes, dict(traffic.calls)))
    return seen


def check_power_sgd(fn):
    for ranks in (3, 1):
        _judge(on_ranks(trial, fn, inputs, False, ranks=ranks), inputs, range(ranks))
    yield "the mean over ranks of matrix + error, projected; on 1 and 3 ranks, all agree"
    yield "twice in a row, from the q and the error that it returned; nothing is lost"
    seen = on_ranks(_all_trials, fn, ranks=4)
    _judge([of_rank[0] for of_rank in seen], thin, range(4))
    yield "a matrix of rank r comes through without loss"
    _bytes([of_rank[0] for of_rank in seen])
    yield "two all-reduces of r (n + m) numbers instead of n m"
    for of_rank in seen:
        for first, _ in of_rank[1]:
            if not all(x.isfinite().all() for x in (first.approximation, first.q, first.error)):
                raise Mistake("a zero gradient gives numbers that are not finite",
                              "Some step divides by a column's length. torch.linalg.qr(p).Q does "
                              "not: it is orthonormal for zeros too.")
    for members in ((0, 2), (1, 3)):
        _judge([seen[rank][2] for rank in members], inputs, members, "in a group of two, ")
    yield "zeros stay zeros; inside a group it meets nobody else"
    _judge_batch([of_rank[3] for of_rank in seen])
    yield "three matrices at once: each as it would be alone"


def _all_trials(fn):
    return [trial(fn, thin, False), trial(fn, nothing, False), trial(fn, inputs, True),
            _batch(fn)]


def _three(rank):
    return [inputs(CASES[0], 10 * rank + i) for i in range(3)]


def _batch(fn):
    """Runs on every rank: the approximation of three matrices at once, or what went wrong."""
    given = [torch.stack(parts).to(device()) for parts in zip(*_three(dist.get_rank()))]
    try:
        return fn(*given)[0].detach().cpu()
    except Exception as error:  # any: .T of three dimensions ends in one or another
        return f"{type(error).__name__}: {error}"


def _judge_batch(seen):
    what = "three matrices of 12 x 8 at once, as (3, 12, 8): "
    hint = ".T turns the order of all dimensions around; .mT transposes each matrix."
    if isinstance(seen[0], str):
        raise Mistake(what + seen[0].partition("\n")[0], hint)
    given = [_three(rank) for rank in range(len(seen))]
    right = torch.stack([project([of_rank[i][0] + of_rank[i][2] for of_rank in given],
                                 given[0][i][1])[0] for i in range(3)])
    for approximation in seen:
        if approximation.shape != right.shape or not _near(approximation, right):
            raise Mistake(f"{what}not what they give one by one", hint)


def _judge(seen, make, ranks, where=""):
    for i, case in enumerate(CASES):
        given = [make(case, rank) for rank in ranks]
        wanted = [matrix + error for matrix, _, error in given]  # of each rank
        q = given[0][1]
        for call in range(2):
            of_ranks = [of_rank[i][call] for of_rank in seen]
            name = f"{where}{case[0]} x {case[1]}, r={case[2]}, {len(seen)} ranks" + (
                ", second call" if call else "")
            _unchanged(name, of_ranks)
            q = _compare(name, of_ranks, wanted, q, given)
            wanted = [matrix + one.error for (matrix, _, _), one in zip(given, of_ranks)]


def _unchanged(name, of_ranks):
    for one in of_ranks:
        if one.changed:
            raise Mistake(f"{name}: `{one.changed}` itself is changed",
                          "matrix + error is a new tensor; all-reduce p and the new q only.")


def project(wanted, q):
    """The oracle: (the mean of `wanted` projected on what it makes of q, the next q)."""
    mean = sum(w.double() for w in wanted) / len(wanted)
    basis = torch.linalg.svd(mean @ q.double(), full_matrices=False).U  # spans the columns of p
    return basis @ (basis.T @ mean), mean


def _compare(name, of_ranks, wanted, q, given):
    approximation, mean = project(wanted, q)
    for one in of_ranks:
        if one.approximation.shape != approximation.shape or one.q.shape != q.shape:
            raise Mistake(f"{name}: shapes {tuple(one.approximation.shape)} and "
                          f"{tuple(one.q.shape)} are returned, not {tuple(approximation.shape)} "
                          f"and {tuple(q.shape)}", "Return p @ q.mT, the new q, and the error.")
        if not torch.equal(one.approximation, of_ranks[0].approximation):
            raise Mistake(f"{name}: ranks end with different gradients",
                          "Both p and q must be all-reduced: then all make the same of them.")
    for one in of_ranks:
        if not _near(one.approximation, approximation):
            raise Mistake(f"{name}: the approximation is off by "
                          f"{_distance(one.approximation, approximation):.2g} of its size",
                          _hint_value(one.approximation, approximation, wanted, q, given))
    left = sum(one.error.double() for one in of_ranks) / len(of_ranks)
    if not _near(left + approximation, mean):
        raise Mistake(f"{name}: what is sent and the mean error left are not the mean of matrix "
                      "+ error", _hint_error(left, approximation, mean, given))
    _same_span(name, of_ranks[0], approximation)
    return of_ranks[0].q


def _near(got, right):
    return _distance(got, right) < 2e-4 or right.norm() < 1e-6 and got.norm() < 1e-4


def _distance(got, right):
    return ((got.double() - right).norm() / right.norm().clamp_min(1e-12)).item()


def _same_span(name, one, approximation):
    """The next q must hold the rows of the approximation: that is the warm start."""
    basis = torch.linalg.qr(one.q.double()).Q
    if not _near(approximation @ basis @ basis.T, approximation):
        raise Mistake(f"{name}: the q that is returned does not lead on",
                      "Return the new q, matrix.mT @ p, and not the one that came in: the next "
                      "call goes on from there, one power iteration a step.")


def _hint_value(got, right, wanted, q, given):
    R, mean = len(wanted), sum(w.double() for w in wanted) / len(wanted)
    if R > 1 and _near(got, R * right):
        return "It is the sum over ranks: divide by the number of ranks, once, where q is summed."
    if R > 1 and _near(got, right / R):
        return ("Divided by the ranks twice: p becomes orthonormal after its sum, so that it needs "
                "no division; q does.")
    if _near(got, project([matrix for matrix, _, _ in given], q)[0]):
        return "The error is not in it: compress matrix + error."
    if _near(got, mean):
        return "That is the mean itself: nothing was compressed."
    p = mean @ q.double()
    if any(_near(got, factor * p @ (p.T @ mean)) for factor in (1, R, R**2)):
        return ("The columns of p must be orthonormal before q is made: p = torch.linalg.qr(p).Q, "
                "after its all-reduce.")
    return ("p = wanted @ q, summed over ranks, then orthonormal (torch.linalg.qr(p).Q); q = "
            "wanted.mT @ p, the mean over ranks; the approximation is p @ q.mT.")


def _hint_error(left, approximation, mean, given):
    if not left.abs().max() > 1e-6:
        return "The error is zero: keep what the approximation leaves out."
    only = sum(matrix.double() for matrix, _, _ in given) / len(given)
    if _near(left, only - approximation):
        return "The old error is lost: error = (matrix + error) - approximation."
    if _near(left, approximation - mean):
        return "The error has the wrong sign: it is wanted - approximation."
    return "error = (matrix + error) - approximation."


def _bytes(seen):
    for i, (n, m, r) in enumerate(CASES):
        calls = seen[0][i][0].calls
        sent = sum(of_rank[i][0].sent for of_rank in seen)
        right = 2 * 3 * 4 * r * (n + m)
        if set(calls) != {"all_reduce"}:
            raise Mistake(f"it calls {', '.join(sorted(calls)) or 'nothing'}", "Two all-reduces.")
        if sent == right and calls["all_reduce"] == 2:
            continue
        what = (f"{n} x {m}, r={r}: {calls['all_reduce']} all-reduces of {sent // 24} numbers in "
                f"all, where {r * (n + m)} are enough")
        hint = "All-reduce p (n x r) and q (m x r), each once, and nothing else."
        if sent // 24 >= n * m:
            hint = f"The matrix itself travels, so nothing is saved. {hint}"
        raise Mistake(what, hint)
