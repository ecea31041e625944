"""What FP8 and larger NVLink domains change in a plan: lib/ranklab/planner/fp8.py, domains.py."""

from dataclasses import replace

import pytest

from ranklab.cli import main
from ranklab.planner import find_node
from ranklab.planner.catalog import MODELS
from ranklab.planner.domains import crossing_share, expert_traffic, published_domains
from ranklab.planner.fp8 import fp8_change, fp8_speedup, gathered_bytes, published_pairs
from ranklab.planner.plan import Plan, Span
from ranklab.planner.step import step_time

A100, H100, RACK = find_node("a100-dgx"), find_node("h100-dgx"), find_node("gb200-nvl72")
FSDP = Plan(dp=64, sequence=8192, micro_batches=2, zero=3, tool="torchtitan")
WIDE = Plan(dp=64, pp=4, ep=64, virtual=4, schedule="interleaved", zero=1, sequence=4096,
            micro_batches=64)


def plan_text(capsys, *words):
    assert not main(["plan", *words])
    return capsys.readouterr().out


def refusal(capsys, *words):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *words])
    return capsys.readouterr().err


# --- FP8 ------------------------------------------------------------------------------------------

def test_amdahl_is_between_one_and_the_products_own_gain():
    faster = H100.rate("fp8") / H100.rate("bf16")
    gains = [fp8_speedup(MODELS["llama-8b"], replace(FSDP, sequence=sequence), H100)
             for sequence in (4096, 32768, 131072)]
    assert 1 < gains[2] < gains[1] < gains[0] < faster  # attention's share grows
    with pytest.raises(ValueError, match="a100-dgx has no FP8"):
        fp8_speedup(MODELS["llama-8b"], FSDP, A100)
    with pytest.raises(ValueError, match="'mxfp8' must be bf16"):
        fp8_change(MODELS["llama-8b"], replace(FSDP, precision="mxfp8"), H100)


def test_weights_gathered_in_fp8_are_half_the_bytes():
    model = MODELS["llama-405b"]
    plan = replace(FSDP, tp=8, sequence_parallel=True)
    bf16, fp8 = fp8_change(model, plan, H100).gathered
    assert bf16 == 2 * 2 * plan.micro_batches * model.layers * model.block / 8 == 2 * fp8
    megatron = replace(WIDE, ep=1)  # once a step, and the embedding stays in bf16
    weights, small = (gathered_bytes(MODELS["llama-8b"], replace(megatron, gathered_bytes=n), H100)
                      for n in (2, 1))
    layers = MODELS["llama-8b"].layers / 4 * MODELS["llama-8b"].block
    assert weights - small == pytest.approx(layers)
    assert small == pytest.approx(layers + 2 * MODELS["llama-8b"].embedding)


def test_fp8_change_is_two_plans():
    for model, plan in (("llama-8b", FSDP), ("llama-70b", Plan(
            dp=4, tp=4, pp=4, micro_batches=16, zero=1, sequence_parallel=True))):
        change = fp8_change(MODELS[model], plan, H100)
        small = step_time(MODELS[model], replace(plan, precision="fp8"), H100)
        assert change.seconds[1] == small.total < change.seconds[0]
        assert change.gathers <= change.seconds[1]
        assert (change.memory[1] < change.memory[0]) == (plan.tool == "megatron")


def test_pairs_are_of_one_layout_and_gain_less_than_amdahl_says():
    pairs = published_pairs()
    assert len(pairs) >= 7
    for bf16, fp8 in pairs:
        assert replace(fp8.plan, precision="bf16") == bf16.plan and fp8.machine == bf16.machine
        assert bf16.seconds / fp8.seconds < fp8_speedup(bf16.model, bf16.plan, bf16.machine)


# --- domains --------------------------------------------------------------------------------------

def test_experts_in_a_rack_send_nothing_over_the_network():
    assert [crossing_share(64, domain) for domain in (1, 8, 64, 72)] == [63 / 64, 7 / 8, 0, 0]
    assert WIDE.span("expert", RACK) == Span(64, 64, 64)
    assert WIDE.span("expert", replace(RACK, node=8)) == Span(64, 8, 64)
    model = MODELS["deepseek-v3"]
    nodes, some, whole = (expert_traffic(model, WIDE, RACK, domain) for domain in (8, 64, 72))
    assert some[1:] == whole[1:] and (some.crossing, some.nbytes) == (0, 0)
    assert nodes.crossing == 7 / 8 and nodes.step > some.step
    rows = 2 * WIDE.tokens * model.hidden * 8 * (1 - (7 / 8)**8) * 7 / 8  # to 8 nodes, but its own
    often = 4 * WIDE.micro_batches * model.sparse_layers / 4  # there, back, and their gradients
    assert nodes.nbytes == pytest.approx(often * rows)
    assert nodes.seconds > nodes.nbytes / RACK.network


def test_what_has_no_domains():
    with pytest.raises(ValueError, match="ep=1"):
        expert_traffic(MODELS["llama-8b"], FSDP, H100, 8)
    for domain in (0, 2):
        with pytest.raises(ValueError, match=f"tp=4 must divide a domain of {domain} GPUs"):
            expert_traffic(MODELS["mixtral-8x7b"], Plan(dp=8, tp=4, ep=8), H100, domain)


def test_published_domains_are_the_same_model_and_gpus():
    rows = published_domains()
    assert len(rows) >= 5 and [row[0] for row in rows] == sorted(row[0] for row in rows)
    for _, node, rack in rows:
        assert (node.model, node.plan.gpus, node.plan.precision) == (
            rack.model, rack.plan.gpus, rack.plan.precision)
        assert node.machine.node == 8 < rack.plan.ep < rack.machine.node == 72


# --- the command ----------------------------------------------------------------------------------

def test_the_command_says_what_fp8_changes(capsys):
    dense = "--model llama-8b --gpus 16 --on h100-dgx --batch 32".split()
    text = " ".join(plan_text(capsys, *dense, "--precision", "fp8").split())
    assert "FP8 for the products of the blocks, " in text and "% of a step of the best" in text
    assert f"In published pairs of runs ({len(published_pairs())}, each of one layout)" in text
    text = plan_text(capsys, "--model", "qwen3-30b-a3b", "--gpus", "64", "--on", "gb200-nvl72",
                     "--batch", "256", "--tool", "megatron", "--domains", "8,64",
                     "--precision", "fp8")
    assert max(map(len, text.splitlines())) <= 100
    assert "has no FP8" in refusal(capsys, "--model", "llama-8b", "--gpus", "16", "--on",
                                   "a100-dgx", "--precision", "fp8")
    assert "ep=1" in refusal(capsys, *dense, "--domains", "8,64")
    two = "--model llama-8b --on h100-dgx:8,a100-dgx:8".split()
    assert "--precision fp8 is for GPUs of one kind" in refusal(capsys, *two, "--precision", "fp8")
    assert "--domains is for GPUs of one kind" in refusal(capsys, *two, "--domains", "8")


def test_the_command_compares_domains(capsys):
    text = plan_text(capsys, "--model", "deepseek-v3", "--gpus", "256", "--on", "gb200-nvl72",
                     "--seq", "4096", "--batch", "4096", "--domains", "8,64")
    (first, second), = ([row.split() for row in text.splitlines() if row.split()[:1] in (
        ["8"], ["64"])],)
    assert first[1] == "88%" and second[1:3] == ["0%", "0"]
    assert "some groups of experts lie in two domains" in " ".join(text.split())
