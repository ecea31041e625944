"""megatron_command: the same model and layout, as options of Megatron-LM.

Each option has a word about it. What Megatron-LM does not have, or has in another way, is said in
sentences above. Names are those of Megatron-LM core 0.19.
"""

from ranklab.expert_parallel import MoEConfig
from ranklab.hybrid.memory import layout_memory
from ranklab.hybrid.planned import model_of, plan_of
from ranklab.planner.memory import memory_per_gpu


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
        *(expert_options(config, layout) if isinstance(config, MoEConfig) else ()),
    ]  # fmt: skip


def expert_options(config, layout):
    """The same for experts. Names and meanings: Megatron Core's MoE guide."""
    return [
        (f"--num-experts {config.n_expert} --moe-router-topk {config.top_k}", "E and k", True),
        (f"--moe-ffn-hidden-size {config.expert_width}", "F of an expert", True),
        (f"--moe-shared-expert-intermediate-size {config.shared_width}", "of one for all tokens",
         config.shared_width > 0),
        (f"--expert-model-parallel-size {layout.ep}", "ranks that share a layer's experts", True),
        ("--moe-token-dispatcher-type alltoall --moe-grouped-gemm", "one product for all", True),
        ("--moe-router-pre-softmax", "weights are not made to add up to 1",
         not config.renormalize),
        ("--moe-router-load-balancing-type seq_aux_loss", "counted in each sequence",
         config.balance == "loss"),
        ("--moe-router-load-balancing-type none", "by no loss", config.balance != "loss"),
        (f"--moe-aux-loss-coeff {config.coefficient:g}", "of that loss", config.balance == "loss"),
        (f"--moe-z-loss-coeff {config.z:g}", "small logits", config.z > 0),
        ("--moe-router-score-function sigmoid --moe-router-enable-expert-bias", "balance by a bias",
         config.balance == "bias"),
        (f"--moe-router-bias-update-rate {config.rate:g}", "its step", config.balance == "bias"),
        (f"--moe-expert-capacity-factor {config.factor:g}", "else no token is dropped",
         config.factor > 0),
    ]  # fmt: skip


def megatron_differs(layout, job):
    """Sentences."""
    stages, ours = layout.pp * layout.virtual, layout_memory(job, layout).total / 1e9
    plan = plan_of(job, layout, "megatron")  # it holds as much on any machine
    theirs = memory_per_gpu(model_of(job.config), plan, machine=None).total / 1e9
    return [sentence for sentence, holds in [
        (f"A GPU holds about {theirs:.1f} GB, with CUDA and gaps; the course's trainer has "
         f"{ours:.1f} GB of tensors.", True),
        ("Its LayerNorms have biases.", True),
        (f"It has 1F1B and interleaving, not {layout.schedule}.", layout.schedule != "1f1b"),
        (f"Stages have as many layers, and {job.config.n_layer} do not go into {stages}: see "
         "--pipeline-model-parallel-layout.", job.config.n_layer % stages),
        ("It counts an expert's places over a rank's tokens, not in each sequence.",
         getattr(job.config, "factor", 0) > 0),
        ("Its bias is added to sigmoids; here it is added to a softmax.",
         getattr(job.config, "balance", "") == "bias"),
        ("Beside expert ranks it wants sequence parallelism between tensor ranks.",
         layout.ep > 1 and layout.tp > 1 and not layout.sequence_parallel),
        ("Its guide to FSDP (custom_fsdp.md) names tensor, context and expert ranks, no pipeline.",
         layout.zero == 3 and layout.pp > 1),
    ] if holds]
