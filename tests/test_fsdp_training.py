"""Lab 07's FSDP in the training loop: trained, saved and loaded on any number of ranks."""

import functools

import pytest
import torch

from ranklab import data, device, launch
from ranklab.checkpoint.files import complete
from ranklab.fsdp import (
    Precision, clip_grad_norm_sharded, full_state_dict, hybrid_shard_groups,
)
from ranklab.fsdp.training import FullyShard
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.text_trainer import TextTrainer, TrainConfig

pytestmark = pytest.mark.timeout(120)

SHAPE = GPTConfig(vocab_size=256, n_ctx=16, n_embd=20, n_head=2, n_layer=2)


def _train(text, ranks, config, until=None, resume=False, hybrid=False, **options):
    """([loss of each step], {name: weight})."""
    torch.manual_seed(0)
    model = GPT(SHAPE).to(device())
    parallel = None
    if ranks > 1 or options:
        groups = hybrid_shard_groups(2) if hybrid else None
        parallel = FullyShard(groups=groups, **options)
    trainer = TextTrainer(model, text, config, device(), parallel=parallel, progress=False)
    if resume:
        trainer.resume()
    history = trainer.fit(until)
    weights = full_state_dict(model) if parallel else model.state_dict()
    state = {(name, kind): value.clone() for name, kind, *_, value in trainer.parallel.state(
        model, trainer.optimizer)} if not parallel else {}
    return history.loss, {**weights, **state}


def train(ranks, config, **how):
    return launch(functools.partial(_train, data.python_text(), ranks, config, **how),
                  ranks=ranks)[0]


def config(folder=None, **changes):
    options = {"steps": 6, "batch": 12, "micro_batch": 2, "log_every": 1, "eval_batch": 12,
               "clip": 0.5, "checkpoint": folder and str(folder), **changes}
    return TrainConfig(**options)


def test_a_checkpoint_goes_on_with_any_number_of_ranks(tmp_path):
    losses, _ = train(1, config())
    before, saved = train(3, config(tmp_path), until=3)
    assert before == pytest.approx(losses[:3], abs=2e-5)
    [folder] = complete(tmp_path)
    for ranks in (1, 2, 4):
        there = tmp_path / str(ranks)
        there.mkdir()
        (there / folder.name).symlink_to(folder)
        _, loaded = train(ranks, config(there), until=3, resume=True)
        for name, weight in saved.items():
            torch.testing.assert_close(loaded[name], weight, atol=0, rtol=0)
        after, _ = train(ranks, config(there), resume=True)
        assert after == pytest.approx(losses[3:], abs=2e-5)


def test_computes_in_bf16_and_steps_in_float32():
    losses, weights = train(2, config(), precision=Precision(torch.bfloat16, torch.float32))
    exact, _ = train(1, config())
    assert losses == pytest.approx(exact, abs=0.05) and losses != pytest.approx(exact, abs=1e-5)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def _norm_without_the_first_gradient(clip):
    model = torch.nn.ModuleDict({"unused": torch.nn.Linear(2, 2), "used": torch.nn.Linear(2, 2)})
    parallel = FullyShard(blocks=lambda model: model.values(), clip=clip)
    parallel.apply(model.to(device()))
    model["used"](torch.ones(1, 2, device=device())).sum().backward()
    return parallel.grad_norm(list(model.parameters())).item()


def test_the_first_parameter_may_have_no_gradient():
    for clip in (clip_grad_norm_sharded, lambda *of: float(clip_grad_norm_sharded(*of))):
        norms = launch(_norm_without_the_first_gradient, clip, ranks=2)
        assert norms == [pytest.approx(6**0.5)] * 2
