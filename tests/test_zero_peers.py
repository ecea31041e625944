"""Lab 06's peers: its losses are those of torch's DDP and of DeepSpeed, which takes its configs."""

import copy
import functools
import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ranklab import device, launch
from ranklab.data_parallel import OverlappedDataParallel
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.peers.deepspeed_ops import compiled_adam
from ranklab.peers.deepspeed_zero import read_by_deepspeed, settings, train_with_deepspeed
from ranklab.projects import zero as project
from ranklab.projects.zero.config import MODELS
from ranklab.zero import ZeroStage1, ZeroStage2, ZeroStage3, deepspeed_config
from ranklab.zero.config import STRATEGIES, fastest_way

pytestmark = pytest.mark.timeout(300)

OURS = {1: ZeroStage1, 2: ZeroStage2, 3: ZeroStage3}
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
V = 64
TINY = GPTConfig(vocab_size=V, n_layer=1, n_ctx=16, n_embd=32)
CASES = [  # the stage, what DeepSpeed offloads to, the type of the parameters
    *((stage, None, torch.float32) for stage in range(4)),
    *((stage, "cpu", torch.float32) for stage in OURS),
    *((stage, None, torch.bfloat16) for stage in OURS)]


def new_gpt(dtype):
    torch.manual_seed(0)
    return GPT(TINY).to(device(), dtype)


def batches():
    made = torch.Generator().manual_seed(dist.get_rank())
    return [(x, x) for x in torch.randint(1, V, (3, 4, 16), generator=made).to(device())]


def losses(model, optimizer, loss_of):
    found = []
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


# --- DeepSpeed ------------------------------------------------------------------------------------

def _with_deepspeed():
    """[(ours, DeepSpeed's)] of this rank, for each of CASES."""
    found = []
    for stage, offload, dtype in CASES:
        model = OURS.get(stage, OverlappedDataParallel)(new_gpt(dtype))
        optimizer = model.make_optimizer(ADAMW) if stage else ADAMW(model.parameters())
        theirs = train_with_deepspeed(new_gpt(dtype), ADAMW, batches(), stage, offload)
        found.append((losses(model, optimizer, lambda model, *batch: model(*batch)), theirs))
    return found


def test_deepspeed_and_ours_have_the_same_losses(monkeypatch, tmp_path):
    """In bfloat16 both have master weights in float32; what is offloaded changes no number."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    for of_rank in launch(_with_deepspeed, ranks=2, timeout=280):
        for (stage, offload, dtype), (ours, theirs) in zip(CASES, of_rank, strict=True):
            tolerance = 1e-4 if dtype == torch.float32 else 0.02
            assert theirs == pytest.approx(ours, rel=tolerance), (stage, offload, dtype)
            assert ours[-1] < ours[0]
    assert not (tmp_path / "built").exists(), "DeepSpeed has compiled something"


def test_both_train_the_project_alike_and_go_on_where_they_were(monkeypatch, tmp_path, text):
    """In stage 3, in micro-batches, and through a checkpoint of DeepSpeed's."""
    monkeypatch.setitem(MODELS, "laptop", GPTConfig(n_layer=1, n_ctx=16, n_embd=32))
    how = {"numbers": (3,), "ranks": 2, "path": text, "steps": 4, "log_every": 1, "batch": 8,
           "micro_batch": 2, "eval_batch": 8}  # fmt: skip
    ours, = project.run(**how)["rows"]
    how |= {"engine": "deepspeed", "checkpoint": str(tmp_path / "saved")}
    first, = project.run(until=3, **how)["rows"]
    again, = project.run(resume=True, **how)["rows"]
    assert (first.steps, again.steps) == (3, 4)
    assert first.history.loss + again.history.loss == pytest.approx(ours.history.loss, rel=1e-4)
    assert again.held_out == pytest.approx(ours.held_out, rel=1e-4)


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
    need = [way.states(n, ranks).total for way in STRATEGIES]
    ways = [fastest_way(n, ranks, each) for each in need]
    assert set(ways) == set(STRATEGIES)
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


def test_without_a_compiler_torchs_adam_steps_and_it_is_said(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiled_adam(ADAMW, "cpu") is ADAMW
    assert capsys.readouterr().err == ("There is no C++ compiler (no-such-compiler): torch's AdamW "
                                       "steps in place of DeepSpeed's.\n")


# --- DDP, on models of transformers ---------------------------------------------------------------

# What is smaller than usual. T5's blocks share a position bias; of Mixtral's experts some get no
# token.
SMALL = {
    "T5ForConditionalGeneration": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
                                   "num_heads": 2, "dropout_rate": 0, "decoder_start_token_id": 0},
    "MixtralForCausalLM": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "num_key_value_heads": 1,
                           "num_local_experts": 6, "num_experts_per_tok": 1},
}
STAGES = (ZeroStage1, False), (ZeroStage2, True), (ZeroStage3, False), (ZeroStage3, True)


def _beside_ddp():
    """{(model, stage, whether it recomputes): (ours, DDP's)}: losses of three steps"""
    import transformers

    def loss_of(model, x, labels):
        return model(input_ids=x, labels=labels).loss

    found = {}
    for name, sizes in SMALL.items():
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        whole = kind(kind.config_class(vocab_size=V, use_cache=False, **sizes)).to(device())
        options = {"find_unused_parameters": "Mixtral" in name}
        ddp = TorchDDP(copy.deepcopy(whole), **options)
        right = losses(ddp, SGD(ddp.parameters()), loss_of)
        for stage, recomputes in STAGES:
            module = copy.deepcopy(whole)
            if recomputes:
                module.gradient_checkpointing_enable({"use_reentrant": False})
            model = stage(module, **options)
            ours = losses(model, model.make_optimizer(SGD), loss_of)
            found[name, stage.__name__, recomputes] = ours, right
    return found


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_models_of_another_library_train_as_with_ddp():
    for of_rank in launch(_beside_ddp, ranks=3, preload=["transformers"]):
        for case, (ours, right) in of_rank.items():
            assert ours == pytest.approx(right, rel=1e-5), case
