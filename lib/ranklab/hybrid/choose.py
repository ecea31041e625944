"""choose_layout: the fastest layout that fits; and what does not fit, in a sentence."""

import itertools
from dataclasses import replace

from ranklab.context_parallel import zigzag_shard
from ranklab.hybrid.costs import layout_seconds
from ranklab.hybrid.experts import refuse_experts
from ranklab.hybrid.layout import Layout
from ranklab.hybrid.memory import layout_memory
from ranklab.pipeline_parallel import places, split_stages
from ranklab.pipeline_parallel.stages import gpt_costs


def choose_layout(job, cluster):
    """(Layout, micro_batch): of all that are legal and fit, the one with the fewest seconds.

    seconds  layout_seconds(job, layout, cluster).total, with this micro_batch in the job
    legal    - dp * tp * pp is cluster.gpus
             - tp divides the heads, and the ranks of the first level of links: it stays inside
             - with sequence_parallel tp divides n_ctx
             - dp * micro_batch divides the batch
             - virtual is 1, 2 or 4; with more than 1 pp is 2 or more, and the micro-batches of a
               pipeline are a multiple of pp
             - each of the pp * virtual stages has a block: n_layer is at least as many
             - the schedule is 1F1B; zero, recompute and outermost are free
    fits     layout_memory(job, layout).total is at most cluster.memory_budget
    error    ValueError that says how many GB the smallest layout needs, where none fits
    lab      12
    """
    found = [(replace(job, micro_batch=size), layout) for layout, size in legal(job, cluster)]
    found.sort(key=lambda each: layout_seconds(*each, cluster).total)
    needs = []
    for trial, layout in found:
        needs.append((layout_memory(trial, layout).total, str(layout)))
        if needs[-1][0] <= cluster.memory_budget:
            return layout, trial.micro_batch
    raise ValueError(refusal(needs, cluster))


def legal(job, cluster):
    """Yields (Layout, micro_batch) of every legal choice that is not another one by name."""
    config, node = job.config, cluster.links[0][0]
    for tp, pp in itertools.product(divisors(cluster.gpus), repeat=2):
        dp, rest = divmod(cluster.gpus, tp * pp)
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


def refusal(needs, cluster):
    if not needs:
        return f"no layout of {cluster.gpus} GPUs is legal for this job"
    least, name = min(needs)
    return (f"no layout fits in the {cluster.memory_budget / 1e9:.1f} GB of a GPU: the smallest, "
            f"{name}, needs {least / 1e9:.1f} GB")


def refuse_misfits(layout, job, per_node):
    """Raises ValueError where the job does not go into the layout, on nodes of so many ranks."""
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
