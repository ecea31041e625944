"""Lab 07's project: the same on any ranks and by either engine, saved, resumed, and refused."""

import dataclasses
import json
import re
import shutil

import pytest
import torch

from ranklab import launch
from ranklab.checkpoint.files import complete
from ranklab.data.instructions import Bytes, Instructions, as_batch, encode
from ranklab.engine import torchrun
from ranklab.fsdp import (
    FullyShardedBlock, clip_grad_norm_sharded, full_state_dict, masked_loss, wrap_policy,
)
from ranklab.projects import fsdp as project
from ranklab.projects.fsdp import training
from ranklab.projects.fsdp.config import LLAMAS, SIZES
from ranklab.projects.fsdp.llama import PRELOAD
from ranklab.projects.fsdp.report import predicted
from ranklab.projects.hugging_face import is_here
from ranklab.targets import IGNORE

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread"),
              pytest.mark.skipif(not is_here(), reason="needs transformers")]

SHAPE = {**LLAMAS["laptop"], "hidden_size": 20, "intermediate_size": 31, "num_attention_heads": 2}
SMALL = dataclasses.replace(SIZES["laptop"], pretrain=0, steps=4, batch=12, micro_batch=2,
                            eval_batch=12, log_every=1, n_ctx=24, clip=0.5)
SUMS = [(f"{i}+{i % 3}=", str(i + i % 3)) for i in range(60)]
TAUGHT = Instructions("sums", SUMS[:40], SUMS[1:13])
PLAIN = [("", f"{i}, {i + 1}, {i + 2}") for i in range(30)]


@pytest.fixture
def alpaca(tmp_path):
    """A file of sums in Alpaca's form."""
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Add", "input": prompt, "output": answer}
                                for prompt, answer in SUMS]))
    return str(path)


def works(changes):
    """On each rank: what the project finds with each of these changes of SMALL; or its sentence."""
    return [work(**each) for each in changes]


def work(shape=SHAPE, until=None, resume=False, **changes):
    config = dataclasses.replace(SMALL, **changes)
    plain = PLAIN if config.pretrain else []
    torch.seed()  # as torchrun's ranks begin, each by chance
    try:
        return training._work(shape, config, training.PARTS, plain, TAUGHT, resume, until, False)
    except Exception as error:
        return str(error)


def on_ranks(ranks, *changes, **how):
    """For each rank what it finds with each of these changes."""
    return launch(works, changes, ranks=ranks, timeout=170, preload=PRELOAD, **how)


def found(ranks, *changes, **how):
    """[what rank 0 finds] with each of these changes."""
    seen = on_ranks(ranks, *changes, **how)[0]
    assert all(isinstance(each, dict) for each in seen), seen
    return seen


# --- training -------------------------------------------------------------------------------------

def test_the_same_on_any_ranks_and_by_either_engine():
    [one] = found(1, {})
    cases = {2: [{}, {"engine": "fsdp2"}, {"recompute": True, "offload": True, "micro_batch": 6},
                 {"most_bytes": 45_000}], 4: [{"shard_ranks": 2}]}
    for ranks, changes in cases.items():
        for change, each in zip(changes, found(ranks, *changes), strict=True):
            assert each["history"].loss == pytest.approx(one["history"].loss, abs=2e-4), change
            for mine, its in zip(each["scores"].values(), one["scores"].values()):
                assert mine == pytest.approx(its, abs=1e-3)
            # But for Adam's steps, padding, and single numbers that are added up.
            [held], _, sent = each["costs"]
            counted = [held.parameters, held.gradients, held.optimizer_state, sent]
            said = predicted(each["numbers"], dataclasses.replace(SMALL, **change), ranks)
            assert counted == pytest.approx(said, rel=0.02)


def test_pretrained_in_bf16_saved_and_loaded_by_transformers(tmp_path):
    import transformers

    changes = {"pretrain": 3, "precision": "bf16", "save": str(tmp_path / "tuned")}
    again = {"model": changes["save"], "steps": 1}
    first, second = found(2, changes, again)
    assert second["scores"][0] == pytest.approx(first["scores"][4], abs=0.02)  # computed in bf16
    model = transformers.AutoModelForCausalLM.from_pretrained(changes["save"])
    tokens, labels = as_batch([encode(pair, Bytes()) for pair in TAUGHT.held_out], SMALL.n_ctx)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(),
                                             ignore_index=IGNORE)
    assert second["scores"][0].loss == pytest.approx(loss.item(), abs=1e-4)


def test_goes_on_with_other_ranks_and_the_other_engine(tmp_path):
    saved = tmp_path / "saved"
    whole, first = found(2, {}, {"checkpoint": str(saved), "until": 2})
    [folder] = complete(saved)
    for name in ("alone", "other", "truncated", "missing"):
        shutil.copytree(saved, tmp_path / name)
    file = tmp_path / "truncated" / folder.name / "rank-00001.pt"
    file.write_bytes(file.read_bytes()[:-9])
    (tmp_path / "missing" / folder.name / "rank-00001.pt").unlink()
    for ranks, name, engine in ((3, "saved", "fsdp2"), (1, "alone", "ours")):
        [second] = found(ranks, {"checkpoint": str(tmp_path / name), "resume": True,
                                 "engine": engine})
        assert second["scores"][2] == pytest.approx(first["scores"][2], abs=1e-4)
        assert second["scores"][4] == pytest.approx(whole["scores"][4], abs=1e-3)

    changes = [{"checkpoint": str(tmp_path / name), "resume": True}
               for name in ("other", "truncated", "missing")]
    changes[0]["shape"] = {**SHAPE, "hidden_size": 24}
    for other, truncated, missing in on_ranks(2, *changes):
        assert "the checkpoint is of another model" in other
        assert "is damaged: rank-00001.pt has" in truncated
        assert "rank-00001.pt is missing" in missing


def test_a_learners_own_functions_are_used(monkeypatch, tmp_path, alpaca):
    called = str(tmp_path / "called")

    def clip(parameters, most, group=None):
        open(called, "w").close()
        return clip_grad_norm_sharded(parameters, most, group)

    class Mine(FullyShardedBlock):
        pass

    how = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(SMALL)}
    how |= {"data": alpaca, "steps": 3, "n_ctx": 48, "save": str(tmp_path / "tuned"),
            "block": Mine, "clip": clip, "loss": lambda *a: masked_loss(*a),
            "policy": lambda *a: wrap_policy(*a), "state": lambda model: full_state_dict(model)}
    monkeypatch.setenv("RANKLAB_REHEARSE", "gpu")  # and under a GPU's rules
    text = project.report(project.run(ranks=2, **how))
    assert (tmp_path / "called").exists()
    assert "Yours: FullyShardedBlock, clip_grad_norm_sharded, masked_loss, wrap_policy" in text
    assert re.search(r"after step 3 +\d\.\d{3} +\d+\.\d%", text)


def test_offload_under_a_gpus_rules(tmp_path):
    half = {"offload": True, "precision": "bf16", "save": str(tmp_path)}
    again = {"model": str(tmp_path), "steps": 1}
    seen = found(2, half | {"recompute": True}, half | {"engine": "fsdp2"}, again, rehearse="gpu")
    *seen, saved = seen
    assert saved["scores"][0].loss == pytest.approx(seen[1]["scores"][4].loss, abs=0.02)
    ours, theirs = (each["scores"][4].loss for each in seen)
    assert ours == pytest.approx(theirs, abs=0.01)
    assert ours < seen[0]["scores"][0].loss - 0.1


def test_torchrun_runs_it_in_place(alpaca):
    done = torchrun("-m", "ranklab.projects.fsdp", "--pretrain", "0", "--steps", "3", "--batch",
                    "4", "--eval-batch", "4", "--data", alpaca, "--recompute", ranks=2)
    assert done.count("peak, with activations") == 1, done


# --- what is refused ------------------------------------------------------------------------------

def test_bad_input_is_one_sentence_on_every_rank(tmp_path):
    changes = ({"lr": float("inf")}, {"n_ctx": 3}, {"batch": 9}, {"eval_batch": 1},
               {"shard_ranks": 3}, {"most_bytes": 9}, {"model": str(tmp_path)})
    sentences = ("the loss of step 2 is nan: go on from", "no token of this batch is an answer",
                 "2 ranks must divide batch=9", "2 ranks need a held-out example each",
                 "shard_ranks=3 must divide the 2 ranks", "most_bytes=9 is too little",
                 "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    (tmp_path / "model.safetensors").write_bytes(b"half")
    for said in on_ranks(2, *changes):
        for one, sentence in zip(said, sentences, strict=True):
            assert sentence in one
