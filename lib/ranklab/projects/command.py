"""What the entry points of the projects share: a dataclass as options, refusal, report, figure.

A project's settings are a frozen dataclass, and its fields are options of the command line. With
option() a field says what stands in the help and which values are right; check_options(self) in
__post_init__ refuses the others.
"""

import argparse
import dataclasses
import sys
import time
import typing

from ranklab.engine import is_main_process
from ranklab.engine.in_place import is_started_by_another

LAUNCH_LIMIT = 24 * 3600  # seconds: ranks of launch have all their time together
COLLECTIVE_LIMIT = 600  # seconds, under torchrun and srun: a dead rank is noticed after it
PATIENCE = 10  # seconds that other ranks wait for rank 0's sentence; torchrun ends them before


def option(default, help=None, choices=None, least=None):
    """A field of a dataclass with what its option says and what check_options refuses."""
    return dataclasses.field(default=default,
                             metadata={"help": help, "choices": choices, "least": least})


def check_options(config):
    """Every field of `config` has one of its choices, and its least value or more.

    error  ValueError that names the field
    """
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), field.metadata.get("choices")
        least = field.metadata.get("least")
        if choices and value not in choices:
            raise ValueError(f"{field.name}={value!r} must be one of {', '.join(choices)}")
        if least is not None and value < least:
            raise ValueError(f"{field.name}={value} must be at least {least}")


def comma_list(kind=str, choices=None):
    """A type for add_argument: "a,b" -> ["a", "b"], each of them made by `kind`."""
    def split(text):
        values = [kind(each) for each in text.split(",")]
        for value in values:
            if choices and value not in choices:
                raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(choices)}")
        return values

    split.__name__ = f"list of {kind.__name__}"  # argparse names it when a value is wrong
    return split


class Command(argparse.ArgumentParser):
    """The command line of the module `name`; what is wrong is refused with exit code 2."""

    def __init__(self, name, doc):
        super().__init__(f"python -m {name}", description=doc,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_ranks(self, help="without torchrun or srun: how many", nodes=False):
        self.add_argument("--ranks", type=int, help=help)
        if nodes:
            self.add_argument("--nodes", type=int, default=1, help="lay the ranks out as nodes")

    def add_resume(self):
        self.add_argument("--resume", action="store_true", help="go on from --checkpoint")

    def add_fields(self, config, *names, without=()):
        """An option for each field of the dataclass, or for those in `names`; none has a default,
        so that what was not given stays as it is in the settings that `config` changes.
        """
        for field in dataclasses.fields(config):
            if names and field.name not in names or field.name in without:
                continue
            how = {"help": field.metadata.get("help")}
            if field.type is bool:
                how["action"] = argparse.BooleanOptionalAction
            elif typing.get_origin(field.type) is tuple:
                how["type"] = lambda text: tuple(text.split(","))
            else:
                how["type"] = field.type if field.type in (int, float) else str
                how["choices"] = field.metadata.get("choices")
            self.add_argument(f"--{field.name.replace('_', '-')}", **how)

    def parse(self, argv=None):
        options = self.parse_args(argv)
        if getattr(options, "resume", False) and not options.checkpoint:
            self.error("--resume goes on from a folder: name it with --checkpoint")
        return options

    def refuse_ranks_in_a_job(self, options):
        if options.ranks and is_started_by_another():
            self.error("--ranks is for python alone: the job has its ranks already")

    def config(self, settings, options):
        """The dataclass `settings`, changed by what was given; refused where it refuses itself."""
        names = [field.name for field in dataclasses.fields(settings)]
        given = {name: value for name, value in vars(options).items()
                 if name in names and value is not None}
        try:
            return dataclasses.replace(settings, **given)
        except ValueError as error:
            self.error(str(error))

    def error(self, message):
        """The program ends with exit code 2; rank 0 says why."""
        if is_main_process():
            super().error(message)
        time.sleep(PATIENCE)  # torchrun ends all ranks with the first that ends
        sys.exit(2)


def time_limit():
    """The timeout for launch: of a whole training, or in a job of torchrun's of one collective."""
    return COLLECTIVE_LIMIT if is_started_by_another() else LAUNCH_LIMIT


def say(*texts):
    """Rank 0 prints those texts that are not empty, each on lines of its own."""
    if is_main_process():
        print("\n".join(filter(None, texts)))


def save_figure(path, draw):
    """The figure that draw() returns is in the file `path`, by rank 0; nothing without a path."""
    if path and is_main_process():
        from ranklab.plots.style import save  # here: the only line that needs matplotlib

        save(draw(), path)
