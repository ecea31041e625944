"""The check of power_sgd, against a projection that is worked out in one process."""

import torch

from ranklab.checks.ddp import matrices
from ranklab.checks.ddp.matrices import CASES, inputs, one_by_one, three
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import GROUPS, on_ranks

def check_power_sgd(fn):
    for ranks in (3, 1):
        _judge(on_ranks(matrices.trial, fn, inputs, False, ranks=ranks), inputs, range(ranks))
    yield "the mean over ranks of matrix + error, projected; on 1 and 3 ranks, all agree"
    yield "twice in a row, from the q and the error that it returned; nothing is lost"
    seen = on_ranks(matrices.all_trials, fn, ranks=4)
    _judge([of_rank[0] for of_rank in seen], matrices.thin, range(4))
    yield "a matrix of rank r comes through without loss"
    _bytes([of_rank[0] for of_rank in seen])
    yield "two all-reduces of r (n + m) numbers instead of n m"
    for of_rank in seen:
        for first, _ in of_rank[1]:
            if not all(x.isfinite().all() for x in (first.approximation, first.q, first.error)):
                raise Mistake("a zero gradient gives numbers that are not finite",
                              "Some step divides by a column's length. torch.linalg.qr(p).Q does "
                              "not: it is orthonormal for zeros too.")
    _judge([of_rank[4] for of_rank in seen], matrices.poor, range(4), "a matrix of rank 1, ")
    for members in GROUPS[::-1]:
        try:
            _judge([seen[rank][2] for rank in members], inputs, members,
                   f"in the group of ranks {members}, ")
        except Mistake as mistake:
            raise Mistake(mistake.what, "Hand `group` on: to both all-reduces, and to "
                          f"get_world_size(group). {mistake.hint}") from None
    yield "zeros stay zeros, a matrix of rank 1 what it is; inside a group it meets nobody else"
    _judge_batch([of_rank[3] for of_rank in seen])
    yield "three matrices at once: each as it would be alone, by two all-reduces for all"


def _judge_batch(seen):
    what = "three matrices of 12 x 8 at once, as (3, 12, 8): "
    hint = ".T turns the order of all dimensions around; .mT transposes each matrix."
    for one in seen:
        if isinstance(one, str):
            raise Mistake(what + one.partition("\n")[0], hint)
    given = [three(rank) for rank in range(len(seen))]
    right = [(3, *x.shape) for x in given[0][0]]
    for one in seen:
        shapes = [tuple(x.shape) for x in (one.approximation, one.q, one.error)]
        if shapes != right:
            raise Mistake(f"{what}shapes {shapes} are returned, not {right}", hint)
    for i, of_matrix in enumerate(zip(*map(one_by_one, seen))):
        own = [of_rank[i] for of_rank in given]
        wanted = [matrix + error for matrix, _, error in own]
        _compare(f"{what}number {i}", of_matrix, wanted, own[0][1], own)
    if seen[0].calls != {"all_reduce": 2}:
        raise Mistake(f"{what}{sum(seen[0].calls.values())} messages, where 2 are enough",
                      "Products and qr take all three as they are, and so does an all-reduce.")


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
        shapes = [tuple(x.shape) for x in (one.approximation, one.q, one.error)]
        right = [tuple(x.shape) for x in (approximation, q, approximation)]
        if shapes != right:
            raise Mistake(f"{name}: shapes {shapes} are returned, not {right}",
                          "Return p @ q.mT, the new q, and the error.")
        if {x.dtype for x in (one.approximation, one.q, one.error)} != {q.dtype}:
            raise Mistake(f"{name}: {q.dtype} came in, and another type goes out",
                          "Keep the matrix's dtype all the way.")
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
    for one, of_rank in zip(of_ranks, wanted):
        if not _near(one.error + one.approximation, of_rank):
            raise Mistake(f"{name}: only the mean over ranks of the errors is right",
                          "Each rank keeps its own matrix + error, minus the approximation that "
                          "all of them get: made of q after its all-reduce, not before.")
        if not torch.equal(one.q, of_ranks[0].q):
            raise Mistake(f"{name}: ranks return different q",
                          "The next call needs the same q on every rank: return the averaged one.")
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
                "no division; q does, once, by the ranks of its group.")
    if _near(got, project([matrix for matrix, _, _ in given], q)[0]):
        return "The error is not in it: compress matrix + error."
    if _near(got, mean):
        return "That is the mean itself: nothing was compressed."
    if any(_near(got, right * R / ranks) for ranks in range(1, 9)):
        return "Divided by the ranks of another group: ask dist.get_world_size(group)."
    p = mean @ q.double()
    if any(_near(got, factor * p @ (p.T @ mean)) for factor in (1, R, R**2)):
        return ("The columns of p must be orthonormal before q is made: p = torch.linalg.qr(p).Q, "
                "after its all-reduce.")
    if torch.linalg.matrix_rank(mean, rtol=1e-5) < min(q.shape[-1], len(mean)):
        return ("The columns of p are nearly alike here: what is left of one after taking off the "
                "others is rounding. torch.linalg.qr(p).Q is orthonormal even so.")
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
        size = seen[0][i][0].q.itemsize
        right = 2 * 3 * size * r * (n + m)
        if set(calls) != {"all_reduce"}:
            raise Mistake(f"it calls {', '.join(sorted(calls)) or 'nothing'}", "Two all-reduces.")
        if sent == right and calls["all_reduce"] == 2:
            continue
        numbers = sent // (6 * size)
        what = (f"{n} x {m}, r={r}: {calls['all_reduce']} all-reduces of {numbers} numbers in "
                f"all, where {r * (n + m)} are enough")
        hint = "All-reduce p (n x r) and q (m x r), each once, and nothing else."
        if sent == 2 * right and calls["all_reduce"] == 2:
            hint = "Numbers twice as long, float64? Keep the matrix's dtype."
        elif numbers >= n * m:
            hint = f"The matrix itself travels, so nothing is saved. {hint}"
        raise Mistake(what, hint)
