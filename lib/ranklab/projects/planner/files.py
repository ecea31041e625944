"""The best layout of each tool, as files that it reads; a dry run in the course's own trainer."""

from pathlib import Path

from ranklab.planner.export import (
    deepspeed_differs, deepspeed_json, megatron_arguments, torchtitan_function, torchtitan_toml,
)
from ranklab.planner.export.nodes import host_gpus


def write_plans(folder, model, layouts, machine):
    """Write files of the first layout of each tool to `folder`; return lines that name them."""
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
            (folder / name).write_text(text.rstrip() + "\n")
        names = ", ".join(str(folder / each) for each in files)
        lines.append(f"{plan.tool} {plan.words()}: {names}")
        if plan.tool == "torchtitan":
            lines.append("  its release 0.2.2 reads the .toml, 0.3.0 the .py")
        if plan.tool == "deepspeed":  # JSON has no comments
            lines += [f"  {sentence}" for sentence in deepspeed_differs(plan)]
    return lines


def texts(model, plan, machine):
    """Return {name of a file: its text} for the tool of the plan."""
    if plan.tool == "megatron":
        return {"megatron.sh": megatron_arguments(model, plan, host_gpus(machine))}
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
