"""A parameter in rows: each rank keeps some of them, and all are there only while they are used."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.engine import device


def rows_of(n, ranks, rank):
    """(first, last + 1) of n rows: the chunk of this rank, as torch.chunk cuts them."""
    each = -(-n // ranks)
    return min(n, rank * each), min(n, (rank + 1) * each)


def shard_parameter(parameter, group=None):
    """This rank's rows of `parameter`, copied: the parameter can be freed.

    Each rank has ceil(n/R) rows; the last ones may have fewer, or none. So a rank can tell which
    rows another one has, without asking. The copy has memory for its rows only.
    shape  (n, ...) -> (rows, ...)
    cost   sends nothing
    error  ValueError for a parameter without a dimension: it has no rows
    lab    07
    """
    if parameter.dim() == 0:
        raise ValueError("a parameter of shape () has no rows: give it the shape (1,)")
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    each = -(-len(parameter) // R)  # rounded up, as torch.chunk cuts
    first, stop = rank * each, (rank + 1) * each  # the last ones may lie beyond the end
    return parameter.detach()[first:stop].clone()


class Precision(NamedTuple):
    """Types of numbers; None: that of the parameters."""

    compute: torch.dtype | None = None  # of gathered parameters, and of what is fed to the module
    reduce: torch.dtype | None = None  # of gradients on their way; None: as computed


class ShardedParameter:
    """A parameter of which this rank keeps `shard`; `whole` has memory only while it is gathered.

    Either of the two stands in the modules in its place: the shard, which the optimizer steps, or
    the whole, with which is computed. Between ranks the rows travel with zeros at the end, so that
    all ranks send alike: `numbers` of each.
    """

    def __init__(self, parameter, places, group, precision, offload=False):
        self.places = places  # [(module, attribute)]: more than one where it is tied
        self.shape, self.ranks = parameter.shape, dist.get_world_size(group)
        self.first, _ = rows_of(len(parameter), self.ranks, dist.get_rank(group))
        self.numbers = -(-len(parameter) // self.ranks) * self.shape[1:].numel()
        on = device() if parameter.is_meta else parameter.device
        self.reduce_in = precision.reduce or precision.compute or parameter.dtype
        rows = shard_parameter(parameter, group)
        if parameter.is_meta:  # NaN until fill_shards: what was forgotten is seen
            rows = torch.full_like(rows, torch.nan, device=on)
        if offload and on.type != "cpu":
            rows = rows.cpu().pin_memory()
        self.shard = nn.Parameter(rows, parameter.requires_grad)
        self.shard.shard_spec = getattr(parameter, "shard_spec", None)  # of lab 08
        # A block that finds either of them in another place must not shard it again.
        self.shard.of_block = parameter.of_block = True
        empty = torch.empty(self.shape, dtype=precision.compute or parameter.dtype, device=on)
        self.whole = nn.Parameter(empty, parameter.requires_grad)
        self.free()

    def padded_shard(self, dtype=None):
        """The shard as it travels: flat, zeros at the end; in the type of computing, or dtype."""
        padded = self.whole.new_zeros(self.numbers, dtype=dtype)
        padded[: self.shard.numel()] = self.shard.detach().flatten().to(padded, non_blocking=True)
        return padded

    def fill(self, parts):
        """The whole is there, in the modules, too.
        shape  parts (R, numbers): the padded shard of each rank
        """
        memory = self.whole.data  # autograd need not know: for it these are the old numbers
        memory.untyped_storage().resize_(memory.nbytes)
        memory.copy_(parts.flatten()[: memory.numel()].view(self.shape))
        self.install(self.whole)

    def free(self):
        """The whole takes no memory, and the modules have the shard."""
        self.whole.untyped_storage().resize_(0)
        self.install(self.shard)

    def install(self, tensor):
        for module, attribute in self.places:
            module._parameters[attribute] = tensor

    def padded_gradient(self):
        """The whole gradient as it travels: a row for each rank. Where there is none, zeros with a
        minus: a sum is -0.0 where all ranks send that, and 0.0 as soon as one of them sends 0.0.
        shape  (R, numbers)
        """
        padded = self.whole.new_zeros(self.ranks * self.numbers, dtype=self.reduce_in)
        self.is_used = self.whole.grad is not None
        if self.is_used:
            padded[: self.whole.numel()] = self.whole.grad.flatten()
        else:
            padded.fill_(-0.0)
        return padded.view(self.ranks, self.numbers)

    def add_gradient(self, mine):
        """The optimizer's gradient has what arrived added to it. What no rank has used gets none:
        by zeros AdamW would let it decay. (To look at them is to wait for the device.)
        shape  mine (numbers,)
        """
        gradient = mine[: self.shard.numel()].view(self.shard.shape).to(self.shard)
        if not self.is_used and torch.all((gradient == 0) & gradient.signbit()):
            return
        self.shard.grad = gradient if self.shard.grad is None else self.shard.grad + gradient
