"""3D parallelism: data, tensor and pipeline parallelism on one model, over one mesh.

    layout.py       Layout: how many ranks along each axis, and what else
    parallelize.py  parallelize: all of it on a model, in order
    training.py     Hybrid: the training loop's view

Nothing of labs 03 to 09 is written again here.
"""

from ranklab.hybrid.layout import Layout, parse_layout
from ranklab.hybrid.parallelize import parallelize
from ranklab.hybrid.training import Hybrid
from ranklab.parallel import mesh_grad_norm

__all__ = ["Hybrid", "Layout", "mesh_grad_norm", "parallelize", "parse_layout"]
