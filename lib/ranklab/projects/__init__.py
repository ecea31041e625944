"""The scenario of each lab: `python -m ranklab.projects.<idea>`, also under torchrun.

Read runner.py first: it runs them all. training.py has the code that all training runs share. A
project's own training.py has its settings, its run and its report; labs call `run` and `report`
with the learner's functions.
"""

__all__ = [
    "baseline", "clinic", "clock", "cluster", "collectives", "context_parallel", "data_parallel",
    "ddp", "expert_parallel", "fsdp", "horovod", "hybrid", "pipeline_parallel", "planner", "ranks",
    "resilience", "tensor_parallel", "tour", "zero",
]
