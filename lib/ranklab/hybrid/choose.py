"""choose_layout: the fastest layout that fits; or a sentence that says why none does."""

import itertools
from dataclasses import replace

from ranklab.context_parallel import zigzag_shard
from ranklab.hybrid.experts import refuse_experts
from ranklab.hybrid.layout import Layout
from ranklab.hybrid.planned import model_of, plan_of
from ranklab.pipeline_parallel import places, split_stages
from ranklab.pipeline_parallel.stages import gpt_costs
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.step import step_time


def choose_layout(job, gpus, machine):
    """(Layout, micro_batch): the fastest of all that are legal and fit.

    seconds  step_time(model, plan, machine).total, with model_of(job.config), and plan_of(job,
             layout) of a job with this micro_batch
    legal    - dp * tp * pp is gpus
             - tp divides the heads, and machine.node: it stays inside a node
             - with sequence_parallel tp divides n_ctx
             - dp * micro_batch divides the batch
             - virtual is 1, 2 or 4; above 1, pp is 2 or more, and the number of micro-batches of
               a pipeline is a multiple of pp
             - each of the pp * virtual stages has a block: n_layer is at least pp * virtual
             - the schedule is 1F1B; zero, recompute and outermost are free
    fits     memory_per_gpu(model, plan, machine).total is at most machine.memory_bytes
    error    ValueError if no layout fits; it says how many GB the smallest one needs
    lab      12
    """
    model, found, needs = model_of(job.config), [], []
    for layout, size in legal(job, gpus, machine.node):
        plan = plan_of(replace(job, micro_batch=size), layout)
        found.append((step_time(model, plan, machine).total, plan, layout))
    for _, plan, layout in sorted(found, key=lambda each: each[0]):
        needs.append((memory_per_gpu(model, plan, machine).total, str(layout)))
        if needs[-1][0] <= machine.memory_bytes:
            return layout, plan.micro_batch
    raise ValueError(refusal(needs, gpus, machine))


def legal(job, gpus, node):
    """Yields (Layout, micro_batch) of every legal choice, but no choice twice by another name.
    node  GPUs in a row that may hold the tensor ranks of a group
    """
    config = job.config
    for tp, pp in itertools.product(divisors(gpus), repeat=2):
        dp, rest = divmod(gpus, tp * pp)
        if rest or config.n_head % tp or node % tp or pp > config.n_layer or job.batch % dp:
            continue
        sequences = (False, True) if tp > 1 and config.n_ctx % tp == 0 else (False,)
        zeros = (0, 1, 3) if dp > 1 else (0,)
        outers = ("pipeline", "data") if dp > 1 and pp > 1 else ("pipeline",)
        for micro_batch in divisors(job.batch // dp):
            in_rounds = pp > 1 and job.batch // dp // micro_batch % pp == 0
            virtuals = [each for each in (1, 2, 4)
                        if each == 1 or in_rounds and pp * each <= config.n_layer]
            for sequence, virtual, zero, recompute, outermost in itertools.product(
                    sequences, virtuals, zeros, (False, True), outers):
                yield Layout(dp, tp, pp, sequence, virtual, zero=zero, recompute=recompute,
                             outermost=outermost), micro_batch


def divisors(n):
    return [each for each in range(1, n + 1) if n % each == 0]


def refusal(needs, gpus, machine):
    if not needs:
        return f"no layout of {gpus} GPUs is legal for this job"
    least, name = min(needs)
    return (f"no layout fits in the {machine.memory_bytes / 1e9:.1f} GB of a GPU: the smallest, "
            f"{name}, needs {least / 1e9:.1f} GB")


def refuse_misfits(layout, job, per_node):
    """Raises ValueError if the layout can't run the job, on nodes of `per_node` ranks."""
    heads, pieces = job.config.n_head, layout.dp * layout.ep * job.micro_batch
    if heads % layout.tp:
        raise ValueError(f"tp={layout.tp} must divide the {heads} heads")
    if layout.cp > 1:
        zigzag_shard(job.config.n_ctx, layout.cp)
    if layout.sequence_parallel and job.config.n_ctx // layout.cp % layout.tp:
        raise ValueError(f"tp={layout.tp} must divide the {job.config.n_ctx // layout.cp} tokens "
                         "of a sequence: with sequence parallelism each rank has as many of them")
    if job.batch % pieces:
        ranks = "dp x ep" if layout.ep > 1 else "dp"
        raise ValueError(f"{ranks} x micro-batch = {pieces} must divide the batch of {job.batch}")
    refuse_experts(layout, job.config)
    layout.refuse_nodes_of(per_node)
    plan = layout.new_schedule()(layout.pp, job.micro_batches(layout))  # refuses what it cannot do
    split_stages(gpt_costs(job.config), len(places(plan)))
