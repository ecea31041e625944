"""Lab 07's dry run: as much is counted as is predicted, and as much as in a step that is real."""

import pytest
import torch
import torch.distributed as dist

from ranklab import launch
from ranklab.projects.fsdp import dry_run, llama
from ranklab.projects.fsdp.config import LLAMAS
from ranklab.projects.fsdp.dry_run import (
    Step, dry_run_report, moments, peak_of, predicted_memory,
)
from ranklab.projects.hugging_face import offline_transformers

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
needs_llama = pytest.mark.skipif(not llama.is_here(), reason="needs transformers")

L7 = LLAMAS["7b"] | {"num_hidden_layers": 3}
L1 = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 3,
      "num_attention_heads": 16}
SMALL = LLAMAS["laptop"]
CASES = [
    (L7, 4, {"offload": True}), (L7, 4, {"pieces": 2}),
    (L7, 8, {"micro_batch": 4, "n_ctx": 4096, "offload": True}), (L1, 3, {"precision": "fp32"}),
    (L1 | {"vocab_size": 1000, "num_key_value_heads": 4, "tie_word_embeddings": True}, 4,
     {"micro_batch": 4, "n_ctx": 2048, "recompute": False}),
    (SMALL, 2, {"micro_batch": 16, "n_ctx": 96}),
]  # fmt: skip


def _counted(cases):
    """Several dry runs in one process."""
    found = []
    for config, ranks, how in cases:
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=1)
        found.append(dry_run._dry_run(config, ranks, Step(**how)))
    return found, dist.is_initialized()


@needs_llama
def test_as_much_as_predicted():
    [(found, still_poses)] = launch(_counted, CASES, ranks=1, timeout=280, preload=llama.PRELOAD)
    assert not still_poses
    for (config, ranks, how), counted in zip(CASES, found):
        said = predicted_memory(config, ranks, **how)
        print(ranks, how, f"{said.total / counted.total - 1:+.2%}")
        assert said.total == pytest.approx(counted.total, rel=0.02)
        assert said.parameters == pytest.approx(counted.parameters, rel=1e-3)


@needs_llama
def test_7b_on_4_gpus_is_as_predicted():
    counted = dry_run.dry_run(LLAMAS["7b"], 4)
    assert predicted_memory(LLAMAS["7b"], 4).total == pytest.approx(counted.total, rel=0.01)
    assert counted.parameters == pytest.approx(4 * 6_738_415_616 / 4, rel=1e-5)
    assert counted.total == pytest.approx(29.9e9, rel=0.01)


def _real(cases):
    transformers = offline_transformers()
    return [peak_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)), Step(**how))
            for config, _, how in cases]


@needs_llama
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs CUDA to be absent: it looks at a CPU")
def test_a_pretended_step_holds_what_a_real_one_does():
    # Most is there when gradients leave. Later, gloo may have let go of a message; NCCL has not.
    cases = [(SMALL, 2, {"n_ctx": 32, **how}) for how in (
        {}, {"recompute": False, "precision": "fp32", "pieces": 2}, {"offload": True})]
    [(found, _)] = launch(_counted, cases, ranks=1, preload=llama.PRELOAD)
    assert found == launch(_real, cases, ranks=2, preload=llama.PRELOAD)[0]


# --- the report -----------------------------------------------------------------------------------

@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(llama, "is_here", lambda: False)


def test_without_transformers_it_predicts(without_transformers):
    text = dry_run_report("7b", 4, 24, offload=True, batch=64, lr=1e-5)
    assert "transformers is not here" in text and "16 times 1 x 1024 tokens on each" in text
    assert "It fits in 24 GB" in text and "CPUs' memory: 108 GB" in text
    assert max(map(len, text.splitlines()[:-2])) <= 100


def test_what_does_not_fit_is_told_what_does(without_transformers):
    text = dry_run_report("7b", 4, 24)
    assert "It does not fit in 24 GB" in text and "Most is there when block 2's" in text
    assert "What fits: offload (4.0 GB), 8 GPUs (16.8 GB), 16 GPUs" in text
    text = dry_run_report("7b", 4, 5, micro_batch=64, n_ctx=8192, recompute=False)
    assert "No single change makes it fit." in text


def test_hybrid_sharding_holds_what_fewer_gpus_would(without_transformers):
    assert (dry_run_report("7b", 8, 24, shard_ranks=4).splitlines()[:-1]
            == dry_run_report("7b", 4, 24).splitlines()[:-1])


def test_the_moments_have_names():
    found = moments(SMALL, 2, Step())
    assert list(found)[0] == "the loss is taken"
    assert len(found) == 2 + 2 * SMALL["num_hidden_layers"]


@needs_llama
def test_the_command_says_so(capsys):
    from ranklab.projects.fsdp.__main__ import main

    assert main(["--dry-run", "--gpus", "2", "--gpu-gb", "24"]) == 0
    assert "It fits in 24 GB" in capsys.readouterr().out
