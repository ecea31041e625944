"""Two linears with Megatron-core, after whose layers ours are named; and megatron_command, which
writes a model and a layout of the course as options of Megatron-LM.
"""

import os
import warnings

import torch
import torch.distributed as dist

from ranklab.engine import device
from ranklab.expert_parallel import MoEConfig
from ranklab.hybrid.memory import layout_memory
from ranklab.planner.export.megatron import megatron_arguments
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.hybrid_jobs import model_of, plan_of
from ranklab.tensor_parallel.split import split_parameter


def parallel_linears(up, down):
    """Split two nn.Linear with Megatron-core's column- and row-parallel layers.

    The first call makes all ranks one tensor-parallel group.
    Returns: two functions, tensor -> tensor, with this rank's parts.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # else it warns in each forward
    with warnings.catch_warnings():  # its faster kernels, Transformer Engine and Apex, need a GPU
        warnings.simplefilter("ignore")
        from megatron.core import ModelParallelConfig, parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(dist.get_world_size())
        # Weights are made on the CPU, so that its random state for GPUs need not be set up.
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


def megatron_command(layout, job, per_node=8):
    """Write a layout as a bash script; data, learning rate and number of steps are its arguments.

        bash train.sh --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 10

    Comments above the options tell what Megatron-LM lacks or does differently.
    """
    config, model, plan = job.config, model_of(job.config), plan_of(job, layout, "megatron")
    megatron_bytes = memory_per_gpu(model, plan, None).total
    course_bytes = layout_memory(job, layout).total
    differs = [
        f"Its fullest GPU holds about {megatron_bytes / 1e9:.1f} GB, that of the course's trainer "
        f"{course_bytes / 1e9:.1f} GB.",
        *["It counts an expert's places over a rank's tokens, not in each sequence."]
        * (getattr(config, "factor", 0) > 0),
        *["Its bias is added to sigmoids; here it is added to a softmax."]
        * (getattr(config, "balance", "") == "bias")]
    more = expert_options(config, layout) if isinstance(config, MoEConfig) else ()
    return megatron_arguments(model, plan, per_node, config.rotary_base, config.dropout, more,
                              differs)


def expert_options(config, layout):
    """List options that a planner's Model lacks: (option, purpose, whether to include it)."""
    return [
        (f"--expert-tensor-parallel-size {layout.tp}", "here tensor ranks share each expert",
         layout.tp > 1),
        ("--moe-router-pre-softmax", "weights are not made to add up to 1",
         not config.renormalize),
        ("--moe-router-load-balancing-type seq_aux_loss", "counted in each sequence",
         config.balance == "loss"),
        ("--moe-router-load-balancing-type none", "by no loss", config.balance != "loss"),
        (f"--moe-aux-loss-coeff {config.coefficient:g}", "of that loss", config.balance == "loss"),
        (f"--moe-z-loss-coeff {config.z:g}", "small logits", config.z > 0),
        ("--moe-router-score-function sigmoid --moe-router-enable-expert-bias", "balance by a bias",
         config.balance == "bias"),
        (f"--moe-router-bias-update-rate {config.rate:g}", "its step", config.balance == "bias"),
        (f"--moe-expert-capacity-factor {config.factor:g}", "else no token is dropped",
         config.factor > 0),
    ]  # fmt: skip
