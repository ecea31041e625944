"""Every figure of the course, and the only folder that imports matplotlib.

There is one file per lab, and style.py, gantt.py and boxes.py for shared code. Each function takes
plain data and returns a figure; nothing is drawn at import.
"""

HEAVY = True  # matplotlib would make each fork of the engine slower
__all__ = [
    "baseline", "clinic", "cluster", "cluster_links", "collectives", "context_parallel",
    "data_parallel", "ddp", "expert_parallel", "fsdp", "horovod", "hybrid", "mesh",
    "pipeline_parallel", "planner", "ranks", "resilience", "tensor_parallel", "zero",
]
