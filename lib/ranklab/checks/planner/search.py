"""The check of search_layouts: the first plan is legal, fits, and is nearly as fast as the best."""

import functools
import re
from dataclasses import replace

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import NO_ERROR, is_near, refusal
from ranklab.planner.catalog import MODELS, find_node, model_of_size
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.search import Found, fastest
from ranklab.planner.space import ADVISED, refuse
from ranklab.planner.step import step_time

SLOWER = 1.02  # than the library's
A100, H100 = find_node("a100-dgx"), find_node("h100-dgx")
CASES = {  # model, machine, GPUs, tokens of a sequence, sequences, tools
    "8B on one node": (MODELS["llama-8b"], A100, 8, 8192, 16, ADVISED),
    "70B on 40 H100s": (MODELS["llama-70b"], H100, 40, 8192, 40, ("megatron",)),
    "10B over two sites": (model_of_size(10e9), replace(A100, island=16, far=0.3e9), 32, 2048, 128,
                           ("megatron",)),
    "13B over four sites, fast between": (MODELS["llama2-13b"], replace(A100, island=8, far=12e9),
                                          32, 2048, 128, ("megatron",)),
    "7B on four cards of 24 GB": (MODELS["llama2-7b"], find_node("rtx4090-pcie"), 4, 2048, 64,
                                  ADVISED),
    "Mixtral on 16 H100s": (MODELS["mixtral-8x7b"], H100, 16, 4096, 32, ("megatron",)),
    "long sequences": (MODELS["qwen2.5-32b"], H100, 16, 32768, 16, ("torchtitan",)),
}
NONE = MODELS["gpt3-175b"], A100, 8, 2048, 64
FASTER = ("Compare step_time(...).total of all plans that fit, with every option: each gains in "
          "one part and loses in another.")


def check_search_layouts(search_layouts):
    for name, case in CASES.items():
        yield f"{name}: {_score(name, _first(search_layouts, name, case), case)}"
    said, least = refusal(search_layouts, *NONE), refusal(fastest, *NONE)
    needed = float(re.search(r"needs ([\d.]+) GB", least)[1])
    numbers = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", re.sub("[,_]", "", said))]
    expect(any(abs(n - needed) <= 0.1 * needed for m in numbers for n in (m, m / 1e9)),
           f"where none fits: {said}", "Raise a NoLayout, a ValueError. Say how much memory the "
           f"smallest layout needs: {needed:.0f} GB.")
    yield "where no layout fits a ValueError says what would be needed"


def _first(search_layouts, name, case):
    """The first Found of a search; all in its list must fit, and the fastest come first."""
    try:
        found = search_layouts(*case[:5], tools=case[5])
    except ValueError as error:
        raise Mistake(f"{name}: a ValueError, {error}", "The library finds a layout that fits.",
                      cause=f"ValueError: {error}") from None
    expect(isinstance(found, list) and found and all(isinstance(each, Found) for each in found),
           f"{name}: {found!r:.60} is returned", "A list of Found(plan, memory, step), the fastest "
           "first.")
    most = max(float(each.memory.total) for each in found)
    expect(most <= case[1].memory_bytes, f"{name}: one in the list needs {most / 1e9:.1f} GB, and "
           f"a GPU has {case[1].memory_bytes / 1e9:.0f}", "Leave out what does not fit.")
    seconds = [float(each.step.total) for each in found]
    for one, after in zip(seconds, seconds[1:]):
        expect(after >= one * (1 - 1e-9), f"{name}: in the list {one:.3f} s are before "
               f"{after:.3f} s", "Sort by step.total, the fastest first.")
    return found[0]


def _score(name, found, case):
    (model, machine, *_, tools), plan = case, found.plan
    where = f"{name}: {plan.tool} {plan.words()}"
    wrong = refusal(refuse, plan, *case[:5])
    expect(wrong == NO_ERROR, f"{where} can't run: {wrong}", "Ask refuse(plan, ...).")
    expect(plan.tool in tools, f"{where}: only {', '.join(tools)} is asked for", "See `tools`.")
    held = memory_per_gpu(model, plan, machine).total
    expect(held <= machine.memory_bytes, f"{where} needs {held / 1e9:.1f} GB, and a GPU has "
           f"{machine.memory_bytes / 1e9:.0f}", "Leave out what does not fit.")
    seconds, best = step_time(model, plan, machine).total, _best(name)
    for what, said, is_so in (("memory", found.memory.total, held),
                              ("step", found.step.total, seconds)):
        expect(is_near(float(said), float(is_so)), f"{where}: its {what} is not that of its plan",
               "Found(plan, memory_per_gpu(model, plan, machine), step_time(...)) of one plan.")
    expect(seconds <= SLOWER * best, f"{where} takes {seconds:.3f} s a step, the library's "
           f"{best:.3f} s", FASTER)
    return f"{plan.words()}: {seconds:.3f} s a step, the library's {best:.3f} s"


@functools.cache
def _best(name):
    *case, tools = CASES[name]
    return fastest(*case, tools=tools).step.total
