"""DataParallel: data parallelism behind the training loop's interface."""

import contextlib

import torch

from ranklab.basics.targets import IGNORE
from ranklab.data_parallel.gradients import OverlappedDataParallel
from ranklab.trainer.parallel import GroupParallel


class DataParallel(GroupParallel):
    """Train with the whole model on every rank; each rank takes every R-th row of the batch.

    wrap: (model, group=group) -> the module that averages gradients in backward: ours, or DDP.
    equal_parts: whether all ranks have equally many targets in each step; if so, they need not
        exchange the numbers of targets.
    compressor: the state that the wrap's hook keeps from step to step on each rank; it has
        state_dict(model).
    Cost: besides the gradients, one all-reduce of 8 bytes a step, if not equal_parts.
    Raises: ValueError for a batch of fewer rows than ranks, or of unequal parts with equal_parts.
    Lab: 03
    """

    context = None  # lab 10: the ranks over which the tokens of a row are split
    each_piece_talks = False  # True: all ranks must run equally many micro-batches, or they hang

    def __init__(self, group=None, wrap=OverlappedDataParallel, equal_parts=False,
                 compressor=None):  # fmt: skip
        super().__init__(group)
        self.wrap, self.equal_parts, self.compressor = wrap, equal_parts, compressor
        self.gradient_scale = self.ranks

    def apply(self, model):
        self.replica = self.wrap(model, group=self.group)
        return self.replica

    def batch(self, inputs, targets):
        """Take every R-th row.

        If each_piece_talks, all ranks get equally many rows: some get a last row whose targets are
        all ignored, so that it changes neither loss nor gradient.
        """
        sharing = self.context.ranks if self.context else 1  # ranks that have the same rows
        rank, ranks = self.rank // sharing, self.ranks // sharing
        if len(inputs) < ranks:
            raise ValueError(f"batch={len(inputs)} rows are too few for {ranks} ranks")
        if self.equal_parts and len(inputs) % ranks:
            raise ValueError(f"equal_parts=True, but {ranks} ranks do not divide batch="
                             f"{len(inputs)} rows")
        x, y = inputs[rank::ranks], targets[rank::ranks]
        if self.each_piece_talks and len(x) < -(-len(inputs) // ranks):
            x, y = torch.cat([x, x[:1]]), torch.cat([y, torch.full_like(y[:1], IGNORE)])
        return self.context.batch(x, y) if self.context else (x, y)

    def token_count(self, targets):
        count = super().token_count(targets)
        return count * self.ranks if self.equal_parts else self.total(count)

    def reduce_now(self):
        """Average the gradients accumulated without communication."""
        self.replica.reduce_now()

    def gradients(self, model):
        """List (parameter, the gradient for this rank's step, number of ranks that have it)."""
        return [(p, p.grad, self.ranks) for p in model.parameters() if p.grad is not None]

    def communication(self, is_last):
        if is_last:
            return contextlib.nullcontext()
        return self.replica.no_sync()  # ours or torch's

    def rank_state(self, model):
        return {"compressor": self.compressor.state_dict(model)} if self.compressor else {}

    def load_rank_state(self, model, state):
        if self.compressor and "compressor" in state:
            self.compressor.load_state_dict(model, state["compressor"])
