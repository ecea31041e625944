"""TensorParallel: the split model as the training loop sees it."""

import torch

from ranklab.parallel import GroupParallel, Piece, groups_here, mesh_grad_norm
from ranklab.tensor_parallel.dropout import dropout_seeds
from ranklab.tensor_parallel.plan import How, parallel_gpt
from ranklab.tensor_parallel.split import split_of


class TensorParallel(GroupParallel):
    """All ranks of the group take the same batch, and each computes its part of every layer.

    apply_to  (model, how) -> the model split
    seed      of dropout; None: the model has none
    changes   of How: sequence_parallel, overlap, or a learner's own functions
    lab       08
    """

    def __init__(self, group=None, apply_to=parallel_gpt, seed=None, **changes):
        super().__init__(group)
        self.apply_to, self.seed, self.changes = apply_to, seed, changes

    def apply(self, model):
        own = None
        if self.seed is not None:
            shared, own = dropout_seeds(self.seed, 0, self.rank, self.ranks)
            torch.manual_seed(shared)
        model = self.apply_to(model, How(self.group, own=own, **self.changes))
        self.parts = dict(model.named_parameters())
        return model

    def make_optimizer(self, new_optimizer, groups):
        """Of the parts that are there now: groups were decided before the model was split."""
        return new_optimizer(groups_here(groups, lambda name, _: self.parts.get(name)))

    def grad_norm(self, parameters):
        return mesh_grad_norm([part for p in parameters if p.grad is not None
                               for part in self.gradients_of(p)], self.group)

    def gradients_of(self, parameter):
        """[(a part of its gradient, how many ranks hold it)]"""
        split = split_of(parameter)
        if split is None:
            return [(parameter.grad, self.ranks)]
        return [(part, copies) for (_, part), copies in
                zip(split.pieces_of(parameter.grad), split.copies)]

    def total(self, value):
        return value  # all ranks have the same

    def total_of(self, shares):
        return shares[0]

    def state(self, model, optimizer):
        """This rank's parts, as boxes of the whole."""
        return in_the_whole(super().state(model, optimizer), model)


def in_the_whole(pieces, model):
    """Pieces of the parts that `model` has here, as Pieces of the whole model."""
    splits = {name: split_of(p) for name, p in model.named_parameters()}
    return [box for piece in pieces for box in boxes_of(piece, splits.get(piece.name))]


def boxes_of(piece, split):
    """The Pieces of the whole that lie in `piece`, a box of this rank's part: one for each range of
    the part's Split that it meets.
    """
    if split is None or not piece.tensor.dim():
        return [piece]
    dim, begin, found = split.dim, 0, []
    first, last = piece.offset[dim], piece.offset[dim] + piece.tensor.shape[dim]
    for start, stop in split.ranges:  # of the whole; in the part it begins at `begin`
        a, b = max(first, begin), min(last, begin + stop - start)
        if a < b:
            offset = (*piece.offset[:dim], start + a - begin, *piece.offset[dim + 1 :])
            found.append(Piece(piece.name, piece.kind, split.whole_shape(tuple(piece.shape)),
                               offset, piece.tensor.narrow(dim, a - first, b - a)))
        begin += stop - start
    return found
