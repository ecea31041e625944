"""What the command takes: what to do, and the files of runs."""

from dataclasses import dataclass

from ranklab.basics.options import existing_file, new_file, option
from ranklab.planner.jobs import is_for_fit
from ranklab.planner.published import read_runs, run_files
from ranklab.projects.runner import OnRanks

COMMANDS = ("score", "fit", "orders", "measure")
PARTS = {"all": lambda row_id: True, "fit": is_for_fit,
         "validation": lambda row_id: not is_for_fit(row_id)}


@dataclass(frozen=True)
class Options(OnRanks):
    """What the command takes."""

    command: str = option("score", "score: errors on files of runs; fit: constants anew; orders: "
                          "six plans; measure: this machine", COMMANDS, nargs="?")
    files: tuple = option((), "files of runs; none: the published ones", kind=existing_file,
                          nargs="*")
    part: str = option("all", "of the rows: those for the fit, or for validation", PARTS)
    json: bool = option(False, "print the scores as JSON")
    write: str | None = option(None, "measure: a node file for `ranklab plan --on`", kind=new_file)

    def runs(self):
        """The Runs of the files, of this part.

        error  ValueError where there are none
        """
        paths = self.files or run_files()
        found = [run for path in paths for run in read_runs(path) if PARTS[self.part](run.row_id)]
        if not found:
            raise ValueError("there are no rows in these files")
        return found
