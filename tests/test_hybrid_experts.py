"""Experts on lab 12's mesh: training equal to one process; costs as predicted; refusals."""

import dataclasses

import pytest
import torch
from test_expert_parallel import FEW, KINDS, SHAPE, of_one_process, text
from test_hybrid_costs import _counted

from ranklab import device, launch
from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.expert_parallel import MoEConfig, moe_parameters
from ranklab.hybrid import (
    Hybrid, Job, Layout, layout_memory, layout_traffic, parse_layout,
)
from ranklab.hybrid.legal import refuse_misfits
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.peers.megatron import megatron_command
from ranklab.planner import model_of, plan_of, step_time
from ranklab.planner.machine import machine
from ranklab.projects.hybrid.config import JOBS, SIZES
from ranklab.trainer.text import TextTrainer

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

LAYOUTS = {  # by the number of ranks, one launch each
    2: "1x1x1,ep=2 1x2x1,sp 2x1x1,full".split(),
    4: """1x2x1,ep=2 1x2x1,ep=2,sp,recompute 2x1x1,ep=2 1x1x2,ep=2 1x1x2,ep=2,zb-h1 1x2x2
          2x2x1,sp,zero""".split(),
}
IN_PARTS = {"balance": "bias", "rate": 0.05, "z": 0.01}  # what a part of a sequence knows


def new_trainer(words, kind, config=FEW):
    layout = parse_layout(words)
    torch.manual_seed(0)
    with torch.device("meta"):  # a rank never has the whole model
        model = GPT(MoEConfig(**SHAPE, **kind))
    return TextTrainer(model, text(), config, device(), progress=False,
                       parallel=Hybrid(layout.new_mesh(), layout))


def seen_by(trainer):
    """(losses and the held-out one, boxes of the whole, the last gradients' norm)."""
    history = trainer.fit()
    boxes = [(p.name, p.offset, p.tensor.cpu()) for p in
             trainer.parallel.state(trainer.model, trainer.optimizer) if p.kind == "weight"]
    norm = trainer.parallel.grad_norm(None).item()
    return [*history.loss, *history.held_out.values()], boxes, norm


def trained(layouts, kind):
    return [seen_by(new_trainer(words, kind)) for words in layouts]


def assert_equal(found, alone):
    """What a rank has seen is what one process has."""
    (losses, boxes, _), (loss, held_out, weights) = found, alone
    assert losses == pytest.approx([*loss, held_out][-len(losses):], abs=2e-6)
    for name, offset, tensor in boxes:
        whole = weights[name][tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))]
        torch.testing.assert_close(tensor, whole, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.sweep] * ("bias" not in name)) for name in KINDS])
def test_training_equals_one_process(name):
    alone = launch(of_one_process, KINDS[name], ranks=1)[0]
    [[(_, _, norm)]] = launch(trained, ["1x1x1"], KINDS[name], ranks=1)
    for ranks, layouts in LAYOUTS.items():
        of_ranks = launch(trained, layouts, KINDS[name], ranks=ranks)
        for found in zip(*of_ranks):
            for of_rank in found:
                assert_equal(of_rank, alone)
                assert of_rank[2] == pytest.approx(norm, rel=1e-4)
            assert {box[0] for of_rank in found for box in of_rank[1]} >= {*alone[2]} - {
                "head.weight"}


def test_with_parts_of_sequences():
    alone = launch(of_one_process, IN_PARTS, ranks=1)[0]
    for [found] in launch(trained, ["1x1x1,ep=2,cp=2"], IN_PARTS, ranks=4):
        assert_equal(found, alone)


def _resumed(kind, folder, *layouts):
    """A step in each layout, and the last ones in the last; what that one has seen."""
    config = dataclasses.replace(FEW, checkpoint=folder)
    for step, words in enumerate(layouts):
        trainer = new_trainer(words, kind, config)
        if step:
            trainer.resume(reshard_checkpoint)
        if words != layouts[-1]:
            trainer.fit(until=step + 1)
    return seen_by(trainer)


def test_a_checkpoint_goes_into_ep_and_out_of_it(tmp_path):
    kind = KINDS["bias, shared expert, top 1 of all"]
    alone = launch(of_one_process, kind, ranks=1)[0]
    for found in launch(_resumed, kind, str(tmp_path / "saved"), "1x1x1,ep=2", "1x2x1",
                        "1x1x1,ep=2,recompute", ranks=2):
        assert_equal(found, alone)


# --- costs ----------------------------------------------------------------------------------------

SENT = [(Job(MoEConfig(64, 16, 4, 8, 32, n_expert=4, **more), 32, 2, precision),
         parse_layout(words)) for words, precision, more in [
            ("2x1x1,ep=2", "fp32", {}), ("1x2x2,ep=2,sp,recompute", "bf16", {"factor": 1.0}),
            ("2x2x2,ep=2,sp", "bf16", {"shared_width": 16}), ("2x1x2,full", "fp32", {}),
            ("1x1x1,ep=2,cp=2", "fp32", {"balance": "none"})]]
HELD = [(Job(MoEConfig(32000, 2048, 4, 16, 2048, n_expert=8, expert_width=7168), 64, 2),
         parse_layout(words)) for words in ("1x4x2,ep=4,sp", "1x1x2,ep=4,recompute", "2x1x1,ep=8")]


@pytest.mark.parametrize("cases", [SENT[:3], pytest.param(SENT[3:] + HELD,
                                                         marks=pytest.mark.sweep)])
def test_it_sends_and_holds_what_is_predicted(cases):
    [found] = launch(_counted, cases, ranks=1, timeout=170)
    for case, (held, sent) in zip(cases, found):
        assert layout_traffic(*case) == pytest.approx(sent, abs=64), case
        if case in HELD:
            said = layout_memory(*case)
            assert said.total == pytest.approx(held.total, rel=0.05), case
            assert (said.parameters, said.gradients) == (held.parameters, held.gradients)


def test_mixtral_fits():
    job, layout = JOBS["mixtral"], SIZES["mixtral"][2]
    assert moe_parameters(job.config)[0] == pytest.approx(47.4e9, rel=1e-3)
    assert moe_parameters(job.config)[0] == layout_memory(job, Layout()).parameters / 4
    assert layout.ranks == 64 and layout_memory(job, layout).total < 78e9
    SIZES["mixtral"][1].refuse_what_does_not_fit(job.config, layout)
    model, plan = model_of(job.config), plan_of(job, layout)
    assert model.parameters == pytest.approx(47.4e9, rel=1e-3)
    assert (plan.gpus, plan.batch) == (64, job.batch)
    said = step_time(model, plan, machine("A100"))
    assert 0 < said.expert < said.products


def test_megatron_is_told_of_experts():
    config = MoEConfig(**SHAPE, shared_width=8, factor=1.25, z=0.001)
    said = megatron_command(parse_layout("2x1x1,ep=2"), Job(config, 16))
    for words in ("--num-experts 4 --moe-router-topk 2 ", "--expert-model-parallel-size 2 ",
                  "--moe-ffn-hidden-size 64 ", "--moe-shared-expert-intermediate-size 8 ",
                  "seq_aux_loss ", "--moe-aux-loss-coeff 0.01 ", "--moe-z-loss-coeff 0.001 ",
                  "--moe-expert-capacity-factor 1.25 ", "places over a rank's tokens"):
        assert words in said, words
    config = MoEConfig(**SHAPE, balance="bias", renormalize=False)
    said += "\n" + (other := megatron_command(parse_layout("1x2x1,ep=2"), Job(config, 16)))
    for words in ("--moe-router-pre-softmax ", "--moe-router-enable-expert-bias ", "to sigmoids",
                  "--moe-router-bias-update-rate 0.001 ", "wants sequence parallelism"):
        assert words in other, words
    assert max(map(len, said.splitlines())) <= 100


# --- refusals -------------------------------------------------------------------------------------

MOE = MoEConfig(**SHAPE, shared_width=6)


@pytest.mark.parametrize("words, config, sentence", [
    ("1x1x1,ep=2", GPTConfig(), "ep=2 shares out experts, and this GPT has none"),
    ("1x1x1,ep=3", MOE, "ep=3 must divide n_expert=4"),
    ("1x4x1", MOE, "tp=4 must divide shared_width=6"),
    ("1x1x1,cp=2", MOE, "a rank has 1/2 of each sequence, but factor=0 and balance='loss' count"),
    ("2x1x1,ep=2", MOE, "dp x ep x micro-batch = 4 must divide the batch of 6"),
])
def test_what_does_not_fit_is_a_sentence(words, config, sentence):
    layout = parse_layout(words)
    batch = 6 if layout.dp > 1 else 12
    with pytest.raises(ValueError, match=sentence):
        refuse_misfits(layout, Job(config, batch), layout.ranks)


@pytest.mark.parametrize("zero", [1, 3])
def test_ep_goes_without_zero(zero):
    with pytest.raises(ValueError, match=f"ep=2 needs zero=0, not {zero}"):
        Layout(2, ep=2, zero=zero)
