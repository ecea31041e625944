"""Lab 12: what goes wrong when a layout is chosen."""

from dataclasses import replace

from mutants import mutant

from ranklab.hybrid import Layout, layout_memory, layout_seconds
from ranklab.hybrid.choose import choose_layout, divisors, legal

FITS = "if needs[-1][0] <= cluster.memory_budget:"
SORT = "    found.sort(key=lambda each: layout_seconds(*each, cluster).total)\n"
SIZE = "replace(job, micro_batch=size)"


def _wrong(*edits, says, **named):
    return mutant(choose_layout, *edits, says=says, **named)


WRONG = [
    _wrong(FITS, "if True:", says="needs .* GB, and a GPU has room"),
    _wrong(SORT, "", says="are possible", called="the_first_that_fits"),
    _wrong(SORT, SORT.replace(".total", ".computing"), says="are possible", called="compute_alone"),
    _wrong("return layout, trial.micro_batch", "return layout", says="Return .Layout, micro_batch"),
    _wrong("raise ValueError(refusal(needs, cluster))", "return found[0][1], 1",
           says="where none fits"),
    _wrong("raise ValueError(refusal(needs, cluster))", "raise ValueError('it does not fit')",
           says="Say how much memory"),
    _wrong("layout_memory(trial, layout)", "layout_memory(job, layout)", says="needs .* GB, and",
           called="memory_of_the_jobs_own_size"),
    _wrong("for layout, size in legal(job, cluster)]", "for layout, size in legal(job, cluster)\n"
           "             if layout.outermost == 'pipeline']", says="3B on two nodes .* are "
           "possible",
           called="pipeline_is_always_outside"),
    _wrong("legal(job, cluster)", "legal(job, replace(cluster, links=((cluster.gpus, 1.0),)))",
           says="the 2 ranks of a node", called="tensor_ranks_over_nodes"),
    _wrong("refusal(needs, cluster)", "f'nothing fits in {cluster.memory_budget / 1e9} GB'",
           says="layout takes .* GB", called="only_the_room_is_said"),
    _wrong("for layout, size in legal(job, cluster)]", "for layout, size in legal(job, cluster)\n"
           "             if layout.virtual == 1]", says="22B.* are possible",
           called="one_stage_a_rank"),
    _wrong(SORT, SORT.replace("*each", "job, each[1]"), called="seconds_of_the_jobs_own_size",
           says="are possible|it raised ZeroDivisionError"),
    _wrong(SORT, "    fastest = lambda: min(found, key=lambda each: layout_seconds(*each, "
           "cluster).total)\n    for _ in found[:]:\n        found.append(found.pop(found.index("
           "fastest())))\n", says="calls of layout_seconds", called="asks_all_again_for_each"),
    _wrong("legal(job, cluster)]", "legal(job, cluster)\n             if size == 1]",
           says="7B on one node.* are possible", called="the_smallest_micro_batch"),
    _wrong("legal(job, cluster)]", "legal(job, cluster)\n             if layout.zero < 3]",
           says="3 wide blocks.*(are possible|a ValueError)", called="never_full_shard"),
]


def choose_layout__as_the_paper_says(job, cluster):
    """needs .* GB|are possible"""
    tp = cluster.links[0][0]
    for pp in divisors(cluster.gpus // tp):
        layout = Layout(cluster.gpus // tp // pp, tp, pp, sequence_parallel=True, zero=1)
        if layout_memory(replace(job, micro_batch=1), layout).total <= cluster.memory_budget:
            return layout, 1
    raise ValueError("none of 1 fits")


def choose_layout__as_many_tensor_ranks_as_possible(job, cluster):
    """tensor 1|must divide"""
    found = [Layout(1, tp, cluster.gpus // tp) for tp in divisors(cluster.gpus)]
    return max(found, key=lambda layout: layout.tp), 1


def choose_layout__any_number_of_virtual_stages(job, cluster):
    """needs a multiple of pp|too few for all stages"""
    for layout, size in legal(job, cluster):
        if layout.pp > 1 and layout.virtual == 1:
            return replace(layout, virtual=job.config.n_layer), size


def choose_layout__data_parallel_without_limits(job, cluster):
    """must divide batch|needs .* GB"""
    return Layout(cluster.gpus, zero=1), 3


def choose_layout__the_smallest(job, cluster):
    """are possible"""
    found = [(replace(job, micro_batch=size), layout) for layout, size in legal(job, cluster)]
    best = min(found, key=lambda each: layout_memory(*each).total)
    if layout_memory(*best).total > cluster.memory_budget:
        raise ValueError("8 is too few")
    layout_seconds(*best, cluster)
    return best[1], best[0].micro_batch
