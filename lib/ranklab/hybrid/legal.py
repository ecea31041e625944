"""Which layouts a job can have: legal lists them, refuse_misfits explains why one is impossible."""

import itertools

from ranklab.context_parallel import zigzag_shard
from ranklab.hybrid.experts import refuse_experts
from ranklab.hybrid.layout import Layout
from ranklab.pipeline_parallel import places, split_stages
from ranklab.pipeline_parallel.stages import gpt_costs


def legal(job, gpus, node):
    """Yield (Layout, micro_batch) for every legal choice, without equivalent ones.

    node  consecutive GPUs that may hold the tensor ranks of a group
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
            virtuals = [n for n in (1, 2, 4)
                        if n == 1 or in_rounds and pp * n <= config.n_layer]
            for sequence, virtual, zero, recompute, outermost in itertools.product(
                    sequences, virtuals, zeros, (False, True), outers):
                yield Layout(dp, tp, pp, sequence, virtual, zero=zero, recompute=recompute,
                             outermost=outermost), micro_batch


def divisors(n):
    """Return the divisors of n, in ascending order."""
    return [divisor for divisor in range(1, n + 1) if n % divisor == 0]


def refuse_misfits(layout, job, per_node):
    """Raise ValueError if the layout can't run the job, on nodes of `per_node` ranks."""
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
