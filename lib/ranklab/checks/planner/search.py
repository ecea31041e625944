"""The check of search_layouts: the first plan is legal, fits, and is nearly as fast as the best."""

import functools
import re
from dataclasses import replace

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import NO_ERROR, refusal
from ranklab.planner.catalog import MODELS, find_node, model_of_size
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.search import Found, fastest
from ranklab.planner.space import ADVISED, refuse
from ranklab.planner.step import step_time

SLOWER = 1.02  # than the library's
A100 = find_node("a100-dgx")
CASES = {  # model, machine, GPUs, tokens of a sequence, sequences, tools
    "8B on one node": (MODELS["llama-8b"], A100, 8, 8192, 128, ADVISED),
    "70B on 64 H100s": (MODELS["llama-70b"], find_node("h100-dgx"), 64, 8192, 64, ("megatron",)),
    "10B over two sites": (model_of_size(10e9), replace(A100, island=16, far=0.3e9), 32, 2048, 128,
                           ("megatron",)),
    "13B over four sites, fast between": (
        MODELS["llama2-13b"], replace(A100, island=8, far=12e9), 32, 2048, 128, ("torchtitan",)),
    "7B on four cards of 24 GB": (MODELS["llama2-7b"], find_node("rtx4090-pcie"), 4, 2048, 64,
                                  ADVISED),
    "Mixtral on 16 H100s": (MODELS["mixtral-8x7b"], find_node("h100-dgx"), 16, 4096, 32,
                            ("megatron",)),
    "long sequences": (MODELS["llama-8b"], find_node("h100-dgx"), 32, 131072, 16, ("torchtitan",)),
}
NONE = MODELS["gpt3-175b"], A100, 8, 2048, 64
FASTER = ("Compare step_time(...).total of all that fit, with every option: each gains in one part "
          "and loses in another.")


def check_search_layouts(search_layouts):
    for name, case in CASES.items():
        yield f"{name}: {_score(name, _first(search_layouts, name, case), case)}"
    said, least = refusal(search_layouts, *NONE), refusal(fastest, *NONE)
    needed = float(re.search(r"needs ([\d.]+) GB", least)[1])
    numbers = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", said.replace(",", ""))]
    expect(any(abs(n - needed) <= 0.1 * needed for n in numbers), f"where none fits: {said}",
           f"That is a NoLayout, a ValueError. Say how much memory is needed: {needed:.0f} GB.")
    yield "where no layout fits a ValueError says what would be needed"


def _first(search_layouts, name, case):
    """The first plan of a search."""
    try:
        found = search_layouts(*case[:5], tools=case[5])
    except ValueError as error:
        raise Mistake(f"{name}: a ValueError, {error}", cause=f"ValueError: {error}") from None
    expect(isinstance(found, list) and found and isinstance(found[0], Found),
           f"{name}: {found!r:.60} is returned", "A list of Found(plan, memory, step), the fastest "
           "first.")
    return found[0].plan


def _score(name, plan, case):
    model, machine, gpus, sequence, batch, tools = case
    where = f"{name}: {plan.tool} {plan.words()}"
    wrong = refusal(refuse, plan, *case[:5])
    expect(wrong == NO_ERROR, f"{where} can't run: {wrong}", "Ask refuse(plan, ...).")
    expect(plan.tool in tools, f"{where}: only {', '.join(tools)} is asked for", "See `tools`.")
    held = memory_per_gpu(model, plan, machine).total
    expect(held <= machine.memory_bytes, f"{where} needs {held / 1e9:.1f} GB, and a GPU has "
           f"{machine.memory_bytes / 1e9:.0f}", "Leave out what does not fit.")
    seconds, best = step_time(model, plan, machine), _best(name)
    expect(seconds.total <= SLOWER * best, f"{where} takes {seconds.total:.3f} s a step, the "
           f"library's {best:.3f} s", FASTER)
    return f"{plan.words()}: {seconds.total:.3f} s a step, the library's {best:.3f} s"


@functools.cache
def _best(name):
    *case, tools = CASES[name]
    return fastest(*case, tools=tools).step.total
