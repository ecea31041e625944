"""The check of power_sgd, against a projection that is worked out in one process."""

import torch

from ranklab.checks.ddp.matrices import CASES, inputs, three, trial, trial_of_four
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import GROUPS, on_ranks


def check_power_sgd(fn):
    for ranks in (3, 1):
        _judge(on_ranks(trial, fn, ranks=ranks), "any", range(ranks))
    yield "the mean over ranks of matrix + error, projected; on 1 and 3 ranks, all agree"
    yield "twice in a row, from the q and the error that it returned; nothing is lost"
    seen = on_ranks(trial_of_four, fn, ranks=4)
    _judge(seen, "thin", range(4))
    yield "a matrix of rank r comes through without loss"
    _bytes([of_rank["thin"] for of_rank in seen])
    yield "two all-reduces of r (n + m) numbers instead of n m"
    for of_rank in seen:
        if not all(x.isfinite().all() for first, _ in of_rank["zero"] for x in first.results()):
            raise Mistake("a zero gradient gives numbers that are not finite",
                          "Some step divides by a column's length. torch.linalg.qr(p).Q does "
                          "not: it is orthonormal for zeros too.")
    _judge(seen, "poor", range(4), "a matrix of rank 1, ")
    for members in GROUPS[::-1]:
        try:
            _judge([seen[rank] for rank in members], "group", members,
                   f"in the group of ranks {members}, ")
        except Mistake as mistake:
            mistake.hint = ("Hand `group` on: to both all-reduces, and to get_world_size(group). "
                            f"{mistake.hint}")
            raise
    yield "zeros stay zeros, a matrix of rank 1 what it is; inside a group it meets nobody else"
    _judge_three([of_rank["three"] for of_rank in seen])
    yield "three matrices at once: each as it would be alone, by two all-reduces for all"


def _judge_three(seen):
    what = "three matrices of 12 x 8 at once, as (3, 12, 8): "
    hint = ".T turns the order of all dimensions around; .mT transposes each matrix."
    given = [three(rank) for rank in range(len(seen))]
    right = [(3, *x.shape) for x in given[0][0]]
    for one in seen:
        if isinstance(one, str):
            raise Mistake(what + one.partition("\n")[0], hint)
        if one.shapes() != right:
            raise Mistake(f"{what}shapes {one.shapes()} are returned, not {right}", hint)
    for i, of_ranks in enumerate(zip(*(one.one_by_one() for one in seen))):
        _compare(f"{what}number {i}", of_ranks, [of_rank[i] for of_rank in given])
    if seen[0].calls != {"all_reduce": 2}:
        raise Mistake(f"{what}{sum(seen[0].calls.values())} messages, where 2 are enough",
                      "Products and qr take all three as they are, and so does an all-reduce.")


def _judge(seen, kind, ranks, where=""):
    for i, (n, m, r) in enumerate(CASES):
        given = [inputs(CASES[i], rank, "any" if kind == "group" else kind) for rank in ranks]
        for call, second in enumerate(("", ", second call")):
            of_ranks = [of_rank[kind][i][call] for of_rank in seen]
            _compare(f"{where}{n} x {m}, r={r}, {len(seen)} ranks{second}", of_ranks, given)
            given = [(matrix, one.q, one.error) for (matrix, *_), one in zip(given, of_ranks)]


def project(wanted, q):
    """The oracle: (the mean of `wanted` projected on what it makes of q, that mean)."""
    mean = sum(w.double() for w in wanted) / len(wanted)
    basis = torch.linalg.svd(mean @ q.double(), full_matrices=False).U  # spans the columns of p
    return basis @ (basis.T @ mean), mean


def _compare(name, of_ranks, given):
    """What ranks have returned of what each was given is right."""
    wanted, q = [matrix + error for matrix, _, error in given], given[0][1]
    approximation, mean = project(wanted, q)
    first = of_ranks[0]
    for one in of_ranks:
        _fits(name, one, [tuple(x.shape) for x in given[0]], q.dtype)
        if not torch.equal(one.approximation, first.approximation):
            raise Mistake(f"{name}: ranks end with different gradients",
                          "Both p and q must be all-reduced: then all make the same of them.")
    if not _is_near(first.approximation, approximation):
        raise Mistake(f"{name}: the approximation is off by "
                      f"{_distance(first.approximation, approximation):.2g} of its size",
                      _hint_value(first.approximation, approximation, mean, given))
    left = sum(one.error.double() for one in of_ranks) / len(of_ranks)
    if not _is_near(left + approximation, mean):
        raise Mistake(f"{name}: what is sent and the mean error left are not the mean of matrix "
                      "+ error", _hint_error(left, approximation, mean, given))
    for one, of_rank in zip(of_ranks, wanted):
        if not _is_near(one.error + one.approximation, of_rank):
            raise Mistake(f"{name}: only the mean over ranks of the errors is right",
                          "Each rank keeps its own matrix + error, minus the approximation that "
                          "all of them get: made of q after its all-reduce, not before.")
        if not torch.equal(one.q, first.q):
            raise Mistake(f"{name}: ranks return different q",
                          "The next call needs the same q on every rank: return the averaged one.")
    basis = torch.linalg.qr(first.q.double()).Q
    if not _is_near(approximation @ basis @ basis.T, approximation):  # that is the warm start
        raise Mistake(f"{name}: the q that is returned does not lead on",
                      "Return the new q, matrix.mT @ p, and not the one that came in: the next "
                      "call goes on from there, one power iteration a step.")


def _fits(name, one, shapes, dtype):
    if one.changed:
        raise Mistake(f"{name}: `{one.changed[0]}` itself is changed",
                      "matrix + error is a new tensor; all-reduce p and the new q only.")
    if one.shapes() != shapes:
        raise Mistake(f"{name}: shapes {one.shapes()} are returned, not {shapes}",
                      "Return p @ q.mT, the new q, and the error.")
    if {x.dtype for x in one.results()} != {dtype}:
        raise Mistake(f"{name}: {dtype} came in, and another type goes out",
                      "Keep the matrix's dtype all the way.")


def _is_near(got, right):
    return _distance(got, right) < 2e-4 or right.norm() < 1e-6 and got.norm() < 1e-4


def _distance(got, right):
    return ((got.double() - right).norm() / right.norm().clamp_min(1e-12)).item()


def _hint_value(got, right, mean, given):
    R, q = len(given), given[0][1]
    p = mean @ q.double()
    slips = [
        (R * right, "It is the sum over ranks: divide by the number of ranks, once, where q is "
                    "summed."),
        (right / R, "Divided by the ranks twice: p becomes orthonormal after its sum, so that it "
                    "needs no division; q does, once, by the ranks of its group."),
        (project([matrix for matrix, *_ in given], q)[0],
         "The error is not in it: compress matrix + error."),
        (mean, "That is the mean itself: nothing was compressed."),
    ]
    slips += [(right * R / ranks, "Divided by the ranks of another group: ask "
               "dist.get_world_size(group).") for ranks in range(1, 9)]
    slips += [(factor * p @ (p.T @ mean), "The columns of p must be orthonormal before q is made: "
               "p = torch.linalg.qr(p).Q, after its all-reduce.") for factor in (1, R, R**2)]
    for wrong, hint in slips:
        if _is_near(got, wrong):
            return hint
    if torch.linalg.matrix_rank(mean, rtol=1e-5) < min(q.shape[-1], len(mean)):
        return ("The columns of p are nearly alike here: what is left of one after taking off the "
                "others is rounding. torch.linalg.qr(p).Q is orthonormal even so.")
    return ("p = wanted @ q, summed over ranks, then orthonormal (torch.linalg.qr(p).Q); q = "
            "wanted.mT @ p, the mean over ranks; the approximation is p @ q.mT.")


def _hint_error(left, approximation, mean, given):
    if not left.abs().max() > 1e-6:
        return "The error is zero: keep what the approximation leaves out."
    only = sum(matrix.double() for matrix, *_ in given) / len(given)
    if _is_near(left, only - approximation):
        return "The old error is lost: error = (matrix + error) - approximation."
    if _is_near(left, approximation - mean):
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
