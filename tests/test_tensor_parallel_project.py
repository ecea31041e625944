"""Lab 08's project: every method trains alike, and holds and sends what the formulas say."""

import importlib.util

import pytest
import torch
from torch import nn

from ranklab import device
from ranklab.engine import launch
from ranklab.hardware import H100
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.peers.megatron import parallel_linears
from ranklab.projects import tensor_parallel as project
from ranklab.projects.tensor_parallel.costs import held_bytes, traffic
from ranklab.projects.tensor_parallel.links import CARD, GB200, NVLINK, ring_link, switch_link
from ranklab.projects.tensor_parallel.training import METHODS, MODELS
from ranklab.tensor_parallel import ColumnParallelLinear, RowParallelLinear

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

SMALL = GPTConfig(n_layer=4, n_ctx=16, n_embd=32)
FEW = {"steps": 3, "batch": 6, "micro_batch": 3, "eval_batch": 6, "clip": 0.3}


@pytest.fixture(autouse=True, scope="module")
def small_model():
    """The laptop's model is a tiny one; not in another process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "laptop", SMALL)
        yield


@pytest.fixture(scope="module")
def every_method(small_model, text):
    return project.run(ranks=2, method="all", path=text, **FEW)


# --- training -------------------------------------------------------------------------------------

def test_every_method_trains_alike_and_holds_and_sends_what_the_formulas_say(every_method):
    one, *others = rows = every_method["rows"]
    assert [row.method for row in rows] == list(METHODS)
    for row in others:
        assert row.history.loss == pytest.approx(one.history.loss, abs=1e-5)
        assert row.held_out == pytest.approx(one.held_out, abs=1e-3)
    for row in rows[:-1]:  # DTensor's traffic is its own affair
        held, messages, sent = row.counted
        assert messages == row.predicted[1]
        assert sent == pytest.approx(row.predicted[2], abs=10)  # a number is not cut for the ring
        adams_steps = 4 * len([*GPT(SMALL).parameters()])  # it counts them
        assert 0 < held - row.predicted[0] <= adams_steps
    assert others[-1].counted[0] == others[1].counted[0]
    text = project.report(every_method)
    assert [f"{row.counted[2]:,}" in text for row in rows] == [True] * 5


def test_the_formula_knows_what_is_sent_in_bf16(text):
    for changes in ({"sequence_parallel": True}, {}):
        row, = project.run(ranks=2, path=text, precision="bf16", **FEW, **changes)["rows"]
        assert row.counted[1:] == pytest.approx(row.predicted[1:], abs=10), changes


# --- DTensor and Megatron-core --------------------------------------------------------------------

def test_dtensor_has_our_losses_and_gathers_no_logits(every_method, text):
    _, _, tensor, sequence, dtensor = every_method["rows"]
    by_tokens, = project.run(ranks=2, method="dtensor", path=text, sequence_parallel=True,
                             **FEW)["rows"]
    for ours, torchs in ((tensor, dtensor), (sequence, by_tokens)):
        assert torchs.history.loss == pytest.approx(ours.history.loss, abs=1e-5)
        # Its loss has a message more, and it adds up norms' gradients more often.
        assert ours.counted[2] <= torchs.counted[2] < 1.02 * ours.counted[2]


def mlp(split):
    torch.manual_seed(0)
    up, down = nn.Linear(12, 24).to(device()), nn.Linear(24, 12).to(device())
    x = torch.randn(2, 5, 12, device=device(), requires_grad=True)
    up, down = split(up, down)
    with Traffic() as traffic:
        y = down(torch.tanh(up(x)))
        y.square().sum().backward()
    return y.detach(), x.grad, dict(traffic.calls), traffic.sent_bytes


@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="needs megatron-core")
@pytest.mark.timeout(200)
def test_megatrons_linears_are_equal_to_ours():
    def both():
        return [mlp(split) for split in (
            lambda up, down: (ColumnParallelLinear(up), RowParallelLinear(down)),
            parallel_linears)]

    alone, = launch(mlp, lambda up, down: (up, down), ranks=1)
    for ours, megatrons in launch(both, ranks=2, rehearse="gpu", timeout=150):
        for got in (ours, megatrons):
            torch.testing.assert_close(got[:2], alone[:2], rtol=1e-5, atol=1e-6)
        assert megatrons[2:] == ours[2:] == ({"all_reduce": 2}, 2 * 2 * 1 * 120 * 4 // 2)


# --- formulas and links ---------------------------------------------------------------------------

def test_gpt2_xl_on_five_ranks_by_the_formulas():
    shape = MODELS["gpt2-xl"]
    assert held_bytes(shape, "tensor", 5) == pytest.approx(16 * 1.555e9 / 5, rel=0.01)
    assert held_bytes(shape, "naive", 4) > held_bytes(shape, "tensor", 4)
    x = 8 * 1024 * 1600 * 2
    assert traffic(shape, 8, 5, size=2, leaving=2)[1] == pytest.approx(194 * 1.6 * x, rel=0.01)


def test_a_ring_through_whole_nodes_has_all_of_their_cards():
    two_nodes = ring_link(16)  # 30 steps, 2 of them between nodes: NCCL's tuning.cc counts so
    assert two_nodes.beta == pytest.approx(1 / (8 * H100.network_bandwidth))
    assert 30 * two_nodes.alpha == pytest.approx(28 * NVLINK.alpha + 2 * CARD.alpha)
    assert ring_link(16, cards=1).beta == ring_link(2, node=1, cards=1).beta == CARD.beta
    assert ring_link(8) == ring_link(32, node=72) == NVLINK


def test_a_switch_takes_one_latency_for_an_all_reduce_however_many_ranks():
    assert GB200.link == 2 / NVLINK.beta  # 900 GB/s, by the planner's table
    for ranks in (2, 16, 72):
        link = switch_link(ranks, GB200.link)
        assert 2 * (ranks - 1) * link.alpha == pytest.approx(25e-6)
        assert link.beta == 1 / GB200.link
