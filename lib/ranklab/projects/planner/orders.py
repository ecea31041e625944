"""Six orders: a model, a machine, and constraints. The planner grades plans by them."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from ranklab.planner.catalog import MODELS, find_node, model_of_size
from ranklab.planner.cost import bill, cost_per_token, price_of
from ranklab.planner.machine import Machine
from ranklab.planner.memory import memory_per_gpu
from ranklab.planner.scaling import scaling_curve
from ranklab.planner.search import RESERVE, room, search_layouts
from ranklab.planner.space import ADVISED, refuse, usual
from ranklab.planner.step import step_time
from ranklab.planner.why import why


class Functions(NamedTuple):
    """The lab's functions: the library's or a learner's."""

    memory: Callable = memory_per_gpu
    step: Callable = step_time
    cost: Callable = cost_per_token
    curve: Callable = scaling_curve
    search: Callable = search_layouts


@dataclass(frozen=True)
class Order:
    """A customer's order; `machines` are the choices, each with a number of GPUs.

    wants  {words: (plan, step, order's machine, functions) -> (the value, whether it is enough)}
    """

    title: str
    model: object
    machines: tuple
    sequence: int
    batch: int
    wants: dict
    tools: tuple = ADVISED


def mfu_above(least):
    def holds(order, plan, step, machine, use):
        mfu = step.mfu(order.model, plan, machine)
        return f"{mfu:.1%}", mfu > least
    return f"MFU above {least:.0%}", holds


def has(words, condition):
    return words, lambda order, plan, step, machine, use: (plan.words(), condition(plan))


def efficient(least, first, last):
    """Return the constraint: `least` efficiency from `first` to `last` GPUs with the same batch."""
    def holds(order, plan, step, machine, use):
        try:
            share = use.curve(order.model, plan, machine, (first, last))[-1][2]
        except ValueError as error:
            return str(error), False
        return f"{share:.1%}", share >= least
    return f"{least:.0%} efficiency from {first} to {last} GPUs", holds


def faster_than(tokens):
    def holds(order, plan, step, machine, use):
        speed = step.tokens_per_second(plan)
        return f"{speed:,.0f}", speed >= tokens
    return f"{tokens:,} tokens/s or more", holds


def quiet(most):
    """Return the constraint: links between islands take at most a fraction `most` of the step."""
    def holds(order, plan, step, machine, use):
        flat = replace(machine, island=0)
        loss = 1 - use.step(order.model, plan, flat).total / step.total
        return f"{loss:.1%}", loss <= most
    return f"at most {most:.0%} of the step for the link between the sites", holds


def cheap(dollars, days, tokens):
    """Return the constraint: at most `dollars` per million tokens, and all tokens in `days`."""
    def holds(order, plan, step, machine, use):
        mfu, price = step.mfu(order.model, plan, machine), price_of(machine.accelerator)[0]
        each = 1e6 * use.cost(order.model, order.sequence, machine, mfu, price)
        took = bill(plan, step, machine, tokens).days
        return f"{each:.3f} $, {took:.0f} days", each <= dollars and took <= days
    return f"at most {dollars} $ a million tokens, {tokens / 1e9:.0f} billion in {days} days", holds


A100 = find_node("a100-dgx")
ORDERS = {
    "10b": Order("10B over two sites of 32 A100s, 0.6 GB/s a GPU between them", model_of_size(10e9),
                 ((replace(A100, island=32, far=0.6e9), 64),), 2048, 512,
                 dict([quiet(0.12), mfu_above(0.45)])),
    "100b": Order("100B on 64 A100s, tensor x pipeline, ZeRO-1, virtual stages",
                  model_of_size(100e9), ((A100, 64),), 2048, 1024,
                  dict([has("tp, pp and virtual above 1, zero 1", lambda plan: min(
                      plan.tp, plan.pp, plan.virtual) > 1 and plan.zero == 1), mfu_above(0.5)]),
                  ("megatron",)),
    "130b": Order("130B on 128 A100s above 50% MFU", MODELS["glm-130b"], ((A100, 128),), 2048, 2048,
                  dict([mfu_above(0.5)])),
    "1b": Order("1B on 8 x 8 A100s, as efficient as on 8", model_of_size(1e9), ((A100, 64),), 2048,
                512, dict([efficient(0.9, 8, 64)])),
    "7b": Order("7B on four cards of 24 GB, all weights trained", MODELS["llama2-7b"],
                ((find_node("rtx4090-pcie"), 4),), 2048, 64, dict([faster_than(5000)])),
    "13b": Order("13B for little money: 64 A100s, or 128 A10Gs", MODELS["llama2-13b"],
                 ((find_node("a100-40gb-dgx"), 64), (find_node("a10-pcie"), 128)), 2048, 512,
                 dict([cheap(0.40, 30, 300e9)])),
}


def orders():
    """Return the orders and their constraints as text."""
    return "\n".join("\n      ".join([f"{name:5} {order.title}", *order.wants])
                     for name, order in ORDERS.items())


def order_of(name, **changes):
    """Return the Order, with its sequence, batch or fields of its machines changed.

    Raises: ValueError if there is no such order or field
    """
    if name not in ORDERS:
        raise ValueError(f"{name!r} is no order: {', '.join(ORDERS)}")
    sizes = {field: changes.pop(field) for field in ("sequence", "batch") if field in changes}
    order = replace(ORDERS[name], **sizes)
    if unknown := set(changes) - {field.name for field in fields(Machine)}:
        raise ValueError(f"{', '.join(unknown)}: an order has sequence, batch, and the fields of "
                         "its machines")
    return replace(order, machines=tuple((replace(machine, **changes), gpus)
                                         for machine, gpus in order.machines))


def grades(order, plan, machine, gpus, use):
    """Grade a plan: return [(the constraint, the plan's value, whether it holds)]."""
    try:
        refuse(plan, order.model, machine, gpus, order.sequence, order.batch)
    except ValueError as error:
        return [("a plan that the tool can run", str(error), False)]
    held = use.memory(order.model, plan, machine).total
    step = use.step(order.model, plan, machine)
    most, whole = room(machine), machine.memory_bytes
    marks = [(f"fits in {most / 1e9:.0f} GB ({RESERVE:.0%} of {whole / 1e9:.0f} left free)",
              f"{held / 1e9:.1f} GB", held <= most)]
    return marks + [(words, *holds(order, plan, step, machine, use))
                    for words, holds in order.wants.items()]


def grade(name, plan, on=0, functions=Functions(), **changes):
    """Grade a plan: return a line for each constraint of an order, as text.

    The tool's own fields are set as usual() has them.
    on: which of the order's machines
    """
    order = order_of(name, **changes)
    machine, gpus = order.machines[on]
    plan = replace(plan, **usual(plan.tool, machine))
    return "\n".join(as_lines(grades(order, plan, machine, gpus, functions)))


def run(only=None, **changes):
    """Find for each order the fastest plan that meets all constraints; return text.

    If no plan meets all of them: the plan that meets most.
    only: the name of one order
    changes: as for order_of; and memory, step, cost, curve, search: your own functions
    """
    functions = {name: changes.pop(name) for name in Functions._fields if name in changes}
    use, lines = Functions(**functions), []
    for name in [only] if only else ORDERS:
        order = order_of(name, **changes)
        lines.append(f"{name:5} {order.title}")
        lines += chosen(order, use)
    return "\n".join(lines)


def chosen(order, use):
    """Return lines about the fastest plan that meets most of an order's constraints."""
    best = None  # (a layout, its grades, its machine)
    for machine, gpus in order.machines:
        try:
            layouts = use.search(order.model, machine, gpus, order.sequence, order.batch,
                                 order.tools)
        except ValueError as error:
            best = best or (None, [("a plan", str(error), False)], machine)
            continue
        for layout in layouts:
            marks = grades(order, layout.plan, machine, gpus, use)
            if best is None or number_kept(marks) > number_kept(best[1]):
                best = layout, marks, machine
            if number_kept(marks) == len(marks):
                break
    layout, marks, machine = best
    lines = [] if layout is None else [
        f"{machine.accelerator}: {layout.plan.tool} {layout.plan.words()}, "
        f"{layout.step.total:.2f} s", why(layout.plan, layout.step, machine)]
    return [f"      {line}" for line in [*lines, *as_lines(marks)]]


def number_kept(marks):
    """Count the constraints that hold in the output of grades()."""
    return sum(holds for *_, holds in marks)


def as_lines(marks):
    """Format the output of grades() as lines."""
    return [f"{'ok' if holds else 'FAIL':5} {words}: {value}" for words, value, holds in marks]
