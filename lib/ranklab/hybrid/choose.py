"""choose_layout: the fastest layout that fits."""

import itertools
from dataclasses import replace

from ranklab.hybrid.costs import layout_memory, layout_seconds
from ranklab.hybrid.layout import Layout


def choose_layout(job, cluster):
    """(Layout, micro_batch): of all that are legal and fit, the one with the fewest seconds.

    seconds  layout_seconds(job, layout, cluster).total, the job with this micro_batch in place of
             its own
    legal    dp * tp * pp is cluster.gpus; tp divides the heads and the first level of links, so
             tensor ranks stay inside; dp * micro_batch divides the batch; a block or more for each
             of the pp * virtual stages; with virtual > 1 the micro-batches are a multiple of pp.
             The schedule is 1F1B; zero is 0 or 1; recompute and sequence_parallel are free
    fits     layout_memory(job, layout).total is at most cluster.room
    error    ValueError that says how many bytes the smallest layout needs, where none fits
    lab      12
    """
    found = [(replace(job, micro_batch=size), layout) for layout, size in legal(job, cluster)]
    found.sort(key=lambda each: layout_seconds(*each, cluster).total)
    needs = []
    for trial, layout in found:
        needs.append((layout_memory(trial, layout).total, str(layout)))
        if needs[-1][0] <= cluster.room:
            return layout, trial.micro_batch
    raise ValueError(refusal(needs, cluster))


def legal(job, cluster):
    """Yields (Layout, micro_batch) of every legal choice."""
    config, node = job.config, cluster.links[0][0]
    for tp, pp in itertools.product(divisors(cluster.gpus), repeat=2):
        if cluster.gpus % (tp * pp) or config.n_head % tp or node % tp or pp > config.n_layer:
            continue
        dp = cluster.gpus // (tp * pp)
        for size in divisors(job.batch // dp) if job.batch % dp == 0 else ():
            rounds = pp > 1 and job.batch // dp // size % pp == 0
            virtuals = [each for each in (1, 2, 4) if pp * each <= config.n_layer]
            for virtual, zero, sequence, recompute in itertools.product(
                    virtuals if rounds else [1], {0, int(dp > 1)}, {False, tp > 1}, (False, True)):
                yield Layout(dp, tp, pp, sequence, virtual, zero=zero, recompute=recompute), size


def divisors(n):
    return [each for each in range(1, n + 1) if n % each == 0]


def refusal(needs, cluster):
    if not needs:
        return f"no layout of {cluster.gpus} GPUs is legal for this job"
    least, name = min(needs)
    return (f"no layout fits in the {cluster.room / 1e9:.1f} GB of a GPU: the smallest, {name}, "
            f"needs {least / 1e9:.1f} GB")
