"""choose_layout: the fastest layout of the course's own trainer (hybrid) that fits; or a sentence
on why none fits.
"""

from dataclasses import replace

from ranklab.hybrid.legal import legal
from ranklab.planner.hybrid_jobs import model_of, plan_of
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.step import step_time


def choose_layout(job, gpus, machine):
    """Return (Layout, micro_batch): the fastest of all that are legal and fit.

    seconds  step_time(model, plan, machine).total, with model_of(job.config), and plan_of(job,
             layout) of a job with this micro_batch
    legal    - dp * tp * pp is gpus
             - tp divides the heads and machine.node, so that it stays inside a node
             - with sequence_parallel, tp divides n_ctx
             - dp * micro_batch divides the batch
             - virtual is 1, 2 or 4; above 1, pp is 2 or more, and the number of micro-batches of
               a pipeline is a multiple of pp
             - each of the pp * virtual stages has a block: n_layer is at least pp * virtual
             - the schedule is 1F1B; zero, recompute and outermost are free
    fits     memory_per_gpu(model, plan, machine).total is at most machine.memory_bytes
    Raises: ValueError if no layout fits; its message gives the GB that the smallest one needs.
    Lab: 12
    """
    model, candidates, needs = model_of(job.config), [], []
    for layout, size in legal(job, gpus, machine.node):
        plan = plan_of(replace(job, micro_batch=size), layout)
        candidates.append((step_time(model, plan, machine).total, plan, layout))
    for _, plan, layout in sorted(candidates, key=lambda each: each[0]):
        needs.append((memory_per_gpu(model, plan, machine).total, str(layout)))
        if needs[-1][0] <= machine.memory_bytes:
            return layout, plan.micro_batch
    raise ValueError(refusal(needs, gpus, machine))


def refusal(needs, gpus, machine):
    """Return a sentence on why no layout is possible.

    needs  [(bytes, layout)] of the legal layouts
    """
    if not needs:
        return f"no layout of {gpus} GPUs is legal for this job"
    least, name = min(needs)
    return (f"no layout fits in the {machine.memory_bytes / 1e9:.1f} GB of a GPU: the smallest, "
            f"{name}, needs {least / 1e9:.1f} GB")
