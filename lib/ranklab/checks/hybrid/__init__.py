"""The exercises and predictions of lab 12, in the order of the lab."""

from ranklab.checks.exercise import Exercise
from ranklab.checks.hybrid import meshes
from ranklab.mesh import build_mesh

PREDICTIONS = ()
EXERCISES = (
    Exercise(build_mesh, meshes.check_build_mesh, hints=(
        "Which groups does rank 0 have to make, and which ones does it keep?",
        "All groups of all axes are made by all ranks, in one order: new_group is a collective. "
        "A rank keeps the group that it is in.",
        "for ranks in mesh.all_along(names): group = dist.new_group(list(ranks)); if dist.get_rank("
        ") in ranks: mesh.groups[mesh._known(names)] = group; for each axis, then for joined.",
    )),
)
