"""The planner's page that plans in the browser: `fragment` builds it, and the page runs `answer`.

The browser has Python without torch, numpy and transformers (Pyodide; site/worker.js). So the
fields of a config.json are read, or it is refused.
"""

import dataclasses
import json

from ranklab.planner.catalog import MODELS, NODES, find_node
from ranklab.planner.cost import price_of
from ranklab.planner.hf_config import by_fields
from ranklab.planner.page import drawn, facts, html_of, static_table
from ranklab.planner.request import Request

FIRST = {"model": "llama-70b", "config": "", "node": "h100-dgx", "gpus": 256, "sequence": 8192,
         "batch": 512, "tokens": 1000, "price": None, "network": None, "link": None}
BY_FIELDS = "a page has no transformers, which would measure the model itself"
LIMITS = {"gpus": 2**17, "sequence": 2**24, "batch": 2**24}  # above them a typing error is likelier


def answer(text):
    """Return the content that the page draws, as JSON, for the state of its form, as JSON.

    model        a name in MODELS; config: the text of a config.json, which takes precedence
    node         a name in NODES
    gpus, sequence, batch  the last in sequences
    tokens       of the whole training run, in billions
    price        dollars per GPU-hour; None: the published one
    network, link  GB/s of a GPU, one direction; None: the node's own
    """
    try:
        form = {**FIRST, **json.loads(text)}
        name, model, notes = model_of(form)
        machine, price = machine_of(form), price_of_gpu(form)
        request = Request(model, machine, *(whole(form, name) for name in LIMITS),
                          tokens=1e9 * above_zero(form, "tokens"), price=price[0])
        return json.dumps({"model": f"{name}, {model.parameters / 1e9:.4g}B parameters",
                           "notes": notes, "row": drawn(request, request.search),
                           "node": facts(machine, price, request.reserve),
                           "tokens": request.tokens})
    except ValueError as error:
        return json.dumps({"refused": str(error)})


def model_of(form):
    """Return (name, Model, notes) of a form. Raises: ValueError."""
    if not form["config"].strip():
        if form["model"] not in MODELS:
            raise ValueError(f"{form['model']!r} is no model: {', '.join(MODELS)}")
        return form["model"], MODELS[form["model"]], []
    try:
        config = json.loads(form["config"])
    except ValueError as error:
        raise ValueError(f"the config.json can't be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError("the config.json is no JSON object")
    name = config.get("_name_or_path") or config.get("model_type") or "config.json"
    return name, by_fields(config, BY_FIELDS), [f"read by its fields: {BY_FIELDS}"]


def machine_of(form):
    """Return the Machine of a form. Raises: ValueError."""
    changes = {name: 1e9 * above_zero(form, name) for name in ("network", "link")
               if form[name] is not None}
    return dataclasses.replace(find_node(form["node"]), **changes)


def price_of_gpu(form):
    """Return (dollars per hour or None, their source)."""
    if form["price"] is not None:
        return above_zero(form, "price"), "yours"
    return price_of(find_node(form["node"]).accelerator)


def whole(form, name):
    """Return a whole number from a form. Raises: ValueError."""
    value, most = form[name], LIMITS[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name}={value} must be a whole number from 1 to {most:,}")
    return value


def above_zero(form, name):
    """Return a positive number from a form. Raises: ValueError."""
    value = form[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise ValueError(f"{name}={value} must be a number above 0")
    return value


def fragment(worker=""):
    """Return the page without its head and body tags.

    worker  the address of site/worker.js; "": the page shows its first plan only
    """
    first = json.loads(answer(json.dumps(FIRST)))
    choice = FIRST["model"], FIRST["node"], FIRST["gpus"], FIRST["sequence"], (
        FIRST["batch"] * FIRST["sequence"])
    data = {"worker": worker, "models": [*MODELS], "nodes": [*NODES], "asked": FIRST,
            "first": first}
    return html_of(data, static_table(choice, first["row"]), "live")
