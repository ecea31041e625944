"""Lab 01's library and project: formulas against counts, recomputing, streams, the whole run."""

import dataclasses
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ranklab import baseline, launch
from ranklab.baseline.checkpointing import random_state, set_random_state
from ranklab.baseline.fragmentation import Arena
from ranklab.baseline.memory import as_trained, live_activations
from ranklab.baseline.roofline import (attainable_flops, block_operations, decode_operation,
                                       matmul_operation, operation_seconds)
from ranklab.baseline.streams import Stream
from ranklab.checks.baseline.counting import counted_activations, counted_flops
from ranklab.checks.baseline.frugal_gradients import MOST, SCORED, _measured, least_bytes
from ranklab.hardware import H100
from ranklab.meter import SavedActivations, memory_of
from ranklab.models.gpt import GPT, GPTConfig, count_parameters
from ranklab.projects.baseline import __main__ as command
from ranklab.projects.baseline import training as project

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [GPTConfig(),
          GPTConfig(vocab_size=77, n_ctx=33, n_layer=3, n_head=1, n_embd=10),
          GPTConfig(vocab_size=128, n_ctx=20, n_layer=1, n_head=6, n_embd=48, flash=False)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch, seq", [(1, 1), (2, 19), (3, 20)])
def test_flops_are_what_torch_counts(shape, batch, seq):
    for backward in (False, True):
        counted = counted_flops(shape, batch, seq, backward)
        assert baseline.transformer_flops(shape, batch, seq, backward) == counted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch, seq", [(2, 19), (3, 20)])
def test_activations_are_what_autograd_saves(shape, dtype, batch, seq):
    predicted = baseline.activation_bytes(shape, batch, seq, dtype.itemsize)
    assert predicted == counted_activations(shape, batch, seq, dtype.itemsize)


@pytest.mark.parametrize("checkpoint_with", [
    baseline.checkpointed, lambda f, x: checkpoint(f, x, use_reentrant=False)])
def test_activations_with_recomputing(checkpoint_with):
    shape = GPTConfig(n_layer=4)
    model = baseline.checkpoint_blocks(GPT(shape), checkpoint_with)
    inputs, targets = (torch.zeros(2, 64, dtype=torch.long) for _ in range(2))
    with SavedActivations(model) as saved:
        model(inputs, targets)
    assert saved.bytes == baseline.activation_bytes(shape, 2, 64, recompute=True)


@pytest.mark.parametrize("recipe", ["fp32", "mixed", "bf16"])
def test_states_are_what_adam_keeps(recipe):
    model, optimizer = as_trained(GPT(GPTConfig()), recipe)
    memory = memory_of(model, optimizer)
    steps = 4 * len(list(model.parameters()))
    predicted = baseline.model_state_bytes(count_parameters(GPTConfig()), recipe)
    assert predicted == {"parameters": memory.parameters, "gradients": memory.gradients,
                         "optimizer": memory.optimizer_state - steps}


def test_recomputing_lowers_the_peak():
    tokens = torch.zeros(2, 64, dtype=torch.long)
    shape = GPTConfig(n_layer=6)
    kept = live_activations(GPT(shape), tokens, tokens)
    recomputed = live_activations(baseline.checkpoint_blocks(GPT(shape)), tokens, tokens)
    for forward, backward in (kept, recomputed):
        assert forward[0] == backward[-1] == 0
        assert forward[-1] == backward[0]
    # while backward runs, one whole block exists besides what forward kept
    assert max(kept[1]) == kept[0][-1] and max(recomputed[1]) > recomputed[0][-1]
    assert max(recomputed[1]) < 0.35 * max(kept[1])


def test_a_checkpointed_gpt_has_the_same_gradients_with_dropout():
    tokens = torch.randint(256, (2, 64))
    found = []
    for wrap in (lambda model: model, baseline.checkpoint_blocks):
        torch.manual_seed(0)
        model = wrap(GPT(GPTConfig(dropout=0.2)))
        model(tokens, tokens).backward()
        found.append([p.grad for p in model.parameters()] + [torch.rand(3)])
    for plain, recomputed in zip(*found):
        torch.testing.assert_close(plain, recomputed)


def test_random_state_goes_back_and_forth():
    state = random_state()
    first = torch.rand(5)
    set_random_state(state)
    assert torch.equal(first, torch.rand(5))


# --- roofline, fragmentation, streams -------------------------------------------------------------

def test_the_roof():
    assert attainable_flops(1e9, H100.bf16_flops, H100.memory_bandwidth) == H100.bf16_flops
    assert attainable_flops(1, H100.bf16_flops, H100.memory_bandwidth) == H100.memory_bandwidth
    square = matmul_operation("square", 4096, 4096, 4096)
    assert square.intensity == pytest.approx(4096 / 3)
    assert operation_seconds(square, 1e12, 1e15) == 2 * 4096**3 / 1e12


def test_a_blocks_products_are_its_flops():
    shape = GPTConfig(n_ctx=64)
    products = [o for o in block_operations(shape, 3, 64)
                if o.name not in ("layer norm", "gelu", "residual add")]
    one_layer = dataclasses.replace(shape, n_layer=1)
    two_layers = dataclasses.replace(shape, n_layer=2)
    right = (baseline.transformer_flops(two_layers, 3, 64, False)
             - baseline.transformer_flops(one_layer, 3, 64, False))
    assert sum(o.flops for o in products) == right


def test_plain_attention_is_bound_by_memory_and_decoding_too():
    shape = GPTConfig(n_ctx=1024, n_embd=1024, n_head=16, flash=False)
    plain = next(o for o in block_operations(shape, 8, 1024) if "plain" in o.name)
    assert plain.intensity < H100.balance
    assert decode_operation(shape, 1).intensity < 1.01


def test_an_arena_fragments():
    arena = Arena(100)
    for name, size in zip("abcde", (30, 10, 30, 10, 20)):
        arena.take(name, size)
    assert arena.gaps() == [] and arena.free_bytes == 0
    arena.give_back("a"), arena.give_back("c")
    assert (arena.free_bytes, arena.largest_gap) == (60, 30)
    with pytest.raises(MemoryError, match="40 bytes wanted for f, 60 are free, but .* has 30"):
        arena.take("f", 40)
    arena.take("f", 30)
    assert arena.pieces["f"] == (0, 30)


def test_a_stream_runs_in_order_and_waits_for_events():
    seen, first, second, gate = [], Stream(), Stream(), threading.Event()
    first.launch(gate.wait)  # returns at once, though the gate is shut
    first.launch(seen.append, "first")
    start, done = second.record(), first.record()
    second.wait_event(done)
    second.launch(seen.append, "second")
    start.synchronize()
    assert seen == []
    gate.set()
    second.synchronize()
    assert seen == ["first", "second"]
    assert start.elapsed_time(done) > 0
    first.close(), second.close()


# --- project --------------------------------------------------------------------------------------

SMALL = {"steps": 4, "batch": 4, "micro_batch": 2, "eval_batch": 8, "log_every": 2,
         "progress": False}


def test_the_project_accounts_for_every_byte_and_flop():
    found = project.run(**SMALL)
    assert found["flops"]["predicted"] == found["flops"]["counted"]
    for name, (predicted, counted) in found["memory"].items():
        steps = 4 * len(list(found["model"].parameters())) if name == "optimizer state" else 0
        assert counted == predicted + steps, name
    shown = project.report(found)
    assert "bigram" in shown and "MFU" in shown and f"{found['memory']['gradients'][1]:,}" in shown


def test_the_project_runs_a_learners_functions():
    def mine(*arguments):
        return baseline.accumulate_gradients(*arguments)

    plain, found = project.run(**SMALL), project.run(**SMALL, frugally=True, accumulate=mine)
    assert "Yours: accumulate. The library's: flops, states" in project.report(found)
    assert found["peak"] < plain["peak"]
    assert found["held_out"] == pytest.approx(plain["held_out"], abs=1e-3)


def test_the_scale_is_that_of_torchs_grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=3)
    ours, theirs = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, other = (torch.optim.SGD([w], lr=0.1, momentum=0.9) for w in (ours, theirs))
    state = baseline.LossScale(2.0**11, 0, 3)
    for factor in (1, 1, 0.5, 1, 64, 1, 1, 1, float("nan"), 1, 1, 1, 1):
        def loss(w, factor=factor):
            return (w.half() * 2).float().sum() * factor

        state = baseline.scale_loss(loss(ours), optimizer, state)
        other.zero_grad()
        scaler.scale(loss(theirs)).backward()
        scaler.step(other)
        scaler.update()
        assert state.scale == scaler.get_scale()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name, config, rows, library_peak", SCORED)
def test_the_check_knows_the_peak_of_the_library(name, config, rows, library_peak):
    assert _measured(baseline.frugal_gradients, config, rows)[1] == library_peak
    assert library_peak < 0.8 * MOST * least_bytes(config)


def test_the_project_runs_on_a_rank():
    [found] = launch(_numbers, ranks=1, timeout=60)
    assert found["flops"]["predicted"] == found["flops"]["counted"]


def _numbers():
    return {"flops": project.run(**SMALL)["flops"]}


def test_the_project_resumes(tmp_path):
    path = str(tmp_path / "run")
    project.run(**SMALL, checkpoint=path)
    found = project.run(**{**SMALL, "steps": 6}, checkpoint=path, resume=True)
    assert found["history"].steps[0] == 5


def test_large_sizes_are_what_their_names_say():
    for name, millions in (("350m", 354), ("774m", 772), ("1.5b", 1512)):
        shape = project.MODELS[name]
        assert count_parameters(shape) / 1e6 == pytest.approx(millions, rel=0.01)
        assert shape.vocab_size % 128 == 0 and shape.head_size == 128
        config = project.TRAINING[name]
        states = 16 * count_parameters(shape)
        kept = baseline.activation_bytes(shape, config.micro_batch, shape.n_ctx, 2)
        # autocast's extra: a float32 residual stream and logits, the weights' casts
        extra = config.micro_batch * shape.n_ctx * (4 * shape.vocab_size
                                                    + 8 * shape.n_embd * shape.n_layer)
        assert states + kept + extra < 80e9, name


def test_a_large_vocabulary_is_trained_on_bytes_too(monkeypatch):
    small = project.large_gpt(n_layer=1, n_head=1, n_embd=32, n_ctx=32)
    monkeypatch.setitem(project.MODELS, "350m", small)
    found = project.run("350m", **SMALL, precision="bf16", lr=1e-2, warmup=1)
    assert found["shape"].vocab_size == 50304 and found["text"].vocab_size == 256
    assert found["sample"].startswith("\ndef ")
    assert found["flops"]["predicted"] == found["flops"]["counted"]


def test_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.txt").write_text("the cat sat on the mat\n" * 400)
    quick = ["--steps", "3", "--batch", "2", "--micro-batch", "1", "--eval-batch", "4",
             "--log-every", "1", "--data", str(tmp_path / "mine.txt")]
    ran = subprocess.run([sys.executable, "-m", "ranklab.projects.baseline", *quick, "--recompute",
                          "--loss-chunks", "2"], capture_output=True, text=True, timeout=100)
    assert "MFU" in ran.stdout and "held-out" in ran.stdout, ran.stderr
    assert "tokens/s=" in ran.stderr  # the progress bar

    def refused(*options):
        with pytest.raises(SystemExit):
            command.project.main([*quick, *options])
        return capsys.readouterr().err

    assert "name it with --checkpoint" in refused("--resume")
    if not torch.cuda.is_available():
        assert "sees no GPU" in refused("--device", "cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "one device" in refused()
