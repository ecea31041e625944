"""Lab 07's project: the same on any ranks and by either engine, saved, resumed, and refused."""

import dataclasses
import json

import pytest
import torch

from ranklab import launch
from ranklab.basics.targets import IGNORE
from ranklab.data.instructions import Bytes, Instructions, as_batch, encode
from ranklab.fsdp.memory import predicted_costs
from ranklab.projects.fsdp import training
from ranklab.projects.fsdp.llama import PRELOAD
from ranklab.projects.fsdp.training import LLAMAS, SIZES
from ranklab.projects.hugging_face import is_here, offline_transformers
from ranklab.projects.training import Session

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread"),
              pytest.mark.skipif(not is_here(), reason="needs transformers")]

SHAPE = {**LLAMAS["laptop"], "hidden_size": 20, "intermediate_size": 31, "num_attention_heads": 2}
SMALL = dataclasses.replace(SIZES["laptop"], pretrain=0, steps=3, batch=12, micro_batch=2,
                            eval_batch=12, log_every=1, n_ctx=24, clip=0.5)
SUMS = [(f"{i}+{i % 3}=", str(i + i % 3)) for i in range(60)]
TAUGHT = Instructions("sums", SUMS[:40], SUMS[1:13])
PLAIN = [("", f"{i}, {i + 1}, {i + 2}") for i in range(30)]


def _all(changes):
    """On each rank: what the project finds with each of these changes of SMALL; or its sentence."""
    return [_one(**each) for each in changes]


def _one(until=None, resume=False, **changes):
    config = dataclasses.replace(SMALL, **changes)
    plain = PLAIN if config.pretrain else []
    torch.seed()  # as torchrun's ranks begin, each by chance
    try:
        return training._work(Session(until=until, resume=resume), SHAPE, config, training.PARTS,
                              plain, TAUGHT)
    except ValueError as error:
        return str(error)


def results_of(ranks, *changes, **how):
    """[what rank 0 finds] with each of these changes."""
    return launch(_all, changes, ranks=ranks, timeout=170, preload=PRELOAD, **how)[0]


def test_the_same_on_any_ranks_by_either_engine_and_after_a_resume(tmp_path):
    saved = {"checkpoint": str(tmp_path)}
    cases = [{}, {"engine": "fsdp2"}, {"recompute": True, "offload": True, "micro_batch": 6},
             {"most_bytes": 45_000}]
    [one] = results_of(1, {})
    *results, refused, half = results_of(2, *cases, {"most_bytes": 9}, saved | {"until": 1})
    hybrid, = results_of(4, {"shard_ranks": 2})
    for change, each in zip([*cases, {"shard_ranks": 2}], [*results, hybrid], strict=True):
        assert each["history"].loss == pytest.approx(one["history"].loss, abs=2e-4), change
        for step, score in each["scores"].items():
            assert score == pytest.approx(one["scores"][step], abs=1e-3), change
        # But for Adam's steps, padding, and single numbers that are added up.
        [held], _, sent = each["costs"]
        counted = [held.parameters, held.gradients, held.optimizer_state, sent]
        config = dataclasses.replace(SMALL, **change)
        predicted = predicted_costs(each["numbers"], config, 4 if config.shard_ranks else 2)
        assert counted == pytest.approx(predicted, rel=0.02)
    assert "most_bytes=9 is too little" in refused
    again, = results_of(3, saved | {"resume": True, "engine": "fsdp2"})
    assert again["scores"][1] == pytest.approx(half["scores"][1], abs=1e-4)
    assert again["scores"][3] == pytest.approx(one["scores"][3], abs=1e-3)


def _loss_by_transformers(folder):
    """The held-out loss of a model that from_pretrained loads."""
    model = offline_transformers().AutoModelForCausalLM.from_pretrained(folder)
    tokens, labels = as_batch([encode(pair, Bytes()) for pair in TAUGHT.held_out], SMALL.n_ctx)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE).item()


@pytest.mark.sweep
def test_pretrained_in_bf16_offloaded_and_saved_for_transformers_under_a_gpus_rules(tmp_path):
    tuned, broken = str(tmp_path / "tuned"), tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    (broken / "model.safetensors").write_bytes(b"half")
    change = {"precision": "bf16", "offload": True, "save": tuned}
    fsdp2, ours, again, refused = results_of(
        2, change | {"engine": "fsdp2"}, change | {"pretrain": 2, "recompute": True},
        {"model": tuned, "steps": 1}, {"model": str(broken)}, rehearse="gpu")
    assert "model.safetensors has no whole" in refused
    for each in (fsdp2, ours):
        assert each["scores"][3].loss < each["scores"][0].loss - 0.1
    assert again["scores"][0] == pytest.approx(ours["scores"][3], abs=0.02)  # computed in bf16
    [loss] = launch(_loss_by_transformers, tuned, ranks=1, preload=PRELOAD)
    assert again["scores"][0].loss == pytest.approx(loss, abs=1e-4)
