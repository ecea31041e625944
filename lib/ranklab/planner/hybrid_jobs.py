"""A job and a layout of lab 12 in the planner's classes, for memory_per_gpu and step_time; and
hybrid_job, the inverse.

No run has tested the planner's model of the course's own trainer. It assumes that no message is
hidden, that no kernels are fused, and that messages have the sizes of bf16 weights, although the
trainer's are float32. It gives all stages the same number of layers; the trainer cuts by FLOPs.
"""

from ranklab.expert_parallel.layer import MoEConfig
from ranklab.hybrid import Job, Layout
from ranklab.models.gpt import GPTConfig
from ranklab.planner.model import Model
from ranklab.planner.plan import Plan
from ranklab.planner.space import USUAL


def model_of(config):
    """Return the planner's Model of a GPTConfig or MoEConfig: plain attention and MLPs, a tied
    head.
    """
    experts = {} if not isinstance(config, MoEConfig) else dict(
        experts=config.n_expert, top_k=config.top_k, expert_ffn=config.expert_width,
        shared=config.shared_width / config.expert_width)  # below 1 if it is narrower
    return Model(config.n_layer, config.n_embd, config.n_head, 0 if experts else 4 * config.n_embd,
                 config.vocab_size, tied=True, **experts)


def plan_of(job, layout, tool="ours"):
    """Return the planner's Plan of a step of this job in this layout, run by "ours" or "megatron".

    The data ranks of the Plan are all ranks with different rows, so they include expert ranks.
    fp16 counts as bf16, and ZB-V as ZB-H1.
    Raises ValueError for fp32, because the planner knows only narrower products.
    """
    if job.precision == "fp32":
        raise ValueError("precision='fp32' is not the planner's: it knows products of bf16 or less")
    schedule = "interleaved" if layout.virtual > 1 else layout.schedule.replace("zb-v", "zb-h1")
    return Plan(dp=layout.dp * layout.ep, tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep,
                sequence=job.config.n_ctx, micro_batch=job.micro_batch,
                micro_batches=job.micro_batches(layout), virtual=layout.virtual, schedule=schedule,
                zero=layout.zero, sequence_parallel=layout.sequence_parallel,
                recompute="full" if layout.recompute else "none", outermost=layout.outermost,
                tool=tool, **USUAL[tool])


def hybrid_job(model, plan):
    """Return the (Job, Layout) of a plan.

    Raises ValueError if the trainer lacks such a model, or can't run such a plan.
    """
    if model.gated or model.experts or model.kv_heads != model.heads:
        raise ValueError("the course's trainer has GPTs with a plain MLP and as many key heads, "
                         "such as gpt3-175b (--model)")
    if (model.ffn != 4 * model.hidden or model.width != model.hidden or not model.tied
            or model.parallel or model.attention_numbers):
        raise ValueError(f"the course's GPT has ffn=4 x {model.hidden}, heads that are "
                         f"{model.hidden} wide together, a tied head, and MLPs behind attention")
    if (plan.recompute in ("selective", "operators") or plan.recomputed < 1 or plan.offload
            or plan.precision != "bf16" or plan.frozen or plan.attended or plan.schedule == "zb-h2"
            or plan.sharders < plan.copies):
        raise ValueError(f"{plan.words()}: the course's trainer recomputes all blocks or none, "
                         "packs no sequences, trains all weights in bf16, on the GPU, without "
                         "zb-h2, and shards states over all ranks with the same weights")
    layout = Layout(dp=plan.dp, tp=plan.tp, pp=plan.pp, cp=plan.cp, virtual=plan.virtual,
                    sequence_parallel=plan.sequence_parallel, zero=plan.zero,
                    schedule=plan.schedule.replace("interleaved", "1f1b"),
                    recompute=plan.recompute == "full", outermost=plan.outermost)
    config = GPTConfig(vocab_size=model.vocab, n_ctx=plan.sequence, n_embd=model.hidden,
                       n_head=model.heads, n_layer=model.layers)
    return Job(config, plan.batch, plan.micro_batch), layout
