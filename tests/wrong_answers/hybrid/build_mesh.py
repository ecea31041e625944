"""Lab 12: what goes wrong when the groups of a mesh are made."""

import torch.distributed as dist
from mutants import mutant

from ranklab.mesh import Mesh, build_mesh

ALL = "        for ranks in mesh.all_along(names):\n"
MINE = "groups[mesh.ranks_along(names)]"
NAMES = "[mesh._known(each) for each in (*mesh.axes, *joined)]"
NEW = "dist.new_group(list(ranks))"
CHECK = "mesh.size != dist.get_world_size()"

WRONG = [
    mutant(build_mesh, ALL, "        for ranks in [mesh.ranks_along(names)]:\n",
           says="All ranks call new_group for all groups", called="members_only"),
    mutant(build_mesh, NAMES, NAMES.replace("[", "{", 1).replace("]", "}"), called="from_a_set",
           says="All ranks call new_group for all groups"),
    mutant(build_mesh, ALL, ALL.replace("mesh.all_along(names)", "sorted(mesh.all_along(names), key"
           "=lambda ranks: dist.get_rank() not in ranks)"), called="mine_first",
           says="All ranks call new_group for all groups"),
    mutant(build_mesh, CHECK, "False", says="no ValueError.*Compare mesh.size"),
    mutant(build_mesh, CHECK, "mesh.size > dist.get_world_size()", says="no ValueError",
           called="too_few_are_accepted"),
    mutant(build_mesh, f" {NAMES}", " [mesh._known(each) for each in mesh.axes]",
           says="also for one axis and for joined", called="joined_is_ignored"),
    mutant(build_mesh, NAMES, "[*((axis,) for axis in mesh.axes), *joined]",
           says="in the order of the mesh's axes"),
    mutant(build_mesh, NAMES, "[*mesh.axes, *(mesh._known(each) for each in joined)]",
           says="tuples of names in the order", called="a_name_is_the_key"),
    mutant(build_mesh, MINE, "groups[ranks]", says="and keep your own", called="keeps_the_last"),
    mutant(build_mesh, "return mesh", "return mesh.groups", says="return that mesh|mesh = Mesh"),
    mutant(build_mesh, "return mesh", "return Mesh(dict(reversed(axes.items())), mesh.groups)",
           says="mesh has the axes|no group along", called="axes_turned_round", Mesh=Mesh),
    mutant(build_mesh, NAMES, "[mesh._known(each) for each in (*mesh.axes, tuple(mesh.axes))]",
           says="also for one axis and for joined", called="all_axes_joined"),
    mutant(build_mesh, "mesh.size != dist", "len(axes) != dist", says="the product of all sizes"),
]


def build_mesh__first_axis_fastest(axes, joined=()):
    """The last axis varies fastest"""
    mesh, turned = Mesh(axes), Mesh(dict(reversed(axes.items())))
    if mesh.size != dist.get_world_size():
        raise ValueError(f"{mesh.size} is not {dist.get_world_size()}")
    for names in [mesh._known(each) for each in (*axes, *joined)]:
        for ranks in turned.all_along(names):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mesh.groups[names] = group
    return mesh


def build_mesh__another_order_on_odd_ranks(axes, joined=()):
    """All ranks call new_group for all groups"""
    mesh = Mesh(axes)
    if mesh.size != dist.get_world_size():
        raise ValueError(f"{mesh.size} is not {dist.get_world_size()}")
    rank = dist.get_rank()
    order = [(names, ranks) for names in (*axes, *joined) for ranks in mesh.all_along(names)]
    for names, ranks in order[rank % 2 :] + order[: rank % 2]:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mesh.groups[mesh._known(names)] = group
    return mesh
