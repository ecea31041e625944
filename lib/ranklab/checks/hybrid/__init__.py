"""The exercises and predictions of lab 12, in the order of the lab."""

from ranklab.checks.hybrid.build_mesh import BUILD_MESH
from ranklab.checks.hybrid.choose_layout import LAYOUT
from ranklab.checks.hybrid.mesh_grad_norm import MESH_NORM
from ranklab.checks.hybrid.parallelize import PARALLELIZE
from ranklab.checks.hybrid.predictions import PREDICTIONS
from ranklab.checks.hybrid.reshard_checkpoint import RESHARD
from ranklab.checks.hybrid.tied_embedding_sync import TIED
from ranklab.checks.hybrid.transfer_weights import TRANSFER

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = BUILD_MESH, PARALLELIZE, TIED, MESH_NORM, RESHARD, LAYOUT, TRANSFER
