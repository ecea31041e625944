"""The training loop and its checkpoint: a step by hand, pieces, precision, ranks, resuming."""

import functools
import shutil

import numpy as np
import pytest
import torch

from ranklab import launch
from ranklab.basics.targets import IGNORE
from ranklab.data import Text, batch_at
from ranklab.data_parallel.training import DataParallel
from ranklab.engine.report import RankError
from ranklab.fsdp.training import FullyShard
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.trainer import decay_groups, learning_rate
from ranklab.trainer.parallel import Parallel
from ranklab.trainer.text import TextTrainer, TrainConfig
from ranklab.zero.training import Zero

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = GPTConfig(vocab_size=32, n_ctx=16, n_layer=1, n_head=2, n_embd=16)
QUICK = {"steps": 6, "batch": 6, "micro_batch": 6, "warmup": 2, "log_every": 2, "eval_batch": 4}


def text():
    numbers = np.random.default_rng(0)
    repeated = np.tile(np.arange(32, dtype=np.uint8), 40)  # the next token is known: it can learn
    return Text("counting", np.roll(repeated, numbers.integers(32)), repeated[:400], 32)


def trainer(dropout=0.0, device="cpu", compile=False, parallel=None, **changes):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**vars(SHAPE), "dropout": dropout}))
    return TextTrainer(model, text(), TrainConfig(**{**QUICK, **changes}), device, compile,
                       parallel=parallel, progress=False)


def weights(trained):
    return [p.detach().clone() for p in trained.model.parameters()]


def assert_equal(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_step_is_what_one_would_write_by_hand():
    mine, oracle = trainer(), trainer().model
    loss = mine.step()
    optimizer = torch.optim.AdamW(decay_groups(oracle, 0.1), betas=(0.9, 0.95), fused=True)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(mine.config, 0)
    right = oracle(*batch_at(text().train, 0, 6, 16))
    right.backward()
    torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
    optimizer.step()
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
    for a, b in zip(mine.model.parameters(), oracle.parameters()):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_pieces_change_nothing(micro_batch):
    whole, pieces = trainer(), trainer(micro_batch=micro_batch)
    whole.fit(), pieces.fit()
    for a, b in zip(whole.model.parameters(), pieces.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_it_learns_and_keeps_a_history():
    mine = trainer(steps=80, lr=1e-2, eval_every=40)
    history = mine.fit()
    assert history.steps == [1, *range(2, 81, 2)]
    assert list(history.held_out) == [40, 80]
    assert history.held_out[80] < 0.5 * history.loss[0]
    assert all(speed > 0 for speed in history.speed[1:])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close(precision):
    full, half = trainer(), trainer(precision=precision)
    full.fit(), half.fit()
    assert half.history.loss[-1] == pytest.approx(full.history.loss[-1], rel=0.02)
    assert all(p.dtype == torch.float32 for p in half.model.parameters())


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_is_bit_equal(tmp_path, stop):
    path = str(tmp_path / "run")
    straight = trainer(dropout=0.1)
    straight.fit()
    first = trainer(dropout=0.1, checkpoint=path, checkpoint_every=stop)
    for _ in range(stop):
        first.step()
    first.save()
    torch.rand(1000)  # another program would draw other random numbers in between
    second = trainer(dropout=0.1, checkpoint=path)
    second.resume()
    assert second.steps_done == stop
    second.fit()
    assert_equal(weights(straight), weights(second))
    assert straight.evaluate() == second.evaluate()


def test_fp16s_scaler_is_resumed_too(tmp_path):
    path = str(tmp_path / "run")
    first = trainer(precision="fp16", checkpoint=path)
    first.fit()
    first.scaler.update(1024.0)
    first.save()
    second = trainer(precision="fp16", checkpoint=path)
    second.resume()
    assert second.scaler.get_scale() == 1024.0


# --- on several ranks: equal to one process ----------------------------------------------------

class Uneven(DataParallel):
    """Most targets do not count, and on the last rank none does in the first step."""

    def batch(self, inputs, targets):
        return super().batch(inputs, without_most(targets))


class UnevenAlone(Parallel):
    def batch(self, inputs, targets):
        return inputs, without_most(targets)


def without_most(targets):
    targets = targets.clone()
    targets[1::2, 3:] = IGNORE
    targets[2::3] = IGNORE  # rows 2, 5: all of the last of three ranks
    return targets


def run_of(parallel, steps, **changes):
    mine = trainer(parallel=parallel, steps=steps, **changes)
    mine.fit()
    return mine.history.loss, mine.history.held_out, weights(mine)


def on_a_rank(kind, wrap, steps, changes):
    torch.manual_seed(0)
    return run_of(kind(**wrap), steps, **changes)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("changes", [{}, {"micro_batch": 1}, {"precision": "fp16"}], ids=str)
def test_every_rank_ends_as_one_process_does(ranks, changes):
    changes = {"eval_batch": 6, "log_every": 1, **changes}
    for kind, alone in ((DataParallel, Parallel), (Uneven, UnevenAlone)):
        loss, held_out, right = run_of(alone(), 4, **changes)
        near = 1e-2 if "precision" in changes else 1e-5
        for got in launch(on_a_rank, kind, {}, 4, changes, ranks=ranks):
            assert got[0] == pytest.approx(loss, rel=near)
            assert got[1] == pytest.approx(held_out, rel=near)
            for a, b in zip(got[2], right):
                torch.testing.assert_close(a, b, rtol=near, atol=2 * near)


def _history(kind, options, changes):
    mine = trainer(parallel=kind(**options), steps=2, **changes)
    mine.fit()
    return mine.history.loss, mine.history.held_out


@pytest.mark.parametrize("kind, options", [(Zero, {"stage": 2}), (Zero, {"stage": 3}),
                                           (FullyShard, {})])
def test_where_each_micro_batch_talks_ranks_may_have_unequal_numbers_of_rows(kind, options):
    """Three rows, of which rank 0 has two; in training and in evaluation."""
    changes = {"batch": 3, "eval_batch": 3, "micro_batch": 1, "log_every": 1}
    right = _history(Parallel, {}, changes)
    for got in launch(_history, kind, options, changes, ranks=2, timeout=30):
        assert got[0] == pytest.approx(right[0], rel=1e-5)
        assert got[1] == pytest.approx(right[1], rel=1e-5)


def test_equal_parts_are_refused_where_rows_are_not_equal():
    with pytest.raises(RankError, match="equal_parts=True, but 2 ranks do not divide batch=3 rows"):
        launch(on_a_rank, DataParallel, {"equal_parts": True}, 1, {"batch": 3}, ranks=2)


def test_torchs_ddp_enters_by_the_same_seam():
    right = run_of(Parallel(), 4, micro_batch=2)
    wrap = {"wrap": lambda model, group: torch.nn.parallel.DistributedDataParallel(
        model, process_group=group)}
    for got in launch(on_a_rank, DataParallel, wrap, 4, {"micro_batch": 2}, ranks=2):
        assert got[0] == pytest.approx(right[0], rel=1e-5)
        for a, b in zip(got[2], right[2]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_a_norm_that_is_not_finite_skips_the_step_and_halves_the_scale():
    class Overflown(Parallel):
        def grad_norm(self, parameters):  # as when another rank's shard has overflowed
            return torch.tensor(torch.inf)

    mine = trainer(precision="fp16", parallel=Overflown())
    before, scale = weights(mine), mine.scaler.get_scale()
    mine.step()
    assert_equal(before, weights(mine))
    assert mine.scaler.get_scale() == scale / 2


def test_a_step_does_not_ask_the_device_for_the_scale(monkeypatch):
    mine = trainer(precision="fp16")
    monkeypatch.setattr(mine.scaler, "get_scale", lambda: pytest.fail("it waits for the device"))
    mine.step()


def _too_few(changes):
    mine = trainer(parallel=DataParallel(), **changes)
    with pytest.raises(ValueError) as error:
        mine.fit()
    return str(error.value), mine.steps_done


@pytest.mark.parametrize("name", ["batch", "eval_batch"])
def test_fewer_rows_than_ranks_are_refused_before_a_step_is_made(name):
    said = launch(_too_few, {"steps": 1, name: 2}, ranks=3)
    assert said == [("batch=2 rows are too few for 3 ranks", 0)] * 3


def test_the_learning_rate_rises_and_falls():
    config = TrainConfig(steps=100, warmup=10, lr=1.0, final_lr=0.1)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == 1.0 and rates.index(1.0) == 9
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_norms_are_not_decayed():
    model = GPT(SHAPE)
    matrices, norms = decay_groups(model, 0.1)
    assert all(p.dim() == 2 for _, p in matrices["params"])
    assert [name for name, _ in norms["params"]] == [
        "blocks.0.norm1.weight", "blocks.0.norm2.weight", "norm.weight"]
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)
    assert len(matrices["params"]) + len(norms["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("changes, sentence", [
    ({"precision": "fp8"}, "precision='fp8' must be one of"),
    ({"micro_batch": 0}, "micro_batch=0 must be at least 1"),
])
def test_a_wrong_config_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        TrainConfig(**changes)


@pytest.mark.slow
@pytest.mark.timeout(400)  # the C++ compiler on a busy machine
@pytest.mark.parametrize("backend", [  # the first makes no C++, which takes half a minute
    "aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)])
def test_a_compiled_run_is_the_same(backend, monkeypatch):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("needs CUDA or a C++ compiler")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    eager, compiled = trainer(), trainer(compile=True)
    eager.fit(), compiled.fit()
    assert compiled.history.loss == pytest.approx(eager.history.loss, rel=1e-3)
    assert compiled.model.state_dict().keys() == eager.model.state_dict().keys()


def test_on_a_gpu_it_is_the_same_run():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    cpu, gpu = trainer(), trainer(device="cuda")
    cpu.fit(), gpu.fit()
    assert gpu.history.loss[-1] == pytest.approx(cpu.history.loss[-1], rel=1e-2)
