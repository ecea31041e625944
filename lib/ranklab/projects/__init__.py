"""The scenario of each lab: `python -m ranklab.projects.<idea>`, also under torchrun.

Read runner.py first: it runs them all. Then of a project config.py (its options and settings),
training.py and report.py; labs call its `run` and `report` with the learner's functions.
"""

__all__ = [
    "authors", "baseline", "clinic", "clock", "cluster", "collectives", "command",
    "context_parallel", "costs", "data_parallel", "ddp", "expert_parallel", "fsdp", "horovod",
    "hugging_face", "hybrid", "pipeline_parallel", "planner", "ranks", "resilience", "runner",
    "tensor_parallel", "tour", "zero",
]
