"""Sequence parallelism: outside the region each rank has some tokens of each sequence.

Without it, all ranks compute the same norms, dropout and residuals; here each rank does so only for
its own tokens. Activations there shrink to 1/tp, and the bytes sent stay the same: see regions.py.
"""

from torch import nn
from torch.func import functional_call

from ranklab.tensor_parallel.regions import copy_to_region


def sequence_parallel_norm(norm, x, group=None):
    """Return norm(x) of this rank's tokens; in backward, sum the norm's gradients over ranks.

    A norm looks at one token at a time, so its output needs no other rank. But its weight is the
    same on all ranks, and each sees only the gradient from its own tokens. `norm` is not modified.
    Shape: (B, T/tp, C) -> (B, T/tp, C).
    Cost: one all-reduce for each parameter of the norm, in backward.
    Lab: 08
    """
    parameters = {name: copy_to_region(p, group) for name, p in norm.named_parameters()}
    return functional_call(norm, parameters, x)


class SequenceParallelNorm(nn.Module):
    """Compute `norm` of this rank's tokens; its parameters keep their names."""

    def __init__(self, norm, group=None, apply=sequence_parallel_norm):
        super().__init__()
        self.group, self.apply_norm = group, apply
        self.hidden = [norm]  # no child, or names would be longer
        self._parameters = norm._parameters

    def forward(self, x):
        return self.apply_norm(self.hidden[0], x, self.group)
