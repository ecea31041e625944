"""The check of build_mesh: real ranks make the groups of several meshes, and use each."""

import math
import re
import zlib
from contextlib import ExitStack
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.mesh import Mesh, build_mesh


class Name(str):
    """The name of an axis. Sets of names have a different order on each rank, as under torchrun."""

    def __hash__(self):
        return zlib.crc32(f"{dist.get_rank()} {self}".encode())


class Axes(NamedTuple):
    """Sizes of axes, for a given number of ranks."""

    ranks: int
    sizes: dict
    joined: tuple = ()

    def __str__(self):
        joined = ", ".join(map(" and ".join, self.joined))
        return " x ".join(map("{0[0]} {0[1]}".format, self.sizes.items())) + (
            f", joined: {joined}" * bool(joined))

    @property
    def arguments(self):
        """Return (axes, joined), new in each call."""
        return ({Name(axis): size for axis, size in self.sizes.items()},
                [tuple(map(Name, names)) for names in self.joined])

    @property
    def keys(self):
        """Return the keys of mesh.groups."""
        return [tuple(axis for axis in self.sizes if axis in names)
                for names in (*((axis,) for axis in self.sizes), *self.joined)]


MESHES = (
    Axes(4, {"data": 2, "tensor": 2}), Axes(4, {"pipeline": 2, "data": 1, "tensor": 2}),
    Axes(4, {"pipeline": 1, "data": 4, "tensor": 1}, (("pipeline", "data"), ("tensor", "data"))),
    Axes(6, {"data": 3, "tensor": 2}, (("data", "tensor"),)),
    Axes(8, {"pipeline": 2, "data": 2, "tensor": 2}, (("tensor", "pipeline"), ("data", "tensor"))),
    Axes(1, {"data": 1, "tensor": 1}, (("data", "tensor"),)))
WRONG_SIZES = Axes(4, {"data": 3}), Axes(4, {"data": 2, "tensor": 4}), Axes(4, {"data": 1})
RETURNS, AXES, REFUSED = "what it returns", "the axes", "ValueErrors"
LACKS, ORDER = "groups that it does not make", "whether it makes them in another order"
MISSING = "missing"


def _along(names):
    return f"the ranks along {' and '.join(names)}"


def _sum_along(names):
    return f"the sum along {' and '.join(names)}"


def _see(fn, case, ranks):
    """Rehearse first, then look. Ranks that make different groups, or in a different order, would
    wait for each other.
    """
    if case.ranks != ranks.size:
        return
    calls, _ = _rehearsed(fn, case)
    of_all = [None] * ranks.size
    dist.all_gather_object(of_all, calls)
    yield _compared(calls, of_all)
    if any(of_rank != calls for of_rank in of_all):
        return
    try:
        mesh, refused = fn(*case.arguments), ""
    except ValueError as error:
        mesh, refused = None, str(error).replace("{", "{{").replace("}", "}}")
    members = {names: _members(mesh, names) for names in case.keys}
    axes = getattr(mesh, "axes", {})
    yield {REFUSED: AtMost(int(bool(refused)), 0, f"it raises a ValueError: {refused}"),
           RETURNS: Must(type(mesh).__name__, "Mesh"),
           AXES: " x ".join(f"{axis} {size}" for axis, size in axes.items())
           } | {_along(names): members[names] for names in case.keys} | {
           _sum_along(names): _sum(mesh, case, names, members[names]) for names in case.keys}


def _rehearsed(fn, case):
    """Return (the groups that it would make, in order; the error that it raised).

    No group is made. Those made only by their members, use_local_synchronization, are left out.
    """
    calls = []

    def new_group(ranks=None, *args, use_local_synchronization=False, **kwargs):
        ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        calls.extend([ranks] * (not use_local_synchronization))
        is_member = dist.get_rank() in ranks
        return dist.group.WORLD if is_member else dist.GroupMember.NON_GROUP_MEMBER

    with ExitStack() as patches:
        for module in (dist, distributed_c10d):
            patches.enter_context(mock.patch.object(module, "new_group", new_group))
        try:
            fn(*case.arguments)
        except Exception as error:
            return calls, error
    return calls, None


def _compared(calls, of_all):
    lacks = [ranks for ranks in dict.fromkeys(sum(of_all, [])) if ranks not in calls]
    is_apart = not lacks and calls != of_all[0]
    return {LACKS: AtMost(len(lacks), 0, f"it makes no groups of the ranks {lacks}; other ranks "
                          "do, and wait"),
            ORDER: AtMost(int(is_apart), 0, f"it makes the groups {calls}; the order of rank 0 is "
                          f"{of_all[0]}")}


def _members(mesh, names):
    group = _group(mesh, names)
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)
    if group == MISSING:
        return f"not there: the keys of mesh.groups are {[*getattr(mesh, 'groups', {})]}"
    return "those of a group without this rank" if (
        group == dist.GroupMember.NON_GROUP_MEMBER) else f"a {type(group).__name__}"


def _group(mesh, names):
    return getattr(mesh, "groups", {}).get(tuple(map(Name, names)), MISSING)


def _sum(mesh, case, names, members):
    """Sum over this rank's group, if all ranks have the right one: otherwise nobody may answer."""
    is_wrong = torch.tensor(float(members != [*Mesh(case.sizes).ranks_along(names)]),
                            device=device())
    dist.all_reduce(is_wrong)
    if is_wrong:
        return None
    total = torch.tensor([2.0 ** dist.get_rank()], device=device())
    dist.all_reduce(total, group=_group(mesh, names))
    return total


def _see_refusal(fn, case, ranks):
    _, error = _rehearsed(fn, case)
    numbers = {*map(int, re.findall(r"\d+", str(error)))}
    missing = {math.prod(case.sizes.values()), case.ranks} - numbers if error else ()
    yield {"what it raises": Must(type(error).__name__ if error else "nothing", "ValueError"),
           "numbers that the error does not mention": Must(sorted(missing), [])}


def by_reshaping(axes, joined=()):
    """Cut a tensor of all ranks into rows, each of which is a group."""
    mesh, names = Mesh(axes), [*axes]
    if mesh.size != dist.get_world_size():
        raise ValueError(f"{mesh.size} is not {dist.get_world_size()}")
    for each in [*((name,) for name in names), *joined]:
        dims = sorted(names.index(name) for name in each)
        ranks = torch.arange(mesh.size).view(*axes.values()).movedim(dims, [*range(-len(dims), 0)])
        rows = ranks.reshape(-1, math.prod(axes[names[dim]] for dim in dims)).tolist()
        mesh.groups[tuple(names[dim] for dim in dims)], _ = dist.new_subgroups_by_enumeration(rows)
    return mesh


# --- mistakes -------------------------------------------------------------------------------------

ALL = "for ranks in mesh.all_along(names):"
OWN, KEY = "mesh.ranks_along(names)", "mesh.groups[names]"
NAMES = "[mesh._known(each) for each in (*mesh.axes, *joined)]"
CHECK = "if mesh.size != dist.get_world_size():"
ERROR = '"{sizes} = {mesh.size} ranks, but the job has {dist.get_world_size()}"'
MESH, RETURN, NEW = "mesh = Mesh(axes)", "return mesh", "if ranks not in groups:"
OTHERS = "tuple(a for a in mesh.axes if a not in names)"


SUMS = tuple({_sum_along(names): None for mesh in MESHES for names in mesh.keys})
BUILD_MESH = Proof(
    build_mesh,
    Stage({"each axis, and axes that are joined, have groups of the right ranks: on 1, 4, 6, 8 "
           "ranks": (),
           "messages reach all ranks of a group, and no others": SUMS},
          _see, MESHES, (4, 6, 8, 1), oracle=by_reshaping),
    Stage("sizes that do not multiply to the number of ranks are a ValueError with both numbers",
          _see_refusal, WRONG_SIZES, (4,), oracle=by_reshaping),
    mistakes=(
        Slip("All ranks must call new_group for all groups, even those that they are not in. Loop "
             "over mesh.all_along(axis), and keep your own.",
             (ALL, "for ranks in [mesh.ranks_along(names)]:")),
        Slip("All ranks must make the groups in the same order: don't loop over a set(), whose "
             "order differs between ranks, and don't put a rank's own groups first.",
             (NAMES, NAMES.replace("[", "{", 1).replace("]", "}")),
             (NAMES, "[*((axis,) for axis in mesh.axes), *{mesh._known(each) for each in joined}]"),
             (ALL, ALL.replace("mesh.all_along(names)", "sorted(mesh.all_along(names), key=lambda "
                               "ranks: dist.get_rank() not in ranks)")),
             (NAMES, f"{NAMES}[::1 - 2 * (dist.get_rank() % 2)]")),
        # which ranks
        Slip("The last axis varies fastest: its ranks are neighbours. mesh.all_along(names) lists "
             "the groups.",
             (ALL, f"turned = Mesh(dict(reversed(axes.items())))\n        {ALL}".replace(
                 "mesh.all", "turned.all"), OWN, "turned.ranks_along(names)")),
        Slip("The ranks of a group differ only along its own axes: mesh.all_along(names).",
             (ALL, f"names, others = {OTHERS}, names\n        {ALL}",
                                        KEY, "mesh.groups[others]")),
        Slip("Keep the group that this rank is in: if dist.get_rank() in ranks.",
             (OWN, "ranks"), (OWN, "mesh.all_along(names)[0]")),
        Slip("An axis of size 1 also has groups, each with one rank.",
             (NEW, "if len(ranks) > 1 and ranks not in groups:", f"groups[{OWN}]",
              f"groups.get({OWN})"),
             (NAMES, NAMES[:-1] + " if each not in axes or axes[each] > 1]")),
        # their keys
        Slip("`joined` also asks for groups: one for each place along the other axes.",
             (NAMES, "[mesh._known(each) for each in mesh.axes]")),
        Slip("`joined` contains tuples of axes: make the groups along each tuple, not along all "
             "axes together.",
             (NAMES, "[mesh._known(each) for each in (*mesh.axes, tuple(mesh.axes))]"),
             (NAMES, "[mesh._known(each) for each in (*mesh.axes, sum(map(tuple, joined), ()))]")),
        Slip("A key lists its names in the order of mesh.axes, whatever their order in `joined`: "
             "tuple(a for a in mesh.axes if a in names).",
             (NAMES, "[*((axis,) for axis in mesh.axes), *joined]"),
             (NAMES, "[*((axis,) for axis in mesh.axes), *(tuple(sorted(each)) for each in "
                     "joined)]")),
        Slip('The keys of mesh.groups are tuples, even for one axis: ("data",).',
             (NAMES, "[*mesh.axes, *(mesh._known(each) for each in joined)]")),
        Slip("The keys of mesh.groups are tuples of names, not of ranks.",
             (KEY, f"mesh.groups[{OWN}]")),
        Slip("A key must be a tuple of names: a list is not hashable.",
             (KEY, "mesh.groups[[*names]]")),
        # the mesh
        Slip("Fill mesh.groups of mesh = Mesh(axes), and return that mesh.",
             (RETURN, "return mesh.groups"), (RETURN, "pass"),
             (RETURN, "return Mesh(axes)"), (RETURN, "return Mesh({}, mesh.groups)")),
        Slip("Keep the axes in the given order, where the last one varies fastest: Mesh(axes).",
             (MESH, "mesh = Mesh(dict(reversed(axes.items())))"),
             (MESH, "mesh = Mesh(dict(sorted(axes.items())))"),
             (RETURN, "return Mesh(dict(reversed(axes.items())), mesh.groups)")),
        # sizes
        Slip("Compare mesh.size with dist.get_world_size() first: if they differ in either "
             "direction, raise ValueError(...).", (CHECK, "if False:"),
             (CHECK, CHECK.replace("!=", ">")), (CHECK, CHECK.replace("!=", "<")),
             (CHECK, "if dist.get_world_size() % mesh.size:"),
             (CHECK, "if mesh.size % dist.get_world_size():")),
        Slip("mesh.size is the product of all sizes: compare that with dist.get_world_size().",
             (CHECK, CHECK.replace("mesh.size", "len(axes)")),
             (CHECK, CHECK.replace("mesh.size", "sum(axes.values())"))),
        Slip("Raise ValueError(...): an assert raises AssertionError, and python -O drops it.",
             (CHECK, "assert mesh.size == dist.get_world_size()\n    if False:")),
        Slip("The error must name both numbers: the product of all sizes, and the number of ranks.",
             (ERROR, '"{sizes} ranks, but the job has {dist.get_world_size()}"'),
             (ERROR, '"{sizes} = {mesh.size} ranks"'), (ERROR, '"the sizes do not fit"')),
    ), hints=(
        "Which groups does rank 0 have to make, and which ones does it keep?",
        "All ranks make all groups of all axes in the same order, because new_group is a "
        "collective. A rank keeps only the groups that it is in.",
        "for ranks in mesh.all_along(names): group = dist.new_group(list(ranks)); if dist.get_rank("
        ") in ranks: mesh.groups[names] = group; names is (axis,) for each axis, then each joined "
        "one, in the order of mesh.axes: tuple(a for a in mesh.axes if a in names).",
    ))
