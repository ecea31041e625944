"""The planner's command: scores on published runs, or constants with their residuals."""

import dataclasses
import json
from dataclasses import dataclass

from ranklab.basics.options import existing_file, new_file, option
from ranklab.planner.constants import CONSTANTS, bounds
from ranklab.planner.jobs import is_for_fit, jobs
from ranklab.planner.published import read_runs, run_files
from ranklab.planner.score import mean, score, total
from ranklab.projects.planner.orders import run
from ranklab.projects.runner import OnRanks

HEADER = (f"{'source':24}{'rows':>6}{'usable':>8}{'used':>6}{'time':>7}{'p90':>7}{'memory':>9}"
          f"{'p90':>7}{'pairs':>8}{'right':>7}")


COMMANDS = ("score", "fit", "orders", "measure")
PARTS = {"all": lambda row_id: True, "fit": is_for_fit,
         "validation": lambda row_id: not is_for_fit(row_id)}


@dataclass(frozen=True)
class Options(OnRanks):
    """The command's options."""

    command: str = option("score", "score: errors on files of runs; fit: constants anew; orders: "
                          "six plans; measure: this machine", COMMANDS, nargs="?")
    files: tuple = option((), "files of runs; none: the published ones", kind=existing_file,
                          nargs="*")
    part: str = option("all", "of the rows: those for the fit, or for validation", PARTS)
    json: bool = option(False, "print the scores as JSON")
    write: str | None = option(None, "measure: a node file for `ranklab plan --on`", kind=new_file)

    def runs(self):
        """Return the files' Runs in this part; raise ValueError if there are none."""
        runs = [run for run in all_runs(self.files) if PARTS[self.part](run.row_id)]
        if not runs:
            raise ValueError("there are no rows in these files")
        return runs


def all_runs(paths=()):
    """Return the Runs of these files; without any, all published ones."""
    return [run for path in paths or run_files() for run in read_runs(path)]


def act(options, _):
    """Return the requested report as text."""
    if options.command == "orders":
        return run()
    if options.command == "measure":
        from ranklab.projects.planner.measure import measure_report  # here: it needs torch

        return measure_report(options.ranks, options.write)
    runs = options.runs()
    if options.command == "fit":
        return fit_report(runs)
    scores = score(runs)
    if options.json:
        return json.dumps({name: each.as_dict() for name, each in scores.items()}, indent=1)
    return "\n".join([score_table(scores), "", used_words(scores["all"]), unused_table(scores)])


def score_table(scores):
    """Return the median and 90th percentile of each source's relative errors as text."""
    lines = [HEADER]
    for name, each in scores.items():
        errors = each.as_dict()
        times, memory, right = errors["step_time"], errors["memory"], errors["pairs"]["right"]
        lines.append(f"{name:24}{each.rows:6}{each.usable:8}{each.used:6}"
                     f"{percent(times['median']):>7}{percent(times['p90']):>7}"
                     f"{percent(memory['median']):>9}{percent(memory['p90']):>7}"
                     f"{len(each.pairs):8}{percent(right):>7}")
    return "\n".join(lines)


def used_words(total_score):
    """Return as text how many used rows are predicted to fit, and the assumptions about them."""
    fits = percent(mean(total_score.fits)) or "none used"
    words = f"said to fit into their GPUs, as they did: {fits}"
    if assumed := total_score.assumed:
        rows = ", ".join(f"{name} in {number} rows" for name, number in assumed.most_common())
        words += f"\nnot printed, the usual is assumed: {rows}"
    return words


def percent(part):
    return "" if part is None else f"{100 * part:.1f}%"


def unused_table(scores):
    """Return as text the reasons why rows were not used."""
    lines = ["not used:"]
    for name, each in scores.items():
        lines += [f"  {name}: {number} rows: {why}" for why, number in each.unused.most_common()
                  if name != "all"]
    return "\n".join(lines) if len(lines) > 1 else "all rows were used"


# --- the fit --------------------------------------------------------------------------------------

def fit_report(runs):
    """Fit the constants again; return them and their errors as text.

    The errors are on the rows of the fit, on validation, and on each source with constants
    fitted without it.
    """
    from ranklab.planner.fit import fit  # here: it needs numpy, and `ranklab plan` does not

    usable = jobs(runs)
    for_fit = [job for job in usable if is_for_fit(job.row_id)]
    constants = fit(for_fit)
    lines = ["constant            fitted    now         from       to  meaning"]
    for name, (low, high, meaning) in bounds().items():
        lines.append(f"{name:17}{getattr(constants, name):11.4g}{getattr(CONSTANTS, name):11.4g}"
                     f"{low:11.4g}{high:11.4g}  {meaning}")
    lines += ["", "fit:", score_table(score(part(runs, True), constants)),
              "", "validation:", score_table(score(part(runs, False), constants)),
              "", "each source, by constants that were fitted on the others:"]
    scores = {}
    for source in sorted({job.source for job in usable}):
        refit = fit([job for job in for_fit if job.source != source], constants, steps=8)
        scores[source] = score([run for run in runs if run.file == source], refit)["all"]
    lines.append(score_table({**scores, "all": total(scores.values())}))
    return "\n".join([*lines, "", dataclass_text(constants)])


def part(runs, for_fit):
    return [run for run in runs if is_for_fit(run.row_id) == for_fit]


def dataclass_text(constants):
    """Return the constants as constants.py has them."""
    values = ", ".join(f"{name}={value:.4g}"
                       for name, value in dataclasses.asdict(constants).items())
    return f"Constants({values})"
