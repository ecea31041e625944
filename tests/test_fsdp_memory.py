"""Lab 07's dry run: as much is counted as is predicted, and as much as in a step that is real."""

import pytest
import torch

from ranklab import launch
from ranklab.fsdp.memory import Step, predicted_memory
from ranklab.projects.fsdp import dry_run
from ranklab.projects.fsdp.__main__ import main
from ranklab.projects.fsdp.config import LLAMAS
from ranklab.projects.fsdp.dry_run import counted, dry_run_report, peak_of
from ranklab.projects.fsdp.llama import PRELOAD
from ranklab.projects.hugging_face import is_here, offline_transformers

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
needs_llama = pytest.mark.skipif(not is_here(), reason="needs transformers")

L7, SMALL = LLAMAS["7b"], LLAMAS["laptop"]
L1 = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 3,
      "num_attention_heads": 16}
# What is held grows by the layer, so one case has them all.
CASES = [
    (L7, 4, {}), (L7 | {"num_hidden_layers": 2}, 4, {"offload": True}),
    (L7 | {"num_hidden_layers": 3}, 4, {"pieces": 2}),
    (L7 | {"num_hidden_layers": 2}, 8, {"micro_batch": 4, "n_ctx": 4096, "offload": True}),
    (L1, 3, {"precision": "fp32"}),
    (L1 | {"vocab_size": 1000, "num_key_value_heads": 4, "tie_word_embeddings": True}, 4,
     {"micro_batch": 4, "n_ctx": 2048, "recompute": False}),
    (SMALL, 2, {"micro_batch": 16, "n_ctx": 96}),
]  # fmt: skip


def _counted(cases):
    """Several dry runs in one process."""
    return [counted(config, ranks, Step(**how)) for config, ranks, how in cases]


@needs_llama
def test_as_much_as_predicted():
    [found] = launch(_counted, CASES, ranks=1, timeout=280, preload=PRELOAD)
    for (config, ranks, how), count in zip(CASES, found):
        said = predicted_memory(config, ranks, **how)
        print(ranks, how, f"{said.total / count.total - 1:+.2%}")
        assert said.total == pytest.approx(count.total, rel=0.02)
        assert said.parameters == pytest.approx(count.parameters, rel=1e-3)
    assert found[0].parameters == pytest.approx(4 * 6_738_415_616 / 4, rel=1e-5)
    assert found[0].total == pytest.approx(29.9e9, rel=0.01)


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
    [found] = launch(_counted, cases, ranks=1, preload=PRELOAD)
    assert found == launch(_real, cases, ranks=2, preload=PRELOAD)[0]


@needs_llama
def test_the_command_says_whether_it_fits(capsys):
    assert main(["--dry-run", "--gpus", "2", "--gpu-gb", "24"]) == 0
    assert "It fits in 24 GB" in capsys.readouterr().out


def test_without_transformers_the_formula_says_what_would_fit(monkeypatch):
    monkeypatch.setattr(dry_run, "is_here", lambda: False)
    text = dry_run_report("7b", 4, 24, offload=True, batch=64, lr=1e-5)
    assert "transformers is not here" in text and "16 times 1 x 1024 tokens on each" in text
    assert "It fits in 24 GB" in text and "CPUs' memory: 108 GB" in text
    text = dry_run_report("7b", 4, 24)
    assert "It does not fit in 24 GB" in text and "Most is there when block 2's" in text
    assert "What fits: offload (4.0 GB), 8 GPUs (16.8 GB), 16 GPUs" in text
    hybrid = dry_run_report("7b", 8, 24, shard_ranks=4)  # as on the GPUs that share a copy
    assert hybrid.splitlines()[:-1] == text.splitlines()[:-1]
    text = dry_run_report("7b", 4, 5, micro_batch=64, n_ctx=8192, recompute=False)
    assert "No single change makes it fit." in text
