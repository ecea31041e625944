"""The check of build_mesh: real ranks make the groups of several meshes, and talk in each."""

import zlib
from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import expect, on_groups
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.checks.trial import refusal
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
ORDER = ("All ranks call new_group for all groups of all axes in one order, also for groups that "
         "they are not in. Loop over mesh.all_along(axis), and keep your own.")
KEYS = ("The keys of mesh.groups are tuples of names in the order of the mesh's axes, also for one "
        "axis and for joined=[(\"tensor\", \"data\")]: tuple(a for a in mesh.axes if a in names).")
FAILURES = {"hang: .*new_group.*": ORDER, LEFT: ORDER, MISMATCH: ORDER,
            "hang: all_reduce(, all_reduce)*": f"{ORDER} A set() has another order on each rank.",
            ".*no group along.*": KEYS,
            "ValueError: .*but the job has.*": "Compare the product of all sizes.",
            "AttributeError: .* has no attribute '(axes|groups?)'":
                "Fill mesh.groups of mesh = Mesh(axes), and return that mesh."}


class Name(str):
    """The name of an axis. Sets of names have another order on each rank, as under torchrun."""

    def __hash__(self):
        return zlib.crc32(f"{dist.get_rank()} {self}".encode())


def _trial(build_mesh, ranks, meshes):
    for axes, joined in meshes:
        right = Mesh({Name(axis): size for axis, size in axes.items()})
        turned, given = Mesh(dict(reversed(right.axes.items()))), dict(right.axes)
        joined = [tuple(map(Name, names)) for names in joined]
        mesh, where = build_mesh(given, joined), f"{axes}, {ranks}"
        given.clear()
        yield partial(expect, [*mesh.axes.items()] == [*right.axes.items()], f"{where}: the mesh "
                      f"has the axes {mesh.axes}", "Mesh(axes) keeps a copy.")
        for names in (*right.axes, *joined):
            yield _talks(f"{where}: along {names}", mesh.group(names), right.ranks_along(names),
                         turned.ranks_along(names))
    for axes in WRONG_SIZES if ranks.size == 4 else ():
        said = refusal(build_mesh, axes)
        yield partial(expect, str(Mesh(axes).size) in said and "4" in said, f"{axes} on 4 ranks: "
                      f"{said}", "Compare mesh.size with dist.get_world_size() first; say both "
                      "numbers.")


def _talks(where, group, wanted, turned):
    """Sums over this rank's group; returns a test of its ranks and of the sum."""
    is_in = group is not dist.GroupMember.NON_GROUP_MEMBER
    ranks = tuple(dist.get_process_group_ranks(group)) if is_in else ()
    total = torch.tensor([2.0 ** dist.get_rank()], device=device())
    if ranks == wanted:  # in a wrong group nobody may answer
        dist.all_reduce(total, group=group)
    return partial(_look, where, ranks, total.item(), wanted, turned)


def _look(where, ranks, total, wanted, turned):
    expect(ranks == wanted, f"{where} are the ranks {ranks}, not {wanted}", "The last axis varies "
           "fastest: its ranks are neighbours." if ranks == turned else ORDER)
    expect(total == sum(2**rank for rank in wanted), f"{where}: a sum is not that of {wanted}",
           ORDER)


def check_build_mesh(build_mesh):
    for ranks, meshes in MESHES.items():
        on_groups(_trial, build_mesh, meshes, failures=FAILURES, ranks=ranks,
                  groupings=[(tuple(range(ranks)),)])
    yield "each axis, and axes that are joined, have groups of the right ranks: on 1, 4, 6, 8 ranks"
    yield "messages reach all of a group, and nobody else"
    yield "sizes that do not multiply to the number of ranks are a ValueError with both numbers"
