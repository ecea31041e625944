"""power_sgd, compared with a projection computed in one process."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.handles import Waits
from ranklab.checks.prover import ALL, GROUPS, Agree, AtMost, Proof, Slip, Stage
from ranklab.ddp import power_sgd
from ranklab.engine import device
from ranklab.meter import Traffic

COST = "calls of collectives", "bytes that it gives to them", "handles that nobody waited for"
SAME = "the approximation on all ranks", "q on all ranks"


class Matrix(NamedTuple):
    """Matrices (n, m) of a given rank, to be approximated with rank r."""

    n: int
    m: int
    r: int
    rank: int  # of the matrix; where it is less than full there is no error before
    dtype: torch.dtype = torch.float32
    many: tuple = ()
    is_strided: bool = False

    def __str__(self):
        kind = {0: ", zeros", 1: ", of rank 1", 2: ", of rank 2"}.get(self.rank, "")
        dtype = ", float64" * (self.dtype == torch.float64)
        return (f"{self.n} x {self.m}, r={self.r}{kind}{dtype}" + ", three at once" * bool(
            self.many) + ", transposed" * self.is_strided)

    def inputs(self, rank):
        """Return (matrix, q, error) of a rank; q is equal on all."""
        own, shared = (torch.Generator().manual_seed(seed) for seed in (rank, 99))
        q, right = (torch.randn(*self.many, *shape, generator=shared)
                    for shape in ((self.m, self.r), (self.rank, self.m)))
        left, error = (torch.randn(*self.many, self.n, columns, generator=own)
                       for columns in (self.rank, self.m))
        inputs = left @ right, q, error * (self.rank == min(self.n, self.m))
        inputs = [x.to(device(), self.dtype) for x in inputs]
        return [x.mT.contiguous().mT if self.is_strided else x for x in inputs]


def _see(fn, case, ranks):
    matrix, q, error = case.inputs(dist.get_rank())
    limit = (case.n + case.m) * case.r * case.dtype.itemsize * (3 if case.many else 1)
    for _ in range(2):  # each call goes on from the one before
        before = matrix, q, error
        inputs = [x.clone() for x in before]
        with Traffic() as traffic, Waits() as waits:
            result = fn(*inputs, *([ranks.group] if ranks.group else []))
        if not isinstance(result, tuple | list) or len(result) != 3:
            yield {"what it returns": f"a {type(result).__name__}"}
            return
        near, q, error = result
        if not all(isinstance(x, torch.Tensor) for x in result) or error.shape != matrix.shape:
            yield {"what it returns": "a list of " + ", ".join(
                f"{[*x.shape]}" if isinstance(x, torch.Tensor) else str(x) for x in result)}
            return
        yield {
            "what it returns": "three tensors",
            "the approximation": near,
            "matrix - error": matrix - error,
            # Its numbers depend on the basis that p is: any is right.
            "the shape and type of q": [*q.shape, str(q.dtype)],
            "the list of changes of its inputs": [(x - y).norm().item()
                                                  for x, y in zip(inputs, before)],
            SAME[0]: Agree(near), SAME[1]: Agree(q),
            **dict(zip(COST, (
                AtMost(len(traffic.ops), 2),
                AtMost(sum(op.payload_bytes for op in traffic.ops), limit),
                AtMost(waits.missing(traffic.calls.total()), 0)))),
        }


def in_one_place(matrix, q, error, group=None):
    """Average the whole matrix + error, and project it on the span of its product with q."""
    target = (matrix + error).double()
    mean = target.contiguous().clone()
    dist.all_reduce(mean, group=group)
    mean /= dist.get_world_size(group)
    basis = torch.linalg.svd(mean @ q.double(), full_matrices=False).U
    near = basis @ (basis.mT @ mean)
    return tuple(x.to(matrix.dtype) for x in (near, mean.mT @ basis, target - near))


SUM_P, SUM_Q = "dist.all_reduce(p, group=group)", "dist.all_reduce(q, group=group)"
QR, DIVIDE = "p = torch.linalg.qr(p).Q", "q /= dist.get_world_size(group)"
TARGET, LEFT = "target = matrix + error", "target - approximation"
RETURN = "return approximation, q"
POWER_SGD = Proof(
    power_sgd,
    Stage({"the mean over ranks of matrix + error, projected; on 1 to 4 ranks and in groups": (),
           "twice in a row, from the q and the error that it returned; nothing is lost": SAME,
           "two all-reduces of r (n + m) numbers instead of n m; still two for three matrices at "
           "once": COST},
          _see, (Matrix(12, 8, 2, 8), Matrix(7, 15, 3, 7), Matrix(7, 15, 3, 0),
                 Matrix(12, 8, 2, 2), Matrix(7, 15, 3, 1), Matrix(6, 6, 4, 6, torch.float64),
                 Matrix(12, 8, 2, 8, many=(3,)), Matrix(8, 5, 2, 5, is_strided=True)),
          (4,), (ALL, *GROUPS), oracle=in_one_place),
    mistakes=(
        Slip("All-reduce both p and q, so that all ranks continue with the same values.",
             (SUM_P, ""), (SUM_Q, "")),
        Slip("p is not orthonormal: take torch.linalg.qr(p).Q after the all-reduce of p.",
             (QR, "")),
        Slip("Call qr after the all-reduce of p: p must be orthonormal when you compute target.mT "
             "@ p.",
             (f"{SUM_P}\n    {QR}", f"{QR}\n    {SUM_P}")),
        Slip("q holds the sum over ranks: divide it by the number of ranks.", (DIVIDE, "")),
        Slip("Compress matrix + error, not matrix alone.",
             ("p = target", "p = matrix", "target.mT", "matrix.mT")),
        Slip("Both products use target, which is matrix + error.", ("p = target", "p = matrix"),
             ("target.mT", "matrix.mT")),
        Slip("The old error is lost: the new error is (matrix + error) - approximation.",
             (LEFT, "matrix - approximation")),
        Slip("The error is what the approximation leaves out; you keep nothing.",
             (LEFT, "0 * target")),
        Slip("You keep all of matrix + error, even what the approximation has already sent.",
             (LEFT, "target")),
        Slip("The error has the wrong sign: (matrix + error) - approximation.",
             (LEFT, "approximation - target")),
        Slip("Return the new q, which is the averaged target.mT @ p: the next call starts from it.",
             (RETURN, "return approximation, was", "p = target", "was = q\n    p = target")),
        Slip("Return the averaged q, which is the same on all ranks.",
             (SUM_Q, f"own = q.clone()\n    {SUM_Q}", RETURN, "return approximation, own")),
        Slip("Subtract the approximation that uses q after its all-reduce, not before.",
             (SUM_Q, f"own = q.clone()\n    {SUM_Q}", LEFT, "target - p @ own.mT")),
        Slip("This sends whole matrices. All-reduce p and the new q instead, which are thin.",
             ("p = target @ q", "mean = target.clone()", SUM_P,
              "dist.all_reduce(mean, group=group)", QR, "mean /= dist.get_world_size(group); "
              "p = torch.linalg.qr(mean @ q).Q", "target.mT", "mean.mT", SUM_Q, "", DIVIDE, "")),
        Slip("Don't write into the inputs: matrix + error makes a new tensor.",
             (TARGET, "target = matrix.add_(error)"), (TARGET, "target = error.add_(matrix)")),
        Slip("Make a new q: the one that you were given belongs to the caller.",
             ("q = target.mT @ p  # (m, r)", "q.copy_(target.mT @ p)")),
        Slip(".T reverses the order of all three dimensions; .mT transposes each matrix.",
             ("target.mT", "target.T"), ("p @ q.mT", "p @ q.T")),
        Slip("Divide by the number of ranks in the group: dist.get_world_size(group).",
             ("get_world_size(group)", "get_world_size()")),
        Slip("Pass `group` to both all-reduces.",
             (SUM_P, "dist.all_reduce(p)", SUM_Q, "dist.all_reduce(q)"),
             (SUM_P, "dist.all_reduce(p)"), (SUM_Q, "dist.all_reduce(q)")),
        Slip("Pass `group` on to both all-reduces, and to dist.get_world_size.",
             (SUM_P, "dist.all_reduce(p)", SUM_Q, "dist.all_reduce(q)",
              "get_world_size(group)", "get_world_size()")),
        Slip("Compute everything in the matrix's dtype: float32 loses digits of a double.",
             (TARGET, "target = (matrix + error).float()", "p = target @ q",
              "p = target @ q.float()"),
             (TARGET, "target = (matrix + error).float()", "p = target @ q",
              "p = target @ q.float()", RETURN,
              "approximation, q = approximation.to(matrix.dtype), q.to(matrix.dtype)\n    "
              f"{RETURN}", LEFT, "target.to(matrix.dtype) - approximation")),
        Slip("Send p and q in the matrix's own dtype: float64 needs twice the bytes.",
             (SUM_P, "p = p.double()\n    dist.all_reduce(p, group=group)\n    "
                     "p = p.to(matrix.dtype)"),
             (SUM_Q, "q = q.double()\n    dist.all_reduce(q, group=group)\n    "
                     "q = q.to(matrix.dtype)")),
        Slip("Columns of p can be zero, and 0 / 0 is NaN. torch.linalg.qr(p).Q is orthonormal even "
             "then, or if columns are nearly equal.",
             (QR, "p = torch.linalg.qr(p / p.norm(dim=-2, keepdim=True)).Q")),
        Slip("Dividing a column by its length does not make it orthogonal to the others: use "
             "torch.linalg.qr(p).Q.", (QR, "p = p / p.norm(dim=-2, keepdim=True).clamp(1e-9)")),
        Slip("Process all matrices together, with one all-reduce for all of them: matmul, .mT and "
             "qr work on batches.",
             (TARGET, "if matrix.dim() == 3:\n        every = [power_sgd(*one, group) for one in "
              "zip(matrix, q, error)]\n        return tuple(torch.stack(parts) for parts in "
              f"zip(*every))\n    {TARGET}")),
        Slip("Return (approximation, q, error), in this order.",
             (RETURN, "return q, approximation"), (f"{RETURN}, {LEFT}", f"return approximation, "
                                                   f"{LEFT}, q"),
             (f"{RETURN}, {LEFT}", RETURN)),
    ), hints=(
        "Compress matrix + error with two products and two all-reduces. What is left over is the "
        "new error.",
        "p = target @ q, all-reduced, then made orthonormal by torch.linalg.qr(p).Q. q = target.mT "
        "@ p, all-reduced and divided by the number of ranks. The gradient is p @ q.mT.",
        "After the second all-reduce: q /= dist.get_world_size(group); approximation = p @ q.mT; "
        "return approximation, q, target - approximation",
    ))
