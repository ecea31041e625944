"""3D parallelism: data, tensor and pipeline parallelism on one model, over one mesh.

    layout.py       Layout: how many ranks each axis has, and the options
    parallelize.py  parallelize: applies each kind to a model, in order
    training.py     Hybrid: the mesh behind the training loop's interface
    parts.py        PARTS: the functions and classes of labs 03 to 12 that it uses

Those four are the idea. Then:
    experts.py      a MoE layer over tensor ranks, and layouts that can't have experts
    shares.py       which layers a rank has, and how many parameters of them
    costs.py        layout_traffic: what a layout sends, by formulas
    memory.py       layout_memory: what it holds, by formulas
    legal.py        legal: which layouts a job can have; planner/choose.py finds the fastest
    counted.py      counted_step, dry_run: what a step holds and sends, counted
    transfer.py     transfer_weights: from trainers to generators in a different layout, live

Everything from labs 03 to 11 is imported, not rewritten here.
"""

from ranklab.formulas.overlap import cheapest_tensor_parallel
from ranklab.hybrid.costs import Job, layout_traffic
from ranklab.hybrid.counted import counted_step
from ranklab.hybrid.layout import Layout, parse_layout
from ranklab.hybrid.legal import legal
from ranklab.hybrid.memory import layout_memory
from ranklab.hybrid.parallelize import parallelize
from ranklab.hybrid.parts import PARTS
from ranklab.hybrid.training import Hybrid
from ranklab.hybrid.transfer import (
    broadcast_bytes, broadcast_weights, refit_bytes, routes, transfer_bytes,
    transfer_weights,
)
from ranklab.mesh import mesh_grad_norm

__all__ = [
    "Hybrid", "Job", "Layout", "PARTS", "broadcast_bytes", "broadcast_weights",
    "cheapest_tensor_parallel", "counted_step", "layout_memory", "layout_traffic",
    "legal", "mesh_grad_norm", "parallelize", "parse_layout", "refit_bytes", "routes",
    "transfer_bytes", "transfer_weights",
]
