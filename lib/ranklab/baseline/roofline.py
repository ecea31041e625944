"""The roofline: an operation waits for arithmetic or for memory; its intensity tells which.

Intensity = FLOPs / bytes moved to and from the device's memory. Below peak FLOP/s / bandwidth,
memory is the limit, and more FLOP/s would change nothing.
Paper: Williams, Waterman, Patterson 2009
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """FLOPs and memory traffic of one operation, both in SI units."""

    name: str
    flops: float
    bytes: float

    @property
    def intensity(self):
        return self.flops / self.bytes


def matmul_operation(name, m, k, n, element=2):
    """Return the Operation (m, k) @ (k, n) with each matrix moved once, as with a perfect cache.

    element: bytes of a number
    """
    return Operation(name, 2 * m * k * n, (m * k + k * n + m * n) * element)


def elementwise_operation(name, count, reads, writes, flops_each, element=2):
    """Return the Operation that computes `count` elements.

    For each element it reads `reads` numbers from memory and writes `writes`.
    element: bytes of a number
    """
    return Operation(name, count * flops_each, count * (reads + writes) * element)


def attainable_flops(intensity, peak_flops, bandwidth):
    """Return the FLOP/s that an operation of this intensity can reach: the roofline itself."""
    return min(peak_flops, intensity * bandwidth)


def operation_seconds(operation, peak_flops, bandwidth):
    """Return the operation's shortest time: the longer of its arithmetic and its memory traffic."""
    return max(operation.flops / peak_flops, operation.bytes / bandwidth)


def block_operations(config, batch, seq, element=2):
    """List the forward operations of one block of GPT(config), without fused kernels."""
    C, H, tokens = config.n_embd, config.n_head, batch * seq
    flash = Operation("attention (flash)", 4 * tokens * seq * C, 4 * tokens * C * element)
    scores = tokens * H * seq  # written and read again: scores, probabilities
    plain = Operation(
        "attention (plain)", 4 * tokens * seq * C, (4 * tokens * C + 4 * scores) * element
    )
    return [
        elementwise_operation("layer norm", tokens * C, 1, 1, 8, element),
        matmul_operation("q, k, v", tokens, C, 3 * C, element),
        flash if config.flash else plain,
        matmul_operation("attention out", tokens, C, C, element),
        elementwise_operation("residual add", tokens * C, 2, 1, 1, element),
        matmul_operation("mlp up", tokens, C, 4 * C, element),
        elementwise_operation("gelu", tokens * 4 * C, 1, 1, 12, element),
        matmul_operation("mlp down", tokens, 4 * C, C, element),
    ]


def decode_operation(config, batch, element=2):
    """Return the Operation of one MLP product for one new token per sequence.

    It shows why generation is limited by memory bandwidth.
    """
    return matmul_operation("mlp up, one token", batch, config.n_embd, 4 * config.n_embd, element)
