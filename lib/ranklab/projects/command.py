"""Shared by all entry points, `ranklab` included: a dataclass as options, refusals, a figure.

Wrong arguments end the program with one sentence and exit code 2, before anything is launched: see
the types in basics/options.py, Command.parse, and `refusals` for the library's own refusals.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import time
import typing
from pathlib import Path

from ranklab.basics.options import about, number, seed
from ranklab.engine import RankError, is_main_process
from ranklab.engine.in_place import is_started_by_another
from ranklab.engine.launcher import default_ranks
from ranklab.engine.report import PACKAGE

LAUNCH_LIMIT = 24 * 3600  # seconds: one limit for the whole run of launch's ranks
COLLECTIVE_LIMIT = 600  # seconds, under torchrun and srun: a dead rank is noticed after it
PATIENCE = 10  # seconds that other ranks wait for rank 0's sentence; torchrun ends them before
MOST_RANKS = 1024  # on one machine


# --- the command line -----------------------------------------------------------------------------

class Command(argparse.ArgumentParser):
    """The command line of the module `name`, or of "ranklab ..."."""

    def __init__(self, name, doc, **more):
        prog = name if name.partition(" ")[0] == "ranklab" else f"python -m {name}"
        super().__init__(prog, description=doc, formatter_class=HelpWithDefaults, **more)

    def add_fields(self, config, *names, without=()):
        """Add an option for each field of a dataclass that option() describes, or for `names` only.

        An option has no default, so that `config` keeps the settings that are not given.
        without: names of fields that get no option
        """
        options = {action.dest for action in self._actions}
        for field in dataclasses.fields(config):
            details = about(config, field.name)
            is_option = field.name in names if names else details and field.name not in without
            if not is_option or field.name in options:
                continue
            flag = details.get("flag") or field.name.replace("_", "-")
            settings = {"help": _with_default(details.get("help"), getattr(config, field.name))}
            if field.type is bool:
                settings["action"] = argparse.BooleanOptionalAction
            else:
                settings["type"] = details.get("kind") or _kind_of(field)
                settings["choices"] = details.get("choices")
                settings["metavar"] = None if settings["choices"] else flag.upper()
            if details.get("nargs"):
                self.add_argument(field.name, nargs=details["nargs"], **settings)
                continue
            self.add_argument(f"--{flag}", dest=field.name, **settings)

    def parse(self, argv=None):
        """Parse the options; refuse those that contradict each other."""
        options = self.parse_args(argv)
        values = vars(options)
        if values.get("resume"):
            self._refuse_resume(options.checkpoint)
        ranks, nodes = values.get("ranks"), values.get("nodes") or 1
        if ranks and is_started_by_another() and ranks != ranks_to_come():
            self.error("--ranks is for python alone: the job has its ranks already")
        if nodes > 1 and ranks_to_come(ranks) % nodes:
            self.error(f"--nodes {nodes} must divide the {ranks_to_come(ranks)} ranks")
        return options

    def _refuse_resume(self, folder):
        if not folder:
            self.error("--resume goes on from a folder: name it with --checkpoint")
        if is_main_process() and not (Path(folder).is_dir() and any(Path(folder).iterdir())):
            self.error(f"--resume: there is no checkpoint at {folder}")

    def config(self, settings, options):
        """Return the dataclass `settings`, changed by the options; refuse what it refuses."""
        names = [field.name for field in dataclasses.fields(settings)]
        changes = {name: value for name, value in vars(options).items()
                   if name in names and value is not None}
        try:
            return dataclasses.replace(settings, **changes)
        except ValueError as error:
            self.error(str(error))

    def error(self, message):
        """End the program with exit code 2 and the reason."""
        _refuse(self.prog, message)


class HelpWithDefaults(argparse.RawDescriptionHelpFormatter):
    """A help formatter that ends the help of each option with its default."""

    def _get_help_string(self, action):
        value = action.default
        if value is False or value == argparse.SUPPRESS or "%(default)" in (action.help or ""):
            return action.help
        return _with_default(action.help, value)


def _with_default(help, value):
    """Add the default to the help text, where there is one."""
    value = ",".join(map(str, value)) if isinstance(value, (tuple, list)) else value
    if value is None or value == "":
        return help
    value = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    return f"{help or ''} ({value})".lstrip().replace("%", "%%")


def _kind_of(field):
    if typing.get_origin(field.type) is tuple:
        return lambda text: tuple(text.split(","))
    if field.name == "seed":
        return seed
    return number(field.type) if field.type in (int, float) else str


def ranks_to_come(ranks=None):
    """Count the ranks that launch(ranks=ranks) will have: the job's, or those that it starts."""
    if is_started_by_another():
        return int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_STEP_NUM_TASKS"])
    return ranks or default_ranks()


# --- refusals -------------------------------------------------------------------------------------

# {a module: its package} of the extra `course`
BROUGHT_BY = {name: name for name in (
    "matplotlib", "jupyterlab", "jupytext", "nbclient", "nbformat", "nbval", "pytest", "deepspeed",
    "ipykernel")} | {"PIL": "pillow", "sklearn": "scikit-learn"}


@contextlib.contextmanager
def refusals(name):
    """End the program with one sentence and exit code 2 where the block raises a refusal.

    A refusal: a ValueError of the library's own, a file that can't be opened, or a package that the
    lean install leaves out. An error on a rank is the engine's report, with exit code 1. Any
    other error is a fault of the program, and passes with its traceback.
    name: of the program, or of its module
    """
    name = name if " " in name else f"python -m {name}" if "." in name else name
    try:
        yield
    except RankError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (package := BROUGHT_BY.get((error.name or "").partition(".")[0])) is None:
            raise
        _refuse(name, f"{package} is not installed: in a clone of ranklab, "
                "python -m pip install '.[course]' -c constraints.txt")
    except (ValueError, OSError) as error:
        if not (sentence := _sentence(error)):
            raise
        _refuse(name, sentence)


def _sentence(error):
    """Return the sentence of an error that the library raised; None for any other error."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    is_ours = trace.tb_frame.f_code.co_filename.startswith(PACKAGE)
    return " ".join(str(error).split()) if is_ours else None


def _refuse(name, message):
    """End the program with exit code 2 and the reason. Other ranks leave that to rank 0."""
    if not is_main_process():
        time.sleep(PATIENCE)  # torchrun ends all ranks with the first that ends
    print(f"{name}: {message}", file=sys.stderr)
    sys.exit(2)


# --- what a project says --------------------------------------------------------------------------

def time_limit():
    """Return the timeout for launch, in seconds.

    It limits a whole training run, or each collective in a job of torchrun or srun.
    """
    return COLLECTIVE_LIMIT if is_started_by_another() else LAUNCH_LIMIT


def say(*texts):
    """Print on rank 0 the texts that are not empty, each on its own lines."""
    if is_main_process() and any(texts):
        print("\n".join(filter(None, texts)))


def save_figure(path, draw):
    """Save the figure that draw() returns to the file `path`, on rank 0.

    Does nothing without a path.
    """
    if path and is_main_process():
        from ranklab.plots.style import save  # here: the only line that needs matplotlib

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save(draw(), path)
