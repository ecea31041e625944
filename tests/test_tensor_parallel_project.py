"""Lab 08's project: every method trains alike, and holds and sends what the formulas say."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from ranklab import data, device
from ranklab.engine import launch, torchrun
from ranklab.hardware import H100
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects import tensor_parallel as project
from ranklab.projects.tensor_parallel.costs import held_bytes, traffic
from ranklab.projects.tensor_parallel.dtensor import parallelize_gpt
from ranklab.projects.tensor_parallel.links import (
    CARD, LINKS, NVLINK, curves, emulate, ring_link,
)
from ranklab.projects.tensor_parallel.training import (
    METHODS, MODELS, PARTS, Settings, train,
)
from ranklab.tensor_parallel import ColumnParallelLinear, TPConfig, parallel_gpt

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

SMALL = GPTConfig(n_layer=4, n_ctx=16, n_embd=32)
FEW = {"steps": 3, "batch": 6, "micro_batch": 3, "eval_batch": 6}


@pytest.fixture
def small_model(monkeypatch):
    """The laptop's model is a tiny one; not in another process."""
    monkeypatch.setitem(MODELS, "laptop", SMALL)


# --- training -------------------------------------------------------------------------------------

@pytest.mark.usefixtures("small_model")
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
        tensors = sum(1 for _ in GPT(SMALL).parameters())
        assert row.said[0] < held <= row.said[0] + 4 * tensors  # Adam counts its steps
    assert others[-1].counted[0] == others[1].counted[0]
    text = project.report(found)
    assert [f"{row.counted[2]:,}" in text for row in found["rows"]] == [True] * 5


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("method", ["tensor", "sequence"])
def test_the_formula_knows_what_is_sent_in_bf16(text, method):
    row, = project.run(ranks=2, method=method, path=text, precision="bf16", **FEW)["rows"]
    assert row.counted[1:] == pytest.approx(row.said[1:], abs=10)


@pytest.mark.usefixtures("small_model")
def test_a_learners_class_is_used_and_named(text):
    class Mine(ColumnParallelLinear):
        def forward(self, x):
            return 0 * super().forward(x)

    losses = [project.run(ranks=2, path=text, **FEW, **mine)["rows"][0].held_out
              for mine in ({}, {"column": Mine})]
    assert losses[0] != pytest.approx(losses[1], abs=1e-5)
    found = project.run(ranks=2, path=text, overlap=True, sequence_parallel=False,
                        **{**FEW, "steps": 1}, column=Mine)
    assert "Yours: column. The library's: copy, reduce, row, " in project.report(found)


@pytest.mark.usefixtures("small_model")
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


# --- DTensor --------------------------------------------------------------------------------------

def three_steps(sequence_parallel, by_dtensor):
    """(losses, Traffic of the last step)."""
    model = GPT(SMALL).to(device())
    model.reset_parameters(seed=0)
    if by_dtensor:
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        parallelize_gpt(model, mesh, sequence_parallel)
    else:
        parallel_gpt(model, TPConfig(sequence_parallel=sequence_parallel))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    tokens = torch.randint(256, (3, 4, 16), generator=torch.Generator().manual_seed(1))
    for batch in tokens.to(device()):
        with Traffic() as seen:
            loss = model(batch, batch)
            with loss_parallel():
                loss.backward()
            optimizer.step()  # here DTensor adds up gradients of norms
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, seen


@pytest.mark.parametrize("ranks", [2, 4])
def test_dtensor_has_our_losses_and_gathers_no_logits(ranks):
    def compare():
        return [three_steps(sequence, by_dtensor) for sequence in (False, True)
                for by_dtensor in (False, True)]

    found = launch(compare, ranks=ranks)[0]
    for losses, seen in found:
        assert losses == pytest.approx(found[0][0], abs=1e-5)
        assert max(op.payload_bytes for op in seen.ops) == 4 * 16 * 32 * 4  # x; logits have 8 times
    (ours, theirs), (split, their_split) = found[:2], found[2:]
    assert ours[1].calls == {"all_reduce": 20}
    assert theirs[1].calls == {"all_reduce": 21}  # the target's logit has a message of its own
    assert theirs[1].sent_bytes == ours[1].sent_bytes
    # AdamW asks for the same sums of norms' gradients several times
    assert split[1].sent_bytes < their_split[1].sent_bytes < 1.02 * split[1].sent_bytes


# --- what is refused ------------------------------------------------------------------------------

def complaint(method, shape, settings, text):
    """What a training says before it ends, on this rank."""
    try:
        train(method, shape, settings, PARTS, text, resume=False, until=None, progress=False)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("method, ranks, changes, said", [
    ("tensor", 3, {}, "tp=3 and n_kv_head=4 must divide n_head=4"),
    ("sequence", 2, {"n_ctx": 15}, "tp=2 must divide the T=15 tokens of a sequence"),
    ("naive", 5, {}, "5 ranks are more than n_layer=4: each needs a layer"),
    ("tensor", 2, {"lr": 1e38}, "the loss of step 2 is nan: train with less than lr=1e+38"),
])
def test_every_rank_says_what_is_wrong(text, method, ranks, changes, said):
    shape = replace(SMALL, n_ctx=changes.pop("n_ctx", 16))
    settings = Settings(log_every=1, **{**FEW, **changes})
    found = launch(complaint, method, shape, settings, data.text_file(text), ranks=ranks)
    assert found == [said] * ranks


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
    assert list(seconds) == list(LINKS)


def test_a_ring_through_whole_nodes_has_all_of_their_cards():
    two_nodes = ring_link(16)
    assert two_nodes.beta == pytest.approx(1 / (8 * H100.network_bandwidth))
    steps, between = 30, 2  # it leaves each of two nodes once: NCCL's tuning.cc counts so
    assert steps * two_nodes.alpha == pytest.approx(
        (steps - between) * NVLINK.alpha + between * CARD.alpha)
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
