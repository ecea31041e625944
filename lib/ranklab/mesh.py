"""Mesh: the ranks of a job laid out along named axes; build_mesh makes the groups of every axis.

    mesh = build_mesh({"pipeline": 2, "data": 2, "tensor": 2})    # on every rank
    mesh.coordinates()                  # rank 6 -> {"pipeline": 1, "data": 1, "tensor": 0}
    dist.all_reduce(x, group=mesh.group("tensor"))

The last axis varies fastest, so its ranks are neighbours: put the axis that communicates most last,
and it stays inside a node. `Mesh({...})` needs no running ranks: it only computes their places.
"""

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from ranklab.engine import device
from ranklab.engine.report import count_ranks

SHOWN_COLUMNS = 60  # of the groups in a line of the printed table


@dataclass(frozen=True)
class Mesh:
    """Lay out ranks along named axes. A method's `axes` is a name or a tuple of names.

    Raises: ValueError for a size below 1, and for an axis, a rank or a group that does not exist.
    Lab: 12
    """

    axes: dict  # name -> size; in the order of the layout, the last one varies fastest
    groups: dict = field(default_factory=dict, repr=False, compare=False)  # made by build_mesh

    def __post_init__(self):
        object.__setattr__(self, "axes", dict(self.axes))  # a copy: the caller's may change
        for name, size in self.axes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"axis {name}={size} must be a whole number, 1 or more")

    def __reduce__(self):
        return Mesh, (self.axes,)  # groups belong to one process, and can't be sent elsewhere

    @functools.cached_property
    def ranks(self):
        """The layout as a NumPy array: its shape is the axes' sizes, its entries are the ranks.

        Not a torch tensor: inside a dry run that would have no numbers.
        """
        return np.arange(self.size).reshape(tuple(self.axes.values()))

    @property
    def size(self):
        """The number of ranks."""
        return math.prod(self.axes.values())

    def coordinates(self, rank=None):
        """Return {axis: place along it} of `rank`, by default of this rank."""
        rank = dist.get_rank() if rank is None else rank
        if not 0 <= rank < self.size:
            raise ValueError(f"rank={rank} must be between 0 and {self.size - 1}")
        places = np.unravel_index(rank, self.ranks.shape)
        return dict(zip(self.axes, map(int, places)))

    def rank_at(self, **places):
        """Return the rank at these places: rank_at(pipeline=1, data=1, tensor=0).

        Give a place for every axis.
        """
        if set(places) != set(self.axes):
            raise ValueError(f"a rank has a place on each axis: {', '.join(self.axes)}")
        for name, size in self.axes.items():
            if not 0 <= places[name] < size:
                raise ValueError(f"{name}={places[name]} must be between 0 and {size - 1}")
        return self.ranks[tuple(places[name] for name in self.axes)].item()

    def ranks_along(self, axes, rank=None):
        """Return `rank` and all ranks that differ from it only on `axes`, sorted.

        rank: by default this rank
        """
        axes, places = self._known(axes), self.coordinates(rank)
        line = tuple(slice(None) if name in axes else places[name] for name in self.axes)
        return tuple(self.ranks[line].flatten().tolist())

    def all_along(self, axes):
        """List the groups of all ranks along `axes`: the distinct results of ranks_along."""
        axes = self._known(axes)
        last = [name for name in self.axes if name not in axes] + list(axes)
        lines = self.ranks.transpose([list(self.axes).index(name) for name in last])
        return [tuple(line) for line in
                lines.reshape(-1, math.prod(self.axes[name] for name in axes)).tolist()]

    def group(self, axes):
        """Return the process group in which this rank communicates along `axes`."""
        axes = self._known(axes)
        if axes not in self.groups:
            raise ValueError(f"the mesh has no group along {' and '.join(axes)}: build_mesh makes "
                             f"one for each axis, and for axes together that are in joined=[...]")
        return self.groups[axes]

    def axes_of(self, ranks):
        """Return the axes along which `ranks` form a whole group; () if they do not."""
        places = [self.coordinates(rank) for rank in ranks]
        axes = tuple(name for name in self.axes if len({place[name] for place in places}) > 1)
        return axes if axes and self.ranks_along(axes, ranks[0]) == tuple(sorted(ranks)) else ()

    def axes_inside(self, per_node):
        """Return the axes whose groups stay inside a node.

        Ranks 0 .. per_node-1 are the first node. The other axes cross nodes, so their messages use
        the slow links.
        """
        if per_node < 1:
            raise ValueError(f"per_node={per_node} must be 1 or more")
        return tuple(axis for axis in self.axes if all(
            len({rank // per_node for rank in ranks}) == 1 for ranks in self.all_along(axis)))

    def __str__(self):
        sizes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        width = max(map(len, ("axis", *self.axes)))
        lines = [f"{count_ranks(self.size)}: {sizes}", f"{'axis':{width}}  groups"]
        return "\n".join(lines + [f"{axis:{width}}  {self._groups_line(axis)}"
                                  for axis in self.axes])

    def _groups_line(self, axis):
        groups = [" ".join(map(str, ranks)) if len(ranks) <= 8 else
                  "{} {} {} ... {}".format(*ranks[:3], ranks[-1]) for ranks in self.all_along(axis)]
        texts = groups[:1]
        while len(texts) < len(groups) and len(" | ".join(groups[:len(texts) + 1])) < SHOWN_COLUMNS:
            texts.append(groups[len(texts)])
        rest = len(groups) - len(texts)
        return " | ".join(texts) + (f" | and {rest} more" if rest else "")

    def _known(self, axes):
        """Return `axes` as a tuple in the mesh's order."""
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in axes:
            if name not in self.axes:
                raise ValueError(f"the mesh has no axis {name!r}, only {', '.join(self.axes)}")
        return tuple(name for name in self.axes if name in axes)


def build_mesh(axes, joined=()):
    """Make the Mesh of all ranks of this job, with a process group for each axis.

    Collective: every rank calls it with the same arguments, and makes all groups in the same order.
    joined: tuples of axes that also get a joint group: [("data", "tensor")].
    Raises: ValueError if the product of the sizes is not the number of ranks.
    Lab: 12
    """
    mesh = Mesh(axes)
    if mesh.size != dist.get_world_size():
        sizes = " x ".join(map(str, mesh.axes.values()))
        raise ValueError(f"{sizes} = {mesh.size} ranks, but the job has {dist.get_world_size()}")
    groups = {}  # where an axis has size 1, two sets of axes may have the same ranks: one group
    for names in [mesh._known(each) for each in (*mesh.axes, *joined)]:
        for ranks in mesh.all_along(names):
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(ranks))
        mesh.groups[names] = groups[mesh.ranks_along(names)]
    return mesh


def mesh_grad_norm(held, group=None):
    """Return the norm of the whole model's gradients, each number counted once, on all ranks.

    held: [(gradient, number of ranks in the group that hold these numbers)].
    Returns: a float32 tensor of 0 dims; squares are summed in float64.
    Cost: one all-reduce of 8 bytes.
    Lab: 12
    """
    total = torch.zeros((), dtype=torch.float64, device=device())
    for gradient, copies in held:
        total += gradient.double().square().sum() / copies
    dist.all_reduce(total, group=group)
    return total.sqrt().float()
