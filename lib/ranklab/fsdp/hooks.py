"""When a block's parameters come and go: as in ZeRO's stage 3 (zero), by the same hooks.

What is FSDP's own: a model is wrapped block by block, any optimizer of torch will do, and a block
may stay whole until its backward. no_sync is that of data_parallel.
"""

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from ranklab.data_parallel.replica import no_sync
from ranklab.fsdp.shards import Precision, ShardedParameter
from ranklab.zero.stage3 import ZeroStage3
from ranklab.zero.unit_hooks import Unit, UnitHooks


class ShardedModule(Unit):
    """`module` with its parameters in shards, but for those of modules inside that were sharded
    before. So shard the blocks of a model first, and then the model: it is their root.

    A subclass says how they travel, in three methods:
        begin_unshard()     the parameters are on their way: self.gathered, self.work
        unshard()           they are whole
        reduce_gradients()  the gradients are on their way to their owners: self.reduction
    Each is called often, also when there is nothing left to do. The optimizer is any of torch's
    over module.parameters(), made afterwards. All ranks must have the same weights before: they
    are not sent. All ranks must use the same blocks in the same order.

    group      the ranks that share the rows; None: all
    replicas   the ranks with the same shard as this one, in hybrid sharding; None: no other
    precision  what is computed and reduced in; the shards keep the type of the parameters
    reshard_after_forward  False: whole until backward is done: more memory, one gather less. A
               root stays whole in any case
    offload    shards, gradients and optimizer live in the CPU's memory
    error      parameters without dimension, of several types, or shared with another block
    """

    def __init__(self, module, group=None, replicas=None, precision=Precision(),
                 reshard_after_forward=True, offload=False):  # fmt: skip
        self.parameters = [
            ShardedParameter(parameter, places, group, precision, offload)
            for parameter, places in places_of(module).items()]
        self.trained = [p for p in self.parameters if p.shard.requires_grad]
        self.group, self.replicas = group, replicas
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.compute, self.reshard_after_forward = precision.compute, reshard_after_forward
        self.work = self.gathered = self.reduction = None
        self.is_whole = False
        module.register_forward_pre_hook(self.cast, with_kwargs=True)
        super().__init__(module)
        BlockHooks().watch([*sharded_modules(module), self])
        module.fully_sharded = self

    def cast(self, module, inputs, kwargs):
        """What is fed to the module is in the type of computing."""
        def cast(x):
            return x.to(self.compute) if torch.is_tensor(x) and x.is_floating_point() else x
        return tree_map(cast, (inputs, kwargs)) if self.compute else None

    def begin_gather(self):
        self.begin_unshard()

    def end_gather(self):
        self.unshard()

    def reshard(self):
        """The modules have this rank's rows, and the whole parameters take no memory."""
        if self.work:  # on its way, and not used
            self.unshard()
        for parameter in self.parameters:
            parameter.free()
        self.is_whole = False

    def has_gradients(self):
        return any(p.whole.grad is not None for p in self.trained)

    def end_reduction(self):
        """The shards have their gradients."""
        if not self.reduction:
            return
        mine, work = self.reduction
        work.wait()
        if self.replicas is not None:  # the other copies of this shard have seen other data
            mine /= dist.get_world_size(self.replicas)
            dist.all_reduce(mine, group=self.replicas)
        for parameter, part in zip(self.trained, mine.split([p.numbers for p in self.trained])):
            parameter.add_gradient(part)
        self.reduction = None

    def no_sync(self):
        """Inside, backward leaves whole gradients where they are and adds them up; for a root."""
        return no_sync(self.hooks)


class BlockHooks(UnitHooks):
    """The hooks of stage 3, around each ShardedModule of a model."""

    enter, backward_of = ZeroStage3.enter, ZeroStage3.backward_of
    backward_done = ZeroStage3.backward_done

    def forward_begins(self):
        """Nothing is left of a forward without backward. Of a backward that raised, all gradients
        are gone: some had arrived, some not.
        """
        if self.in_backward:
            self.in_backward = False
            for block in self.units:
                block.end_reduction()
                for parameter in block.parameters:
                    parameter.whole.grad = parameter.shard.grad = None
        self.free_all()
        super().forward_begins()

    def leave(self, block, module, inputs, outputs):
        """As in stage 3; but a block may stay whole until its own backward is done."""
        stays = block.stays
        block.stays = stays or not block.reshard_after_forward
        ZeroStage3.leave(self, block, module, inputs, outputs)
        block.stays = stays


def sharded_modules(module):
    """The ShardedModules of what is inside `module`, in order."""
    return [inside.fully_sharded for inside in module.modules() if hasattr(inside, "fully_sharded")]


def sharded_parameters(module):
    """{shard: its ShardedParameter} of all blocks inside `module`."""
    return {p.shard: p for block in sharded_modules(module) for p in block.parameters}


def places_of(module):
    """{parameter: [(module, attribute)]} of all that is not in a block inside `module`.

    error  ValueError, see ShardedModule
    """
    shards, places = sharded_parameters(module), {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None or parameter in shards:
                continue
            name = f"{path}.{attribute}".lstrip(".")
            if hasattr(parameter, "of_block"):
                raise ValueError(f"{name} is a parameter of a block that was sharded before, too: "
                                 "shard a module that holds both, or leave both to the model")
            if parameter.dim() == 0:
                raise ValueError(f"{name} has the shape (), so it has no rows to share out: give "
                                 "it the shape (1,)")
            places.setdefault(parameter, []).append((owner, attribute))
    types = {parameter.dtype for parameter in places}
    if len(types) > 1:
        raise ValueError("the parameters of a block travel in one message, but these are "
                         + " and ".join(sorted(map(str, types))))
    return places
