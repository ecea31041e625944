"""The best layout of each tool, as files that it reads; a dry run in the course's own trainer."""

import itertools
import json
import textwrap
from pathlib import Path

from ranklab.planner.export import (
    deepspeed_differs, deepspeed_json, megatron_arguments, torchtitan_function, torchtitan_toml,
)
from ranklab.planner.export.megatron import model_unsaid
from ranklab.planner.export.nodes import host_gpus

FILES = {"megatron": ["megatron.sh"], "torchtitan": ["torchtitan.toml", "torchtitan_planned.py"],
         "deepspeed": ["deepspeed.json"], "ours": ["ranklab.sh"]}
MARK = "Written by ranklab plan --write; the next call replaces it."


def refuse_to_replace(folder, tools):
    """Raise ValueError if a file of these tools is in `folder` and was not written by this module.
    """
    for path in (Path(folder) / name for tool in tools for name in FILES[tool]):
        if path.exists() and not (path.is_file() and MARK in path.read_text(errors="replace")):
            raise ValueError(f"{path} is there and was not written by ranklab plan: move it, or "
                             "give --write another folder")


def write_plans(folder, model, layouts, machine, notes=()):
    """Write files of the first layout of each tool to `folder`.

    notes: sentences for each file
    Returns: lines that name the files and say what is not in them
    """
    folder, lines, tools = Path(folder), [], set()
    folder.mkdir(parents=True, exist_ok=True)
    for plan in (each.plan for each in layouts if each.plan.tool not in tools):
        tools.add(plan.tool)
        try:
            files = texts(model, plan, machine)
        except ValueError as error:
            lines.append(f"{plan.tool}: no file: {error}")
            continue
        for name, text in files.items():
            (folder / name).write_text(with_header(name, text, notes).rstrip() + "\n")
        names = ", ".join(str(folder / each) for each in files)
        lines.append(f"{plan.tool} {plan.words()}: {names}")
        sentences = [sentence for text in files.values() for sentence in comments(text)]
        if plan.tool == "torchtitan":
            sentences.append("its release 0.2.2 reads the .toml, 0.3.0 the .py")
        if plan.tool == "deepspeed":  # JSON has no comments
            sentences += deepspeed_differs(plan)
        lines += [line for sentence in dict.fromkeys(sentences) for line in textwrap.wrap(
            sentence, 100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)]
    return [*lines, *(line for note in notes for line in textwrap.wrap(note, 100))]


def with_header(name, text, notes):
    """Return the text of a file after MARK and notes: comments, or a key of a JSON object."""
    if name.endswith(".json"):
        return json.dumps({"_": " ".join([MARK, *notes]), **json.loads(text)}, indent=2)
    return "\n".join([*(f"# {sentence}" for sentence in [MARK, *notes]), text])


def comments(text):
    """Return the sentences of the comments with which a file begins."""
    first = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    return [line.removeprefix("# ") for line in first]


def texts(model, plan, machine):
    """Return {name of a file: its text} for the tool of the plan."""
    if plan.tool == "megatron":
        return {"megatron.sh": megatron_arguments(model, plan, host_gpus(machine),
                                                  differs=model_unsaid(model))}
    if plan.tool == "torchtitan":
        return {"torchtitan.toml": torchtitan_toml(model, plan),
                "torchtitan_planned.py": torchtitan_function(model, plan)}
    if plan.tool == "deepspeed":
        return {"deepspeed.json": deepspeed_json(model, plan)}
    from ranklab.planner.export.hybrid import hybrid_command  # here: it needs torch

    return {"ranklab.sh": hybrid_command(model, plan, host_gpus(machine))}


def dry_run(model, plan):
    """Run a plan's first rank in lab 12's trainer, and count the bytes that it holds and sends.

    Returns: lines with the bytes predicted by the formulas, and as counted
    """
    from ranklab.planner.export.hybrid import dry_run_plan  # here: it needs torch

    result = dry_run_plan(model, plan)
    rows = [("held", result.formula_memory.reading("allocated"), result.memory.total),
            *((f"sent by {axis} ranks", nbytes, result.sent[axis])
              for axis, nbytes in result.formula_sent.items())]
    title = f"{plan.gpus} GPUs, {plan.words()}"
    return [f"{title:{max(26, len(title))}}{'bytes said':>18}{'counted':>18}",
            *(f"{label:{max(26, len(title))}}{a:18,.0f}{b:18,.0f}" for label, a, b in rows)]
