"""The few fitted numbers of step_time and memory_per_gpu, each with its meaning and its bounds.

`python -m ranklab.projects.planner fit` finds them: by least squares of the logarithm of step
time, robust against outliers, on the training part of the published runs (jobs.is_for_fit). None
is of one run or of one source.
"""

import dataclasses
from dataclasses import dataclass


def fitted(default, low, high, meaning):
    return dataclasses.field(default=default, metadata={"low": low, "high": high,
                                                        "meaning": meaning})


@dataclass(frozen=True)
class Constants:
    """What the published runs were fitted with."""

    product: float = fitted(0.877, 0.6, 1.0, "of the best matrix product's rate, in large ones")
    product_hopper: float = fitted(0.808, 0.5, 1.0, "the same of bf16 on H100 and later")
    product_fp8: float = fitted(0.897, 0.4, 1.0, "the same, of FP8's rate, one scale a tensor")
    product_block: float = fitted(0.887, 0.3, 1.0, "the same, MXFP8: a scale for each 32 numbers")
    product_rows: float = fitted(0.481, 0.2, 1.0, "the same, FP8 with a scale for each row")
    product_fp4: float = fitted(0.705, 0.2, 1.0, "the same, of NVFP4's rate")
    launch: float = fitted(3.67e-6, 1e-6, 60e-6, "seconds of a product besides FLOPs and bytes")
    product_half: float = fitted(38.7, 1, 1000, "mean side of a product that reaches half of that")
    flash: float = fitted(0.385, 0.2, 1.0, "of products' rate: FlashAttention 1, 2 on A100")
    flash_hopper: float = fitted(0.246, 0.15, 1.0, "the same on H100 and later")
    flash_tuned: float = fitted(0.5, 0.2, 1.0, "the same, kernels for those (cuDNN, 3)")
    flash_half: float = fitted(517, 1, 3000, "tokens at which it has half of that")
    flash_head: float = fitted(91.3, 0, 128, "head size: products as slow as exponentials")
    score_bytes: float = fitted(8.81, 4, 40, "bytes for each score of unfused attention, forward")
    misaligned: float = fitted(16.8, 1, 20, "times longer: unfused heads no multiple of 8")
    fused_bytes: float = fitted(125, 20, 250, "of other work, for each number of x: fused")
    eager_bytes: float = fitted(142, 40, 400, "the same where kernels are not fused")
    cast_bytes: float = fitted(34.2, 0, 150, "more of them where products are in 8 or 4 bits")
    expert_bytes: float = fitted(79.3, 2, 200, "for each number of a token with an expert")
    expert_fused_bytes: float = fitted(29.8, 1, 100, "the same where these are fused with messages")
    host_seconds: float = fitted(0.00822, 0.0, 30e-3, "of a layer with experts, to launch it all")
    logit_bytes: float = fitted(14.4, 6, 80, "of the loss, for each logit")
    optimizer_bytes: float = fitted(39.2, 20, 160, "of a step, for each parameter of a rank")
    overlap: float = fitted(2.4, 1.0, 10.0, "n: hidden a, b take (a^n + b^n)^(1/n)")
    link_share: float = fitted(0.624, 0.5, 1.1, "of NCCL's measured bandwidth in a node, in a job")
    exchange_share: float = fitted(0.908, 0.1, 1.0, "of both in an all-to-all")
    network_share: float = fitted(0.963, 0.3, 1.0, "of the network cards' bandwidth, in a job")
    pipeline_exposed: float = fitted(0.258, 0.0, 2.0, "of a pipeline's messages that no work hides")
    waiting: float = fitted(0.00337, 0.0, 0.05, "longer, for each doubling of nodes")
    step_seconds: float = fitted(0.0259, 0.0, 0.2, "of a step besides: loader, norms")
    context_bytes: float = fitted(1.44e9, 0.3e9, 6e9, "of CUDA and NCCL on a GPU")
    gaps: float = fitted(0.0715, 0.0, 0.3, "of what comes and goes: gaps between it")


CONSTANTS = Constants()


def bounds():
    """{name: (low, high, meaning)} of all constants."""
    return {field.name: (field.metadata["low"], field.metadata["high"], field.metadata["meaning"])
            for field in dataclasses.fields(Constants)}
