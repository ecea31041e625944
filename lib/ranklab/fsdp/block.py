"""FullyShardedBlock: parameters in rows, gathered in one message before they are used."""

import torch
import torch.distributed as dist

from ranklab.fsdp.shards import ShardedModule


class FullyShardedBlock(ShardedModule):
    """`module`, of whose parameters each rank keeps some rows, and all of them while it runs.

        for block in model.blocks.values():
            FullyShardedBlock(block)
        FullyShardedBlock(model)
        optimizer = torch.optim.AdamW(model.parameters())     # of the rows

    After backward() the gradients are this rank's rows of the mean over ranks.
    cost   a step sends the parameters of a block twice, those of the root once, all gradients once:
           (R-1)/R of them; in 1 message each; hybrid: 1/R of the gradients once more by all-reduce
    paper  Zhao et al. 2023, PyTorch FSDP
    lab    07
    """

    def begin_unshard(self):
        """The parameters are on their way to this rank, if they are not here."""
        if not self.parameters or self.is_whole or self.work:
            return
        mine = torch.cat([p.padded_shard() for p in self.parameters])
        self.gathered = mine.new_empty(self.ranks * len(mine))
        self.work = dist.all_gather_single(self.gathered, mine, group=self.group, async_op=True)

    def unshard(self):
        """The modules have their whole parameters."""
        self.begin_unshard()
        if not self.work:
            return
        self.work.wait()
        parts = self.gathered.view(self.ranks, -1).split([p.numbers for p in self.parameters], 1)
        for parameter, part in zip(self.parameters, parts):
            parameter.fill(part)
        self.work, self.gathered, self.is_whole = None, None, True

    def reduce_gradients(self):
        """The gradients are on their way to become means, each row on its owner; none is whole."""
        if not self.trained:
            return
        whole = torch.cat([p.padded_gradient() for p in self.trained], dim=1)  # (R, numbers)
        whole /= self.ranks
        mine = whole.new_empty(whole.shape[1])
        work = dist.reduce_scatter_single(mine, whole.flatten(), group=self.group, async_op=True)
        self.reduction = mine, work
        for parameter in self.trained:
            parameter.whole.grad = None
