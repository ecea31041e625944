"""PARTS: the functions and classes that Hybrid puts together, by the names of their exercises."""

from dataclasses import replace

from ranklab.data_parallel.gradients import OverlappedDataParallel
from ranklab.hybrid.parallelize import parallelize
from ranklab.mesh import build_mesh, mesh_grad_norm
from ranklab.pipeline_parallel import tied_embedding_sync
from ranklab.pipeline_parallel.schedules import gpipe_schedule, one_f_one_b_schedule
from ranklab.tensor_parallel.attention import parallel_attention
from ranklab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ranklab.tensor_parallel.plan import GPT_PLAN
from ranklab.tensor_parallel.regions import copy_to_region, reduce_from_region
from ranklab.zero.stages import ZeroStage1

PARTS = {each.__name__: each for each in (
    OverlappedDataParallel, ZeroStage1, copy_to_region, reduce_from_region, ColumnParallelLinear,
    RowParallelLinear, parallel_attention, gpipe_schedule, one_f_one_b_schedule, build_mesh,
    parallelize, tied_embedding_sync, mesh_grad_norm)}
TENSOR = {"copy": "copy_to_region", "reduce": "reduce_from_region",  # a field of TPConfig: a part
          "column": "ColumnParallelLinear", "row": "RowParallelLinear",
          "attention": "parallel_attention"}


def plan_with(model, parts):
    """Return the model's plan of tensor parallelism, with a learner's `parts` in each TPConfig."""
    changes = {field: parts[name] for field, name in TENSOR.items()
               if parts[name] is not PARTS[name]}

    def with_changes(style):
        return lambda module, how: style(module, replace(how, **changes))

    return {pattern: with_changes(style)
            for pattern, style in getattr(model, "plan", GPT_PLAN).items()}
