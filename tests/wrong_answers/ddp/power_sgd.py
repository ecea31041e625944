from mutants import mutant

from ranklab.ddp import power_sgd as answer

SUM_P, SUM_Q = "dist.all_reduce(p, group=group)", "dist.all_reduce(q, group=group)"
QR = "p = torch.linalg.qr(p).Q"
DIVIDE = "q /= dist.get_world_size(group)"


def _gram_schmidt(p, epsilon=0.0):
    for i in range(p.shape[-1]):
        column, rest = p[..., i:i + 1], p[..., i + 1:]
        column /= column.norm(dim=-2, keepdim=True) + epsilon
        rest -= column * (column * rest).sum(dim=-2, keepdim=True)
    return p


WRONG = [
    mutant(answer, SUM_P, "", says="All-reduce both p and q"),
    mutant(answer, QR, "", says="made of a p that is not orthonormal"),
    mutant(answer, DIVIDE, "", says="approximation is 4 times what is right"),
    mutant(answer, "p = target", "p = matrix", "target.mT", "matrix.mT",
           says=r"compress matrix \+ error"),
    mutant(answer, "target - approximation", "matrix - approximation",
           says="The old error is lost"),
    mutant(answer, "target - approximation", "0 * target",
           says="keep what the approximation leaves out"),
    mutant(answer, "return approximation, q", "return approximation, was", "p = target",
           "was = q\n    p = target", says="Return the new q"),
    mutant(answer, "p = target @ q", "mean = target.clone()", SUM_P,
           "dist.all_reduce(mean, group=group)",
           QR, "mean /= dist.get_world_size(group); p = torch.linalg.qr(mean @ q).Q",
           "target.mT", "mean.mT", SUM_Q, "", DIVIDE, "",
           says="sends 384 bytes in 1 calls .* 160 bytes in 2 are enough"),
    mutant(answer, "target = matrix + error", "target = matrix.add_(error)",
           says="the change of its inputs is .*not 0"),
    mutant(answer, "target.mT", "target.T", says=r"\.mT transposes each matrix"),
    mutant(answer, "get_world_size(group)", "get_world_size()",
           says="divided by the number of all ranks"),
    mutant(answer, SUM_Q, f"own = q.clone()\n    {SUM_Q}", "target - approximation",
           "target - p @ own.mT", says="made of q after its all-reduce"),
    mutant(answer, SUM_Q, f"own = q.clone()\n    {SUM_Q}", "return approximation, q",
           "return approximation, own", says="q is not that of rank 0.*Return the averaged q"),
    mutant(answer, "target = matrix + error", "target = (matrix + error).float()", "p = target @ q",
           "p = target @ q.float()",
           says="torch.float32, not torch.float64.*in the matrix's dtype"),
    mutant(answer, QR, "p = orthonormal(p)",
           says="zeros, r=3.* is nan at.*orthonormal even where", orthonormal=_gram_schmidt),
    mutant(answer, QR, "p = orthonormal(p, 1e-8)",
           says="a matrix of rank 1.*is orthonormal even where", orthonormal=_gram_schmidt),
    mutant(answer, "target = matrix + error",
           "if matrix.dim() == 3:\n        every = [power_sgd(*one, "
           "group) for one in zip(matrix, q, error)]\n        return tuple(torch.stack(parts) for "
           "parts in zip(*every))\n    target = matrix + error",
           says="three matrices at once.* in 6 calls .* in 2 are enough"),
]
