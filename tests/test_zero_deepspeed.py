"""DeepSpeed beside lab 06's ZeRO: the same losses, and configs that it takes."""

import functools

import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects import zero as project
from ranklab.projects.zero.config import MODELS
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3, deepspeed_config, deepspeed_ops
from ranklab.zero.config import WAYS, fastest_way
from ranklab.zero.deepspeed_engine import read_by_deepspeed, settings, train_with_deepspeed

pytestmark = pytest.mark.timeout(300)

OURS = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
TINY = GPTConfig(vocab_size=64, n_layer=1, n_ctx=16, n_embd=32)
RANKS = 2
CASES = [  # the stage, what DeepSpeed offloads to, the type of the parameters
    *((stage, None, torch.float32) for stage in range(4)),
    *((stage, "cpu", torch.float32) for stage in OURS),
    *((stage, None, torch.bfloat16) for stage in OURS)]


def new_model(dtype):
    torch.manual_seed(0)
    return GPT(TINY).to(device(), dtype)


def batches():
    made = torch.Generator().manual_seed(dist.get_rank())
    return [(tokens, tokens) for tokens in torch.randint(64, (3, 4, 16), generator=made)
            .to(device())]


def our_losses(stage, dtype):
    model = OURS.get(stage, OverlappedDataParallel)(new_model(dtype))
    optimizer = model.make_optimizer(ADAMW) if stage else ADAMW(model.parameters())
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _losses():
    """[(ours, DeepSpeed's)] of this rank, for each of CASES."""
    return [(our_losses(stage, dtype),
             train_with_deepspeed(new_model(dtype), ADAMW, batches(), stage, offload))
            for stage, offload, dtype in CASES]


def test_deepspeed_and_ours_have_the_same_losses(monkeypatch, tmp_path):
    """In bfloat16 both have master weights in float32; what is offloaded changes no number."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    for of_rank in launch(_losses, ranks=RANKS, timeout=280):
        for (stage, offload, dtype), (ours, theirs) in zip(CASES, of_rank, strict=True):
            tolerance = 1e-4 if dtype == torch.float32 else 0.02
            assert theirs == pytest.approx(ours, rel=tolerance), (stage, offload, dtype)
            assert ours[-1] < ours[0]
    assert not (tmp_path / "built").exists(), "DeepSpeed has compiled something"


def test_both_engines_train_the_project_alike_and_go_on_where_they_were(monkeypatch, tmp_path,
                                                                        text):
    """In stage 3, in micro-batches, and through a checkpoint of DeepSpeed's."""
    monkeypatch.setitem(MODELS, "laptop", GPTConfig(n_layer=1, n_ctx=16, n_embd=32))
    how = {"numbers": (3,), "ranks": RANKS, "path": text, "steps": 4, "log_every": 1, "batch": 8,
           "micro_batch": 2, "eval_batch": 8}  # fmt: skip
    ours, = project.run(**how)["rows"]
    how |= {"engine": "deepspeed", "checkpoint": str(tmp_path / "saved")}
    first, = project.run(until=3, **how)["rows"]
    assert first.costs.parameters == ours.costs.parameters, "bytes of parameters"
    again, = project.run(resume=True, **how)["rows"]
    assert (first.steps, again.steps) == (3, 4)
    assert first.history.loss + again.history.loss == pytest.approx(ours.history.loss, rel=1e-4)
    assert again.held_out == pytest.approx(ours.held_out, rel=1e-4)


# --- configs --------------------------------------------------------------------------------------

def _understood(configs, ranks):
    """What DeepSpeed has understood of each: its stage, and where state and parameters are."""
    with pytest.raises(AssertionError, match="train_batch_size is not equal"):
        read_by_deepspeed(configs[0], 3 * ranks)
    found = []
    for zero in (read_by_deepspeed(config, ranks).zero_config for config in configs):
        found.append((zero.stage, *(place is not None and place.device == "cpu"
                                    for place in (zero.offload_optimizer, zero.offload_param))))
    return found


def test_deepspeed_accepts_the_config_of_each_way_and_refuses_a_batch_for_other_ranks():
    """The memory of a GPU is such that one way after the other is the fastest that fits."""
    n, ranks = 10**9, 4
    need = [way.states(n, ranks).total for way in WAYS]
    ways = [fastest_way(n, ranks, each) for each in need]
    assert set(ways) == set(WAYS)
    configs = [deepspeed_config(n, ranks, each, 8 * ranks, 2, precision=precision)
               for each in need for precision in ("bf16", "fp16", "fp32")]
    # on a rank: DeepSpeed changes much in the process that imports it
    understood = launch(_understood, configs, ranks, ranks=1, timeout=120)[0]
    assert understood == [tuple(way) for way in ways for _ in range(3)]


def test_settings_refuse_what_is_not_there():
    model = torch.nn.Linear(2, 2)
    for arguments, said in (((4,), "stage=4 must be"), ((0, "cpu"), "offload needs stage"),
                            ((1, "disk"), "offload='disk' must be"),
                            ((2, "cpu", True), "offload_parameters needs stage 3")):
        with pytest.raises(ValueError, match=said):
            settings(model, *arguments)


# --- what is compiled -----------------------------------------------------------------------------

def test_without_a_compiler_torchs_adam_steps_and_it_is_said(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert deepspeed_ops.compiled_adam(ADAMW, "cpu") is ADAMW
    assert capsys.readouterr().err == ("There is no C++ compiler (no-such-compiler): torch's AdamW "
                                       "steps in place of DeepSpeed's.\n")


def test_the_lock_of_a_build_that_was_stopped_is_removed(tmp_path, capsys):
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    deepspeed_ops.remove_stale_lock(folder)
    (folder / "lock").touch()
    deepspeed_ops.remove_stale_lock(folder)
    assert not list(folder.iterdir())
    assert "A build of cpu_adam was stopped half-way" in capsys.readouterr().err
