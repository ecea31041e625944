"""DeepSpeed beside lab 06's ZeRO: the same losses, and configs that it takes."""

import functools

import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects import zero as project
from ranklab.zero import (
    ZeroStage1, ZeroStage2, ZeroStage3, deepspeed_config, deepspeed_ops, offload_optimizer,
)
from ranklab.zero.config import WAYS, fastest_way
from ranklab.zero.deepspeed_engine import (
    read_by_deepspeed, settings, train_with_deepspeed,
)

pytestmark = pytest.mark.timeout(300)

OURS = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
RANKS = 2


def new_model(dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=64, n_ctx=16, n_embd=32)).to(device(), dtype)


def batches():
    made = torch.Generator().manual_seed(dist.get_rank())
    return [(tokens, tokens) for tokens in torch.randint(64, (5, 4, 16), generator=made)
            .to(device())]


def ours(stage, offload=None, dtype=torch.float32):
    if stage == 0:
        model = OverlappedDataParallel(new_model(dtype))
        return trained(model, ADAMW(model.parameters()))
    model = OURS[stage](new_model(dtype))
    return trained(model, offload_optimizer(model, ADAMW) if offload else
                   model.make_optimizer(ADAMW))


def trained(model, optimizer):
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _losses():
    """{(stage, offload): (ours, DeepSpeed's)} of this rank."""
    ways = [(0, None), *((stage, offload) for stage in OURS for offload in (None, "cpu"))]
    return {way: (ours(*way), train_with_deepspeed(new_model(), ADAMW, batches(), *way))
            for way in ways}


def test_deepspeed_and_ours_have_the_same_losses(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    seen = launch(_losses, ranks=RANKS, timeout=280)
    for of_rank in seen:
        assert len(of_rank) == 7
        for way, (mine, theirs) in of_rank.items():
            assert theirs == pytest.approx(mine, rel=1e-4), way
            assert mine[-1] < mine[0]
    assert not (tmp_path / "built").exists(), "DeepSpeed has compiled something"


def _in_bf16():
    return [(ours(stage, dtype=torch.bfloat16),
             train_with_deepspeed(new_model(torch.bfloat16), ADAMW, batches(), stage))
            for stage in OURS]


def test_a_bf16_model_has_master_weights_in_both():
    for of_rank in launch(_in_bf16, ranks=RANKS, timeout=280):
        for mine, theirs in of_rank:
            assert theirs == pytest.approx(mine, rel=0.02)


# --- the project ---------------------------------------------------------------------------------

def test_both_engines_train_the_project_alike_and_go_on_where_they_were(tmp_path):
    how = {"ranks": RANKS, "steps": 6, "log_every": 1, "batch": 8, "micro_batch": 2,
           "eval_batch": 8}  # fmt: skip
    mine, theirs = (project.run(engine=engine, **how)["rows"] for engine in ("ours", "deepspeed"))
    for a, b in zip(mine, theirs, strict=True):
        assert b.history.loss == pytest.approx(a.history.loss, rel=1e-4)
        assert b.held_out == pytest.approx(a.held_out, rel=1e-4)
        assert b.costs.parameters == a.costs.parameters, "bytes of parameters"
    how |= {"engine": "deepspeed", "numbers": (2,), "checkpoint": str(tmp_path / "saved")}
    assert project.run(until=3, **how)["rows"][0].steps == 3
    again = project.run(resume=True, **how)["rows"][0]
    assert again.held_out == pytest.approx(mine[2].held_out, rel=1e-4)


# --- configs --------------------------------------------------------------------------------------

def _understood(configs, ranks):
    """What DeepSpeed has understood of each: its stage, and where state and parameters are."""
    found = []
    for zero in (read_by_deepspeed(config, ranks).zero_config for config in configs):
        found.append((zero.stage, *(place is not None and place.device == "cpu"
                                    for place in (zero.offload_optimizer, zero.offload_param))))
    return found


def test_deepspeed_accepts_the_config_of_each_way():
    """The memory of a GPU is such that one way after the other is the fastest that fits."""
    n, ranks = 10**9, 4
    need = [way.gpu_bytes(n, ranks) for way in WAYS]
    ways = [fastest_way(n, ranks, each) for each in need]
    assert set(ways) == set(WAYS)
    configs = [deepspeed_config(n, ranks, each, 8 * ranks, 2, precision=precision)
               for each in need for precision in ("bf16", "fp16", "fp32")]
    # on a rank: DeepSpeed changes much in the process that imports it
    understood = launch(_understood, configs, ranks, ranks=1, timeout=120)[0]
    assert understood == [tuple(way) for way in ways for _ in range(3)]


def _refused(config):
    with pytest.raises(AssertionError, match="train_batch_size is not equal"):
        read_by_deepspeed(config, 16)


def test_deepspeed_refuses_a_batch_that_does_not_fit_the_ranks():
    launch(_refused, deepspeed_config(10**9, 8, 80e9, 64, 2), ranks=1)


def test_settings_refuse_what_is_not_there():
    model = torch.nn.Linear(2, 2)
    for arguments, said in (((4,), "stage=4 must be"), ((0, "cpu"), "offload needs stage"),
                            ((1, "nvme", False, 0.0, "folder"), "'nvme' needs stage 3"),
                            ((3, "nvme"), "needs stage 3 and a folder"),
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


def _without_libaio():
    from deepspeed.accelerator import get_accelerator

    builder = type(get_accelerator().create_op_builder("AsyncIOBuilder"))
    builder.is_compatible = lambda self, verbose=False: False
    with pytest.raises(RuntimeError, match="'nvme' needs libaio: apt install libaio-dev"):
        train_with_deepspeed(new_model(), ADAMW, batches(), 3, "nvme", "folder")


def test_nvme_says_what_is_missing(monkeypatch):
    launch(_without_libaio, ranks=1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="There is no C.. compiler .*: offload='nvme' needs one"):
        deepspeed_ops.load_async_io()


def test_the_lock_of_a_build_that_was_stopped_is_removed(tmp_path, capsys):
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    deepspeed_ops.remove_stale_lock(folder)
    (folder / "lock").touch()
    deepspeed_ops.remove_stale_lock(folder)
    assert not list(folder.iterdir())
    assert "A build of cpu_adam was stopped half-way" in capsys.readouterr().err
