"""ContextParallel, for the training loop: each rank has some tokens of every sequence.

For the weights it is a DataParallel (data_parallel).
"""

import torch
import torch.distributed as dist

from ranklab.context_parallel.block import causal_blocks
from ranklab.context_parallel.ring import context_attention
from ranklab.context_parallel.shard import begins_in, zigzag_shard
from ranklab.context_parallel.ulysses import ulysses_attention
from ranklab.data_parallel.training import DataParallel


class TokenShard:
    """Split the tokens of a sequence over the ranks of a ring, of a Ulysses group, or of both.

    All these ranks are neighbours, and the ulysses rank varies fastest. With both, a block of the
    ring has all tokens of a Ulysses group.
    ring, ulysses: groups; None: a group of only this rank
    shard: (T, ranks) -> positions (R, T/R), the same on all ranks
    end: the last token of each document; no token attends across it. None: one document
    attention, trade: context_attention and ulysses_attention, or a learner's own functions
    Lab: 10
    """

    def __init__(self, ring=None, ulysses=None, shard=zigzag_shard, end=None,
                 attention=context_attention, trade=ulysses_attention):  # fmt: skip
        self.ring = ring or dist.new_subgroups(1)[0]
        self.ulysses, self.shard, self.end = ulysses, shard, end
        self.attention, self.trade = attention, trade
        self.row, self.rows = dist.get_rank(self.ring), dist.get_world_size(self.ring)
        self.ranks, self.rank = self.rows, self.row
        if ulysses:
            columns = dist.get_world_size(ulysses)
            self.ranks, self.rank = self.rows * columns, self.row * columns + dist.get_rank(ulysses)
        self.tokens = self.length = None  # of the sequences seen last, and of batch's

    def batch(self, inputs, targets):
        """Take this rank's tokens of all rows.

        With `end` the inputs are (B, 2, T/R): the tokens, and the start of each token's document.
        """
        self.length = inputs.shape[1]
        positions = self.shard(self.length, self.ranks)[self.rank]
        if self.end is not None:
            inputs = torch.stack([inputs, begins_in(inputs, self.end)], dim=1)
        return inputs[..., positions], targets[:, positions]

    def apply(self, model):
        """Make `model`, a GPT, attend to the keys of all ranks. In place."""
        if model.config.dropout:
            raise ValueError(f"dropout={model.config.dropout} must be 0: probabilities that are "
                             "computed again in backward would be dropped otherwise")
        for block in model.blocks.values():
            block.attention.attend = self.attend
        model.register_forward_pre_hook(self.enter, with_kwargs=True)
        return model

    def enter(self, model, args, kwargs):
        """Pass the positions of its tokens to the model, before a forward."""
        x, begins = args[0].unbind(1) if self.end is not None else (args[0], None)
        # a tensor rank may have only its own tokens of a pipeline's hidden states
        positions = self.set_visible(self.length or x.shape[1] * self.ranks, x.device, begins)
        return (x, *args[1:]), {**kwargs, "positions": positions}

    def set_visible(self, tokens, device, begins=None):
        """Set, for all layers, the keys that each query sees in sequences of `tokens` tokens.

        Returns: the positions of this rank's tokens.
        """
        if tokens != self.tokens or begins is not None:
            positions = self.shard(tokens, self.ranks)
            self.tokens, self.positions = tokens, positions[self.rank].to(device)
            self.visible = causal_blocks(positions.view(self.rows, -1), self.row,
                                         self.gather(begins))
        return self.positions

    def gather(self, begins):
        """All-gather the `begins` of all tokens of the Ulysses group."""
        if begins is None or self.ulysses is None:
            return begins
        parts = [torch.empty_like(begins) for _ in range(self.ranks // self.rows)]
        dist.all_gather(parts, begins.contiguous(), group=self.ulysses)
        return torch.cat(parts, dim=-1)

    def attend(self, q, k, v):
        if self.ulysses is None:
            return self.ring_attend(q, k, v)
        return self.trade(q, k, v, self.ring_attend, self.ulysses)

    def ring_attend(self, q, k, v):
        return self.attention(q, k, v, self.visible, self.ring)


class ContextParallel(DataParallel):
    """Train with the same weights and different tokens on each rank; gradients as over rows.

    group: all ranks that hold these weights: the ranks of `tokens`, once for each share of rows.
    tokens: a TokenShard; None: a ring of the whole group. Its ranks are neighbours in the group.
    options: for DataParallel.
    Lab: 10
    """

    def __init__(self, group=None, tokens=None, **options):
        super().__init__(group, **options)
        self.context = tokens or TokenShard(group or dist.group.WORLD)

    def apply(self, model):
        return super().apply(self.context.apply(model))
