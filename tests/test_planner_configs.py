"""What a plan reads in the config.json of well-known models, beside what their makers publish.

configs.json holds each model's config, as far as it says more than its class has by itself, and the
billions of parameters, in all and met by a token, that its card or paper tells (recalled). Those
without a total are to be refused.
"""

import json
import sys
from pathlib import Path

import pytest

from ranklab.planner import hf_config
from ranklab.planner.catalog import MODELS, find_model, of_config
from ranklab.planner.export import megatron_arguments
from ranklab.planner.hf_config import FAMILIES, by_fields, read_config
from ranklab.planner.plan import Plan

transformers = pytest.importorskip("transformers")
CONFIGS = json.loads(Path(__file__).with_name("configs.json").read_text())
KNOWN = {name: told for name, told in CONFIGS.items() if "total" in told}
LLAMA = KNOWN["llama-3.1-8b"]["config"]
pytestmark = pytest.mark.timeout(120)


def test_there_are_sixty_models_of_forty_types():
    assert len(KNOWN) >= 60 and len({told["config"]["model_type"] for told in KNOWN.values()}) >= 40


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_is_as_large_as_its_card_says(name):
    told = KNOWN[name]
    model = of_config(told["config"])
    assert model.parameters / 1e9 == pytest.approx(told["total"], rel=0.02)
    if "active" in told:  # cards round much, "A3B", and some count the embedding
        most = model.active + (0 if model.tied else model.embedding)
        assert 0.85 * model.active <= 1e9 * told["active"] <= 1.05 * most


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in KNOWN])
def test_what_a_plan_does_not_know_is_refused(name):
    with pytest.raises(ValueError, match="without attention|an encoder and a decoder|is an encoder|"
                                         "has parts"):
        of_config(CONFIGS[name]["config"])


@pytest.mark.parametrize("name", [name for name, told in KNOWN.items()
                                  if told["config"]["model_type"] in FAMILIES])
def test_a_family_is_read_by_its_fields_as_it_is_measured(name):
    config = KNOWN[name]["config"]
    read, measured = by_fields(config), of_config(config)
    assert read.parameters == pytest.approx(measured.parameters, rel=0.002)
    assert read.active == pytest.approx(measured.active, rel=0.002)
    for field in ("layers", "hidden", "heads", "kv_heads", "head_size", "gated", "tied", "experts",
                  "top_k", "shared", "dense", "vocab"):
        if not (field == "kv_heads" and measured.attention_numbers):
            assert getattr(read, field) == getattr(measured, field), field


def test_biases_of_experts_are_no_width():
    model = of_config(KNOWN["gpt-oss-120b"]["config"])
    assert (model.expert_ffn, model.gated) == (2880, True)
    assert "--moe-ffn-hidden-size 2880 " in megatron_arguments(model, Plan(dp=8, ep=8))


def test_each_family_is_held_to_transformers():
    assert {told["config"]["model_type"] for told in KNOWN.values()} >= FAMILIES.keys()


def test_a_missing_transformers_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["qwen3-8b"]["config"]))
    name, model = find_model(str(tmp_path))
    assert name == ("qwen3 (read by its fields: transformers, which measures the model itself, is "
                    "not installed)")
    assert model.parameters == pytest.approx(8.19e9, rel=1e-3)
    with pytest.raises(ValueError, match="'falcon' can't be read: transformers, .* not installed"):
        of_config(KNOWN["falcon-40b"]["config"])


@pytest.mark.parametrize("config, words", [
    ({"model_type": "my_own"}, "'my_own' can't be read: transformers .* can't build it"),
    ({"model_type": "llama", "num_hidden_layers": "many"},
     'num_hidden_layers="many" must be a whole number of at least 1'),
    ({"num_hidden_layers": 3}, "no hidden_size"),
    ({"hidden_size": 64}, "no num_attention_heads"),
    ({**LLAMA, "num_hidden_layers": "32"}, 'num_hidden_layers="32" must be a whole number'),
    ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number of at least 1"),
    ({**LLAMA, "num_hidden_layers": True}, "num_hidden_layers=true must be a whole number"),
    ({**LLAMA, "hidden_size": 4096.5}, "hidden_size=4096.5 must be a whole number"),
    ({**LLAMA, "vocab_size": -1}, "vocab_size=-1 must be a whole number"),
    ({**LLAMA, "num_key_value_heads": 0}, "num_key_value_heads=0 must be a whole number"),
    ({**LLAMA, "num_attention_heads": 30, "num_key_value_heads": 7}, "7 key heads must divide the "
                                                                     "30 heads"),
    ({**LLAMA, "num_attention_heads": 30, "num_key_value_heads": 6},
     "30 heads must divide hidden_size=4096, or head_dim be given"),
    ({**LLAMA, "intermediate_size": [14336] * 32}, "intermediate_size is a list of 32 numbers"),
    ({"model_type": "falcon", "num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole"),
    ({"model_type": "kimi_k2"}, r"\(ValueError: Unrecognized model identifier: kimi_k2\.\)"),
    ({"model_type": "smollm3", "num_hidden_layers": 2, "layer_types": ["full_attention", None]},
     "'layer_types' with value .* doesn't match any type"),
    ({"model_type": "distilbert"}, "distilbert is an encoder, in which a token attends to those "),
    ({"model_type": "deepseek_v32", "num_hidden_layers": 2},
     r"deepseek_v32 attends to selected tokens \(2048 of them, by an indexer\)")])
def test_what_cannot_be_built_or_read_is_a_sentence(config, words):
    with pytest.raises(ValueError, match=words):
        read_config(config)


def test_a_reason_is_quoted_in_whole_words():
    long = ValueError("for validator 'x':\n    TypeError: " + "word " * 90 + "\n  more")
    assert hf_config.reason_of(long).startswith("TypeError: word")
    assert hf_config.reason_of(long).endswith(" word ...") and len(hf_config.reason_of(long)) <= 200


def test_sizes_that_a_config_leaves_out_are_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        name: value for name, value in LLAMA.items() if name != "num_hidden_layers"}))
    assert find_model(str(tmp_path))[0] == (
        "llama (left out, and so the default of LlamaConfig: num_hidden_layers 32)")
    _, (note,) = read_config({"model_type": "llama"})
    assert note.endswith("num_hidden_layers 32, hidden_size 4096, num_attention_heads 32, "
                         "intermediate_size 11008, vocab_size 32000")
    assert read_config(LLAMA)[1] == [] == read_config(KNOWN["gpt2-xl"]["config"])[1]


def test_a_flat_config_with_a_vision_tower_is_its_language_model():
    flat = {**KNOWN["qwen2.5-7b"]["config"], "model_type": "qwen2_5_vl",
            "vision_config": {"depth": 32}, "rope_scaling": {"type": "mrope", "mrope_section": [
                16, 24, 24]}}
    model, notes = read_config(flat)
    assert model == of_config(KNOWN["qwen2.5-7b"]["config"])
    assert notes == ["its language model alone: vision_config is left out"]
    assert read_config({**flat, "tie_word_embeddings": True})[0].tied


def test_experts_without_their_number_of_a_token_are_refused(monkeypatch):
    monkeypatch.setattr(hf_config, "TOP_K", ("unknown",))
    with pytest.raises(ValueError, match="how many of them a token meets: none of unknown"):
        of_config(KNOWN["mixtral-8x7b"]["config"])


def test_windows_cost_what_their_tokens_see():
    model = of_config(KNOWN["gemma-3-27b"]["config"])
    assert (model.windowed, model.window) == (52, 1024)
    assert model.attended(512) == 512 and model.attended(8192) == (10 * 8192 + 52 * 1024) / 62


@pytest.mark.parametrize("name", [name for name in MODELS if name in KNOWN])
def test_a_named_model_is_that_of_its_config(name):
    assert MODELS[name].attended(32768) == of_config(KNOWN[name]["config"]).attended(32768)


def test_dense_layers_between_those_with_experts_are_on_every_stage():
    model = of_config(KNOWN["llama-4-maverick"]["config"])
    assert model.spread and [model.dense_of(12, first) for first in (True, False)] == [6, 6]
    first = of_config(KNOWN["deepseek-v3"]["config"])
    assert [first.dense_of(16, is_first) for is_first in (True, False)] == [3, 0]
