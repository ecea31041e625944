"""The same two linears by Megatron-core, after whose layers ours are named."""

import os
import warnings

import torch
import torch.distributed as dist

from ranklab.engine import device
from ranklab.tensor_parallel.split import split_parameter


def parallel_linears(up, down):
    """Megatron-core's column- and row-parallel layers with this rank's parts of two nn.Linear, as
    functions, tensor -> tensor. All ranks are one tensor-parallel group, from the first call on.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else it warns in each forward
    with warnings.catch_warnings():  # Transformer Engine and Apex, its faster kernels, need a GPU
        warnings.simplefilter("ignore")
        from megatron.core import ModelParallelConfig, parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(dist.get_world_size())
        # Weights are made on the CPU, because its random state for GPUs is another story.
        config = ModelParallelConfig(use_cpu_initialization=True, params_dtype=up.weight.dtype,
                                     tensor_model_parallel_size=dist.get_world_size())
        options = {"config": config, "bias": True, "init_method": torch.nn.init.zeros_}
        column = ColumnParallelLinear(up.in_features, up.out_features, gather_output=False,
                                      **options).to(device())
        row = RowParallelLinear(down.in_features, down.out_features, input_is_parallel=True,
                                skip_bias_add=False, **options).to(device())
    with torch.no_grad():
        column.weight.copy_(split_parameter(up.weight, 0))
        column.bias.copy_(split_parameter(up.bias, 0))
        row.weight.copy_(split_parameter(down.weight, 1))
        row.bias.copy_(down.bias)
    return lambda x: column(x)[0], lambda x: row(x)[0]
