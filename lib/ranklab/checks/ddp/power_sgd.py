"""The check of power_sgd, against a projection that is worked out in one process."""


import torch

from ranklab.checks.beside import TURNS, beside, on_groups
from ranklab.checks.ddp.hooks import alike
from ranklab.engine import device

CASES = {  # n, m, r, and the rank of each matrix
    "12 x 8, r=2": (12, 8, 2, 8), "7 x 15, r=3": (7, 15, 3, 7), "zeros, r=3": (7, 15, 3, 0),
    "a matrix of rank 2, r=2": (12, 8, 2, 2), "a matrix of rank 1, r=3": (7, 15, 3, 1),
    "6 x 6 in float64, r=4": (6, 6, 4, 6), "three matrices at once, r=2": (12, 8, 2, 8)}
ADVICE = {
    "the approximation": "p = wanted @ q, summed over ranks, then orthonormal; q = wanted.mT @ p, "
    "the mean over ranks; the approximation is p @ q.mT. All in the matrix's dtype. torch.linalg."
    "qr(p).Q is orthonormal even where columns of p are nearly alike, or zero.",
    "matrix - error": "error = (matrix + error) - approximation.",
    "the change of its inputs": "matrix + error is a new tensor; all-reduce p and the new q only."}
FAILURES = {r"RuntimeError: The size of tensor a \(8\) must match the size of tensor b \(3\).*":
            ".T turns the order of all three dimensions around; .mT transposes each matrix."}
NEW_Q = "Return the new q, wanted.mT @ p, averaged: the next call goes on from there."
ALIKE = "All-reduce both p and q, so that all ranks go on with the same. Return the averaged q."


def check_power_sgd(fn):
    on_groups(_trial, fn, failures=FAILURES)
    yield "the mean over ranks of matrix + error, projected; on 1 to 4 ranks and in groups"
    yield "twice in a row, from the q and the error that it returned; nothing is lost"
    yield "two all-reduces of r (n + m) numbers instead of n m; as many for three matrices at once"


def _trial(power_sgd, ranks):
    for case in CASES:
        where, given = f"{case}, {ranks}", [_inputs(case, rank) for rank in ranks.members]
        turns = list(_one_process(given, ranks.index))
        matrix, q, error = given[ranks.index]
        results = [(None, q, error)]  # of all calls: each goes on from the one before

        def call(turn):
            before = matrix, *results[-1][1:]
            after = [x.clone() for x in before]
            results.append(power_sgd(*after, ranks.group))
            return {"the approximation": results[-1][0], "matrix - error": matrix - results[-1][2],
                    "the change of its inputs": torch.stack([(x - y).norm()
                                                             for x, y in zip(after, before)])}

        looks = list(beside(where, ranks, call, lambda turn: {
            name: right for name, (right, _) in turns[turn].items()}, advice=ADVICE.get,
            slips=lambda name, turn: turns[turn][name][1],
            sends=(2, torch.cat([matrix @ q, q], -2).nbytes)))
        _, (near, new_q, _), _ = results
        yield alike(f"{where}: the approximation", near, ranks, ALIKE)
        yield alike(f"{where}: q", new_q, ranks, ALIKE)
        yield from looks


def _inputs(case, rank):
    """(matrix, q, error) of a rank; q is equal on all. Only matrices of full rank have an error."""
    n, m, r, width = CASES[case]
    mine, shared = (torch.Generator().manual_seed(seed) for seed in (rank, 99))
    many = (3,) if "three" in case else ()
    q, right = (torch.randn(*many, *shape, generator=shared) for shape in ((m, r), (width, m)))
    left, error = (torch.randn(*many, n, columns, generator=mine) for columns in (width, m))
    dtype = torch.float64 if "float64" in case else torch.float32
    return [x.to(device(), dtype) for x in (left @ right, q, error * (width == min(n, m)))]


def _one_process(given, index):
    """The oracle: of each call {name: ([what each rank must have], slips of rank `index`)}."""
    dtype, R, first = given[0][0].dtype, len(given), given[index][1].double()
    matrices, _, errors = zip(*([x.double() for x in of_rank] for of_rank in given))
    q, matrix = first, matrices[index]
    for _ in TURNS:
        wanted = [matrix + error for matrix, error in zip(matrices, errors)]
        mean, p, mine = sum(wanted) / R, sum(wanted) @ q, wanted[index]
        near, basis = _projected(mean, q)
        errors = [each - near for each in wanted]
        expected = {"the approximation": ([near] * R, {
            "that of the matrix alone": (_projected(sum(matrices) / R, q)[0], "Compress matrix + "
                                         "error."),
            "made of a p that is not orthonormal": (p @ (p.mT @ mean), "qr comes after the sum."),
            "made of the first call's q": (_projected(mean, first)[0], NEW_Q),
        }), "matrix - error": ([m - error for m, error in zip(matrices, errors)], {
            "the matrix": (matrix, "The error is 0: keep what the approximation leaves out."),
            "the approximation": (near, "The old error is lost."),
            "made of this rank's own q": (matrix - mine + basis @ (basis.mT @ mine), "The approx"
                                          "imation is made of q after its all-reduce, not before."),
        }), "the change of its inputs": ([torch.zeros(3, device=near.device)] * R, {})}
        yield {name: ([x.to(dtype) for x in right],
                      {what: (wrong.to(dtype), hint) for what, (wrong, hint) in slips.items()})
               for name, (right, slips) in expected.items()}
        q = mean.mT @ basis


def _projected(mean, q):
    """(`mean`, projected on what it makes of q; an orthonormal basis of that)."""
    basis = torch.linalg.svd(mean @ q, full_matrices=False).U
    return basis @ (basis.mT @ mean), basis
