"""What all stages share: an optimizer over what one rank owns."""

import contextlib

import torch
import torch.distributed as dist

from ranklab.parallel import groups_here


class Owned:
    """A mixin for a Replica whose buckets are ShardedBuckets."""

    def make_optimizer(self, new_optimizer, groups=None):
        """new_optimizer over the parts that this rank owns; its step ends with step_ends().

        Any optimizer will do that treats each number for itself: SGD, Adam, AdamW and their like.
        One that looks at a matrix as a whole (Muon, Shampoo) or at its norm (LARS) would see parts.
        groups  dicts with "params", a list of (name, parameter), and options of their own; all that
                is trained, by default. What is in no group is not stepped
        """
        groups = groups or [{"params": [(name, p) for name, p in self.module.named_parameters()
                                        if p.requires_grad]}]
        masters = {id(part.parameter): part.master
                   for bucket in self.buckets for part in bucket.parts}
        optimizer = new_optimizer(groups_here(groups, lambda _, p: masters.get(id(p))))
        optimizer.register_step_post_hook(lambda *_: self.step_ends())
        return optimizer

    def backward_ends(self):
        """As a Replica's; gradients on their way to the CPU's memory are there."""
        super().backward_ends()
        shard, master = self.buckets[0].shard, self.buckets[0].master
        if shard.is_cuda and not master.is_cuda:  # torch copies to pinned memory, and goes on
            torch.cuda.current_stream().synchronize()

    def used_anywhere(self):
        """The parameters that had a gradient on this rank or on any other, in this backward.

        cost   one all-reduce of 4 bytes for each parameter
        """
        parameters = [(p, p in bucket.used) for bucket in self.buckets for p in bucket.parameters]
        used = torch.tensor([here for _, here in parameters], dtype=torch.int32,
                            device=parameters[0][0].device)
        dist.all_reduce(used, group=self.group)
        return {p for (p, _), ranks in zip(parameters, used.tolist()) if ranks}

    def whole(self):
        """Inside, `module` has all its parameters; stages 1 and 2 always have them."""
        return contextlib.nullcontext()

    def load_state_dict(self, *args, **kwargs):
        with self.whole():
            result = super().load_state_dict(*args, **kwargs)
        for bucket in self.buckets:
            bucket.update_master()
        return result
