"""A Plan in the course's own trainer (lab 12): its Job and Layout, its command, a dry run of it."""

from typing import NamedTuple

from ranklab.hybrid import Job, Layout, layout_traffic
from ranklab.hybrid.choose import refuse_misfits
from ranklab.hybrid.counted import dry_run
from ranklab.meter import Memory
from ranklab.models.gpt import GPTConfig
from ranklab.planner.memory import GpuMemory, memory_per_gpu


def own_job(model, plan):
    """(Job, Layout) of this plan.

    error  ValueError if the trainer has no such model, or can't run such a plan
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


def own_command(model, plan, per_node=8, *options):
    """The command that trains this plan with the course's own project, on its text.

    options  more options of the project: "--steps 100"
    error    ValueError if the trainer can't run it
    lab      13
    """
    job, layout = own_job(model, plan)
    refuse_misfits(layout, job, per_node)
    nodes, ranks = -(-layout.ranks // per_node), min(per_node, layout.ranks)
    where = f"--nnodes {nodes} --rdzv-endpoint $HEAD:29500 " if nodes > 1 else ""
    words = ",".join([f"{layout.dp}x{layout.tp}x{layout.pp}", *layout.words()])
    shape = "x".join(map(str, (model.layers, model.hidden, model.heads, plan.sequence,
                               model.vocab)))
    return " \\\n    ".join([
        f"torchrun {where}--nproc-per-node {ranks} -m ranklab.projects.hybrid",
        f"--shape {shape} --layout {words}",
        " ".join([f"--batch {job.batch} --eval-batch {job.batch} --micro-batch {job.micro_batch}",
                  f"--precision {job.precision} --no-compare", *options])])


class DryRun(NamedTuple):
    """Bytes of the first rank, counted and by formulas."""

    held: Memory
    sent: dict  # axis: bytes in a step
    said: GpuMemory
    said_sent: dict


def dry_run_plan(model, plan):
    """The DryRun of this plan: lab 12's code runs in one process that plays the first rank.

    cost   tensors have no memory: a minute of one core for 130B
    error  as in own_job, and if the layout can't run the model
    lab    13
    """
    job, layout = own_job(model, plan)
    refuse_misfits(layout, job, layout.ranks)
    held, sent = dry_run(job, layout)
    return DryRun(held, sent, memory_per_gpu(model, plan, None, "ours"),
                  layout_traffic(job, layout))
