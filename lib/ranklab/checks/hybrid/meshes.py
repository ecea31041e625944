"""The check of build_mesh: real ranks make the groups of several meshes, and talk in each of them."""

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import hinted, on_ranks, rank_name
from ranklab.engine import device
from ranklab.mesh import Mesh

MESHES = {  # ranks: [(axes, joined)]
    1: [({"data": 1, "tensor": 1}, [("data", "tensor")])],
    4: [({"data": 2, "tensor": 2}, ()), ({"pipeline": 2, "data": 1, "tensor": 2}, ()),
        ({"pipeline": 1, "data": 4, "tensor": 1}, [("pipeline", "data"), ("data", "tensor")])],
    6: [({"data": 3, "tensor": 2}, [("data", "tensor")])],
    8: [({"pipeline": 2, "data": 2, "tensor": 2}, [("tensor", "pipeline"), ("data", "tensor")])],
}
ORDER = ("All ranks call new_group for all groups of all axes, in one order, also for groups "
         "that they are not in: loop over mesh.all_along(axis), and keep your own.")
KEYS = ("The keys of mesh.groups are tuples of names in the order of the mesh's axes, also for one "
        "axis and for joined=[(\"tensor\", \"data\")]: mesh._known(names) gives that tuple.")
SIZES = ("Compare mesh.size with dist.get_world_size(), before any group is made; say both "
         "numbers in the sentence.")


def _trial(build_mesh, meshes):
    """[(axes of the mesh, groups in the order in which they were made, {names: ranks of mine},
    names along which messages went astray)]
    """
    found = []
    for axes, joined in meshes:
        given, made = dict(axes), []
        real = dist.new_group
        dist.new_group = lambda ranks=None, *more, **options: (
            options.get("use_local_synchronization") or made.append(tuple(ranks or ())),
            real(ranks, *more, **options))[1]  # fmt: skip
        try:
            mesh = build_mesh(given, joined)
        finally:
            dist.new_group = real
        given.clear()
        if not isinstance(mesh, Mesh):
            raise TypeError(f"a {type(mesh).__name__} is returned, no Mesh")
        mine = {names: _ranks_of(mesh.group(names)) for names in (*axes, *joined)}
        found.append((list(mesh.axes.items()), made, mine, _astray(mesh, Mesh(axes), mine)))
    return found


def _ranks_of(group):
    is_mine = group is not dist.GroupMember.NON_GROUP_MEMBER
    return tuple(dist.get_process_group_ranks(group)) if is_mine else None


def _astray(mesh, right, mine):
    """The names of groups whose sum over its ranks is wrong; nobody sends where a group is."""
    is_right = all(right.ranks_along(names) == ranks for names, ranks in mine.items())
    agreed = torch.tensor([is_right], dtype=torch.int32, device=device())
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    astray = []
    for names, ranks in mine.items() if agreed.item() else ():
        x = torch.tensor([2.0 ** dist.get_rank()], device=device())
        dist.all_reduce(x, group=mesh.group(names))
        astray += [names] if x.item() != sum(2**rank for rank in ranks) else []
    return astray


def check_build_mesh(build_mesh):
    hints = {"does not end": ORDER, "the mesh has no group along": KEYS, "killed": ORDER,
             "no Mesh": "Fill mesh.groups of Mesh(axes), and return that mesh.",
             "onnect": ORDER, "but the job has": "The product of all sizes counts."}
    for ranks, meshes in MESHES.items():
        with hinted(hints):
            seen = on_ranks(_trial, build_mesh, meshes, ranks=ranks)
        for i, (axes, joined) in enumerate(meshes):
            sizes = " x ".join(f"{name} {size}" for name, size in axes.items())
            for rank, found in enumerate(of_rank[i] for of_rank in seen):
                where = f"{sizes}, {rank_name(rank, ranks)}"
                _look(where, Mesh(axes), rank, seen[0][i][1], *found)
    yield "each axis, and axes that are joined, have groups of the right ranks: on 1, 4, 6, 8 ranks"
    yield "all ranks make all groups in one order, and messages reach the whole group"
    wrong = {"data": 3}, {"data": 2, "tensor": 4}, {"data": 1}
    for said in on_ranks(_refusals, build_mesh, wrong, ranks=4):
        for axes, text in zip(wrong, said):
            if not text or str(Mesh(axes).size) not in text or "4" not in text:
                raise Mistake(f"{axes} on 4 ranks: {text or 'no ValueError'}", SIZES)
    yield "sizes that do not multiply to the number of ranks are a ValueError with both numbers"


def _refusals(build_mesh, wrong):
    said = []
    for axes in wrong:
        try:
            said.append(build_mesh(axes) and "")
        except ValueError as error:
            said.append(str(error))
    return said


def _look(where, right, rank, order, axes, made, mine, astray):
    if axes != list(right.axes.items()):
        raise Mistake(f"{where}: the mesh has the axes {dict(axes)}", "Mesh(axes) keeps a copy.")
    for names, got in mine.items():
        wanted = right.ranks_along(names, rank)
        if got != wanted:
            mirrored = Mesh(dict(reversed(right.axes.items()))).ranks_along(names, rank)
            whose = "a group that it is not in" if got is None or rank not in got else got
            raise Mistake(f"{where}: the group along {names} is {whose}, not {wanted}",
                          "The last axis varies fastest: its ranks are neighbours."
                          if got == mirrored else "A rank's own group along an axis has the ranks "
                          "that differ from it in that place alone, mesh.ranks_along(axis): of all "
                          "groups that are made, keep that one.")
    if made != order:
        raise Mistake(f"{where} calls new_group for {made}, and rank 0 for {order}", ORDER)
    if astray:
        raise Mistake(f"{where}: a sum along {astray[0]} is not that of its ranks", ORDER)
