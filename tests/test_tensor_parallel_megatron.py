"""Megatron-core's column- and row-parallel linears have our values, gradients and messages."""

import importlib.util

import pytest
import torch
from torch import nn

from ranklab import device, launch
from ranklab.meter import Traffic
from ranklab.projects.tensor_parallel.megatron import parallel_linears
from ranklab.tensor_parallel import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("megatron"),
                                reason="needs megatron-core")


def ours(up, down):
    return ColumnParallelLinear(up), RowParallelLinear(down)


def mlp(split):
    torch.manual_seed(0)
    up, down = nn.Linear(12, 24).to(device()), nn.Linear(24, 12).to(device())
    x = torch.randn(2, 5, 12, device=device(), requires_grad=True)
    up, down = split(up, down)
    with Traffic() as traffic:
        y = down(torch.tanh(up(x)))
        y.square().sum().backward()
    return y.detach(), x.grad, dict(traffic.calls), traffic.sent_bytes


def both():
    return [mlp(split) for split in (ours, parallel_linears)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rehearse", [None, "gpu"])
def test_megatrons_linears_are_equal_to_ours(rehearse):
    alone = launch(mlp, lambda up, down: (up, down), ranks=1)[0]
    for ours_, theirs in launch(both, ranks=4, rehearse=rehearse, timeout=150):
        for got in (ours_, theirs):
            torch.testing.assert_close(got[:2], alone[:2], rtol=1e-5, atol=1e-6)
        assert theirs[2:] == ours_[2:] == ({"all_reduce": 2}, 2 * 2 * 3 * 120 * 4 // 4)
