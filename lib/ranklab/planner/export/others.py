"""A Plan as configs of torchtitan and DeepSpeed.

torchtitan  0.2.2 is the last release that reads TOML (config/job_config.py). 0.3.0 takes a function
            in Python that returns a config (config/configs.py, config/README.md), and its flags of
            the same names will be removed. Both parsers read 36 such configs. On its main branch
            of August 2026 (b5bcd76) three have new names: num_tokens_per_microbatch_per_dp_rank,
            num_tokens_per_train_step, num_pp_microbatches
DeepSpeed   0.19 (runtime/config.py, runtime/zero/config.py), which reads this in a test
"""

import json

from ranklab.planner.catalog import MODELS
from ranklab.planner.export.megatron import unsaid

FLAVORS = {  # in the catalog -> torchtitan's module, flavor, and a config without the shape
    "llama-8b": ("llama3", "8B", "llama3_8b"), "llama-70b": ("llama3", "70B", "llama3_70b"),
    "llama-405b": ("llama3", "405B", "llama3_70b"),  # llama3_405b has FP8
    "qwen3-30b-a3b": ("qwen3", "30B-A3B", "qwen3_30b_a3b"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B", "qwen3_30b_a3b"),
    "gpt-oss-120b": ("gpt_oss", "120b", "gpt_oss_120b"),
    "deepseek-v3": ("deepseek_v3", "671B", "deepseek_v3_671b")}
OTHERWISE = ("llama3", "debugmodel", "llama3_debugmodel")
NO_PIPELINE = {"qwen3", "gpt_oss"}  # in 0.2.2: pipelining_fn=None (models/*/__init__.py), at which
# train.py raises; 0.3.0 has one for both
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
CHECKPOINTS = {"none": ("none", None), "full": ("full", "FullAC"),
               "operators": ("selective", "SelectiveAC"), "selective": ("none", None)}


def torchtitan_toml(model, plan):
    """Return a TOML file for torchtitan 0.2.2. Its user chooses data, learning rate and steps.

        CONFIG_FILE=plan.toml NGPU=8 ./run_train.sh
    Lab: 13
    """
    module, flavor, _ = flavor_of(model) or OTHERWISE
    sections = {"model": {"name": module, "flavor": flavor}, **torchtitan_settings(model, plan)}
    sections["compile"].pop("enable_async_tensor_parallel")
    sections["parallelism"].pop("enable_sequence_parallel")
    sections["parallelism"]["enable_async_tensor_parallel"] = is_async(plan)
    sections["activation_checkpoint"] = {"mode": CHECKPOINTS[plan.recompute][0],
                                         "selective_ac_option": "op"}
    refused = [f"torchtitan 0.2.2 has no pipeline for {module} and refuses this file: use "
               "0.3.0."] * (plan.pp > 1 and module in NO_PIPELINE)
    lines = [f"# {sentence}" for sentence in [*refused, *torchtitan_differs(model, plan)]]
    for name, values in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}"
                                     for key, value in values.items())]
    return "\n".join(lines).strip()


def torchtitan_function(model, plan):
    """Return such a config as a function for torchtitan 0.3.0, in a file plan.py.

        torchrun --nproc-per-node 8 -m torchtitan.train --module plan --config planned
    Lab: 13
    """
    module, flavor, base = flavor_of(model) or OTHERWISE
    settings, kind = torchtitan_settings(model, plan), CHECKPOINTS[plan.recompute][1]
    if plan.pp > 1 or plan.ep > 1:  # it refuses them together
        settings["training"]["disable_cuda_graphs"] = True
    return "\n".join([
        *(f"# {sentence}" for sentence in torchtitan_differs(model, plan)),
        *[f"from torchtitan.distributed.activation_checkpoint import {kind}"] * bool(kind),
        f"from torchtitan.models.{module} import model_registry",
        f"from torchtitan.models.{module}.config_registry import {base}", "", "",
        "def planned():", f"    config = {base}()",
        f"    config.model_spec = model_registry({flavor!r})",
        *(f"    config.{section}.{key} = {value!r}" for section, values in settings.items()
          for key, value in values.items()),
        f"    config.activation_checkpoint = {kind and kind + '.Config()'}", "    return config"])


def flavor_of(model):
    """Return the entry of this model in FLAVORS, or None."""
    return next((flavor for name, flavor in FLAVORS.items() if MODELS[name] == model), None)


def is_async(plan):
    return "tensor" in plan.hides and plan.tp > 1 and plan.fused


def torchtitan_settings(model, plan):
    """Return {section: {key: value}} that both versions accept, except two keys of 0.3.0.

    Without a pipeline, micro-batches are torchtitan's gradient accumulation.
    """
    shard = max(1, plan.sharders // plan.cp) if plan.zero else 1
    pieces, less = plan.micro_batches if plan.pp > 1 else 1, int(bool(
        model.layers % (plan.pp * plan.virtual)))
    parallelism = {
        "data_parallel_replicate_degree": plan.dp // shard, "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never",
        "tensor_parallel_degree": plan.tp, "enable_sequence_parallel": plan.sequence_parallel,
        "context_parallel_degree": plan.cp, "expert_parallel_degree": plan.ep,
        "pipeline_parallel_degree": plan.pp}
    if plan.pp > 1:
        parallelism |= {
            "pipeline_parallel_schedule": SCHEDULES.get(plan.schedule, "1F1B"),
            "pipeline_parallel_microbatch_size": plan.micro_batch,
            "pipeline_parallel_first_stage_less_layers": less,
            "pipeline_parallel_last_stage_less_layers": less,
            "pipeline_parallel_layers_per_stage":
                -(-(model.layers + 2 * less) // (plan.pp * plan.virtual))}
    return {"training": {"local_batch_size": plan.micro_batch * pieces,
                         "global_batch_size": plan.batch, "seq_len": plan.sequence,
                         "enable_cpu_offload": plan.offload},
            "parallelism": parallelism,
            "compile": {"enable": plan.fused, "enable_async_tensor_parallel": is_async(plan)}}


def torchtitan_differs(model, plan):
    """Return sentences about the parts of the plan that the config does not express."""
    return [sentence for sentence, holds in [
        ("Models have fixed shapes, and none is this one: debugmodel takes its place.",
         flavor_of(model) is None),
        ("It has no ZeRO-1: fully_shard shards optimizer, gradients and weights.", plan.zero == 1),
        ("Without sharding it has no ranks but data ranks.",
         not plan.zero and plan.gpus > 1 and plan.gpus > plan.dp),
        (f"shard={plan.shard} is not dp_shard x cp, with cp={plan.cp}.",
         plan.zero > 0 and plan.sharders % plan.cp > 0),
        (f"Here it runs 1F1B, not {plan.schedule}.", plan.schedule not in SCHEDULES),
        (f"{model.layers} layers are uneven in {plan.pp * plan.virtual} stages: it gives the first "
         "ones more.", model.layers % (plan.pp * plan.virtual)
         and (model.layers + 2) % (plan.pp * plan.virtual)),
        ("0.2.2 splits sequences between tensor ranks in any case.",
         plan.tp > 1 and not plan.sequence_parallel),
        ("Flash attention keeps no scores: nothing is recomputed.", plan.recompute == "selective"),
        ("All blocks are recomputed, not some.", plan.recompute != "none" and plan.recomputed < 1),
        ("Gradients are reduced only in float32.", plan.gradient_bytes == 2),
        ("fully_shard hides its messages.", "data" not in plan.hides and plan.zero > 0),
        ("Weights and gradients are also on the host.", plan.offload),
    ] if holds] + unsaid(
        plan, "graphs", "attention", "attended", "precision", "gathered_bytes", "fused_experts",
        "frozen", "outermost")


# --- DeepSpeed ------------------------------------------------------------------------------------

def deepspeed_json(model, plan):
    """Return a config for deepspeed.initialize, as JSON. JSON has no comments: see
    deepspeed_differs. Its user chooses the optimizer.
    Lab: 13
    """
    zero = {"stage": plan.zero, "overlap_comm": "data" in plan.hides, "contiguous_gradients": True}
    if plan.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config = {"train_batch_size": plan.batch, "train_micro_batch_size_per_gpu": plan.micro_batch,
              "gradient_accumulation_steps": plan.micro_batches, "bf16": {"enabled": True},
              "data_types": {"grad_accum_dtype": "fp32" if plan.gradient_bytes == 4 else "bf16"},
              "zero_optimization": zero}
    if plan.pp > 1:
        config["pipeline"] = {"stages": plan.pp, "activation_checkpoint_interval":
                              int(plan.recompute == "full")}
    return json.dumps(config, indent=2)


def deepspeed_differs(plan):
    """Return sentences on what the program must do itself, and what DeepSpeed can't do."""
    return [sentence for sentence, holds in [
        (f"The pipeline is the program's: PipelineModule(layers, num_stages={plan.pp}), and "
         "engine.train_batch.", plan.pp > 1),
        ("Its pipeline engine refuses ZeRO 2 and 3.", plan.pp > 1 and plan.zero > 1),
        (f"The model must call deepspeed.checkpointing.checkpoint for {plan.recomputed:.0%} of its "
         "blocks.",
         plan.recompute == "full"),
        ("overlap_comm hides only the traffic of data ranks.", bool({*plan.hides} - {"data"})),
        (f"It shards over all {plan.copies} ranks, not {plan.sharders}.",
         plan.zero > 0 and plan.sharders < plan.copies),
    ] if holds] + unsaid(
        plan, "graphs", "tp", "sequence_parallel", "cp", "ep", "sequence", "virtual", "schedule",
        "recompute",
        "attention", "attended", "precision", "gathered_bytes", "fused", "fused_experts", "frozen",
        "outermost")
