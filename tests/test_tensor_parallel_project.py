"""Lab 08's project: every method trains alike, and holds and sends what the formulas say."""

import importlib.util

import pytest
import torch
from torch import nn

from ranklab import device
from ranklab.engine import launch, torchrun
from ranklab.hardware import H100
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects import tensor_parallel as project
from ranklab.projects.tensor_parallel.costs import held_bytes, traffic
from ranklab.projects.tensor_parallel.links import CARD, NVLINK, curves, emulate, ring_link
from ranklab.projects.tensor_parallel.megatron import parallel_linears
from ranklab.projects.tensor_parallel.training import METHODS, MODELS
from ranklab.tensor_parallel import ColumnParallelLinear, RowParallelLinear

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

SMALL = GPTConfig(n_layer=4, n_ctx=16, n_embd=32)
FEW = {"steps": 3, "batch": 6, "micro_batch": 3, "eval_batch": 6, "clip": 0.3}


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    """The laptop's model is a tiny one; not in another process."""
    monkeypatch.setitem(MODELS, "laptop", SMALL)


# --- training -------------------------------------------------------------------------------------

def test_every_method_trains_alike_and_holds_and_sends_what_the_formulas_say(text):
    found = project.run(ranks=4, method="all", path=text, **FEW)
    one, *others = found["rows"]
    assert [row.method for row in found["rows"]] == list(METHODS)
    for row in others:
        assert row.history.loss == pytest.approx(one.history.loss, abs=1e-5)
        assert row.held_out == pytest.approx(one.held_out, abs=1e-3)
    for row in found["rows"][:-1]:  # DTensor's traffic is its own affair
        held, messages, sent = row.counted
        assert messages == row.said[1]
        assert sent == pytest.approx(row.said[2], abs=10)  # a number is not cut for the ring
        assert 0 < held - row.said[0] <= 4 * len([*GPT(SMALL).parameters()])  # Adam's step counts
    assert others[-1].counted[0] == others[1].counted[0]
    text = project.report(found)
    assert [f"{row.counted[2]:,}" in text for row in found["rows"]] == [True] * 5


def test_a_learners_class_is_used_and_the_formula_knows_what_is_sent_in_bf16(text):
    class Mine(ColumnParallelLinear):
        def forward(self, x):
            return 0 * super().forward(x)

    found = [project.run(ranks=2, path=text, precision="bf16", **FEW, **mine)
             for mine in ({"sequence_parallel": True}, {"column": Mine})]
    for row in (each["rows"][0] for each in found):
        assert row.counted[1:] == pytest.approx(row.said[1:], abs=10)
    losses = [each["rows"][0].held_out for each in found]
    assert losses[0] != pytest.approx(losses[1], abs=1e-5)
    assert "Yours: column. The library's: copy, reduce, row, " in project.report(found[1])


def test_a_checkpoint_of_four_ranks_goes_on_on_two_and_on_one(text, tmp_path):
    how = {**FEW, "steps": 6, "path": text}
    whole, = project.run(ranks=4, **how)["rows"]
    for ranks, method in ((2, "tensor"), (1, "one")):
        kept = {**how, "checkpoint": str(tmp_path / method)}
        first, = project.run(ranks=4, until=3, **kept)["rows"]
        second, = project.run(ranks=ranks, method=method, resume=True, **kept)["rows"]
        assert first.held_out is None
        assert first.history.loss + second.history.loss == pytest.approx(whole.history.loss,
                                                                         abs=1e-4)
        assert second.held_out == pytest.approx(whole.held_out, abs=1e-3)
    assert "one" in project.report(project.run(ranks=1, method="one", resume=True, **kept))


def test_torchrun_runs_it_in_place(text):
    options = [word for name, value in FEW.items()
               for word in (f"--{name.replace('_', '-')}", str(value))]
    done = torchrun("-m", "ranklab.projects.tensor_parallel", "--method", "naive", "--data", text,
                    "--precision", "bf16", *options, ranks=2)
    assert done.count("naive") == 2, done  # its row, and the last line


# --- DTensor and Megatron-core --------------------------------------------------------------------

@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dtensor_has_our_losses_and_gathers_no_logits(text, sequence_parallel):
    ours, theirs = (project.run(ranks=2, method=method, path=text, **FEW,
                                sequence_parallel=sequence_parallel)["rows"][0]
                    for method in ("tensor", "dtensor"))
    assert theirs.history.loss == pytest.approx(ours.history.loss, abs=1e-5)
    # Its loss has a message more, and norms' gradients are added up more often; logits are large.
    assert ours.counted[2] <= theirs.counted[2] < 1.02 * ours.counted[2]


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
@pytest.mark.parametrize("rehearse", [None, "gpu"])
def test_megatrons_linears_are_equal_to_ours(rehearse):
    def both():
        return [mlp(split) for split in (
            lambda up, down: (ColumnParallelLinear(up), RowParallelLinear(down)),
            parallel_linears)]

    alone, = launch(mlp, lambda up, down: (up, down), ranks=1)
    for ours, theirs in launch(both, ranks=4, rehearse=rehearse, timeout=150):
        for got in (ours, theirs):
            torch.testing.assert_close(got[:2], alone[:2], rtol=1e-5, atol=1e-6)
        assert theirs[2:] == ours[2:] == ({"all_reduce": 2}, 2 * 2 * 3 * 120 * 4 // 4)


# --- formulas and links ---------------------------------------------------------------------------

def test_gpt2_xl_on_five_ranks_by_the_formulas():
    shape = MODELS["gpt2-xl"]
    assert held_bytes(shape, "tensor", 5) == pytest.approx(16 * 1.555e9 / 5, rel=0.01)
    assert held_bytes(shape, "naive", 4) > held_bytes(shape, "tensor", 4)
    x = 8 * 1024 * 1600 * 2
    assert traffic(shape, 8, 5, size=2, leaving=2)[1] == pytest.approx(194 * 1.6 * x, rel=0.01)


def test_a_slow_link_makes_it_lose():
    seconds = curves(MODELS["gpt2-xl"], 8, ranks=(1, 2, 4, 8, 16))
    inside, alone = seconds["NVLink joins all"][:4], seconds["1 a node, 1 card"]
    assert inside == sorted(inside, reverse=True) and alone == sorted(alone)
    eight, one = (seconds[f"8 a node, {cards}"] for cards in ("8 cards", "1 card"))
    assert eight[:4] == one[:4] == inside and one[4] > one[1]


def test_a_ring_through_whole_nodes_has_all_of_their_cards():
    two_nodes = ring_link(16)  # 30 steps, 2 of them between nodes: NCCL's tuning.cc counts so
    assert two_nodes.beta == pytest.approx(1 / (8 * H100.network_bandwidth))
    assert 30 * two_nodes.alpha == pytest.approx(28 * NVLINK.alpha + 2 * CARD.alpha)
    assert ring_link(16, cards=1).beta == ring_link(2, node=1, cards=1).beta == CARD.beta
    assert ring_link(8) == ring_link(32, node=72) == NVLINK


def test_emulated_links_agree_with_the_formula():
    for alone in (2.0, 4.0, 8.0):  # a busy machine adds to what is measured: less to long naps
        found = emulate(alone=alone)
        if all(measured < 1.15 * said for said, measured in found.values()):
            break
    for said, measured in found.values():
        assert measured == pytest.approx(said, rel=0.15)
    assert found["one node"][1] < alone < found["two nodes"][1]
