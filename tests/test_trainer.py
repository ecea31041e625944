"""The training loop and its checkpoint: one step by hand, pieces, precision, hooks, resuming."""

import shutil

import numpy as np
import pytest
import torch

from ranklab.checkpoint import load_checkpoint, save_checkpoint
from ranklab.data import Text, batch_at
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.trainer import Hooks, TrainConfig, Trainer, learning_rate, make_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = GPTConfig(vocab_size=32, n_ctx=16, n_layer=1, n_head=2, n_embd=16)
QUICK = {"steps": 6, "batch": 6, "micro_batch": 6, "warmup": 2, "log_every": 2, "eval_batch": 4}


def text():
    numbers = np.random.default_rng(0)
    repeated = np.tile(np.arange(32, dtype=np.uint8), 40)  # the next token is known: it can learn
    return Text("counting", np.roll(repeated, numbers.integers(32)), repeated[:400], 32)


def trainer(dropout=0.0, device="cpu", compile=False, hooks=None, **changes):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**vars(SHAPE), "dropout": dropout}))
    return Trainer(model, text(), TrainConfig(**{**QUICK, **changes}), device, compile,
                   hooks=hooks or Hooks(), progress=False)


def weights(trained):
    return [p.detach().clone() for p in trained.model.parameters()]


def assert_equal(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_step_is_what_one_would_write_by_hand():
    mine, oracle = trainer(), trainer().model
    loss = mine.step()
    optimizer = make_optimizer(oracle, mine.config)
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
    assert all(speed > 0 for speed in history.tokens_per_second[1:])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_stays_close(precision):
    full, half = trainer(), trainer(precision=precision)
    full.fit(), half.fit()
    assert half.history.loss[-1] == pytest.approx(full.history.loss[-1], rel=0.02)
    assert all(p.dtype == torch.float32 for p in half.model.parameters())


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_is_bit_equal(tmp_path, stop):
    path = str(tmp_path / "run.pt")
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
    path = str(tmp_path / "run.pt")
    first = trainer(precision="fp16", checkpoint=path)
    first.fit()
    first.scaler.update(1024.0)
    first.save()
    second = trainer(precision="fp16", checkpoint=path)
    second.resume()
    assert second.scaler.get_scale() == 1024.0


def test_a_save_that_dies_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    mine = trainer()
    save_checkpoint(path, mine.model, mine.optimizer, 1)
    before = path.read_bytes()

    def die(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("ranklab.checkpoint.os.replace", die)
    with pytest.raises(OSError):
        save_checkpoint(path, mine.model, mine.optimizer, 2)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        load_checkpoint(path, mine.model, mine.optimizer)


def test_hooks_see_every_step_in_order():
    seen = []

    def clip(parameters, max_norm):
        seen.append("clip")
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    hooks = Hooks(my_rows=lambda x, y: (seen.append("rows"), x[:3], y[:3])[1:],
                  after_backward=lambda model: seen.append("gradients"), clip=clip,
                  average=lambda loss: loss)
    trainer(hooks=hooks, steps=2).fit()
    assert seen == ["rows", "gradients", "clip"] * 2


def test_two_halves_averaged_by_hooks_are_the_whole():
    whole = trainer()
    whole.step()
    halves = [trainer(hooks=Hooks(my_rows=lambda x, y, r=r: (x[3 * r : 3 * r + 3],
                                                             y[3 * r : 3 * r + 3]),
                                  clip=lambda parameters, norm: None)) for r in (0, 1)]
    for half in halves:
        half.step()
    pairs = zip(*(half.model.parameters() for half in halves))
    mean = [(a.grad + b.grad) / 2 for a, b in pairs]
    norm = torch.stack([g.norm() for g in mean]).norm()
    for got, right in zip(mean, (p.grad for p in whole.model.parameters())):
        torch.testing.assert_close(got * min(1.0, 1.0 / norm), right, rtol=1e-3, atol=1e-6)


def test_the_learning_rate_rises_and_falls():
    config = TrainConfig(steps=100, warmup=10, lr=1.0, final_lr=0.1)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == 1.0 and rates.index(1.0) == 9
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_norms_are_not_decayed():
    model = GPT(SHAPE)
    matrices, norms = make_optimizer(model, TrainConfig()).param_groups
    assert all(p.dim() == 2 for p in matrices["params"])
    assert norms["weight_decay"] == 0.0
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
def test_a_compiled_run_is_the_same():
    if not shutil.which("g++"):
        pytest.skip("needs CUDA or a C++ compiler")
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
