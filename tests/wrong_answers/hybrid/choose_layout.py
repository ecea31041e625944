"""Lab 12: what goes wrong when a layout is chosen."""

from dataclasses import replace

from mutants import mutant

from ranklab.hybrid import Layout
from ranklab.hybrid.legal import divisors, legal
from ranklab.planner import choose_layout, memory_per_gpu, model_of, plan_of

FITS = "if needs[-1][0] <= machine.memory_bytes:"
SORT = "sorted(candidates, key=lambda each: each[0])"
PLAN = "plan_of(replace(job, micro_batch=size), layout)"
LEGAL = "legal(job, gpus, machine.node)"
NONE = "raise ValueError(refusal(needs, gpus, machine))"


def _wrong(*edits, says, **named):
    return mutant(choose_layout, *edits, says=says, **named)


def _never(what, says, called):
    """Layouts of this kind are left out."""
    return _wrong(f"{LEGAL}:\n", f"{LEGAL}:\n        if {what}:\n            continue\n", says=says,
                  called=called)


WRONG = [
    _wrong(FITS, "if True:", says="needs .* GB, and a GPU has"),
    _wrong(SORT, "candidates", says="are possible", called="the_first_that_fits"),
    _wrong("machine).total, plan", "machine).products, plan", says="are possible",
           called="compute_alone"),
    _wrong("return layout, plan.micro_batch", "return layout", says="Return .Layout, micro_batch"),
    _wrong(NONE, "return layout, 1", says="where none fits"),
    _wrong(NONE, "raise ValueError('it does not fit')", says="Say how much memory"),
    _wrong("((memory_per_gpu(model, plan,", "((memory_per_gpu(model, plan_of(job, layout),",
           says="needs .* GB, and|are possible", called="memory_of_the_jobs_own_size"),
    _wrong(LEGAL, "legal(job, gpus, gpus)", says="the 2 ranks of a node",
           called="tensor_ranks_over_nodes"),
    _wrong("refusal(needs, gpus, machine)", "f'nothing fits in {machine.memory_bytes / 1e9} GB'",
           says="layout takes .* GB", called="only_the_room_is_said"),
    _wrong(PLAN, f"{PLAN}\n        own = plan_of(job, layout)", "((step_time(model, plan,",
           "((step_time(model, own,", called="seconds_of_the_jobs_own_size",
           says="are possible|a ValueError, micro_batches=0"),
    _wrong(f"    for _, plan, layout in {SORT}:", 
           "    fastest = lambda: min(candidates, key=lambda each: step_time("
           "model, each[1], machine).total)\n    for _ in candidates[:]:\n"
           "        _, plan, layout = candidates.pop(candidates.index(fastest()))",
           says="calls of step_time", called="asks_all_again_for_each"),
    _never("layout.outermost == 'data'", "3B on two nodes .* are possible",
           "pipeline_is_always_outside"),
    _never("layout.virtual > 1", "22B.* are possible", "one_stage_a_rank"),
    _never("size > 1", "are possible", "the_smallest_micro_batch"),
    _never("layout.zero == 3", "3 wide blocks.*(are possible|a ValueError)", "never_full_shard"),
]


def choose_layout__as_the_paper_says(job, gpus, machine):
    """needs .* GB|are possible"""
    tp = machine.node
    for pp in divisors(gpus // tp):
        layout = Layout(gpus // tp // pp, tp, pp, sequence_parallel=True, zero=1)
        plan = plan_of(replace(job, micro_batch=1), layout)
        if memory_per_gpu(model_of(job.config), plan, machine).total <= machine.memory_bytes:
            return layout, 1
    raise ValueError("none of 1 fits")


def choose_layout__as_many_tensor_ranks_as_possible(job, gpus, machine):
    """tensor [1-9]|must divide"""
    candidates = [Layout(1, tp, gpus // tp) for tp in divisors(gpus)]
    return max(candidates, key=lambda layout: layout.tp), 1


def choose_layout__any_number_of_virtual_stages(job, gpus, machine):
    """needs a multiple of pp|too few for all stages"""
    for layout, size in legal(job, gpus, machine.node):
        if layout.pp > 1 and layout.virtual == 1:
            return replace(layout, virtual=job.config.n_layer), size


def choose_layout__data_parallel_without_limits(job, gpus, machine):
    """must divide batch|needs .* GB"""
    return Layout(gpus, zero=1), 3


def choose_layout__the_smallest(job, gpus, machine):
    """are possible"""
    model = model_of(job.config)
    candidates = [(plan_of(replace(job, micro_batch=size), layout), layout)
             for layout, size in legal(job, gpus, machine.node)]
    plan, layout = min(candidates, key=lambda each: memory_per_gpu(model, each[0], machine).total)
    if memory_per_gpu(model, plan, machine).total > machine.memory_bytes:
        raise ValueError("8 is too few")
    return layout, plan.micro_batch
