"""plan_page: a page on which a reader changes a training's choices; all numbers are this library's.

The search for each choice runs when the page is made. The page's script only draws its result.
"""

import html
import itertools
import json
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path

from ranklab.planner.machine import Machine
from ranklab.planner.memory import GpuMemory
from ranklab.planner.quick import quick_search
from ranklab.planner.search import RESERVE, NoLayout, distinct, room, search_layouts
from ranklab.planner.space import ADVISED
from ranklab.planner.step import Step
from ranklab.planner.why import assumptions, likely_range, why
from ranklab.planner.wish import Wish

TEMPLATE = Path(__file__).with_suffix(".html")
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

    price  (dollars of a GPU for an hour, or None; its source)
    """

    machine: Machine
    gpus: tuple
    batches: tuple
    price: tuple


@dataclass(frozen=True)
class Choices:
    """All combinations of these, each a tuple (model, node, gpus, sequence, batch in tokens).

    models, nodes  {name: Model}, {name: Node}
    asked          the choice that is shown first, with a full search; the others have a
                   quick_search
    tokens         of the training in the bill
    reserve        the share of a GPU's memory that stays free
    """

    models: dict
    nodes: dict
    sequences: tuple
    asked: tuple
    tokens: float = 1e12
    tools: tuple = ADVISED
    reserve: float = RESERVE

    def __iter__(self):
        for name, (node, kind) in itertools.product(self.models, self.nodes.items()):
            for rest in itertools.product(kind.gpus, self.sequences, kind.batches):
                yield name, node, *rest

    def wish(self, name, node, gpus, sequence, batch):
        machine, price = self.nodes[node].machine, self.nodes[node].price[0]
        return Wish(self.models[name], machine, gpus, sequence, batch // sequence, self.tools,
                    self.tokens, price, self.reserve)


def around(name, wish, source):
    """The Choices of one Wish, and of half and twice its GPUs, sequence and batch.

    name, source  of its model; of its price
    """
    tokens, node = wish.batch * wish.sequence, wish.machine.name
    kind = Node(wish.machine, near(wish.gpus), near(tokens), (wish.price, source))
    return Choices({name: wish.model}, {node: kind}, near(wish.sequence),
                   (name, node, wish.gpus, wish.sequence, tokens), wish.tokens, wish.tools,
                   wish.reserve)


def near(size):
    return (*([size // 2] if size % 2 == 0 else ()), size, 2 * size)


def plan_page(choices, spread=map):
    """One HTML file that loads nothing; spread: a pool's map, for many choices."""
    return WHOLE.format(fragment(choices, spread))


def fragment(choices, spread=map):
    """The same without head and body, for a page of a site."""
    rows = dict(zip(choices, spread(partial(row, choices), choices)))
    data = {
        "asked": choices.asked, "sequences": choices.sequences, "tokens": choices.tokens,
        "models": {name: model.parameters for name, model in choices.models.items()},
        "nodes": {name: {"gpus": node.gpus, "batches": node.batches, "price": node.price,
                         "GB": node.machine.memory_bytes / 1e9,
                         "room": room(node.machine, choices.reserve) / 1e9,
                         "gpu": node.machine.accelerator}
                  for name, node in choices.nodes.items()},
        "memory": [field.name for field in fields(GpuMemory)],
        "step": [field.name for field in fields(Step)],
        "rows": {" ".join(map(str, choice)): found for choice, found in rows.items()}}
    text = json.dumps(data, separators=(",", ":")).replace("<", r"\u003c")
    asked = static(choices.asked, rows[choices.asked])
    return TEMPLATE.read_text().replace("{{asked}}", asked).replace("{{data}}", text)


def row(choices, choice):
    """What the page draws of a choice; or a sentence, if nothing fits.

    [GB of each part of memory], [seconds of each part of the step], why,
    [seconds that are likely, from and to, by what], [tokens a second; days, dollars, MWh of all],
    seconds without what hides messages and without newer kernels of attention, None if it has none,
    [(layout, seconds, GB, MFU in %) of the best]
    """
    *_, sequence, batch = choice
    if batch % sequence:
        return f"a batch of {batch} tokens is no whole number of sequences of {sequence}"
    wish = choices.wish(*choice)
    search = search_layouts if choice == choices.asked else quick_search
    try:
        found = distinct(search(wish.model, wish.machine, wish.gpus, wish.sequence, wish.batch,
                                wish.tools, reserve=wish.reserve))
    except NoLayout as error:
        return str(error)
    plan, memory, step = found[0]
    low, high, similar = likely_range(plan, wish.machine)
    bill = wish.bill(found[0])
    assumed = assumptions(wish.model, plan, wish.machine)
    layouts = [(f"{each.plan.tool} {each.plan.words()}", short(each.step.total),
                short(each.memory.total / 1e9),
                short(100 * each.step.mfu(wish.model, each.plan, wish.machine))) for each in found]
    return ([short(nbytes / 1e9) for nbytes in astuple(memory)],
            [short(seconds) for seconds in astuple(step)], why(plan, step, wish.machine),
            [short(low * step.total), short(high * step.total), similar],
            [short(step.tokens_per_second(plan)), short(bill.days),
             bill.dollars and short(bill.dollars), short(bill.energy / 3.6e9)],
            short(assumed[-1][1]) if assumed else None, layouts)


def short(number):
    """Four digits of it."""
    return int(found) if (found := float(f"{number:.4g}")).is_integer() else found


def static(asked, found):
    """The asked choice as a table, for readers without scripts."""
    name, node, gpus, sequence, batch = asked
    said = html.escape(f"{name} on {gpus} GPUs of {node}, {batch:,} tokens a step in sequences of "
                       f"{sequence:,}")
    if isinstance(found, str):
        return f"<p>{said}: {html.escape(found)}</p>"
    lines = [f"<tr><td>{layout}<td>{seconds:.3g} s<td>{gb:.3g} GB<td>{mfu:.3g}%"
             for layout, seconds, gb, mfu in found[-1]]
    return (f"<table><caption>{said}<tr><th>layout<th>step<th>memory<th>MFU\n"
            + "\n".join(lines) + f"</table>\n<p>The fastest: {found[2]}.</p>")
