"""plan_page: a page on which a reader changes the choices of a training run; all numbers are this
library's.

The search for each choice runs when the page is built. The page's script only draws its result.
"""

import html
import itertools
import json
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path

from ranklab.planner.machine import Machine, dtype_of
from ranklab.planner.memory import GpuMemory
from ranklab.planner.request import Request
from ranklab.planner.score import likely_range
from ranklab.planner.search import RESERVE, NoLayout, distinct, room
from ranklab.planner.space import ADVISED
from ranklab.planner.step import Step
from ranklab.planner.why import assumptions, why

FOLDER = Path(__file__).parent
WHOLE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plan of a training</title>
<style>:root {{ color-scheme: light dark }} body {{ font: 16px/1.5 system-ui, sans-serif;
  max-width: 60em; margin: 0 auto; padding: 1em }}</style></head>
<body><h1>Plan of a training</h1>
{}</body></html>
"""


@dataclass(frozen=True)
class Node:
    """The choices for a kind of node: numbers of GPUs, and of tokens in a batch.

    price  (dollars per GPU-hour, or None; its source)
    """

    machine: Machine
    gpus: tuple
    batches: tuple
    price: tuple


@dataclass(frozen=True)
class Choices:
    """All combinations of these, each a tuple (model, node, gpus, sequence, batch in tokens).

    models, nodes  {name: Model}, {name: Node}
    first          the choice that is shown first, with a full search; the others have a
                   quick_search
    tokens         of the training run in the bill
    reserve        the share of a GPU's memory that stays free
    """

    models: dict
    nodes: dict
    sequences: tuple
    first: tuple
    tokens: float = 1e12
    tools: tuple = ADVISED
    reserve: float = RESERVE

    def __iter__(self):
        for model, (name, node) in itertools.product(self.models, self.nodes.items()):
            for sizes in itertools.product(node.gpus, self.sequences, node.batches):
                yield model, name, *sizes

    def request(self, model, node, gpus, sequence, batch):
        """Return the Request of one choice."""
        machine, price = self.nodes[node].machine, self.nodes[node].price[0]
        return Request(self.models[model], machine, gpus, sequence, batch // sequence, self.tools,
                       self.tokens, price, self.reserve)


def around(name, request, source):
    """Return the Choices of one Request, and of half and twice its GPUs, sequence and batch.

    name, source  of its model; of its price
    """
    tokens, node = request.batch * request.sequence, request.machine.name
    choices = Node(request.machine, half_and_twice(request.gpus), half_and_twice(tokens),
                   (request.price, source))
    return Choices({name: request.model}, {node: choices}, half_and_twice(request.sequence),
                   (name, node, request.gpus, request.sequence, tokens), request.tokens,
                   request.tools, request.reserve)


def half_and_twice(size):
    """Return (half the size, if that is whole; the size; twice the size)."""
    return (*([size // 2] if size % 2 == 0 else ()), size, 2 * size)


def plan_page(choices, spread=map):
    """Return one HTML file that loads nothing.

    spread  a pool's map, for many choices
    """
    return WHOLE.format(fragment(choices, spread))


def fragment(choices, spread=map):
    """Return such a page without its head and body tags, for a page of a site."""
    rows = dict(zip(choices, spread(partial(row, choices), choices)))
    data = {
        "asked": choices.first, "sequences": choices.sequences, "tokens": choices.tokens,
        "models": {name: model.parameters for name, model in choices.models.items()},
        "nodes": {name: {"gpus": node.gpus, "batches": node.batches,
                         **facts(node.machine, node.price, choices.reserve)}
                  for name, node in choices.nodes.items()},
        "rows": {" ".join(map(str, choice)): cells for choice, cells in rows.items()}}
    return html_of(data, static_table(choices.first, rows[choices.first]), "choices")


def html_of(data, first, controls):
    """Return the page of these data.

    first     the content for readers without scripts
    controls  the script that fills the form: "choices" or "live"
    """
    data = {**data, "memory": [field.name for field in fields(GpuMemory)],
            "step": [field.name for field in fields(Step)]}
    text = json.dumps(data, separators=(",", ":")).replace("<", r"\u003c")
    script = "".join((FOLDER / f"page_{name}.js").read_text() for name in ("draw", controls))
    page = (FOLDER / "page.html").read_text()
    return (page.replace("{{asked}}", first).replace("{{data}}", text)
            .replace("{{script}}", script))


def facts(machine, price, reserve):
    """Return the page's facts about a GPU; price as in Node."""
    return {"price": price, "GB": machine.memory_bytes / 1e9,
            "room": room(machine, reserve) / 1e9, "gpu": machine.accelerator,
            "dtype": dtype_of(machine.accelerator)}


def row(choices, choice):
    """Return the content that the page draws for a choice; or a sentence, if nothing fits."""
    *_, sequence, batch = choice
    if batch % sequence:
        return f"a batch of {batch} tokens is no whole number of sequences of {sequence}"
    request = choices.request(*choice)
    return drawn(request, request.search if choice == choices.first else request.quick_search)


def drawn(request, search):
    """Return the content that the page draws for a Request; or a sentence, if nothing fits.

    [GB of each part of memory], [seconds of each part of the step], why,
    [likely seconds from and to, by what], [tokens per second; days, dollars, MWh in all],
    seconds without hidden messages and without newer attention kernels, None if it has none,
    [(layout, seconds, GB, MFU in %) of the best]
    """
    try:
        best = distinct(search())
    except NoLayout as error:
        return str(error)
    plan, memory, step = best[0]
    model, machine, bill = request.model, request.machine, request.bill(best[0])
    low, high, similar = likely_range(model, plan, machine)
    without = assumptions(model, plan, machine)
    layouts = [(f"{layout.plan.tool} {layout.plan.words()}", short(layout.step.total),
                short(layout.memory.total / 1e9),
                short(100 * layout.step.mfu(model, layout.plan, machine))) for layout in best]
    return ([short(nbytes / 1e9) for nbytes in astuple(memory)],
            [short(seconds) for seconds in astuple(step)], why(plan, step, machine),
            [short(low * step.total), short(high * step.total), similar],
            [short(step.tokens_per_second(plan)), short(bill.days),
             bill.dollars and short(bill.dollars), short(bill.energy / 3.6e9)],
            short(without[-1][1]) if without else None, layouts)


def short(number):
    """Round to four digits."""
    rounded = float(f"{number:.4g}")
    return int(rounded) if rounded.is_integer() else rounded


def static_table(choice, cells):
    """Return a choice as a table, for readers without scripts.

    cells  from row()
    """
    name, node, gpus, sequence, batch = choice
    title = html.escape(f"{name} on {gpus} GPUs of {node}, {batch:,} tokens a step in sequences of "
                        f"{sequence:,}")
    if isinstance(cells, str):
        return f"<p>{title}: {html.escape(cells)}</p>"
    lines = [f"<tr><td>{layout}<td>{seconds:.3g} s<td>{gb:.3g} GB<td>{mfu:.3g}%"
             for layout, seconds, gb, mfu in cells[-1]]
    return (f"<table><caption>{title}<tr><th>layout<th>step<th>memory<th>MFU\n"
            + "\n".join(lines) + f"</table>\n<p>The fastest: {cells[2]}.</p>")
