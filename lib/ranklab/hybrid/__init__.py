"""3D parallelism: data, tensor and pipeline parallelism on one model, over one mesh.

    layout.py       Layout: how many ranks along each axis, and what else
    parallelize.py  parallelize: all of it on a model, in order
    training.py     Hybrid: the training loop's view

Those three are the idea. Then:
    experts.py      a MoE layer over tensor ranks, and what experts do not go with
    shares.py       which layers, and how many numbers of them, a rank has
    costs.py        layout_traffic, layout_seconds: what a layout costs, by formulas
    memory.py       layout_memory: what it holds; megatron_memory: in Megatron-LM, roughly
    choose.py       choose_layout: the fastest layout that fits
    counted.py      counted_step, dry_run: what a step holds and sends, counted
    torch_hybrid.py, deepspeed_pipeline.py, megatron.py  the same by other tools

Nothing of labs 03 to 11 is written again here.
"""

from ranklab.hybrid.choose import choose_layout
from ranklab.hybrid.costs import Cluster, Job, layout_seconds, layout_traffic
from ranklab.hybrid.layout import Layout, parse_layout
from ranklab.hybrid.memory import layout_memory, megatron_memory
from ranklab.hybrid.parallelize import parallelize
from ranklab.hybrid.training import Hybrid
from ranklab.mesh import mesh_grad_norm

__all__ = [
    "Cluster", "Hybrid", "Job", "Layout", "choose_layout", "layout_memory", "layout_seconds",
    "layout_traffic", "megatron_memory", "mesh_grad_norm", "parallelize", "parse_layout",
]
