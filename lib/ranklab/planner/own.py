"""A Plan in the course's own trainer (lab 12): its command, and a dry run of it."""

from typing import NamedTuple

from ranklab.hybrid import layout_traffic
from ranklab.hybrid.counted import dry_run
from ranklab.hybrid.legal import refuse_misfits
from ranklab.meter import Memory
from ranklab.planner.memory import GpuMemory, memory_per_gpu
from ranklab.planner.planned import own_job


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
