"""One runner for all projects: options from dataclasses, a report, a figure, an exit code.

A project has one frozen dataclass for its command, an Options, and often a second one for its
training, the settings. Each field is an option, whose help comes from basics/options.py.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ranklab.basics.options import check_options, existing_file, number, option, picture, positive
from ranklab.projects.command import MOST_RANKS, Command, refusals, save_figure, say, time_limit


class Shown(NamedTuple):
    """The output of a project."""

    text: str
    draw: Callable | None = None  # returns the figure for --figure
    code: int = 0  # the exit code


@dataclass(frozen=True)
class Project:
    """A command: `main` parses, refuses, runs, prints and draws.

    act  (options, settings) -> Shown, or only its text
    """

    package: str
    doc: str
    options: type
    act: Callable

    def parse(self, argv=None):
        """Return (the options, the settings as changed on the command line)."""
        command = Command(self.package, self.doc)
        with refusals(self.package):
            usual = self.options()
            command.add_fields(usual)
            if usual.settings():
                command.add_fields(usual.settings(), without=self.options.without)
            namespace = command.parse(argv)
            options = command.config(usual, namespace)
            settings = options.settings()
            return options, settings and command.config(settings, namespace)

    def main(self, argv=None):
        """Run the command; return its exit code. Wrong arguments end the program."""
        options, settings = self.parse(argv)
        with refusals(self.package):
            result = self.act(options, settings)
            result = result if isinstance(result, Shown) else Shown(result)
            say(result.text)
            if result.draw:
                save_figure(options.figure, result.draw)
            return result.code


def run_and_report(run, report, figure=None):
    """Return an `act` that calls `run` with all options and settings, and shows its report.

    figure  (result of `run`) -> the figure for --figure
    """
    def act(options, settings):
        arguments = vars(options) | watched() | vars(settings)
        arguments.pop("figure", None)
        results = run(**arguments)
        return Shown(report(results), figure and functools.partial(figure, results))

    return act


def watched():
    """Return the arguments for a long run: a progress bar in a terminal, and the time limit."""
    return {"progress": sys.stderr.isatty(), "timeout": time_limit()}


# --- options that several projects have -----------------------------------------------------------

@dataclass(frozen=True)
class Options:
    """The options of a command besides the training settings."""

    without: ClassVar = ()  # fields of the settings that are no options

    def __post_init__(self):
        check_options(self)

    def settings(self):
        """Return the settings that the command line can change; None if there are none."""


@dataclass(frozen=True)
class OnRanks(Options):
    """A command that runs on ranks."""

    ranks: int | None = option(None, "without torchrun or srun: how many",
                               kind=number(least=1, most=MOST_RANKS))


@dataclass(frozen=True)
class OnNodes(OnRanks):
    """A command that runs on ranks, laid out as nodes."""

    nodes: int = option(1, "laid out as so many", kind=positive)


@dataclass(frozen=True)
class Resumed(Options):
    """A training run that can be resumed from its checkpoint."""

    resume: bool = option(False, "go on from --checkpoint")


@dataclass(frozen=True)
class OnText(Options):
    """A training run on text."""

    path: str | None = option(None, "a text file, or tokens in a .bin file (uint16)",
                              kind=existing_file, flag="data")


@dataclass(frozen=True)
class Machine(Options):
    """The machine that a dry run or a choice is for."""

    gpus: int = option(4, "of the machine to plan for", kind=number(least=1, most=4096))
    gpu_gb: float = option(24, "memory of each", kind=number(float, above=0))


@dataclass(frozen=True)
class Drawn(Options):
    """A command that draws."""

    figure: str | None = option(None, "draw what was found in this .svg or .png", kind=picture)
