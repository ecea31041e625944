"""Which part of a parameter a rank holds, and how to cut it out. Nothing is sent."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.models.initialise import normal_by_name


class ShardSpec(NamedTuple):
    """The part of a parameter that this rank holds: ranges of one dim, one after the other."""

    dim: int
    size: int  # of the whole parameter along dim
    ranges: tuple  # of (start, stop)
    copies: tuple  # for each range: how many ranks hold it

    def whole_shape(self, part):
        """Return the shape of the whole parameter, if this rank's part has the shape `part`."""
        return (*part[: self.dim], self.size, *part[self.dim + 1 :])

    def pieces_of(self, part):
        """List (start of the range in the whole parameter, view of `part`), in order."""
        lengths = [stop - start for start, stop in self.ranges]
        return list(zip([start for start, _ in self.ranges], part.split(lengths, self.dim)))


def even_split(size, dim, group=None, parts=None):
    """Make the ShardSpec with 1/R of `size`, or of each of `parts`, on each rank, in rank order.

    parts: the sizes of several matrices stored as one: a fused q, k, v has three. Cut as one
        matrix, the first rank would hold all of q and nothing of v.
    Raises: ValueError if the number of ranks does not divide each part.
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    ranges, begin = [], 0
    for part in parts or (size,):
        if part % R:
            raise ValueError(f"tp={R} must divide the {part} rows or columns of a matrix")
        length = part // R
        ranges.append((begin + rank * length, begin + (rank + 1) * length))
        begin += part
    if begin != size:
        raise ValueError(f"parts={tuple(parts)} add up to {begin}, but the matrix has {size} rows")
    return ShardSpec(dim, size, tuple(ranges), (1,) * len(ranges))


SPECS = "shard_spec", "expert_spec"  # a parameter may be cut along a dim of each kind: lab 11


def take(parameter, split, spec="shard_spec"):
    """Copy this rank's part into a new parameter, which has its ShardSpec as an attribute."""
    if parameter is None:
        return None
    part = torch.cat([parameter.detach().narrow(split.dim, start, stop - start)
                      for start, stop in split.ranges], split.dim)  # fmt: skip
    part = nn.Parameter(part, parameter.requires_grad)
    for name in SPECS:
        setattr(part, name, getattr(parameter, name, None))
    setattr(part, spec, split)
    return part


def split_parameter(parameter, dim, group=None, parts=None):
    """Copy this rank's 1/R of `parameter` along `dim`, so that the parameter can be freed.

    None stays None, for a layer without bias. See even_split.
    """
    if parameter is not None:
        return take(parameter, even_split(parameter.shape[dim], dim, group, parts))


@torch.no_grad()
def draw_part(parameter, name, std, seed=None):
    """Draw this rank's part of the numbers that a single process would draw with normal_by_name."""
    specs, shape = specs_of(parameter), tuple(parameter.shape)
    if not specs:
        return normal_by_name(parameter, name, std, seed)
    for split in specs:
        shape = split.whole_shape(shape)
    normal_by_name(full := torch.empty(shape), name, std, seed)
    for split in specs:
        full = take(full, split)
    parameter.copy_(full)


def split_of(parameter):
    """Return the parameter's ShardSpec among tensor ranks; None if each holds all of it."""
    return getattr(parameter, "shard_spec", None)


def specs_of(parameter):
    """List the parameter's ShardSpecs: among tensor ranks, and among expert ranks."""
    return [spec for name in SPECS if (spec := getattr(parameter, name, None))]
