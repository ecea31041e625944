"""Parameters in rows: each rank keeps some rows, and gathers all of them only for their use.

The engine of ZeRO's stage 3 (ranklab.zero) decides when they are gathered and freed. New in FSDP: a
model is wrapped block by block, any torch optimizer works, and a block may stay whole until its
backward. no_sync comes from data_parallel.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from ranklab.data_parallel.replica import no_sync
from ranklab.engine import device
from ranklab.zero.stage3 import ZeroStage3
from ranklab.zero.units import Shards, Unit, UnitHooks


def rows_of(n, ranks, rank):
    """Return (first, last + 1) of `rank`'s chunk of n rows, as torch.chunk cuts them."""
    length = -(-n // ranks)
    return min(n, rank * length), min(n, (rank + 1) * length)


def shard_parameter(parameter, group=None):
    """Copy this rank's rows of `parameter`, so that the parameter can be freed.

    Each rank has ceil(n/R) rows; the last ranks may have fewer, or none. So a rank knows which rows
    each other rank has, without asking. The copy has memory for its rows only.
    Shape: (n, ...) -> (rows, ...).
    Cost: sends nothing.
    Raises: ValueError for a parameter without dimensions, because it has no rows.
    Lab: 07
    """
    if parameter.dim() == 0:
        raise ValueError("a parameter of shape () has no rows: give it the shape (1,)")
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    length = -(-len(parameter) // R)  # rounded up, as torch.chunk cuts
    first, stop = rank * length, (rank + 1) * length  # the last ones may lie beyond the end
    return parameter.detach()[first:stop].clone()


class Precision(NamedTuple):
    """Types of numbers; None means the type of the parameters."""

    compute: torch.dtype | None = None  # of gathered parameters, and of the module's inputs
    reduce: torch.dtype | None = None  # of gradients in messages; None: as computed


class ShardedParameter:
    """A parameter of which this rank keeps `shard`; `whole` has memory only while it is gathered.

    The modules hold one of the two: `shard`, which the optimizer steps, or `whole`, which the
    forward uses. In messages, rows are padded with zeros so that all ranks send the same count:
    `numbers` each.
    """

    def __init__(self, parameter, places, group, precision, offload=False):
        self.places = places  # [(module, attribute)]: more than one where it is tied
        self.shape, self.ranks = parameter.shape, dist.get_world_size(group)
        self.first, _ = rows_of(len(parameter), self.ranks, dist.get_rank(group))
        self.numbers = -(-len(parameter) // self.ranks) * self.shape[1:].numel()
        place = device() if parameter.is_meta else parameter.device
        self.reduce_in = precision.reduce or precision.compute or parameter.dtype
        rows = shard_parameter(parameter, group)
        if parameter.is_meta:  # NaN until fill_shards, so that a forgotten weight shows
            rows = torch.full_like(rows, torch.nan, device=place)
        if offload and place.type != "cpu":
            rows = rows.cpu().pin_memory()
        self.shard = nn.Parameter(rows, parameter.requires_grad)
        self.shard.shard_spec = getattr(parameter, "shard_spec", None)  # of lab 08
        # A block that finds either of them elsewhere must not shard it again.
        self.shard.is_sharded = parameter.is_sharded = True
        memory = torch.empty(self.shape, dtype=precision.compute or parameter.dtype, device=place)
        self.whole = nn.Parameter(memory, parameter.requires_grad)
        self.free()

    def padded_shard(self, dtype=None):
        """Return the shard for a message: flat, padded with zeros; in the compute type, or dtype.
        """
        padded = self.whole.new_zeros(self.numbers, dtype=dtype)
        padded[: self.shard.numel()] = self.shard.detach().flatten().to(padded, non_blocking=True)
        return padded

    def fill(self, parts):
        """Fill the whole parameter, and let the modules use it.

        Shape: parts (R, numbers): the padded shard of each rank.
        """
        memory = self.whole.data  # hidden from autograd, for which the numbers have not changed
        memory.untyped_storage().resize_(memory.nbytes)
        memory.copy_(parts.flatten()[: memory.numel()].view(self.shape))
        self.install(self.whole)

    def free(self):
        """Free the memory of `whole`, and let the modules use the shard."""
        self.whole.untyped_storage().resize_(0)
        self.install(self.shard)

    def install(self, tensor):
        for module, attribute in self.places:
            module._parameters[attribute] = tensor

    def padded_gradient(self):
        """Return the whole gradient for a message: a row for each rank.

        A missing gradient is sent as -0.0, because a sum is -0.0 only if all ranks send -0.0, and
        0.0 as soon as one rank sends 0.0.
        Shape: (R, numbers).
        """
        padded = self.whole.new_zeros(self.ranks * self.numbers, dtype=self.reduce_in)
        self.is_used = self.whole.grad is not None
        if self.is_used:
            padded[: self.whole.numel()] = self.whole.grad.flatten()
        else:
            padded.fill_(-0.0)
        return padded.view(self.ranks, self.numbers)

    def add_gradient(self, part):
        """Add `part`, a received gradient, to the optimizer's gradient.

        A parameter that no rank has used gets none, because with zeros AdamW would decay it. (This
        test of the numbers waits for the device.)
        Shape: part (numbers,).
        """
        gradient = part[: self.shard.numel()].view(self.shard.shape).to(self.shard)
        if not self.is_used and torch.all((gradient == 0) & gradient.signbit()):
            return
        self.shard.grad = gradient if self.shard.grad is None else self.shard.grad + gradient


class BlockHooks(UnitHooks):
    """Call the methods of stage 3 for each ShardedModule of a model."""

    enter, leave = ZeroStage3.enter, ZeroStage3.leave
    backward_of, backward_done = ZeroStage3.backward_of, ZeroStage3.backward_done


class ShardedModule(Shards):
    """Shard the module's parameters, except those of modules inside that are already sharded.

    So shard the blocks of a model first, and then the model: it is their root.

    A subclass defines how parameters are sent, in begin_unshard(), which starts to fill
    self.gathered, unshard() and reduce_gradients(). Afterwards make any torch optimizer over
    module.parameters(). All ranks must start with the same weights: they are not sent. All ranks
    must use the same blocks in the same order.

    group: the ranks that share the rows; None: all
    replicas: the ranks with the same shard as this one, in hybrid sharding; None: no other
    precision: the types for computing and reducing; the shards keep the type of the parameters
    reshard_after_forward: if False, the block stays whole until the end of backward: more memory,
        one gather less. A root stays whole in any case
    offload: keep shards, gradients and optimizer in the CPU's memory
    Raises: ValueError for parameters without dimension, of several types, or shared with
        another block
    """

    def __init__(self, module, group=None, replicas=None, precision=Precision(),
                 reshard_after_forward=True, offload=False):  # fmt: skip
        self.parameters = [
            ShardedParameter(parameter, places, group, precision, offload)
            for parameter, places in places_of(module).items()]
        self.trained = [p for p in self.parameters if p.shard.requires_grad]
        self.group, self.replicas = group, replicas
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.compute, self.gathered = precision.compute, None
        module.register_forward_pre_hook(self.cast, with_kwargs=True)
        self.unit = Unit(module, [self], reshard_after_forward)
        BlockHooks().watch([*(inside.unit for inside in sharded_modules(module)), self.unit])
        module.fully_sharded = self

    def cast(self, module, inputs, kwargs):
        """Cast the module's floating-point inputs to the compute type."""
        def cast(x):
            return x.to(self.compute) if torch.is_tensor(x) and x.is_floating_point() else x
        return tree_map(cast, (inputs, kwargs)) if self.compute else None

    def free(self):
        """Free the whole parameters, so that the modules hold only this rank's rows."""
        for parameter in self.parameters:
            parameter.free()

    def has_gradients(self):
        return any(p.whole.grad is not None for p in self.trained)

    def add_gradients(self, gradient):
        """Add the reduced `gradient` to the shards' gradients, averaged over replicas."""
        if self.replicas is not None:  # the other copies of this shard have seen other data
            gradient /= dist.get_world_size(self.replicas)
            dist.all_reduce(gradient, group=self.replicas)
        for parameter, part in zip(self.trained, gradient.split([p.numbers for p in self.trained])):
            parameter.add_gradient(part)

    def drop_gradients(self):
        for parameter in self.parameters:
            parameter.whole.grad = parameter.shard.grad = None

    def no_sync(self):
        """Accumulate whole gradients in the block, without sending; for a root."""
        return no_sync(self.unit.hooks)


def sharded_modules(module):
    """List the ShardedModules inside `module`, in order."""
    return [inside.fully_sharded for inside in module.modules() if hasattr(inside, "fully_sharded")]


def sharded_parameters(module):
    """Return {shard: its ShardedParameter} of all blocks inside `module`."""
    return {p.shard: p for block in sharded_modules(module) for p in block.parameters}


def places_of(module):
    """Return {parameter: [(module, attribute)]} of `module`, without those of sharded blocks in it.

    Raises: ValueError, see ShardedModule.
    """
    shards, places = sharded_parameters(module), {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None or parameter in shards:
                continue
            name = f"{path}.{attribute}".lstrip(".")
            if hasattr(parameter, "is_sharded"):
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
