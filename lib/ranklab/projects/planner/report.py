"""What the command prints: a table of scores, or constants with their residuals."""

import dataclasses
import json

from ranklab.planner.constants import CONSTANTS, bounds
from ranklab.planner.fit import fit
from ranklab.planner.jobs import Unused, is_for_fit, job_of
from ranklab.planner.score import mean, score, total
from ranklab.projects.planner.measure import measure_report
from ranklab.projects.planner.orders import run

HEADER = (f"{'source':24}{'rows':>6}{'usable':>8}{'used':>6}{'time':>7}{'p90':>7}{'memory':>9}"
          f"{'p90':>7}{'pairs':>8}{'right':>7}")


def act(options, settings):
    if options.command == "orders":
        return run()
    if options.command == "measure":
        return measure_report(options.ranks, options.write)
    runs = options.runs()
    if options.command == "fit":
        return fit_report(runs)
    found = score(runs)
    if options.json:
        return json.dumps({name: each.as_dict() for name, each in found.items()}, indent=1)
    return "\n".join([score_table(found), "", used_words(found["all"]), unused_table(found)])


def score_table(scores):
    """Median and 90th percentile of the relative errors of each source, as text."""
    lines = [HEADER]
    for name, each in scores.items():
        found = each.as_dict()
        times, memory, right = found["step_time"], found["memory"], found["pairs"]["right"]
        lines.append(f"{name:24}{each.rows:6}{each.usable:8}{each.used:6}"
                     f"{percent(times['median']):>7}{percent(times['p90']):>7}"
                     f"{percent(memory['median']):>9}{percent(memory['p90']):>7}"
                     f"{len(each.pairs):8}{percent(right):>7}")
    return "\n".join(lines)


def used_words(found):
    """Whether the used rows are said to fit, and what was assumed about them, as text."""
    words = f"said to fit into their GPUs, as they did: {percent(mean(found.fits)) or 'none used'}"
    if found.assumed:
        rows = ", ".join(f"{name} in {number} rows" for name, number in found.assumed.most_common())
        words += f"\nnot printed, the usual is assumed: {rows}"
    return words


def percent(part):
    return "" if part is None else f"{100 * part:.1f}%"


def unused_table(found):
    """Why rows were not used, as text."""
    lines = ["not used:"]
    for name, each in found.items():
        lines += [f"  {name}: {number} rows: {why}" for why, number in each.unused.most_common()
                  if name != "all"]
    return "\n".join(lines) if len(lines) > 1 else "all rows were used"


# --- the fit --------------------------------------------------------------------------------------

def fit_report(runs):
    """The constants, fitted again on the rows for the fit, and their errors: on those rows, on
    validation, and on each source with constants that were fitted without it.
    """
    jobs = [job for job in map(usable, runs) if job]
    for_fit = [job for job in jobs if is_for_fit(job.row_id)]
    constants = fit(for_fit)
    lines = ["constant            fitted    now         from       to  meaning"]
    for name, (low, high, meaning) in bounds().items():
        lines.append(f"{name:17}{getattr(constants, name):11.4g}{getattr(CONSTANTS, name):11.4g}"
                     f"{low:11.4g}{high:11.4g}  {meaning}")
    lines += ["", "fit:", score_table(score(part(runs, True), constants)),
              "", "validation:", score_table(score(part(runs, False), constants)),
              "", "each source, by constants that were fitted on the others:"]
    alone = {}
    for source in sorted({job.source for job in jobs}):
        others = fit([job for job in for_fit if job.source != source], constants, steps=8)
        alone[source] = score([run for run in runs if run.file == source], others)["all"]
    lines.append(score_table({**alone, "all": total(alone.values())}))
    return "\n".join([*lines, "", dataclass_text(constants)])


def part(runs, for_fit):
    return [run for run in runs if is_for_fit(run.row_id) == for_fit]


def usable(run):
    """The Job of a Run; None if it can't be used."""
    try:
        return job_of(run)
    except Unused:
        return None


def dataclass_text(constants):
    """The constants as constants.py has them."""
    values = ", ".join(f"{name}={value:.4g}"
                       for name, value in dataclasses.asdict(constants).items())
    return f"Constants({values})"
