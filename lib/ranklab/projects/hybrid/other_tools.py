"""The same model and layout, as Megatron-LM and torchtitan are told of it.

Each option has a word about it. What a tool does not have, or has in another way, is said in
sentences above. Names are those of Megatron-LM core 0.19 and of torchtitan 0.2.2.
"""

from ranklab.hybrid import layout_memory, megatron_memory
from ranklab.pipeline_parallel.torch_pipelining import TORCH_SCHEDULES


def megatron_command(layout, job, per_node=8):
    """A piece of bash. Data, learning rate and number of steps are its user's.

        bash train.sh --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 10
    """
    nodes, per_node = max(1, layout.ranks // per_node), min(per_node, layout.ranks)
    needs_order = layout.tp > 1 and layout.zero != 3  # kernels start in the order of Python's calls
    given = [(option, why) for option, why, holds in megatron_options(layout, job) if holds]
    return "\n".join([
        *(f"# {sentence}" for sentence in megatron_differs(layout, job)),
        "options=(", *(f"    {option:54}  # {why}" for option, why in given), ")",
        *["# on each node; HEAD is the first one's name"] * (nodes > 1),
        *["CUDA_DEVICE_MAX_CONNECTIONS=1 \\"] * needs_order,
        f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-endpoint $HEAD:29500 \\"
        if nodes > 1 else f"torchrun --nproc-per-node {per_node} \\",
        '    pretrain_gpt.py "${options[@]}" "$@"'])


def megatron_options(layout, job):
    """[(option, what it is for, whether it is given)]"""
    config, dropout = job.config, f"{job.config.dropout:g}"
    return [
        (f"--num-layers {config.n_layer} --hidden-size {config.n_embd}", "L and C", True),
        (f"--num-attention-heads {config.n_head}", "H", True),
        (f"--seq-length {config.n_ctx} --max-position-embeddings {config.n_ctx}", "T", True),
        (f"--vocab-size {config.vocab_size}", "V", True),
        (f"--make-vocab-size-divisible-by {-(-config.vocab_size // layout.tp)}",
         "else V grows to a multiple of 128 tp", True),
        (f"--position-embedding-type rope --rotary-base {config.rotary_base:.0f}", "rotary", True),
        (f"--attention-dropout {dropout} --hidden-dropout {dropout}", "0.1 by default", True),
        ("--disable-bias-linear", "linear layers have no biases", True),
        (f"--tensor-model-parallel-size {layout.tp}", "ranks that share each layer", True),
        ("--sequence-parallel", "between them, each has its tokens",
         layout.sequence_parallel and layout.tp > 1),
        (f"--pipeline-model-parallel-size {layout.pp}", "what is left is data parallel", True),
        (f"--num-virtual-stages-per-pipeline-rank {layout.virtual}", "interleaved 1F1B",
         layout.virtual > 1),
        ("--use-tp-pp-dp-mapping", "data ranks lie furthest apart", layout.outermost == "data"),
        ("--use-distributed-optimizer", "ZeRO-1", layout.zero == 1),
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", "ZeRO-3", layout.zero == 3),
        ("--data-parallel-sharding-strategy optim_grads_params", "all of it", layout.zero == 3),
        (f"--micro-batch-size {job.micro_batch}", "sequences in one forward", True),
        (f"--global-batch-size {job.batch}", "sequences in a step, over all ranks", True),
        ("--recompute-granularity full", "blocks are checkpointed", layout.recompute),
        ("--recompute-method uniform --recompute-num-layers 1", "each", layout.recompute),
        (f"--{job.precision}", "weights, too, beside float32 masters", job.precision != "fp32"),
    ]  # fmt: skip


def megatron_differs(layout, job):
    """Sentences."""
    stages, ours = layout.pp * layout.virtual, layout_memory(job, layout).total / 1e9
    return [sentence for sentence, holds in [
        (f"Its first rank holds about {megatron_memory(job, layout).total / 1e9:.1f} GB, that of "
         f"the course's trainer {ours:.1f} GB.", True),
        ("Its LayerNorms have biases.", True),
        (f"It has 1F1B and interleaving, not {layout.schedule}.", layout.schedule != "1f1b"),
        (f"Stages have as many layers, and {job.config.n_layer} do not go into {stages}: see "
         "--pipeline-model-parallel-layout.", job.config.n_layer % stages),
        ("Its guide to FSDP says nothing of pipelines.", layout.zero == 3 and layout.pp > 1),
    ] if holds]


def torchtitan_toml(layout, job):
    """The text of a config. Of the model it has a name: its shape is written down in Python."""
    config, shards = job.config, layout.zero or layout.ranks > layout.dp
    schedule = TORCH_SCHEDULES["interleaved" if layout.virtual > 1 else layout.schedule]
    per_stage = -(-config.n_layer // (layout.pp * layout.virtual))
    rows = job.batch // layout.dp if layout.pp > 1 else job.micro_batch
    dtype = {"bf16": "bfloat16"}.get(job.precision, "float32")
    lines = [*(f"# {sentence}" for sentence in torchtitan_differs(layout, job)), "", f"""[model]
name = "llama3"
flavor = "yours"  # llama3_args: dim={config.n_embd}, n_layers={config.n_layer}, \
n_heads={config.n_head}, vocab_size={config.vocab_size}

[training]
seq_len = {config.n_ctx}
local_batch_size = {rows}  # sequences that a rank takes at once; a pipeline cuts them up
global_batch_size = {job.batch}  # sequences in a step, over all ranks
mixed_precision_param = "{dtype}"  # of matrix products; weights are float32

[parallelism]
data_parallel_replicate_degree = {1 if shards else layout.dp}
data_parallel_shard_degree = {layout.dp if shards else 1}  # FSDP2: ZeRO-3
tensor_parallel_degree = {layout.tp}
pipeline_parallel_degree = {layout.pp}
pipeline_parallel_schedule = "{schedule}"
pipeline_parallel_microbatch_size = {job.micro_batch}"""]
    if layout.virtual > 1:
        lines.append(f"""pipeline_parallel_layers_per_stage = {per_stage}
pipeline_parallel_first_stage_less_layers = 0  # else the embedding counts as one
pipeline_parallel_last_stage_less_layers = 0  # else the head does""")
    mode = "full" if layout.recompute else "none"
    return "\n".join([*lines, f'\n[activation_checkpoint]\nmode = "{mode}"'])


def torchtitan_differs(layout, job):
    """Sentences."""
    return [sentence for sentence, holds in [
        ("The first rank of the course's trainer, and not torchtitan's, holds "
         f"{layout_memory(job, layout).total / 1e9:.1f} GB.", True),
        ("Later versions have these names in Python, in place of TOML.", True),
        ("Its Llama has RMSNorms, SwiGLU, and a head that is not tied.", True),
        ("There is no ZeRO-1: FSDP2 shards weights and gradients, too.", layout.zero == 1),
        ("Replicas are for data ranks alone, so with others FSDP2 shards all.",
         not layout.zero and layout.dp > 1 and layout.ranks > layout.dp),
        ("Tensor ranks are sequence parallel, always.",
         layout.tp > 1 and not layout.sequence_parallel),
        ("Pipeline ranks lie furthest apart, always.", layout.outermost == "data"),
        ("Its zero-bubble schedules have two stages on a rank.", layout.schedule == "zb-h1"),
        ("It has no fp16.", job.precision == "fp16"),
    ] if holds]
