"""TensorParallel: the split model behind the training loop's interface."""

import torch

from ranklab.mesh import mesh_grad_norm
from ranklab.tensor_parallel.dropout import dropout_seeds, has_dropout
from ranklab.tensor_parallel.plan import TPConfig, parallel_gpt
from ranklab.tensor_parallel.split import split_of, specs_of
from ranklab.trainer.parallel import GroupParallel, Piece, groups_here


class TensorParallel(GroupParallel):
    """Train with a part of every layer on each rank; all ranks take the same batch.

    apply_to: (model, TPConfig) -> the split model.
    seed: of dropout, the same on all ranks; None: the seed of torch.manual_seed.
    place: (number of this group among all groups with different dropout, the sizes of all axes).
    changes: fields of TPConfig: sequence_parallel, overlap, or a learner's own functions.
    Lab: 08
    """

    def __init__(self, group=None, apply_to=parallel_gpt, seed=None, place=None, **changes):
        super().__init__(group)
        self.apply_to, self.seed, self.changes = apply_to, seed, changes
        self.data_rank, self.sizes = place or (0, {"tensor": self.ranks})
        self.shared_seed = None  # the group's seed, where the model has dropout

    def apply(self, model):
        seed = self.seed_dropout(model)
        model = self.apply_to(model, TPConfig(self.group, dropout_seed=seed, **self.changes))
        self.parts = dict(model.named_parameters())
        return model

    def seed_dropout(self, model):
        """Seed the generator for this group, if `model` has dropout; return a seed for this rank.
        """
        if not has_dropout(model):
            return None
        seed = torch.initial_seed() % 2**40 if self.seed is None else self.seed
        self.shared_seed, own_seed = dropout_seeds(seed, self.data_rank, self.rank, self.ranks)
        torch.manual_seed(self.shared_seed)
        return own_seed

    def rank_state(self, model):
        return {"sizes": list(self.sizes.items())}

    def load_rank_state(self, model, state):
        """Seed again if the layout has changed, because all ranks of a group must draw equally."""
        if self.shared_seed is not None and state != self.rank_state(model):
            torch.manual_seed(self.shared_seed)

    def make_optimizer(self, new_optimizer, groups):
        """Make the optimizer of this rank's parts; `groups` were formed before the split."""
        return new_optimizer(groups_here(groups, lambda name, _: self.parts.get(name)))

    def grad_norm(self, parameters):
        return mesh_grad_norm([part for p in parameters if p.grad is not None
                               for part in self.gradients_of(p)], self.group)

    def gradients_of(self, parameter):
        """List (a part of the parameter's gradient, the number of ranks that hold it)."""
        split = split_of(parameter)
        if split is None:
            return [(parameter.grad, self.ranks)]
        return [(part, copies) for (_, part), copies in
                zip(split.pieces_of(parameter.grad), split.copies)]

    def total(self, value):
        return value  # all ranks have the same value

    def total_of(self, shares):
        return shares[0]

    def state(self, model, optimizer):
        """List this rank's parts, as boxes of the whole parameters."""
        return in_the_whole(super().state(model, optimizer), model)


def in_the_whole(pieces, model):
    """Turn Pieces of this rank's parts of `model` into Pieces of the whole model."""
    specs = {name: specs_of(p) for name, p in model.named_parameters()}
    whole_pieces = []
    for piece in pieces:
        boxes = [piece]
        for spec in specs.get(piece.name, ()):
            boxes = [inner for box in boxes for inner in boxes_of(box, spec)]
        whole_pieces += boxes
    return whole_pieces


def boxes_of(piece, split):
    """Return `piece`, a box of this rank's part, as Pieces of the whole parameter.

    There is one Piece for each range of the part's ShardSpec that overlaps the box.
    """
    if not piece.tensor.dim():
        return [piece]
    dim, begin, boxes = split.dim, 0, []
    first, last = piece.offset[dim], piece.offset[dim] + piece.tensor.shape[dim]
    for start, stop in split.ranges:  # in the whole; in the part the range begins at `begin`
        a, b = max(first, begin), min(last, begin + stop - start)
        if a < b:
            offset = (*piece.offset[:dim], start + a - begin, *piece.offset[dim + 1 :])
            boxes.append(Piece(piece.name, piece.kind, split.whole_shape(tuple(piece.shape)),
                               offset, piece.tensor.narrow(dim, a - first, b - a)))
        begin += stop - start
    return boxes
