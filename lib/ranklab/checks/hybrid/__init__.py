"""The exercises and predictions of lab 12, in the order of the lab."""

from ranklab import checkpoint
from ranklab.checks.exercise import Exercise
from ranklab.checks.hybrid.build_mesh import check_build_mesh
from ranklab.checks.hybrid.choose_layout import LAYOUT
from ranklab.checks.hybrid.gradients import check_tied_embedding_sync
from ranklab.checks.hybrid.mesh_grad_norm import MESH_NORM
from ranklab.checks.hybrid.parallelize import check_parallelize
from ranklab.checks.hybrid.predictions import PREDICTIONS
from ranklab.checks.hybrid.reshard_checkpoint import check_reshard_checkpoint
from ranklab.hybrid import parallelize
from ranklab.mesh import build_mesh
from ranklab.pipeline_parallel import tied_embedding_sync

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(build_mesh, check_build_mesh, hints=(
        "Which groups does rank 0 have to make, and which ones does it keep?",
        "All ranks make all groups of all axes in one order, because new_group is a collective. "
        "A rank keeps the group that it is in.",
        "for ranks in mesh.all_along(names): group = dist.new_group(list(ranks)); if dist.get_rank("
        ") in ranks: mesh.groups[names] = group; names is (axis,) for each axis, then each joined "
        "one, in the order of mesh.axes: tuple(a for a in mesh.axes if a in names).",
    )),
    Exercise(parallelize, check_parallelize, hints=(
        "Which kind of parallelism needs to see what the others have left?",
        "Two calls hold on to what they find: one to layers, one to parameters. Calls that replace "
        "layers or parameters come before these two. And give memory once nothing is dropped any "
        "more.",
        "hybrid.pipeline.keep_stages(model); parallel_gpt(model, TPConfig(hybrid.tensor.group, "
        "layout.sequence_parallel)); hybrid.materialize(model); with layout.recompute "
        "checkpoint_blocks(model, ...); hybrid.pipeline.make_stages(model); "
        "hybrid.data.apply(model)",
    )),
    Exercise(tied_embedding_sync, check_tied_embedding_sync, hints=(
        "Each of the two ranks has a part of the gradient. What does the other rank need?",
        "Send your own gradient, receive the other one into an empty tensor, wait for both, add.",
        "dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, group=group, group_peer=other), "
        "dist.P2POp(dist.irecv, theirs, group=group, group_peer=other)]); wait; mine + theirs",
    )),
    MESH_NORM,
    Exercise(checkpoint.reshard_checkpoint, check_reshard_checkpoint, hints=(
        "A piece is at 3 to 6 of the whole, and a box at 0 to 4. Which numbers do they share?",
        "In each dim they share everything from the larger offset to the smaller end. Subtract the "
        "piece's offset for a slice of the piece, and the box's offset for a slice of the box.",
        "starts = [max(a, b) ...]; stops = [min(a + n, b + m) ...]; piece.tensor[slices of start - "
        "a to stop - a].copy_(box[slices of start - b to stop - b]), after all were counted",
    )),
    LAYOUT,
)
