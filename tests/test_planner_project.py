"""Lab 13's project: orders, their grades, formulas beside published runs, a measured node."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from ranklab.planner import Plan, find_node, memory_per_gpu, search_layouts, step_time
from ranklab.planner.catalog import MODELS, NODES, find_model, model_of_size
from ranklab.planner.mixed import mixed_plans, mixed_step
from ranklab.planner.space import ADVISED, layouts, refuse
from ranklab.planner.why import shares
from ranklab.projects import planner as project
from ranklab.projects.planner.__main__ import project as command
from ranklab.projects.planner.plan import main as ranklab_plan

ROOT = Path(__file__).parents[1]
A100, H100 = find_node("a100-dgx"), find_node("h100-dgx")


# --- orders ---------------------------------------------------------------------------------------

def test_every_order_has_a_plan_that_keeps_all_constraints(capsys):
    assert not command.main(["orders"])
    printed = capsys.readouterr().out
    assert printed.count(" ok ") >= 12 and "FAIL" not in printed
    assert "10b   10B over two sites" in printed and "RTX-4090: deepspeed" in printed


def test_grades_name_what_fails():
    plan = Plan(dp=2, tp=8, pp=4, micro_batches=512, zero=1, sequence_parallel=True)
    assert "FAIL  tp, pp and virtual above 1" in project.grade("100b", plan)
    large = dataclasses.replace(plan, dp=8, pp=1, micro_batches=128)
    assert re.search(r"FAIL  fits in 76 GB .*: 1\d\d\.\d GB", project.grade("100b", large))
    assert "128 GPUs, not 64" in project.grade("100b", dataclasses.replace(plan, dp=4))
    with pytest.raises(ValueError, match="'3b' is no order: 10b, 100b"):
        project.grade("3b", plan)


def test_orders_run_the_functions_that_are_given():
    calls = []

    def search(*args, **named):
        calls.append(args)
        return search_layouts(*args, **named)

    slower = project.run(only="10b", search=search, far=0.02e9)
    assert len(calls) == 1 and calls[0][1].far == 0.02e9
    assert "links of islands" in slower
    tight = project.run(only="130b", memory=lambda *_: dataclasses.replace(
        memory_per_gpu(*_), weights=1e12))
    assert "FAIL  fits in 76 GB" in tight


# --- formulas beside published runs ---------------------------------------------------------------

def test_errors_are_those_of_the_functions_that_are_given():
    lines = project.errors().splitlines()
    assert len(lines) == 5 and "kept back" in lines[3]
    doubled = project.errors(step=lambda *args: dataclasses.replace(
        step_time(*args), rest=step_time(*args).total)).splitlines()
    errors = [float(re.findall(r"([\d.]+)%", each[3])[0]) for each in (lines, doubled)]
    assert errors[1] > 80 > 10 > errors[0]
    assert lines[2] == doubled[2]  # memory is as it was


def test_what_was_trained_fits():
    for name, cards, plan in project.TRAINED:
        held = memory_per_gpu(MODELS[name], plan, find_node(cards)).total
        assert 0.3 < held / find_node(cards).memory_bytes <= 1, name


def test_the_number_of_published_step_times_is_said_alike():
    number = len(project.predicted())
    for path in ("README.md", "labs/source/13_planner.py", "slides/13_planner.md"):
        numbers = re.findall(r"(\d+) published (?:step times|runs)", (ROOT / path).read_text())
        assert str(number) in numbers, path


# --- models, nodes, layouts -----------------------------------------------------------------------

@pytest.mark.parametrize("name, billions, active", [
    ("llama-8b", 8.03, 7.5), ("llama2-13b", 13.0, 12.9), ("gpt3-175b", 174.6, 174.6),
    ("mixtral-8x7b", 46.7, 12.7), ("deepseek-v3", 671, 36.7), ("qwen3-235b-a22b", 235, 21.6)])
def test_models_have_the_size_of_their_name(name, billions, active):
    model = MODELS[name]
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert model.active / 1e9 == pytest.approx(active, rel=0.02)


def test_a_config_json_is_the_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}))
    assert find_model(str(tmp_path)) == ("llama", MODELS["llama-8b"])
    (tmp_path / "other.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="no num_attention_heads"):
        find_model(str(tmp_path / "other.json"))
    with pytest.raises(ValueError, match="'gpt5' is no model: gpt2-xl, "):
        find_model("gpt5")


@pytest.mark.parametrize("size", [5e7, 1e9, 7e9, 13e9, 70e9, 175e9, 1e12])
def test_a_model_of_a_size(size):
    assert model_of_size(size).parameters == pytest.approx(size, rel=0.08)


def test_every_layout_can_run_and_has_its_batch():
    for name, node, gpus, sequence, batch in (
            ("llama-70b", H100, 64, 8192, 256), ("mixtral-8x7b", H100, 16, 8192, 64),
            ("llama2-7b", find_node("rtx4090-pcie"), 4, 2048, 64)):
        for tool in ADVISED:
            plans = [*layouts(MODELS[name], node, gpus, sequence, batch, tool)]
            assert plans
            for plan in plans:
                refuse(plan, MODELS[name], node, gpus, sequence, batch)
    assert NODES["gb200-nvl72"][1] == 72


def test_the_search_is_sorted_and_fits():
    candidates = search_layouts(MODELS["llama-8b"], H100, 16, 8192, 64)
    times = [each.step.total for each in candidates]
    assert times == sorted(times)
    assert all(each.memory.total <= 0.9 * H100.memory_bytes for each in candidates)
    whole = search_layouts(MODELS["llama-8b"], H100, 16, 8192, 64, reserve=0)
    assert len(whole) > len(candidates) and any(
        each.memory.total > 0.9 * H100.memory_bytes for each in whole)
    best = candidates[0]
    assert sum(share for _, share in shares(best.plan, best.step, H100)) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"no layout fits in the 85 GB .*10% .* needs [\d.]+ GB"):
        search_layouts(MODELS["gpt3-175b"], A100, 8, 2048, 64)


def test_unlike_gpus_end_together():
    plan = Plan(dp=4, tp=4, pp=4, sequence=8192, micro_batches=1, zero=1, sequence_parallel=True)
    plans = mixed_plans(MODELS["llama-70b"], plan, [(H100, 64), (A100, 64)], 512)
    assert sum(each.batch for each in plans) == 512 and plans[0].batch > 1.8 * plans[1].batch
    slow, fast = (step_time(MODELS["llama-70b"], each, machine).total
                  for each, machine in zip(plans, (H100, A100)))
    assert slow == pytest.approx(fast, rel=0.1)
    assert mixed_step(MODELS["llama-70b"], plans, (H100, A100)) >= max(slow, fast) * 0.99


# --- the command ----------------------------------------------------------------------------------

def test_a_measured_node_is_a_machine(tmp_path, capsys):
    path = tmp_path / "node.json"
    assert not command.main(["measure", "--ranks", "2", "--write", str(path)])
    assert "all-reduce" in capsys.readouterr().out
    node = find_node(str(path))
    assert node.node == 2 and node.bf16 > 0 and 1e7 < node.link < 1e12
    assert search_layouts(model_of_size(5e7), node, 2, 128, 8, ("torchtitan",))
    ranklab_plan(["--params", "5e7", "--gpus", "2", "--on", str(path)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "no price is known (--price), no power of a GPU is known" in printed
