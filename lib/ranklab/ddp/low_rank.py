"""PowerSGD: send the gradient of a matrix as two thin matrices, found by power iteration.

    model.register_comm_hook(PowerSGD(rank=4), PowerSGD.hook)

Unlike the entries that top-k picks, thin matrices can be added up: everything goes by all-reduce,
so the cost does not grow with the number of ranks.
"""

import torch
import torch.distributed as dist

from ranklab.basics.flat import pack, unpack


def power_sgd(matrix, q, error, group=None):
    """Approximate the mean over ranks of matrix + error by a matrix of the rank r of `q`.

    One power iteration: from step to step, while gradients change slowly, it comes closer to the
    best approximation of rank r. The mean over ranks of the errors is exactly what is missing from
    the approximation. Inputs stay unchanged. `q` must be the same on every rank.
    Returns: (approximation, q, error): q is the starting point for the next step; error is this
        rank's matrix + error, minus the approximation.
    Shape: (n, m), (m, r), (n, m) -> (n, m), (m, r), (n, m); for a batch of matrices (b, n, m).
    Cost: two all-reduces, of n*r and m*r numbers instead of n*m.
    Paper: Vogels et al. 2019, "PowerSGD"
    Lab: 04
    """
    target = matrix + error
    p = target @ q  # (n, r)
    dist.all_reduce(p, group=group)
    p = torch.linalg.qr(p).Q  # orthonormal columns; also where p is 0, unlike Gram-Schmidt
    q = target.mT @ p  # (m, r)
    dist.all_reduce(q, group=group)
    q /= dist.get_world_size(group)
    approximation = p @ q.mT
    return approximation, q, target - approximation


class PowerSGD:
    """A DDP hook: send matrix gradients as approximations of rank `rank`, all others unchanged.

    Tensors of more dimensions count as matrices: (first dimension, all others). A matrix that would
    not get more than `shrink` times smaller is sent unchanged. Matrices of one shape are sent
    together.

    start           number of steps at the beginning in which nothing is compressed
    error_feedback  False: the approximation error is dropped (for comparison)
    seed            of the first q; the same on every rank
    approximate     power_sgd, or a learner's own

    Cost: for each bucket, two all-reduces for each shape, and one for all the rest. They block:
        nothing is hidden behind backward.
    Raises: ValueError for a rank below 1.
    """

    def __init__(self, rank=4, group=None, start=0, error_feedback=True, shrink=2, seed=0,
                 approximate=power_sgd):  # fmt: skip
        if rank < 1:
            raise ValueError(f"rank={rank} must be at least 1")
        self.rank, self.group, self.start, self.shrink = rank, group, start, shrink
        self.error_feedback, self.step, self.approximate = error_feedback, 0, approximate
        self.errors, self.qs = {}, {}  # by parameter: DDP rebuilds its buckets in its second step
        self.generator = torch.Generator().manual_seed(seed)

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average the bucket's gradients over ranks, matrices approximately."""
        by_shape, rest = {}, []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
            if self.step >= self.start and self._is_worth_it(gradient):
                by_shape.setdefault(gradient.shape, []).append((parameter, gradient))
            else:
                rest.append(gradient)
        for pairs in by_shape.values():
            self._approximate(*zip(*pairs))
        if rest:
            self._average(rest)
        self.step += bucket.is_last()
        return finished(bucket.buffer())

    def state_dict(self, model):
        """Return the state for the next step, keyed by the plain model's parameter names.

        The errors differ from rank to rank.
        """
        names = dict(model.named_parameters())
        tensors = {kind: {name: values[p] for name, p in names.items() if p in values}
                   for kind, values in (("errors", self.errors), ("qs", self.qs))}  # fmt: skip
        return {"step": self.step, "generator": self.generator.get_state(), **tensors}

    def load_state_dict(self, model, state):
        self.step = state["step"]
        self.generator.set_state(state["generator"])
        self.errors, self.qs = ({p: state[kind][name].to(p.device) for name, p in
                                 model.named_parameters() if name in state[kind]}
                                for kind in ("errors", "qs"))  # fmt: skip

    def _is_worth_it(self, gradient):
        if gradient.dim() < 2:
            return False
        n, m = len(gradient), gradient[0].numel()
        return self.shrink * self.rank * (n + m) < n * m

    def _approximate(self, parameters, gradients):
        """Average gradients of one shape over ranks, to rank self.rank."""
        matrix = torch.stack([g.flatten(1).float() for g in gradients])  # (b, n, m); no QR of fp16
        q = torch.stack([self._q(p, matrix) for p in parameters])  # (b, m, r)
        zeros = torch.zeros_like(matrix[0])
        error = torch.stack([self.errors.get(p, zeros) for p in parameters])
        approximation, q, error = self.approximate(matrix, q, error, self.group)
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients)):
            gradient.copy_(approximation[i].view_as(gradient))
            if self.error_feedback:
                self.errors[parameter] = error[i]
            self.qs[parameter] = q[i]

    def _q(self, parameter, matrix):
        if parameter in self.qs:
            return self.qs[parameter]
        q = torch.randn(matrix.shape[-1], self.rank, generator=self.generator)
        return q.to(matrix.device)

    def _average(self, gradients):
        """Average the gradients over ranks, by one all-reduce."""
        flat = pack(gradients)
        dist.all_reduce(flat.div_(dist.get_world_size(self.group)), group=self.group)
        unpack(flat, gradients)


def finished(buffer):
    """Return a future that holds `buffer` already."""
    future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future
