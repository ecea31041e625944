"""Lab 13: searches that leave something out, and what is no answer of a search."""

from dataclasses import replace

from mutants import mutant

from ranklab.planner import space, step
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.search import ADVISED, Found, layouts, search_layouts, step_time

PLANS = "for plan in layouts(model, machine, gpus, sequence, batch, tool)"
SORT = "sorted(candidates, key=lambda each: each.step.total)"
RAISE = "raise NoLayout(refusal(least, machine, gpus, batch, reserve))"
FITS = "if memory.total <= room(machine, reserve):"
ADD = "candidates.append(Found(plan, memory, step_time(model, plan, machine)))"


def _only(condition, says, called):
    return mutant(search_layouts, PLANS, f"{PLANS} if {condition}", says=says, called=called)


SLOW = r"s a step, the library's|ValueError, no layout fits"
WRONG = [
    _only("plan.recompute == 'none'", SLOW, "no_recompute"),
    _only("plan.recompute == 'full'", SLOW, "always_recompute"),
    _only("plan.recompute != 'operators'", SLOW, "all_or_nothing"),
    _only("plan.micro_batch == 1", SLOW, "micro_batches_of_1"),
    _only("not plan.offload", "four cards of 24 GB", "no_offload"),
    _only("plan.cp == 1", SLOW, "no_context_ranks"),
    _only("plan.ep == 1", "Mixtral.*the library's", "no_expert_ranks"),
    _only("plan.virtual == 1", SLOW, "no_virtual_stages"),
    _only("plan.tp == 1", SLOW, "no_tensor_ranks"),
    _only("plan.pp == 1", SLOW, "no_pipeline"),
    _only("plan.tp * plan.pp in (1, 2, 4, 8, 16, 32)", "40 H100s.*the library's", "powers_of_two"),
    _only("plan.outermost == 'data' or 1 in (plan.dp, plan.pp)", SLOW, "data_between_sites"),
    mutant(search_layouts, ADD, ADD.replace("machine)", "replace(machine, island=0))"),
           says="two sites.*(its step is not|the library's)", called="no_islands",
           replace=replace),
    mutant(search_layouts, "for tool in tools", "for tool in ADVISED", says="is asked for",
           called="all_tools"),
    mutant(search_layouts, "for tool in tools", "for tool in tools[:1]",
           says="24 GB: a ValueError", called="the_first_tool"),
    mutant(search_layouts, FITS, "if True:", says="needs .* GB, and with 10% left free",
           called="no_limit"),
    mutant(search_layouts, FITS, "if memory.total <= 80e9:", says="needs .* GB, and with 10% "
           "left free a GPU has 76.5", called="always_80_gb"),
    mutant(search_layouts, FITS, "if memory.total <= gpus * machine.memory_bytes:",
           says="needs .* GB, and with 10% left free", called="all_gpus_together"),
    mutant(search_layouts, FITS, FITS.replace("room(machine, reserve)", "machine.memory_bytes"),
           says="needs .* GB, and with 10% left free", called="to_the_brim"),
    mutant(search_layouts, FITS, FITS.replace("(machine, reserve)", "(machine)"),
           says="half of the memory.*needs .* GB, and with 45% left free",
           called="always_10_percent"),
    mutant(search_layouts, "in watch([plan", "in ([plan", says="watch got 0 plans",
           called="unwatched"),
    mutant(search_layouts, SORT, f"{SORT}[:1]", says="the list has 1 of ", called="only_the_best"),
    mutant(search_layouts, "    return sorted(candidates",
           "    candidates += [each._replace(plan=replace("
           "each.plan, zero=3)) for each in candidates]\n    return sorted(candidates",
           says="megatron has no zero=3|its (memory|step) is not that", called="illegal_later",
           replace=replace),
    mutant(search_layouts, RAISE, RAISE.replace("NoLayout(", "ValueError("),
           says="a ValueError, no layout fits.*Raise a NoLayout", called="a_plain_valueerror"),
    mutant(search_layouts, "    if not candidates:\n", "    if least is None:\n        min([])\n"
           "    if not candidates:\n", says="3 sequences on 64 GPUs.*a ValueError, min",
           called="min_of_nothing"),
    mutant(search_layouts, SORT, "candidates", says="in the list .* are before",
           called="not_sorted"),
    mutant(search_layouts, SORT, f"{SORT}[::-1]", says="in the list .* are before",
           called="slowest_first"),
    mutant(search_layouts, SORT, "sorted(candidates, key=lambda each: each.memory.total)",
           says="in the list .* are before", called="by_memory"),
    mutant(search_layouts, SORT, "[min(candidates, key=lambda each: each.step.products)]",
           says="the library's", called="least_computing"),
    mutant(search_layouts, SORT, f"{SORT}[0]", says="A list of Found", called="one_found"),
    mutant(search_layouts, SORT, f"{SORT}[0].plan", says="A list of Found", called="the_plan"),
    mutant(search_layouts, SORT, f"[each.plan for each in {SORT}]", says="A list of Found",
           called="plans"),
    mutant(search_layouts, SORT, f"[tuple(each) for each in {SORT}]", says="A list of Found",
           called="plain_tuples"),
    mutant(search_layouts, "    candidates, least = [], None\n",
           "    return [fastest(model, machine, gpus, sequence, batch, tools=tools)]\n",
           says="calls the library's own", called="by_the_librarys_fastest"),
    mutant(search_layouts, RAISE, "return []", says="no ValueError.*Raise a NoLayout",
           called="empty"),
    mutant(search_layouts, RAISE, "raise NoLayout('nothing fits')", says="Say how much memory",
           called="without_gb"),
    mutant(search_layouts, RAISE, "raise NoLayout(f'80 GB do not do on {gpus} GPUs')",
           says="Say how much memory", called="only_the_room"),
    mutant(search_layouts, "memory.total < least[0]", "memory.total > least[0]",
           says="Say how much memory", called="the_largest"),
]


def search_layouts__of_other_hardware(model, machine, gpus, sequence, batch, tools=ADVISED,
                                      watch=iter, reserve=0.1):
    """can't run: .* as usual\\(tool, machine\\) says"""
    candidates = []
    for plan in layouts(model, machine, gpus, sequence, batch, tools[0]):
        plan = replace(plan, precision="nvfp4", hides=("data", "tensor", "pipeline", "context"))
        memory = memory_per_gpu(model, plan, machine)
        if memory.total <= (1 - reserve) * machine.memory_bytes:
            candidates.append(Found(plan, memory, step_time(model, plan, machine)))
    return sorted(candidates, key=lambda each: each.step.total)


def search_layouts__shards_of_less_than_none(model, machine, gpus, sequence, batch, tools=ADVISED,
                                             watch=iter, reserve=0.1):
    """can't run: .* shard=-1 must divide"""
    plan = space.Plan(dp=gpus, sequence=sequence, micro_batches=batch // gpus, zero=3, shard=-1,
                      **space.usual("torchtitan", machine))
    return [Found(plan, memory_per_gpu(model, plan, machine), step_time(model, plan, machine))]


def search_layouts__a_larger_batch(model, machine, gpus, sequence, batch, tools=ADVISED,
                                   watch=iter, reserve=0.1):
    """can't run: .* a batch of"""
    plan = space.Plan(dp=gpus, sequence=sequence, micro_batches=batch, zero=3,
                      **space.usual("torchtitan", machine))
    return [Found(plan, memory_per_gpu(model, plan, machine), step_time(model, plan, machine))]


def search_layouts__as_everybody_does(model, machine, gpus, sequence, batch, tools=ADVISED,
                                      watch=iter, reserve=0.1):
    """the library's|a ValueError|needs .* GB"""
    tp = min(8, machine.node, model.kv_heads)
    pp = max(1, gpus // tp // 2)
    dp = gpus // tp // pp
    plan = space.Plan(dp=dp, tp=tp, pp=pp, sequence=sequence, micro_batches=batch // dp, zero=1,
                      recompute="full", sequence_parallel=tp > 1,
                      **space.usual("megatron", machine))
    return [Found(plan, memory_per_gpu(model, plan, machine), step_time(model, plan, machine))]


def search_layouts__numbers_of_another_plan(model, machine, gpus, sequence, batch, tools=ADVISED,
                                            watch=iter, reserve=0.1):
    """its (memory|step) is not that of its plan"""
    candidates = [
        plan for tool in tools for plan in layouts(model, machine, gpus, sequence, batch, tool)
        if memory_per_gpu(model, plan, machine).total <= 0.9 * machine.memory_bytes]
    best = min(candidates, key=lambda plan: step.step_time(model, plan, machine).total)
    return [Found(best, memory_per_gpu(model, candidates[0], machine),
                  step.step_time(model, candidates[-1], machine))]
