"""When parameters come and go: the hooks around a module's forward and backward.

What tells that a backward runs is from data_parallel, and what tells that it is done, from zero.
"""

import functools

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from ranklab.data_parallel.recovery import in_backward
from ranklab.data_parallel.replica import no_sync
from ranklab.fsdp.shards import Precision, ShardedParameter
from ranklab.zero.units import call_after_backward


class ShardedModule:
    """`module` with its parameters in shards, but for those of modules inside that were sharded
    before. So shard the blocks of a model first, and then the model: it is their `root`.

    A subclass says how they travel, in three methods:
        begin_unshard()     the parameters are on their way: self.gathered, self.work
        unshard()           they are whole
        reduce_gradients()  the gradients are on their way to their owners: self.reduction
    Each is called often, also when there is nothing left to do. The optimizer is any of torch's
    over module.parameters(), made afterwards. Other ranks must have the same weights before: nobody
    sends them. All ranks must use the same blocks in the same order.

    group      the ranks among which rows are shared out; None: all
    replicas   the ranks with the same shard as this one, in hybrid sharding; None: no other
    precision  what is computed and reduced in; the shards keep the type of the parameters
    reshard_after_forward  False: whole until backward is done: more memory, one gather less. A
               root stays whole in any case
    offload    shards, gradients and optimizer live in the CPU's memory
    error      parameters without dimension, of several types, or shared with another block
    """

    def __init__(self, module, group=None, replicas=None, precision=Precision(),
                 reshard_after_forward=True, offload=False):  # fmt: skip
        self.module, self.group, self.replicas = module, group, replicas
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.precision, self.reshard_after_forward = precision, reshard_after_forward
        self.inner = sharded_modules(module)
        self.parameters = [
            ShardedParameter(parameter, places, group, precision, offload)
            for parameter, places in places_of(module).items()]
        self.trained = [p for p in self.parameters if p.shard.requires_grad]
        self.work = self.gathered = self.reduction = None
        self.is_whole, self.sync = False, True
        self.stays = False  # whole until all backward ends
        self.order, self.order_before, self.awaits_end = [], [], False  # used by a root
        self.blocks = [*self.inner, self]
        for block in self.blocks:
            block.root = self
        module.fully_sharded = self
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave)

    # --- what ends ------------------------------------------------------------------------------

    def reshard(self):
        """The modules have this rank's rows, and the whole parameters take no memory."""
        if self.stays:
            return
        if self.work:  # on its way, and nobody came to use it
            self.unshard()
        for parameter in self.parameters:
            parameter.free()
        self.is_whole = False

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

    # --- forward --------------------------------------------------------------------------------

    def enter(self, module, inputs, kwargs):
        """Before the forward: the parameters are whole, and the next block's on their way."""
        if self.root is self and not in_backward():
            self.begin_forward()
        self.unshard()
        if self.root is not self and not in_backward():
            self.root.order.append(self)
            prefetch(self.root.order_before, len(self.root.order))
        inputs, kwargs = tree_map(self.cast, (inputs, kwargs))
        return call_after_backward(self.backward_done, (inputs, kwargs))

    def begin_forward(self):
        """Nothing is left of a forward without backward. Of a backward that raised, all gradients
        are gone: some had arrived, some not.
        """
        if self.awaits_end:
            self.awaits_end = False
            for block in self.blocks:
                block.end_reduction()
                for parameter in block.parameters:
                    parameter.whole.grad = parameter.shard.grad = None
        self.reshard_all()
        self.order_before, self.order = self.order or self.order_before, []

    def cast(self, x):
        if torch.is_tensor(x) and x.is_floating_point() and self.precision.compute:
            return x.to(self.precision.compute)
        return x

    def leave(self, module, inputs, outputs):
        """After the forward: the parameters are shards again, and backward will gather them. Where
        no tensor tells when that begins, as one inside of an object, they stay whole to its end.
        """
        if in_backward():  # a checkpoint's second forward; the backward itself follows
            return
        begins = functools.partial(self.backward_begins, self.root.order, len(self.root.order) - 1)
        tensors = [output for output in tree_leaves(outputs) if torch.is_tensor(output)]
        for output in tensors:
            if output.requires_grad:
                output.register_hook(begins)
        self.stays = not tensors
        if self.root is not self:
            if self.reshard_after_forward:
                self.reshard()
        elif not torch.is_grad_enabled():  # no backward will
            self.reshard_all()

    # --- backward -------------------------------------------------------------------------------

    def backward_begins(self, order, place, _):
        """Before the backward: the parameters are whole; those of the block before, on their way.
        place  of this block in the forward's `order`
        """
        root = self.root
        if not root.awaits_end:
            root.awaits_end = True
            torch.autograd.Variable._execution_engine.queue_callback(root.finish)
        self.unshard()
        if self is not root:
            prefetch(order, place - 1)

    def backward_done(self):
        """After it: the gradients are on their way, and the parameters are shards again."""
        if self is self.root:
            return  # an input that wants a gradient: finish() comes
        self.reduce()
        self.reshard()

    def reduce(self):
        if self.root.sync:
            for block in self.root.inner:  # gradients of two blocks are whole, at most
                block.end_reduction()
            self.reduce_gradients()

    def finish(self):
        """All gradients have arrived, and all is in shards; called at the end of backward."""
        self.awaits_end = False
        for block in (*reversed(self.inner), self):
            # the root in any case: another rank may have used what this one has not
            if block is self or any(p.whole.grad is not None for p in block.trained):
                block.reduce()
        for block in self.blocks:
            block.end_reduction()
        self.reshard_all()

    def reshard_all(self):
        for block in self.blocks:
            block.stays = False
            block.reshard()

    def no_sync(self):
        """Inside, backward leaves whole gradients where they are and adds them up; for a root."""
        return no_sync(self)


def prefetch(order, place):
    """The block at this place is on its way, if there is one."""
    if 0 <= place < len(order):
        order[place].begin_unshard()


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
