"""The check of build_mesh: real ranks make the groups of several meshes, and talk in each."""

import zlib

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import LEFT, MISMATCH, hinted
from ranklab.checks.trial import on_ranks, rank_name
from ranklab.engine import device
from ranklab.mesh import Mesh

MESHES = {  # ranks: [(axes, joined)]
    1: [({"data": 1, "tensor": 1}, [("data", "tensor")])],
    4: [({"data": 2, "tensor": 2}, ()), ({"pipeline": 2, "data": 1, "tensor": 2}, ()),
        ({"pipeline": 1, "data": 4, "tensor": 1}, [("pipeline", "data"), ("data", "tensor")])],
    6: [({"data": 3, "tensor": 2}, [("data", "tensor")])],
    8: [({"pipeline": 2, "data": 2, "tensor": 2}, [("tensor", "pipeline"), ("data", "tensor")])],
}
WRONG_SIZES = {"data": 3}, {"data": 2, "tensor": 4}, {"data": 1}  # on 4 ranks
ORDER = ("All ranks call new_group for all groups of all axes, in one order, also for groups "
         "that they are not in: loop over mesh.all_along(axis), and keep your own.")
KEYS = ("The keys of mesh.groups are tuples of names in the order of the mesh's axes, also for one "
        "axis and for joined=[(\"tensor\", \"data\")]: tuple(a for a in mesh.axes if a in names).")
FAILURES = {"hang: .*new_group.*": ORDER,
            "hang: all_reduce(, all_reduce)*": f"{ORDER} A set has another order on each rank.",
            LEFT: ORDER, MISMATCH: ORDER, ".*no group along.*": KEYS,
            "ValueError: .*but the job has.*": "The product of all sizes counts.",
            "AttributeError: .* has no attribute 'groups?'":
                "Fill mesh.groups of mesh = Mesh(axes), and return that mesh."}



class Name(str):
    """Of an axis. A set has its texts in another order on each rank, as under torchrun."""

    def __hash__(self):
        return zlib.crc32(f"{dist.get_rank()} {self}".encode())


def _trial(build_mesh, meshes):
    """[(sizes of the mesh, {names: (ranks of my group along them, the sum of 2**rank in it)})]"""
    found = []
    for axes, joined in meshes:
        axes = {Name(axis): size for axis, size in axes.items()}
        joined, given = [tuple(map(Name, names)) for names in joined], dict(axes)
        mesh, sums = build_mesh(given, joined), {}
        given.clear()
        for names in (*axes, *joined):
            group = mesh.group(names)
            mine = group is not dist.GroupMember.NON_GROUP_MEMBER
            ranks = tuple(dist.get_process_group_ranks(group)) if mine else ()
            total = torch.tensor([2.0 ** dist.get_rank()], device=device())
            if ranks == Mesh(axes).ranks_along(names):  # in any other one nobody may answer
                dist.all_reduce(total, group=group)
            sums[tuple(map(str, names)) if names in joined else str(names)] = ranks, total.item()
        found.append(([(str(axis), size) for axis, size in mesh.axes.items()], sums))
    return found


def check_build_mesh(build_mesh):
    for ranks, meshes in MESHES.items():
        with hinted(FAILURES):
            seen = on_ranks(_trial, build_mesh, meshes, ranks=ranks)
        for i, (axes, _) in enumerate(meshes):
            for rank, of_rank in enumerate(seen):
                _look(f"{axes}, {rank_name(rank, ranks)}", Mesh(axes), rank, *of_rank[i])
    yield "each axis, and axes that are joined, have groups of the right ranks: on 1, 4, 6, 8 ranks"
    yield "messages reach all of a group, and nobody else"
    for said in on_ranks(_refusals, build_mesh, ranks=4):
        for axes, text in zip(WRONG_SIZES, said):
            if not text or str(Mesh(axes).size) not in text or "4" not in text:
                raise Mistake(f"{axes} on 4 ranks: {text or 'no ValueError'}", "Compare mesh.size "
                              "with dist.get_world_size() first; say both numbers.")
    yield "sizes that do not multiply to the number of ranks are a ValueError with both numbers"


def _refusals(build_mesh):
    said = []
    for axes in WRONG_SIZES:
        try:
            said.append(build_mesh(axes) and "")
        except ValueError as error:
            said.append(str(error))
    return said


def _look(where, right, rank, sizes, sums):
    if sizes != list(right.axes.items()):
        raise Mistake(f"{where}: the mesh has the axes {dict(sizes)}", "Mesh(axes) keeps a copy.")
    turned = Mesh(dict(reversed(right.axes.items())))
    for names, (ranks, total) in sums.items():
        wanted = right.ranks_along(names, rank)
        if ranks != wanted:
            hint = "The last axis varies fastest: its ranks are neighbours."
            raise Mistake(f"{where}: the group along {names} has the ranks {ranks}, not {wanted}",
                          hint if ranks == turned.ranks_along(names, rank) else ORDER)
        if total != sum(2**other for other in wanted):
            raise Mistake(f"{where}: a sum along {names} is not that of {wanted}", ORDER)
