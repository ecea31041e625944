"""Experts on lab 12's mesh: training equal to one process; costs as predicted; refusals."""

import dataclasses

import pytest
import torch
from test_expert_parallel import FEW, KINDS, SHAPE, of_one_process, text

from ranklab import device, launch
from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.expert_parallel import MoEConfig
from ranklab.hybrid import Hybrid, Job, Layout, parse_layout
from ranklab.hybrid.choose import refuse_misfits
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.text_trainer import TextTrainer

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
    """(losses and the held-out one, {box of the whole: numbers}), after the last step."""
    history = trainer.fit()
    boxes = [(p.name, p.offset, p.tensor.cpu()) for p in
             trainer.parallel.state(trainer.model, trainer.optimizer) if p.kind == "weight"]
    return [*history.loss, *history.held_out.values()], boxes


def trained(layouts, kind):
    return [seen_by(new_trainer(words, kind)) for words in layouts]


def assert_equal(found, alone):
    """What a rank has seen is what one process has."""
    (losses, boxes), (loss, held_out, weights) = found, alone
    assert losses == pytest.approx([*loss, held_out][-len(losses):], abs=2e-6)
    for name, offset, tensor in boxes:
        whole = weights[name][tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))]
        torch.testing.assert_close(tensor, whole, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_training_equals_one_process(name):
    alone = launch(of_one_process, KINDS[name], ranks=1)[0]
    for ranks, layouts in LAYOUTS.items():
        of_ranks = launch(trained, layouts, KINDS[name], ranks=ranks)
        for found in zip(*of_ranks):
            for of_rank in found:
                assert_equal(of_rank, alone)
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
