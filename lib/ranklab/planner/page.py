"""plan_page: a page on which a reader changes a training's choices; all numbers are this library's.

Each choice is searched when the page is made. Its script looks rows up and draws them.
"""

import html
import itertools
import json
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path

from ranklab.planner.cost import bill, price_of
from ranklab.planner.failures import checkpoint_seconds, good_share
from ranklab.planner.machine import Machine
from ranklab.planner.memory import GpuMemory
from ranklab.planner.quick import quick_search
from ranklab.planner.search import NoLayout, search_layouts
from ranklab.planner.step import Step
from ranklab.planner.why import likely_range, why

TOKENS = 1e12  # of the training that is billed
LAYOUTS = 5
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
    """What may be asked of a kind of node: numbers of GPUs, and of tokens in a batch."""

    machine: Machine
    gpus: tuple
    batches: tuple


@dataclass(frozen=True)
class Choices:
    """All combinations of these, each a tuple (model, node, gpus, sequence, batch in tokens).

    models, nodes  {name: Model}, {name: Node}
    asked          the choice that is shown first; all its layouts are searched, while the others
                   have a quick_search
    """

    models: dict
    nodes: dict
    sequences: tuple
    asked: tuple

    def __iter__(self):
        for name, (node, kind) in itertools.product(self.models, self.nodes.items()):
            for rest in itertools.product(kind.gpus, self.sequences, kind.batches):
                yield name, node, *rest


def around(name, model, machine, gpus, sequence, batch):
    """The Choices of one query, `batch` sequences, and of half and twice its sizes."""
    node = Node(machine, near(gpus), near(batch * sequence))
    return Choices({name: model}, {machine.name: node}, near(sequence),
                   (name, machine.name, gpus, sequence, batch * sequence))


def near(size):
    return (*([size // 2] if size % 2 == 0 else ()), size, 2 * size)


def plan_page(choices, spread=map):
    """One HTML file that loads nothing; spread: a pool's map, for many choices."""
    return WHOLE.format(fragment(choices, spread))


def fragment(choices, spread=map):
    """The same without head and body, for a page of a site."""
    rows = dict(zip(choices, spread(partial(row, choices), choices)))
    data = {
        "asked": choices.asked, "sequences": choices.sequences, "models": {
            name: f"{model.parameters / 1e9:.3g}B" for name, model in choices.models.items()},
        "nodes": {name: {"gpus": node.gpus, "batches": node.batches, "price": price(node.machine),
                         "GB": node.machine.memory_bytes / 1e9, "gpu": node.machine.accelerator}
                  for name, node in choices.nodes.items()},
        "memory": [field.name for field in fields(GpuMemory)],
        "step": [field.name for field in fields(Step)],
        "rows": {" ".join(map(str, choice)): found for choice, found in rows.items()}}
    text = json.dumps(data, separators=(",", ":")).replace("<", r"\u003c")
    asked = static(choices.asked, rows[choices.asked])
    return TEMPLATE.read_text().replace("{{asked}}", asked).replace("{{data}}", text)


def price(machine):
    """Of a GPU, in words."""
    dollars, source = price_of(machine.accelerator)
    return f"${dollars:g} an hour of a GPU ({source})" if dollars else "no price is published"


def row(choices, choice):
    """What is drawn of a choice; or a sentence, where nothing fits.

    [GB of each part of memory], [seconds of each part of the step], why,
    [seconds that are likely, from and to, of what], [days, dollars, MWh of TOKENS, good share],
    [(layout, seconds, GB, MFU in %) of the best]
    """
    name, node, gpus, sequence, batch = choice
    model, machine = choices.models[name], choices.nodes[node].machine
    if batch % sequence:
        return f"a batch of {batch} tokens is no whole number of sequences of {sequence}"
    search = search_layouts if choice == choices.asked else quick_search
    try:
        found = search(model, machine, gpus, sequence, batch // sequence)
    except NoLayout as error:
        return str(error)
    plan, memory, step = found[0]
    low, high, similar = likely_range(plan, machine)
    share = good_share(gpus, checkpoint_seconds(model, max(1, gpus / machine.node)))
    cost = bill(plan, step, machine, TOKENS, price_of(machine.accelerator)[0], share)
    layouts = [(f"{plan.tool} {plan.words()}", short(step.total), short(memory.total / 1e9),
                short(100 * step.mfu(model, plan, machine)))
               for plan, memory, step in found[:LAYOUTS]]
    return ([short(nbytes / 1e9) for nbytes in astuple(memory)],
            [short(seconds) for seconds in astuple(step)], why(plan, step, machine),
            [short(low * step.total), short(high * step.total), similar],
            [short(cost.days), cost.dollars and short(cost.dollars), short(cost.energy / 3.6e9),
             short(share)], layouts)


def short(number):
    """Four digits of it."""
    return int(found) if (found := float(f"{number:.4g}")).is_integer() else found


def static(asked, found):
    """The asked choice as a table: what is read where no script runs."""
    name, node, gpus, sequence, batch = asked
    said = html.escape(f"{name} on {gpus} GPUs of {node}, {batch:,} tokens a step in sequences of "
                       f"{sequence:,}")
    if isinstance(found, str):
        return f"<p>{said}: {html.escape(found)}</p>"
    lines = [f"<tr><td>{layout}<td>{seconds} s<td>{gb} GB<td>{mfu}%"
             for layout, seconds, gb, mfu in found[-1]]
    return (f"<table><caption>{said}<tr><th>layout<th>step<th>memory<th>MFU\n"
            + "\n".join(lines) + f"</table>\n<p>The fastest: {found[2]}.</p>")
