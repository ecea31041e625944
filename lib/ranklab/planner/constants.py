"""The few fitted numbers of step_time and memory_per_gpu, each with its meaning and its bounds.

`python -m ranklab.projects.planner fit` finds them by least squares on the logarithm of step time,
robust to outliers, on the training part of the published runs (jobs.is_for_fit). No constant
belongs to a single run or source.
"""

import dataclasses
from dataclasses import dataclass


def fitted(default, low, high, meaning):
    """Return a field of Constants with its bounds and its meaning."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high,
                                                        "meaning": meaning})


@dataclass(frozen=True)
class Constants:
    """The constants that were fitted to published runs."""

    product: float = fitted(0.872, 0.6, 1.0, "of the best matrix product's rate, in large ones")
    product_hopper: float = fitted(0.793, 0.5, 1.0, "the same of bf16 on H100 and later")
    product_rows: float = fitted(0.466, 0.2, 1.0, "the same, FP8 with a scale for each row")
    product_fp4: float = fitted(0.677, 0.2, 1.0, "the same, of NVFP4's rate")
    flash: float = fitted(0.376, 0.2, 1.0, "of products' rate: FlashAttention 1, 2 on A100")
    flash_hopper: float = fitted(0.243, 0.15, 1.0, "the same on H100 and later")
    flash_tuned: float = fitted(0.524, 0.2, 1.0, "the same, kernels for those (cuDNN, 3)")
    misaligned: float = fitted(16.9, 1, 20, "times longer: unfused heads no multiple of 8")
    other_bytes: float = fitted(139, 20, 250, "of other work, for each number of x")
    expert_bytes: float = fitted(95.5, 2, 200, "for each number of a token with an expert")
    host_seconds: float = fitted(0.00835, 0.0, 30e-3, "of a layer with experts, to launch it all")
    overlap: float = fitted(2.19, 1.0, 10.0, "n: hidden a, b take (a^n + b^n)^(1/n)")
    link_share: float = fitted(0.599, 0.5, 1.1, "of NCCL's measured bandwidth in a node, in a job")
    step_seconds: float = fitted(0.0245, 0.0, 0.2, "of a step besides: loader, norms")
    context_bytes: float = fitted(1.59e9, 0.3e9, 6e9, "of CUDA and NCCL on a GPU")
    gaps: float = fitted(0.0598, 0.0, 0.3, "of what comes and goes: gaps between it")


CONSTANTS = Constants()


def bounds():
    """Return {name: (low, high, meaning)} of all constants."""
    return {field.name: (field.metadata["low"], field.metadata["high"], field.metadata["meaning"])
            for field in dataclasses.fields(Constants)}
