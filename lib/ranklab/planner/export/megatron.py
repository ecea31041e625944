"""megatron_arguments: a Plan as options of Megatron-LM, each with a short comment.

Names follow megatron/training/arguments.py and the dataclasses from which it makes options, in
Megatron-LM core 0.20 (commit d98e8a6, August 2026). Its parser, validate_args and
TransformerConfig accepted 89 such texts on a CPU, with Transformer Engine mocked; none was run.
The options for windows were looked up in the same commit, and are in none of these texts.
"""

import itertools
from dataclasses import replace

from ranklab.planner.export.nodes import nodes_differ, nodes_of
from ranklab.planner.plan import Plan

PRECISIONS = {  # in addition to --bf16
    "bf16": "", "fp8": "--fp8-format hybrid --fp8-recipe delayed",
    "fp8-rowwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8", "nvfp4": "--fp4-format e2m1"}
CONTEXT = {"p2p": "a ring, during attention", "a2a": "each has some heads",
           "all_gather": "each has all keys"}
BACKENDS = {"flash": "flash", "tuned": "fused", "unfused": "unfused"}


def megatron_arguments(model, plan, per_node=8, rotary_base=None, dropout=0.0, more=(), differs=()):
    """Return a bash script. Its user chooses data, learning rate and number of steps.

        bash train.sh --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 10

    more     options that a Model does not know, as [(option, its purpose, whether it is given)]
    differs  more sentences
    Raises ValueError for a precision that Megatron-LM does not support, and as nodes_of.
    Lab: 13
    """
    if plan.precision not in PRECISIONS:
        raise ValueError(f"precision={plan.precision!r} is not one of {', '.join(PRECISIONS)}")
    nodes, each = nodes_of(plan, per_node)
    in_order = (plan.tp > 1 or plan.cp > 1) and plan.zero < 2  # kernels start in Python's order
    options = [(option, why) for option, why, holds in [
        *shape_options(model, plan, rotary_base, dropout),
        *(expert_options(model, plan) if model.experts else ()), *layout_options(model, plan),
        *work_options(model, plan), *more] if holds]
    return "\n".join([
        *(f"# {sentence}" for sentence in [
            *differs, *nodes_differ(plan, per_node), *megatron_differs(model, plan)]),
        "options=(", *(f"    {option:54}  # {why}" for option, why in options), ")",
        *["# on each node; HEAD is the first one's name"] * (nodes > 1),
        *["CUDA_DEVICE_MAX_CONNECTIONS=1 \\"] * in_order,
        f"torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-endpoint $HEAD:29500 \\"
        if nodes > 1 else f"torchrun --nproc-per-node {each} \\",
        '    pretrain_gpt.py "${options[@]}" "$@"'])


def shape_options(model, plan, rotary_base, dropout):
    """Return [(option, its purpose, whether it is given)] for the shape of the model."""
    tokens, rows = plan.sequence, -(-model.vocab // plan.tp)
    return [
        (f"--num-layers {model.layers} --hidden-size {model.hidden}", "layers, width", True),
        (f"--num-attention-heads {model.heads}", "heads", True),
        (f"--kv-channels {model.head_size}", "of a head", model.width != model.hidden),
        (f"--group-query-attention --num-query-groups {model.kv_heads}", "heads for keys",
         model.kv_heads != model.heads),
        *window_options(model, plan),
        (f"--ffn-hidden-size {model.ffn}", "of the MLP", model.ffn > 0),
        ("--swiglu --normalization RMSNorm", "MLPs of three matrices, as Llama's", model.gated),
        (f"--seq-length {tokens} --max-position-embeddings {tokens}", "tokens", True),
        (f"--vocab-size {model.vocab}", "vocabulary", True),
        (f"--make-vocab-size-divisible-by {rows}", "else it grows to a multiple of 128 tp", True),
        ("--untie-embeddings-and-output-weights", "the head has a matrix", not model.tied),
        ("--position-embedding-type rope", "rotary; its base: --rotary-base", True),
        (f"--rotary-base {rotary_base or 0:.0f}", "of the angles", rotary_base),
        (f"--attention-dropout {dropout:g} --hidden-dropout {dropout:g}", "0.1 by default", True),
        ("--disable-bias-linear", "linear layers have no biases", True),
    ]  # fmt: skip


def has_windows(model, plan):
    """Return whether some layers see fewer tokens than a sequence has."""
    return model.windowed > 0 and model.window < plan.sequence


def full_every(model):
    """Return n if one layer of each n, the last, may be the one that sees all tokens: only this n
    gives as many of them as the Model has. 0: no n does, or several do, or all layers have windows.
    """
    periods = [n for n in range(2, model.layers + 1)
             if model.layers // n == model.layers - model.windowed]
    return periods[0] if len(periods) == 1 else 0


def window_options(model, plan):
    """Return such options for sliding windows, if the layers that have them are known.

    The window counts a token itself, --window-size only those before it: Megatron-LM's
    examples/gptoss has 127,0 for a window of 128.
    """
    every, has = full_every(model), has_windows(model, plan)
    return [
        (f"--window-size {model.window - 1},0", "tokens before and after that a token sees",
         has and (every > 0 or model.windowed == model.layers)),
        (f"--window-attn-skip-freq {every}", f"1 layer in {every} sees all", has and every > 0)]


def expert_options(model, plan):
    """Return such options for experts."""
    return [
        (f"--num-experts {model.experts} --moe-router-topk {model.top_k}", "all, a token's", True),
        (f"--moe-ffn-hidden-size {model.expert_ffn}", "the width of an expert", True),
        (f"--moe-shared-expert-intermediate-size {model.shared * model.expert_ffn:.0f}",
         "of one for all tokens", model.shared > 0),
        (f'--moe-layer-freq "([0]*{model.dense}+[1]*{model.sparse_layers})"',
         "the first layers have an MLP", model.dense > 0 and not model.spread),
        (f'--moe-layer-freq "([0,1]*{model.dense})"', "every second layer has an MLP",
         model.spread and 2 * model.dense == model.layers),
        (f"--expert-model-parallel-size {plan.ep}", "ranks that share a layer's experts", True),
        ("--expert-tensor-parallel-size 1", "each expert is whole", plan.tp > 1),
        ("--moe-token-dispatcher-type alltoall", "tokens go to their experts",
         not plan.fused_experts),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", "sorted",
         plan.fused_experts),
        ("--moe-grouped-gemm", "one product for all", True),
        ("--moe-permute-fusion", "sorting is fused", plan.fused),
        ("--overlap-moe-expert-parallel-comm", "during another micro-batch",
         "expert" in plan.hides and plan.ep > 1),
    ]  # fmt: skip


def layout_options(model, plan):
    """Return such options for the layout of the ranks."""
    copies, messages = plan.copies // plan.sharders, context_messages(model, plan)
    return [
        (f"--tensor-model-parallel-size {plan.tp}", "ranks that share each layer", True),
        ("--sequence-parallel", "between them, each has its tokens",
         plan.sequence_parallel and plan.tp > 1),
        (f"--context-parallel-size {plan.cp} --cp-comm-type {messages}", CONTEXT[messages],
         plan.cp > 1),
        (f"--pipeline-model-parallel-size {plan.pp}", "what is left is data parallel", True),
        ("--use-tp-pp-dp-mapping", "data ranks lie furthest apart", plan.outermost == "data"),
        ("--use-distributed-optimizer", "ZeRO-1", plan.zero == 1),
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", f"ZeRO-{plan.zero}", plan.zero > 1),
        ("--data-parallel-sharding-strategy optim_grads", "all but weights", plan.zero == 2),
        ("--data-parallel-sharding-strategy optim_grads_params", "all of it", plan.zero == 3),
        (f"--num-distributed-optimizer-instances {copies}", "copies of all shards",
         plan.zero > 0 and copies > 1),
        (f"--micro-batch-size {plan.micro_batch}", "sequences in one forward", True),
        (f"--global-batch-size {plan.batch}", "sequences in a step, over all ranks", True),
    ]  # fmt: skip


def context_messages(model, plan):
    """Return how context ranks talk: as in a ring, which the prediction is for, unless there are
    windows. Transformer Engine refuses these with p2p, and a2a where context ranks do not divide
    the heads for keys (its context_parallel.py, commit d0067d0).
    """
    if not has_windows(model, plan):
        return "p2p"
    return "all_gather" if max(1, model.kv_heads // plan.tp) % plan.cp else "a2a"


def work_options(model, plan):
    """Return such options for stages, recomputation, precision and kernels."""
    layers = model.layers / plan.pp / plan.virtual
    even, hides = layers == int(layers), plan.hides
    full, some = plan.recompute == "full", plan.recomputed < 1
    return [
        (f'--pipeline-model-parallel-layout "{"" if even else stage_text(model, plan)}"',
         "layers of each stage", not even),
        (f"--num-virtual-stages-per-pipeline-rank {plan.virtual}", "interleaved 1F1B",
         even and plan.virtual > 1),
        ("--no-overlap-p2p-communication", "stages wait for messages",
         plan.virtual > 1 and "pipeline" not in hides),
        ("--recompute-granularity full", "blocks are checkpointed", full),
        ("--recompute-method uniform --recompute-num-layers 1", "each", full and not some),
        (f"--recompute-method block --recompute-num-layers {round(plan.recomputed * layers)}",
         "of a stage's", full and some),
        ("--recompute-granularity selective", "attention's core", plan.recompute == "selective"),
        ("--bf16", "weights as well, with float32 masters", True),
        (PRECISIONS[plan.precision], "products", plan.precision != "bf16"),
        ("--fp8-param-gather", "weights are gathered in FP8", plan.gathered_bytes == 1),
        ("--grad-reduce-in-bf16", "gradients are added up in bf16", plan.gradient_bytes == 2),
        (f"--attention-backend {BACKENDS[plan.attention]}", "its kernels", True),
        ("--overlap-grad-reduce", "during backward", "data" in hides and plan.copies > 1),
        ("--overlap-param-gather", "during forward",
         "data" in hides and plan.copies > 1 and plan.zero > 0),
        ("--tp-comm-overlap", "products and messages in pieces",
         "tensor" in hides and plan.tp > 1 and plan.sequence_parallel),
        ("--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-rope-fusion", "separate kernels",
         not plan.fused),
        ("--optimizer-cpu-offload --use-precision-aware-optimizer", "Adam is on the host",
         plan.offload),
    ]  # fmt: skip


def stage_text(model, plan):
    """Return the stages in Megatron-LM's notation: Et*3|(t*4|)*14t*3L, with E the embedding, t a
    layer, L the loss.
    """
    first, *middle, last = replace(plan, pp=plan.pp * plan.virtual, virtual=1).stages(model.layers)
    runs = "".join(f"(t*{n}|)*{len([*run])}" for n, run in itertools.groupby(middle))
    return f"Et*{first}|{runs}t*{last}L"


def megatron_differs(model, plan):
    """Return sentences about the parts of the plan that these options do not express."""
    windows = has_windows(model, plan)
    some = f"{model.windowed} of {model.layers} layers have windows of {model.window} tokens"
    return [sentence for sentence, holds in [
        (f"{some}. Compare them with --window-attn-skip-freq: their order is assumed.",
         windows and full_every(model) > 0),
        (f"{some}, and a plan does not know which: add --window-size {model.window - 1},0 and "
         "--window-attn-skip-freq.",
         windows and not full_every(model) and model.windowed < model.layers),
        ("The prediction is for a ring of context ranks, which Transformer Engine refuses with "
         "windows.", windows and plan.cp > 1),
        ("Its LayerNorms have biases.", not model.gated),
        (f"It has 1F1B and interleaving, not {plan.schedule}.",
         plan.schedule not in ("1f1b", "interleaved")),
        ("With expert ranks it wants sequence parallelism between tensor ranks.",
         plan.ep > 1 and plan.tp > 1 and not plan.sequence_parallel),
        ("Its guide to FSDP (megatron_fsdp.md) names no pipeline.", plan.zero > 1 and plan.pp > 1),
        ("It recomputes --recompute-modules, and in all blocks.", plan.recompute == "operators"
         or plan.recompute == "selective" and plan.recomputed < 1),
        ("It hides messages between stages only where they are interleaved.",
         "pipeline" in plan.hides and plan.pp > 1 and plan.virtual == 1),
        ("It hides messages between tensor ranks only with --sequence-parallel.",
         "tensor" in plan.hides and plan.tp > 1 and not plan.sequence_parallel),
        ("It scales FP8 by tensors, blocks or MX groups, not by rows.",
         plan.precision == "fp8-rowwise"),
        ("Its attention and MLP follow one another: they have no common input.", model.parallel),
        ("The attention here is plain; the model's is not. If it is low-rank (MLA), add "
         "--multi-latent-attention and its sizes: --q-lora-rank, --kv-lora-rank, --qk-head-dim, "
         "--qk-pos-emb-head-dim, --v-head-dim.", model.attention_numbers > 0),
    ] if holds] + unsaid(plan, "attended", "frozen", "graphs")


def model_unsaid(model):
    """Return [a sentence] on what a Model does not know, and its options."""
    options = (
        "--add-qkv-bias (Qwen2.5), --qk-layernorm (Qwen3), --rotary-base, --norm-epsilon"
        if model.gated else
        "--squared-relu (Nemotron-4), or learned positions and biases (GPT-3, OPT) by "
        "--position-embedding-type learned_absolute and without --disable-bias-linear; ALiBi "
        "(BLOOM) does not exist there")
    sinks = ", --softmax-type learnable (gpt-oss)" if model.experts and model.gated else ""
    return ["A plan knows sizes only. Not said here, and yours to add if the model has it: "
            f"{options}{sinks}."]


def unsaid(plan, *names):
    """Return [a sentence] if the plan's values of these fields differ from Plan()'s."""
    values = [f"{name}={getattr(plan, name)}" for name in names
             if getattr(plan, name) != getattr(Plan(), name)]
    return [f"The program's or the model's, not said here: {', '.join(values)}."] * bool(values)
