"""The check of search_layouts: its plans are legal and fit, and the first is nearly the fastest."""

import functools
import re
from dataclasses import replace

from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.looks import expect
from ranklab.checks.prover import Slip
from ranklab.checks.trial import NO_ERROR, called_with, is_near, refusal
from ranklab.planner.catalog import MODELS, find_node, model_of_size
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.plan import Plan
from ranklab.planner.request import Request
from ranklab.planner.search import RESERVE, Found, NoLayout, fastest, room, search_layouts
from ranklab.planner.space import ADVISED, refuse
from ranklab.planner.step import step_time

SLOWER = 1.02  # than the library's
MOST = 200  # entries of a list that are computed again
ENOUGH = 10  # entries, if the library finds as many
A100, H100 = find_node("a100-dgx"), find_node("h100-dgx")
CASES = {  # model, machine, GPUs, tokens of a sequence, sequences, tools, {reserve}
    "8B on one node": (MODELS["llama-8b"], A100, 8, 8192, 16, ADVISED, {}),
    "70B on 40 H100s": (MODELS["llama-70b"], H100, 40, 8192, 40, ("megatron",), {}),
    "10B over two sites": (model_of_size(10e9), replace(A100, island=16, far=0.3e9), 32, 2048, 128,
                           ("megatron",), {}),
    "13B over four sites, fast between": (MODELS["llama2-13b"], replace(A100, island=8, far=12e9),
                                          32, 2048, 128, ("megatron",), {}),
    "7B on four cards of 24 GB": (MODELS["llama2-7b"], find_node("rtx4090-pcie"), 4, 2048, 64,
                                  ADVISED, {}),
    "Mixtral on 16 H100s": (MODELS["mixtral-8x7b"], H100, 16, 4096, 32, ("megatron",), {}),
    "long sequences": (MODELS["qwen2.5-32b"], H100, 16, 32768, 16, ("torchtitan",), {}),
    "8B, nearly half of the memory left free": (MODELS["llama-8b"], H100, 8, 8192, 32, ADVISED,
                                                {"reserve": 0.45}),
    "8B, nothing left free": (MODELS["llama-8b"], A100, 8, 8192, 16, ADVISED, {"reserve": 0.0}),
}
NONE = MODELS["gpt3-175b"], A100, 8, 2048, 64
NO_PLAN = MODELS["llama-8b"], A100, 64, 2048, 3  # of 64 GPUs at most 3 can be data ranks
FASTER = ("Compare step_time(...).total of all plans that fit, with every option: each choice "
          "speeds up one part and slows down another.")
FITTING = "The library finds a layout that fits."
ALL = "Return every layout that fits, not only the best one."
LEAVE_OUT = "Leave out layouts that do not fit."
A_LIST = "Return a list of Found(plan, memory, step), fastest first."
SORTED = "Sort by step.total, fastest first."
OF_ONE_PLAN = ("All three must be for the same plan: Found(plan, memory_per_gpu(model, plan, "
               "machine), step_time(...)).")
ASK = "Check plans with refuse(plan, ...)."
TOOLS = "Use only the tools in `tools`."
WATCH = "for plan in watch(plans): ..."
RAISE = "Raise NoLayout."
SAY = "Say how much memory the smallest layout needs:"


def check_search_layouts(search_layouts):
    for name in CASES:
        rows, watched = _searched(search_layouts, name)
        yield f"{name}: {_score(name, rows)}"
        least = min(ENOUGH, len(_best(name)))
        expect(len(rows) >= least, (f"{name}: the list has {len(rows)} layouts, not {least} or "
                                    "more"),
               ALL)
        expect(watched and all(isinstance(each, Plan) for each in watched),
               f"{name}: watch got {len(watched)} plans", WATCH)
    yield "the lists have what fits, and watch gets the plans"
    error = _error(search_layouts, "175B on 8 A100s, which can't fit", *NONE)
    needed = float(re.search(r"needs ([\d.]+) GB", str(_error(fastest, "", *NONE)))[1])
    message = str(error)
    numbers = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", re.sub("[,_]", "", message))]
    expect(any(abs(n - needed) <= 0.1 * needed for m in numbers for n in (m, m / 1e9)),
           f"where none fits: {message}", f"{SAY} {needed:.0f} GB.")
    yield "where no layout fits a NoLayout says what would be needed"
    _error(search_layouts, "3 sequences on 64 GPUs, which no layout divides", *NO_PLAN,
           tools=("deepspeed",))
    yield "where there is no layout at all it is also a NoLayout"


def _error(search, where, *args, **options):
    """Return the NoLayout that it raises."""
    try:
        search(*args, **options)
    except NoLayout as error:
        return error
    except ValueError as error:
        raise Mistake(f"{where}: a {type(error).__name__}, {error}", RAISE) from None
    raise Mistake(f"{where}: {NO_ERROR}", RAISE)


def _searched(search, name):
    """Return (a search's list, the Plans that `watch` got); check that all fit, fastest first."""
    *case, tools, reserve = CASES[name]
    watched = []

    def watch(plans):
        for plan in plans:
            watched.append(plan)
            yield plan

    try:
        with called_with(name):
            rows = search(*case, tools=tools, watch=watch, **reserve)
    except ValueError as error:
        raise Mistake(f"{name}: a ValueError, {error}", FITTING) from None
    expect(isinstance(rows, list) and rows and all(
        isinstance(each, Found) and hasattr(each.memory, "total") and hasattr(each.step, "total")
        for each in rows),
           f"{name}: {rows!r:.60} is returned", A_LIST)
    most, free = room(case[1], **reserve), reserve.get("reserve", RESERVE)
    peak = max(float(each.memory.total) for each in rows)
    expect(peak <= most, f"{name}: one in the list needs {peak / 1e9:.1f} GB, and with {free:.0%} "
           f"left free a GPU has {most / 1e9:.1f}", LEAVE_OUT)
    seconds = [float(each.step.total) for each in rows]
    for one, after in zip(seconds, seconds[1:]):
        expect(after >= one * (1 - 1e-9), f"{name}: in the list, {one:.3f} s comes before "
                                          f"{after:.3f} s", SORTED)
    return rows, watched


def _score(name, rows):
    """Check that each entry (of a long list, some) is legal, with the numbers of its plan."""
    model, machine, *_ = CASES[name]
    for each in rows[::max(1, len(rows) // MOST)]:
        _is_right(name, each)
    plan, seconds = rows[0].plan, step_time(model, rows[0].plan, machine).total
    best = _best(name)[0].step.total
    expect(seconds <= SLOWER * best, f"{name}: {plan.tool} {plan.words()} takes {seconds:.3f} s a "
           f"step, the library's {best:.3f} s", FASTER)
    return f"{plan.words()}: {seconds:.3f} s a step, the library's {best:.3f} s"


def _is_right(name, row):
    model, machine, *sizes, tools, reserve = CASES[name]
    plan, most = row.plan, room(machine, **reserve)
    where = f"{name}: {plan.tool} {plan.words()}"
    wrong = refusal(refuse, plan, model, machine, *sizes)
    expect(wrong == NO_ERROR, f"{where} can't run: {wrong}", ASK)
    expect(plan.tool in tools, f"{where}: only {', '.join(tools)} is asked for", TOOLS)
    size = memory_per_gpu(model, plan, machine).total
    free = reserve.get("reserve", RESERVE)
    expect(size <= most, f"{where} needs {size / 1e9:.1f} GB, and with {free:.0%} left free a GPU "
           f"has {most / 1e9:.1f}", LEAVE_OUT)
    seconds = step_time(model, plan, machine).total
    for part, number, right in (("memory", row.memory.total, size),
                                ("step", row.step.total, seconds)):
        expect(is_near(float(number), float(right)), f"{where}: its {part} is not that of its plan",
               OF_ONE_PLAN)


@functools.cache
def _best(name):
    """Return the library's layouts, the fastest first."""
    *case, tools, reserve = CASES[name]
    return Request(*case, tools, **reserve).search()


PLANS = "for plan in layouts(model, machine, gpus, sequence, batch, tool)"
SORT, LAST = "sorted(candidates, key=lambda each: each.step.total)", "    return sorted(candidates"
NO_PLANS = "raise NoLayout(refusal(least, machine, gpus, batch, reserve))"
ADD = "candidates.append(Found(plan, memory, step_time(model, plan, machine)))"


def _only(*kinds):
    return [(PLANS, f"{PLANS} if {kind}") for kind in kinds]


def _changed(*changes):
    return [(LAST, f"    candidates = [each._replace(plan=replace(each.plan, {change})) for each "
             f"in candidates]\n{LAST}") for change in changes]


SEARCH = Exercise(
    search_layouts, check_search_layouts, mistakes=(
        Slip(FASTER, *_only(
            "plan.recompute == 'full'", "plan.recompute != 'operators'", "plan.micro_batch == 1",
            "plan.cp == 1", "plan.ep == 1", "plan.virtual == 1", "plan.tp == 1",
            "plan.outermost == 'data' or 1 in (plan.dp, plan.pp)"),
            (SORT, "[min(candidates, key=lambda each: each.step.products)]")),
        Slip(FITTING, *_only("not plan.offload", "plan.pp == 1",
                             "plan.tp * plan.pp in (1, 2, 4, 8, 16, 32)"),
             ("for tool in tools", "for tool in tools[:1]")),
        Slip(ALL, *_only("plan.recompute == 'none'"), (SORT, f"{SORT}[:1]")),
        Slip(LEAVE_OUT, *(("room(machine, reserve)", room) for room in (
            "1e99", "80e9", "machine.memory_bytes", "machine.memory_bytes * gpus",
            "room(machine)"))),
        Slip(OF_ONE_PLAN, (ADD, ADD.replace("machine)", "replace(machine, island=0))")),
             *_changed("recompute='full'"), replace=replace),
        Slip(ASK, *_changed("precision='nvfp4'", "shard=-1",
                            "micro_batches=2 * each.plan.micro_batches"), replace=replace),
        Slip(TOOLS, ("for tool in tools", "for tool in ADVISED")),
        Slip(WATCH, ("in watch([plan", "in ([plan")),
        Slip(SORTED, (SORT, "candidates"), (SORT, f"{SORT}[::-1]"),
             (SORT, SORT.replace("step", "memory"))),
        Slip(A_LIST, (SORT, f"{SORT}[0]"), (SORT, f"{SORT}[0].plan"),
             (SORT, f"[each.plan for each in {SORT}]"), (SORT, f"[*map(tuple, {SORT})]")),
        Slip(RAISE, (NO_PLANS, "return []"), (NO_PLANS, NO_PLANS.replace("NoLayout", "ValueError")),
             ("    if not candidates:", "    if least is None:\n        min([])\n    if not "
              "candidates:")),
        Slip(SAY, (NO_PLANS, "raise NoLayout('nothing fits')"), ("< least[0]", "> least[0]"),
             (NO_PLANS, "raise NoLayout(f'80 GB do not do on {gpus} GPUs')")),
        Slip("it calls the library's own search_layouts", ("    candidates, least = [], None\n", (
            "    return [fastest(model, machine, gpus, sequence, batch, tools=tools)]\n"))),
    ), hints=(
        "Which cheap test rules out most plans?",
        "Check memory first, and call step_time only for plans that fit. Begin with layouts(model, "
        "machine, gpus, sequence, batch, tool).",
        "The library leaves this out: take a fast plan that nearly fits, and raise `recomputed` "
        "from 0 until it does.",
    ))
