"""A Plan as what its tool reads: all of it is said; DeepSpeed, bash, TOML and lab 12 take it."""

import json
import re
import subprocess
import tomllib
from dataclasses import fields, replace

import pytest

from ranklab.hybrid import layout_memory, parse_layout
from ranklab.hybrid.legal import refuse_misfits
from ranklab.peers.deepspeed_zero import read_by_deepspeed
from ranklab.planner import Model, Plan, memory_per_gpu
from ranklab.planner.catalog import MODELS
from ranklab.planner.export import (
    deepspeed_differs, deepspeed_json, megatron_arguments, torchtitan_function, torchtitan_toml,
)
from ranklab.planner.export.hybrid import dry_run_plan, hybrid_command
from ranklab.planner.hybrid_jobs import hybrid_job
from ranklab.planner.machine import machine
from ranklab.planner.space import layouts
from ranklab.projects.hybrid.config import parse_shape
from ranklab.projects.planner.files import with_header

LLAMA, GPT = MODELS["llama-8b"], Model(8, 256, 8, 1024, 512, tied=True)
PLAN = Plan(dp=4, tp=2, pp=2, cp=2, sequence=8192, micro_batch=2, micro_batches=8, zero=1,
            sequence_parallel=True, recompute="full")
CHANGES = [  # of every field but the tool
    {"dp": 8}, {"tp": 4}, {"pp": 4}, {"cp": 4}, {"ep": 2}, {"sequence": 4096}, {"micro_batch": 1},
    {"micro_batches": 4}, {"virtual": 2, "schedule": "interleaved"}, {"schedule": "gpipe"},
    {"schedule": "zb-h1"}, {"zero": 0}, {"zero": 2}, {"zero": 3}, {"shard": 4},
    {"sequence_parallel": False}, {"recompute": "none"}, {"recompute": "selective"},
    {"recompute": "operators"}, {"recomputed": 0.5}, {"attention": "tuned"},
    {"attention": "unfused"}, {"attended": 512}, {"precision": "fp8"},
    {"precision": "fp8-rowwise"}, {"precision": "mxfp8"}, {"precision": "nvfp4"},
    {"gradient_bytes": 2}, {"gathered_bytes": 1}, {"hides": ()},
    {"hides": ("data", "tensor", "pipeline", "context")},
    {"fused": False}, {"fused_experts": True}, {"frozen": True}, {"outermost": "data"},
    {"offload": True}, {"graphs": True}]


def with_sentences(model, plan):
    return deepspeed_json(model, plan) + "\n".join(deepspeed_differs(plan))


@pytest.mark.parametrize("write", [
    megatron_arguments, torchtitan_toml, torchtitan_function, with_sentences])
def test_every_field_of_a_plan_is_said(write):
    experts = MODELS["qwen3-30b-a3b"]
    names = {field.name for field in fields(PLAN)}
    assert names - {"tool"} == {name for change in CHANGES for name in change}
    for change in CHANGES:
        plan = replace(PLAN, zero=3) if write in (torchtitan_toml, torchtitan_function) else PLAN
        if plan == replace(plan, **change):
            plan = replace(plan, zero=1)
        assert write(experts, replace(plan, **change)) != write(experts, plan), change


def test_every_size_of_a_model_is_megatrons():
    plain = megatron_arguments(GPT, PLAN)
    for change in ({"layers": 10}, {"hidden": 512}, {"heads": 16}, {"ffn": 512}, {"vocab": 300},
                   {"kv_heads": 2}, {"head_size": 64}, {"gated": True}, {"tied": False},
                   {"experts": 8, "top_k": 2, "expert_ffn": 64}, {"parallel": True},
                   {"attention_numbers": 10**5}):
        assert megatron_arguments(replace(GPT, **change), PLAN) != plain, change
    deepseek = megatron_arguments(MODELS["deepseek-v3"], Plan(dp=8, ep=8))
    for words in ('--moe-layer-freq "([0]*3+[1]*58)"', "--multi-latent-attention",
                  "--moe-shared-expert-intermediate-size 2048", "--expert-model-parallel-size 8"):
        assert words in deepseek, words


def test_megatrons_text_is_bash_with_the_stages_of_the_plan():
    said = megatron_arguments(MODELS["llama-405b"], replace(PLAN, tp=8, pp=16))
    assert subprocess.run(["bash", "-n"], input=said, text=True).returncode == 0
    assert '--pipeline-model-parallel-layout "Et*7|(t*8|)*14t*7L"' in said
    assert "--nnodes 128 --nproc-per-node 8" in said and "CUDA_DEVICE_MAX_CONNECTIONS=1" in said
    uneven = megatron_arguments(LLAMA, replace(PLAN, pp=6))
    stages = re.search(r'layout "(.*?)"', uneven)[1]
    found = [int(n) for n, times in re.findall(r"t\*(\d+)\|?(?:\)\*(\d+))?", stages)
             for _ in range(int(times or 1))]
    assert tuple(found) == Plan(pp=6).stages(32)
    with pytest.raises(ValueError, match="precision='int4' is not one of bf16, fp8"):
        megatron_arguments(LLAMA, replace(PLAN, precision="int4"))


@pytest.mark.parametrize("plan, most, numbers", [
    (Plan(dp=6, tp=2), 8, (2, 6)), (Plan(dp=5, tp=2), 8, (2, 5)), (Plan(dp=20), 8, (4, 5)),
    (Plan(dp=16), 8, (2, 8)), (Plan(dp=3), 8, (1, 3)), (Plan(dp=3), 1, (3, 1))])
def test_torchrun_starts_as_many_processes_as_the_plan_has_gpus(plan, most, numbers):
    said = megatron_arguments(LLAMA, plan, most)
    found = re.search(r"torchrun (?:--nnodes (\d+) )?--nproc-per-node (\d+)", said).groups()
    assert tuple(int(number or 1) for number in found) == numbers
    assert numbers[0] * numbers[1] == plan.gpus
    assert ("do not fill nodes of 8" in said) == (numbers[1] in (5, 6))
    assert ("tensor ranks on two nodes" in said) == (numbers == (2, 5))
    with pytest.raises(ValueError, match="11 GPUs can't be divided evenly over nodes of 8"):
        megatron_arguments(LLAMA, Plan(pp=11))
    assert "--nnodes 3 --rdzv-endpoint $HEAD:29500 --nproc-per-node 4" in hybrid_command(
        GPT, Plan(dp=6, tp=2), 5)


@pytest.mark.parametrize("layers, windowed, words", [
    (36, 18, "--window-size 127,0 --window-attn-skip-freq 2"),  # gpt-oss
    (62, 52, "--window-size 127,0 --window-attn-skip-freq 6"),  # Gemma 3
    (32, 32, "--window-size 127,0"), (24, 22, "22 of 24 layers have windows"), (32, 0, "")])
def test_windows_of_the_prediction_are_megatrons(layers, windowed, words):
    model = replace(LLAMA, layers=layers, window=128, windowed=windowed)
    said = megatron_arguments(model, replace(PLAN, cp=4))
    options = [line.partition("#")[0].strip() for line in said.splitlines()
               if line.strip().startswith("--")]
    assert " ".join(option for option in options if "window" in option) == (
        words if words.startswith("--") else "")
    assert words in said or words.startswith("--")
    assert ("cp-comm-type p2p" in said) == ("windows" not in said) == (windowed == 0)
    assert ("cp-comm-type a2a" in said) == (windowed > 0)  # 8 heads for keys, tp 2, cp 4
    assert "cp-comm-type p2p" in megatron_arguments(model, replace(PLAN, cp=4, sequence=128))
    if windowed:
        assert "cp-comm-type all_gather" in megatron_arguments(model, replace(PLAN, cp=8))


def test_torchtitan_is_told_of_the_mesh_and_the_micro_batches():
    plan = replace(PLAN, zero=3, shard=4, virtual=2, schedule="interleaved")
    said = tomllib.loads(torchtitan_toml(LLAMA, plan))
    assert said["model"] == {"name": "llama3", "flavor": "8B"}
    mesh = said["parallelism"]
    assert (mesh["data_parallel_replicate_degree"], mesh["data_parallel_shard_degree"]) == (2, 2)
    assert (mesh["pipeline_parallel_schedule"], mesh["pipeline_parallel_layers_per_stage"]) == (
        "Interleaved1F1B", 8)
    assert (said["training"]["local_batch_size"], said["training"]["global_batch_size"]) == (16, 64)
    assert said["activation_checkpoint"]["mode"] == "full"
    alone = tomllib.loads(torchtitan_toml(LLAMA, replace(plan, pp=1, virtual=1)))
    assert alone["training"]["local_batch_size"] == 2  # the rest is gradient accumulation
    assert "none is this one" in torchtitan_toml(GPT, plan)
    for name in ("qwen3-30b-a3b", "gpt-oss-120b", "llama-8b"):  # the first two have no pipeline
        first = torchtitan_toml(MODELS[name], plan).partition("\n")[0]
        assert ("0.2.2 has no pipeline" in first) == (name != "llama-8b")
        assert "no pipeline" not in torchtitan_function(MODELS[name], plan)
    assert "no pipeline" not in torchtitan_toml(
        MODELS["gpt-oss-120b"], replace(plan, pp=1, virtual=1))
    compile(torchtitan_function(LLAMA, plan), "plan.py", "exec")


@pytest.mark.parametrize("change", [
    {}, {"pp": 1, "zero": 3}, {"pp": 1, "zero": 2, "offload": True, "gradient_bytes": 2}])
def test_deepspeed_takes_its_config(change):
    plan = replace(PLAN, tp=1, cp=1, sequence_parallel=False, **change)
    text = deepspeed_json(LLAMA, plan)
    text = with_header("deepspeed.json", text, ["A note."])
    read = read_by_deepspeed(json.loads(text), plan.dp)
    assert read.zero_optimization_stage == plan.zero and read.bfloat16_config.enabled
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (plan.batch, 8)
    assert (read.zero_config.offload_optimizer is not None) == plan.offload
    assert f"num_stages={plan.pp}" in with_sentences(LLAMA, plan) or plan.pp == 1


def test_the_courses_project_takes_its_command():
    plan = replace(PLAN, sequence=512, cp=1)
    said = hybrid_command(GPT, plan)
    job, layout = hybrid_job(GPT, plan)
    assert parse_layout(re.search(r"--layout (\S+)", said)[1]) == layout
    shape = parse_shape(re.search(r"--shape (\S+)", said)[1])
    assert replace(shape, rotary_base=100.0) == job.config
    assert memory_per_gpu(GPT, plan, None, "ours").reading("allocated") == layout_memory(
        job, layout).total
    for model, change, words in (
            (LLAMA, {}, "a plain MLP"), (replace(GPT, tied=False), {}, "a tied head"),
            (GPT, {"offload": True}, "on the GPU"), (GPT, {"tp": 3}, "tp=3 must divide the 8")):
        with pytest.raises(ValueError, match=words):
            hybrid_command(model, replace(plan, **change))


@pytest.mark.parametrize("plan", [
    Plan(dp=2, tp=2, pp=2, sequence=512, micro_batches=4),
    Plan(dp=2, pp=2, sequence=512, virtual=2, schedule="interleaved", micro_batches=4, zero=1,
         recompute="full"),
    Plan(dp=2, tp=2, pp=2, sequence=512, micro_batches=4, zero=3, sequence_parallel=True)])
def test_a_dry_run_counts_what_formulas_say(plan):
    run = dry_run_plan(GPT, plan)
    assert run.memory.total == pytest.approx(run.formula_memory.reading("allocated"), rel=0.05)
    for axis, nbytes in run.formula_sent.items():
        assert run.sent[axis] == pytest.approx(nbytes, rel=0.05), axis


def test_lab_12_takes_every_layout_of_the_search():
    node, found = replace(machine("A100-SXM-80GB"), node=6), 0
    for gpus, tokens in ((12, 96), (6, 1000), (12, 8192)):
        for plan in layouts(Model(6, 192, 6, 768, 300, tied=True), node, gpus, tokens, 12, "ours"):
            job, layout = hybrid_job(Model(6, 192, 6, 768, 300, tied=True), plan)
            refuse_misfits(layout, job, 6)
            found += 1
    assert found > 300
