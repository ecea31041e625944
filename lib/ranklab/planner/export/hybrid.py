"""A Plan in the course's own trainer (lab 12): its command, and a dry run of it."""

from typing import NamedTuple

from ranklab.hybrid import layout_traffic
from ranklab.hybrid.counted import dry_run
from ranklab.hybrid.legal import refuse_misfits
from ranklab.meter import Memory
from ranklab.planner.export.nodes import nodes_of
from ranklab.planner.hybrid_jobs import hybrid_job
from ranklab.planner.memory import GpuMemory, memory_per_gpu


def hybrid_command(model, plan, per_node=8, *options):
    """Return the command that runs this plan in the course's own project, on the project's text.

    options  more options of the project: "--steps 100"
    Raises ValueError if the trainer can't run the plan.
    Lab: 13
    """
    job, layout = hybrid_job(model, plan)
    nodes, ranks = nodes_of(plan, per_node)
    refuse_misfits(layout, job, ranks)
    rendezvous = f"--nnodes {nodes} --rdzv-endpoint $HEAD:29500 " if nodes > 1 else ""
    words = ",".join([f"{layout.dp}x{layout.tp}x{layout.pp}", *layout.words()])
    shape = "x".join(map(str, (model.layers, model.hidden, model.heads, plan.sequence,
                               model.vocab)))
    return " \\\n    ".join([
        f"torchrun {rendezvous}--nproc-per-node {ranks} -m ranklab.projects.hybrid",
        f"--shape {shape} --layout {words}",
        " ".join([f"--batch {job.batch} --eval-batch {job.batch} --micro-batch {job.micro_batch}",
                  f"--precision {job.precision} --no-compare", *options])])


class DryRun(NamedTuple):
    """Bytes of the first rank, counted and by formulas.

    sent, formula_sent  {axis: bytes per step}
    """

    memory: Memory
    sent: dict
    formula_memory: GpuMemory
    formula_sent: dict


def dry_run_plan(model, plan):
    """Return the DryRun of a plan: lab 12's code runs in one process that plays the first rank.

    Cost: no memory for tensors; a minute on one core for 130B.
    Raises ValueError as hybrid_job does, and if the layout can't run the model.
    Lab: 13
    """
    job, layout = hybrid_job(model, plan)
    refuse_misfits(layout, job, layout.ranks)
    memory, sent = dry_run(job, layout)
    return DryRun(memory, sent, memory_per_gpu(model, plan, None, "ours"),
                  layout_traffic(job, layout))
