"""The report of `make gpu`: report.json, and report.md for people."""

import json
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path


def line(result):
    """Return one part in one line."""
    words = result["words"].partition("\n")[0]
    shown = ", ".join(f"{name} {number}" for name, number in [*result["numbers"].items()][:3])
    return (f"{result['state']:9}{result['seconds']:7.1f} s  {result['name']:12} "
            f"{words or shown}")[:150].rstrip()


def write(out, job, results):
    """Write both files into the folder `out`."""
    about = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
             "commit": commit(), "python": platform.python_version(), **job}
    whole = {"about": about, "parts": results}
    (out / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    (out / "report.md").write_text(markdown(whole))


def commit():
    """Return the checkout's commit, or "unknown" where it travels without its history."""
    try:
        said = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], cwd=Path(__file__).parent,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:  # no git here
        return "unknown"
    return said.stdout.strip() or "unknown"


def markdown(whole):
    """Return the report as text: each part's state, seconds and numbers, then what failed."""
    about, results = whole["about"], whole["parts"]
    states = [result["state"] for result in results]
    ways = ("a rehearsal: no GPU, on the CPU under a GPU's rules" if about["rehearsal"] else
            f"{about['gpus']} GPU(s), shared" if about["share"] else f"{about['gpus']} GPU(s)")
    lines = [f"# make gpu, {about['date']}, commit {about['commit']}", "",
             f"{about['ranks']} ranks, {ways}; torch {about['torch']}, Python {about['python']}. "
             + ", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed",
                                                                       "left out")) + "."]
    for section in dict.fromkeys(result["section"] for result in results):
        lines += ["", f"## {section}", "", "| part | what | state | s | numbers |",
                  "|---|---|---|---|---|"]
        lines += [f"| {r['name']} | {r['what']} | {r['state']} | {r['seconds']:.0f} | "
                  f"{cell(r)} |" for r in results if r["section"] == section]
    failed = [result for result in results if result["state"] == "failed"]
    for result in failed:
        lines += ["", f"### {result['name']} failed", "", "```", result["words"], "```"]
    return "\n".join(lines) + "\n"


def cell(result):
    """Return the numbers of a part, or why there are none."""
    numbers = "<br>".join(f"{name}: {number}" for name, number in result["numbers"].items())
    return numbers or result["words"].partition("\n")[0].replace("|", "/")
