"""A DeepSpeed config for the fastest training of a model on given GPUs; and how to read one."""

import json
from pathlib import Path
from typing import NamedTuple

from ranklab.formulas.zero import zero_memory


class Strategy(NamedTuple):
    """A stage of ZeRO, and the states that it moves to the CPU's memory."""

    stage: int
    offload_optimizer: bool = False
    offload_parameters: bool = False

    def __str__(self):
        text = f"stage {self.stage}"
        offloads = (["optimizer"] * self.offload_optimizer
                    + ["parameters"] * self.offload_parameters)
        return text + (f", {' and '.join(offloads)} in CPU memory" if offloads else "")

    def states(self, parameters, ranks):
        """Compute the States that each GPU holds, in mixed precision with Adam."""
        states = zero_memory(self.stage, parameters, ranks)
        if self.offload_optimizer:
            states = states._replace(gradients=0, optimizer_state=0)
        return states._replace(parameters=0) if self.offload_parameters else states


# From fast to slow, for well-connected GPUs. 7.5e9 parameters on the 8 GPUs of a node: stage 3
# gathers once more in each micro-batch, 13 GB at NVLink's 450 GB/s: 0.03 s. Offload (ZeRO-Offload,
# 2101.06840) moves 1/8 of 15 GB to the CPU and the same back, at PCIe's 24 GB/s: 0.16 s. Its Adam
# reads 2 + 4 + 8 bytes a parameter and writes as much, at 200 GB/s a node: 1.05 s, once a step. So
# stage 3 comes first; but not if it gathers through one card of 100 Gbit/s a node, 1.05 s each
# time, or about 40 times in a step.
STRATEGIES = (
    Strategy(0), Strategy(1), Strategy(2), Strategy(3), Strategy(2, offload_optimizer=True),
    Strategy(3, offload_optimizer=True),
    Strategy(3, offload_optimizer=True, offload_parameters=True))


def fastest_way(parameters, ranks, gpu_bytes, other_bytes=0):
    """Choose the first of STRATEGIES, from fast to slow, whose states fit on each GPU.

    other_bytes: memory for activations and buckets, on each GPU.
    Raises: ValueError when not even the last one fits.
    """
    for strategy in STRATEGIES:
        if strategy.states(parameters, ranks).total + other_bytes <= gpu_bytes:
            return strategy
    raise ValueError(f"{other_bytes / 1e9:.1f} GB beside the model's states do not fit into "
                     f"{gpu_bytes / 1e9:.1f} GB: use a smaller micro batch, or checkpointing")


def deepspeed_config(parameters, ranks, gpu_bytes, batch, micro_batch, other_bytes=0,
                     precision="bf16", lr=3e-4, bucket=50_000_000):
    """Write the config for deepspeed.initialize(config=...) of the fastest strategy that fits.

    It has the three batch sizes, the optimizer AdamW with its lr, {precision: {"enabled": True}}
    except for "fp32", and zero_optimization: the stage, bucket sizes, and for what the strategy
    offloads "offload_optimizer" and "offload_param", each
    {"device": "cpu", "pin_memory": True}.
    batch: sequences in a step: micro_batch x accumulation steps x ranks.
    other_bytes: memory on each GPU for everything except states: activations, buckets, fragments.
    bucket: numbers in a message; two are in memory at a time, and count in other_bytes.
    Raises: ValueError if the batch does not divide evenly, or nothing fits.
    Lab: 06
    """
    if batch % (micro_batch * ranks):
        raise ValueError(f"batch={batch} must be micro_batch={micro_batch} x ranks={ranks} x a "
                         "whole number of accumulation steps")
    strategy = fastest_way(parameters, ranks, gpu_bytes, other_bytes)
    zero = {"stage": strategy.stage, "overlap_comm": True, "contiguous_gradients": True,
            "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if strategy.stage == 3:
        zero |= {"stage3_prefetch_bucket_size": bucket,
                 "stage3_gather_16bit_weights_on_model_save": True}
    if strategy.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if strategy.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": batch // (micro_batch * ranks),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95],
                                                  "weight_decay": 0.1}},
        "zero_optimization": zero,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def read_config(path):
    """Read a DeepSpeed config; return (the stage, {name: value}).

    Names: batch, micro_batch, clip, precision, offload, lr, betas, weight_decay.
    Raises: ValueError for a setting that has no such name.
    """
    try:
        config = json.loads(Path(path).read_text())
        zero = dict(config.get("zero_optimization", {}))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no DeepSpeed config: {error}") from None
    optimizer = {"type": "AdamW", "params": {}} | config.get("optimizer", {})
    kind = optimizer["type"]
    for is_asked, advice in (
            (config.get("fp16", {}).get("enabled"), "fp16 is not for this project: take bf16"),
            (zero.get("offload_param"), "offload_param is not for this project"),
            (kind != "AdamW", f"optimizer.type={kind!r} must be 'AdamW'")):
        if is_asked:
            raise ValueError(f"{path}: {advice}")
    settings = {name: optimizer["params"].get(name) for name in ("lr", "betas", "weight_decay")}
    settings |= {"batch": config.get("train_batch_size"),
                 "micro_batch": config.get("train_micro_batch_size_per_gpu"),
                 "clip": config.get("gradient_clipping"),
                 "precision": "bf16" if config.get("bf16", {}).get("enabled") else "fp32",
                 "offload": "cpu" if zero.get("offload_optimizer") else None,
                 "betas": tuple(settings["betas"]) if settings["betas"] else None}
    settings = {name: value for name, value in settings.items() if value is not None}
    return zero.get("stage", 0), settings
