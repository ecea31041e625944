"""What ZeroStage3 gathers at once: a unit, in buckets (data_parallel) that come and go."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ranklab.data_parallel.buckets import buckets_of
from ranklab.zero.partition import ShardedBucket


def units_of(module, chosen=None):
    """[(module, its parameters)]: what is gathered, used and freed together; `module` itself last.

    chosen  modules inside `module`, none inside another; by default each entry of each ModuleList
            that is not inside another one: the blocks of a transformer
    A parameter that two units have, or none, belongs to `module`, and is there all the time.
    """
    blocks = blocks_of(module) if chosen is None else list(chosen)
    users = Counter(parameter for block in blocks for parameter in block.parameters())
    units = [(block, [p for p in block.parameters() if users[p] == 1]) for block in blocks]
    rest = [p for p in module.parameters() if users[p] != 1]
    return [(block, its) for block, its in [*units, (module, rest)] if its]


def blocks_of(module):
    """The entries of all outermost ModuleLists and ModuleDicts, in their order."""
    found = []
    for child in module.children():
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        found += child.children() if is_list else blocks_of(child)
    return found


class ShardedWeights(ShardedBucket):
    """A ShardedBucket of which this rank keeps the shard only; the whole comes and goes."""

    def __init__(self, parameters, group=None):
        super().__init__(parameters, group)
        self.trained = parameters[0].requires_grad
        self.place, self.shard = self.shard, self.shard.clone()
        self.set_master(self.shard if self.master is self.place else self.master)
        self.work, self.is_whole = None, True
        self.free_gradients()
        self.free()

    def gather(self):
        """As a ShardedBucket's; the parameters have no gradients, because a second use in the same
        backward would add to what is on its way.
        """
        super().gather()
        for parameter in self.parameters:
            parameter.grad = None

    def begin_gather(self):
        """The whole weights are on their way to this rank, if they are not here."""
        if not self.is_whole:
            self.is_whole = True
            self.weights.untyped_storage().resize_(self.weights.nbytes)
            self.work = dist.all_gather_single(self.weights, self.shard, group=self.group,
                                               async_op=True)

    def end_gather(self):
        """The whole weights are here."""
        self.begin_gather()
        if self.work:
            self.work.wait()
            self.work = None

    def free(self):
        """The weights take no memory until they are gathered again."""
        if self.is_whole:
            self.end_gather()  # they may still be on their way
            self.weights.untyped_storage().resize_(0)
            self.is_whole = False

    def take_shard(self):
        """The shard is what lies in its place in the whole weights."""
        self.shard.copy_(self.place)


class Unit:
    """One module and the ShardedWeights of its parameters, of each type one, frozen ones apart."""

    def __init__(self, module, parameters, group_of):
        self.module, self.stays = module, False  # stays: whole until all backward ends
        self.buckets = [bucket for trained in (True, False) for bucket in buckets_of(
            [p for p in parameters if p.requires_grad == trained], 2**63, group_of,
            ShardedWeights)]
        self.trained = [bucket for bucket in self.buckets if bucket.trained]

    def begin_gather(self):
        for bucket in self.buckets:
            bucket.begin_gather()

    def end_gather(self):
        self.begin_gather()
        for bucket in self.buckets:
            bucket.end_gather()

    def free(self):
        if not self.stays:
            for bucket in self.buckets:
                bucket.free()


class _AfterBackward(torch.autograd.Function):
    """The identity; `then` is called when the gradients of all of the inputs are known, which is
    after those of every parameter that was used since.
    """

    @staticmethod
    def forward(ctx, then, *tensors):
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.then()
        return None, *gradients


def call_after_backward(then, inputs):
    """`inputs`, in any nesting, such that their backward ends with `then()`."""
    needed = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not needed or not torch.is_grad_enabled():
        return inputs
    passed = dict(zip(map(id, needed), _AfterBackward.apply(then, *needed)))
    return tree_map(lambda x: passed.get(id(x), x), inputs)
