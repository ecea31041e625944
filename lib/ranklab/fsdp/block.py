"""FullyShardedBlock: parameters in rows, gathered in one message before they are used."""

import torch
import torch.distributed as dist

from ranklab.fsdp.shards import ShardedModule


class FullyShardedBlock(ShardedModule):
    """Keep some rows of each parameter on each rank; gather all rows only while the module runs.

        for block in model.blocks.values():
            FullyShardedBlock(block)
        FullyShardedBlock(model)
        optimizer = torch.optim.AdamW(model.parameters())     # of the rows

    After backward() the gradients are this rank's rows of the mean over ranks.
    Cost: a step sends the parameters of a block twice, the root's once, all gradients once: (R-1)/R
        of them, in 1 message each; hybrid: also an all-reduce of 1/R of the gradients.
    Paper: Zhao et al. 2023, PyTorch FSDP
    Lab: 07
    """

    def begin_unshard(self):
        """Start gathering the parameters, unless they are already whole or on their way."""
        if not self.parameters or self.is_whole or self.work:
            return
        message = torch.cat([p.padded_shard() for p in self.parameters])
        self.gathered = message.new_empty(self.ranks * len(message))
        self.work = dist.all_gather_single(self.gathered, message, group=self.group, async_op=True)

    def unshard(self):
        """Gather the parameters, and give the modules the whole ones."""
        self.begin_unshard()
        if not self.work:
            return
        self.work.wait()
        parts = self.gathered.view(self.ranks, -1).split([p.numbers for p in self.parameters], 1)
        for parameter, part in zip(self.parameters, parts):
            parameter.fill(part)
        self.work, self.gathered, self.is_whole = None, None, True

    def reduce_gradients(self):
        """Start averaging the gradients, each row on its owner; free the whole gradients."""
        if not self.trained:
            return
        grads = torch.cat([p.padded_gradient() for p in self.trained], dim=1)  # (R, numbers)
        grads /= self.ranks
        shard = grads.new_empty(grads.shape[1])
        work = dist.reduce_scatter_single(shard, grads.flatten(), group=self.group, async_op=True)
        self.reduction = shard, work
        for parameter in self.trained:
            parameter.whole.grad = None
