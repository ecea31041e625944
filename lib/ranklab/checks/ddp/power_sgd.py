"""The check of power_sgd, against a projection that is worked out in one process."""

from functools import partial

import torch

from ranklab.checks.beside import TURNS, beside, expect, on_groups
from ranklab.checks.ddp.hooks import alike
from ranklab.engine import device

CASES = {  # n, m, r, and the rank of each matrix
    "12 x 8, r=2": (12, 8, 2, 8), "7 x 15, r=3": (7, 15, 3, 7), "9 x 5, r=1": (9, 5, 1, 5),
    "a matrix of rank 2, r=2": (12, 8, 2, 2), "zeros, r=3": (7, 15, 3, 0),
    "a matrix of rank 1, r=3": (7, 15, 3, 1), "6 x 6 in float64, r=4": (6, 6, 4, 6),
    "three matrices at once, (3, 12, 8), r=2": (12, 8, 2, 8),
}
NEW_Q = "Return the new q, wanted.mT @ p, averaged: the next call goes on from there."
ADVICE = {
    "approximation": "p = wanted @ q, summed over ranks, then orthonormal; q = wanted.mT @ p, the "
    "mean over ranks; the approximation is p @ q.mT. All in the matrix's dtype. torch.linalg.qr(p)"
    ".Q is orthonormal even where columns of p are nearly alike, or zero.",
    "matrix - error": "error = (matrix + error) - approximation.",
    "what q leads to": NEW_Q}
FAILURES = {r"RuntimeError: The size of tensor a \(8\) must match the size of tensor b \(3\).*":
            ".T turns the order of all three dimensions around; .mT transposes each matrix."}
ALIKE = "Both p and q must be all-reduced: then all make the same of them. Return the averaged q."


def check_power_sgd(fn):
    on_groups(_trial, fn, failures=FAILURES)
    yield "the mean over ranks of matrix + error, projected; on 1 to 4 ranks, all agree"
    yield "twice in a row, from the q and the error that it returned; nothing is lost"
    yield "a matrix of rank r comes through without loss; zeros, and one of rank 1, as they are"
    yield "two all-reduces of r (n + m) numbers instead of n m; as many for three matrices at once"
    yield "inside a group it meets nobody else"


def _trial(power_sgd, ranks):
    for case in CASES:
        where, given = f"{case}, {ranks}", [_inputs(case, rank) for rank in ranks.members]
        rights, slips = zip(*_one_process(given, ranks.index))
        matrix, q, _ = given[ranks.index]
        p_and_q = torch.cat([matrix @ q, q], -2)
        calls = []
        call = partial(_call, power_sgd, given[ranks.index], ranks.group, rights, calls)
        looks = list(beside(where, ranks, call, rights.__getitem__, advice=ADVICE.get,
                            slips=lambda name, turn: slips[turn].get(name, {}),
                            sends=(2, p_and_q.nbytes)))
        for shapes, changed, near, new_q, _ in calls:
            yield partial(expect, shapes == [matrix.shape, q.shape, matrix.shape], f"{where}: "
                          f"shapes {shapes} are returned", "Return p @ q.mT, the new q, the error.")
            yield partial(expect, not changed, f"{where}: `{', '.join(changed)}` itself is changed",
                          "matrix + error is a new tensor; all-reduce p and the new q only.")
            yield alike(f"{where}: the approximation", near, ranks, ALIKE)
            yield alike(f"{where}: q", new_q, ranks, ALIKE)
        yield from looks


def _inputs(case, rank):
    """(matrix, q, error) of a rank; q is alike on all. Only matrices of full rank have an error."""
    n, m, r, width = CASES[case]
    mine, shared = (torch.Generator().manual_seed(seed) for seed in (rank, 99))
    many = (3,) if "three" in case else ()
    q = torch.randn(*many, m, r, generator=shared)
    matrix = torch.randn(*many, n, width, generator=mine) @ torch.randn(*many, width, m,
                                                                        generator=shared)
    error = torch.randn(*many, n, m, generator=mine) * (width == min(n, m))
    dtype = torch.float64 if "float64" in case else torch.float32
    return [x.to(device(), dtype) for x in (matrix, q, error)]


def _call(power_sgd, given, group, rights, calls, turn):
    """The second call goes on from the q and the error of the first, where they have the shapes."""
    matrix, q, error = (given[0], *calls[0][3:]) if turn else given
    if q.shape != given[1].shape or error.shape != matrix.shape:
        return {}
    before = {"matrix": matrix, "q": q, "error": error}
    after = {name: x.clone() for name, x in before.items()}
    near, new_q, left = power_sgd(*after.values(), group)
    changed = [name for name, x in before.items()
               if not torch.allclose(x, after[name], 0, 0, equal_nan=True)]
    shapes = [tuple(x.shape) for x in (near, new_q, left)]
    calls.append((shapes, changed, near, new_q.clone(), left.clone()))
    if shapes != [matrix.shape, q.shape, matrix.shape]:
        return {}
    right = rights[turn]["approximation"][0]
    basis = torch.linalg.qr(new_q.to(right.dtype)).Q
    return {"approximation": near, "matrix - error": matrix - left,
            "what q leads to": right @ basis @ basis.mT}


def _one_process(given, index):
    """The oracle of each call: {name: [what each rank must have]}, and slips of rank `index`."""
    (matrix, q, _), dtype, R = given[index], given[0][0].dtype, len(given)
    q, errors = q.double(), [error.double() for *_, error in given]
    for _ in TURNS:
        wanted = [of_rank[0].double() + error for of_rank, error in zip(given, errors)]
        mean, p = sum(wanted) / R, sum(wanted) @ q
        near, basis = _projected(mean, q)
        alone, _ = _projected(sum(matrix for matrix, *_ in given).double() / R, q)
        old, errors = torch.linalg.qr(q).Q, [each - near for each in wanted]
        mine = wanted[index] - basis @ (basis.mT @ wanted[index])
        slips = {
            "approximation": {
                "that of the matrix alone": (alone, "Compress matrix + error."),
                "the mean itself": (mean, "Nothing was compressed."),
                "made of a p that is not orthonormal": (
                    p @ (p.mT @ mean), "p = torch.linalg.qr(p).Q, after its all-reduce."),
            },
            "matrix - error": {
                "the matrix": (matrix, "The error is 0: keep what the approximation leaves out."),
                "the approximation": (near, "The old error is lost."),
                "made of this rank's own q": (matrix - mine, "The approximation that all get is "
                                              "made of q after its all-reduce, not before."),
            },
            "what q leads to": {"where the old q leads": (near @ old @ old.mT, NEW_Q)},
        }
        yield ({"approximation": [near.to(dtype)] * R, "what q leads to": [near.to(dtype)] * R,
                "matrix - error": [(of_rank[0] - error).to(dtype)
                                   for of_rank, error in zip(given, errors)]},
               {name: {what: (wrong.to(dtype), hint) for what, (wrong, hint) in of.items()}
                for name, of in slips.items()})
        q = mean.mT @ basis


def _projected(mean, q):
    """(`mean`, projected on what it makes of q; an orthonormal basis of that)."""
    basis = torch.linalg.svd(mean @ q, full_matrices=False).U
    return basis @ (basis.mT @ mean), basis
