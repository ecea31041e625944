"""Options: fields of a dataclass with a help text and allowed values.

A project's settings are a frozen dataclass, and its fields are options of its command line.
option() gives a field its help text; check_options(self) in __post_init__ refuses wrong values.
"""

import argparse
import contextlib
import dataclasses
import math
import os
from pathlib import Path


def option(default, help=None, choices=None, least=None, kind=None, flag=None, nargs=None):
    """Make a field of a dataclass, with its option's help and the values that check_options allows.

    kind: a function that converts the command line's text; by default the type of the field
    flag: the option's name, if it differs from the field's
    nargs: "?" or "*" for a positional argument, written without a flag
    """
    about = {"help": help, "choices": choices, "least": least, "kind": kind, "flag": flag,
             "nargs": nargs}
    return dataclasses.field(default=default, metadata={
        name: value for name, value in about.items() if value is not None})


def about(config, name):
    """Return what option() recorded for the field `name`, of this class or a base class."""
    kind, metadata = config if isinstance(config, type) else type(config), {}
    for each in reversed(kind.__mro__):
        fields = vars(each).get("__dataclass_fields__", {})
        metadata |= fields[name].metadata if name in fields else {}
    return metadata


def check_options(config):
    """Refuse a field of `config` that is not one of its choices, or below its least value.

    Raises: ValueError, which names the field.
    """
    for field in dataclasses.fields(config):
        value, metadata = getattr(config, field.name), about(config, field.name)
        choices, least = metadata.get("choices"), metadata.get("least")
        if choices and value not in choices:
            raise ValueError(f"{field.name}={value!r} must be one of {', '.join(choices)}")
        if least is not None and not value >= least:  # NaN is not
            raise ValueError(f"{field.name}={value} must be at least {least}")


# --- types for add_argument: each refuses text that does not fit ----------------------------------

def number(kind=int, least=None, most=None, above=None):
    """Make a type for add_argument: a finite number within the given bounds.

    `least` and `most` are inclusive bounds, `above` is an exclusive one; None: no bound.
    """
    bounds = [f"{word} {bound}" for word, bound in (
        ("of at least", least), ("above", above), ("at most", most)) if bound is not None]
    wanted = " ".join(["a", "whole " * (kind is int) + "number", " and ".join(bounds)]).strip()

    def read(text):
        with contextlib.suppress(ValueError, OverflowError):
            value = kind(text)
            if (math.isfinite(value) and (least is None or value >= least)
                    and (most is None or value <= most) and (above is None or value > above)):
                return value
        raise argparse.ArgumentTypeError(f"{wanted} is wanted, not {text!r}")

    return read


positive = number(least=1)
seed = number(least=0, most=2**63 - 1)


def comma_list(kind=str, choices=None):
    """Make a type for add_argument: "a,b" -> ["a", "b"].

    `kind` converts each value, which must be one of the `choices`.
    """
    def split(text):
        values = [kind(each) for each in text.split(",")]
        for value in values:
            if choices and value not in choices:
                known = ", ".join(map(str, choices))
                raise argparse.ArgumentTypeError(f"{value!r} is not one of {known}")
        return values

    split.__name__ = f"list of {kind.__name__}"  # argparse shows it when a value is wrong
    return split


def existing_file(text):
    """Check that `text` is the path of an existing file; return it."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return text


def existing_folder(text):
    """Check that `text` is the path of an existing folder; return it."""
    if not text or not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return text


def existing_place(text):
    """Check that `text` is the path of an existing file or folder; return it."""
    if not text or not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder {text!r}")
    return text


def new_folder(text):
    """Check that `text` is the path of a folder that exists or can be made; return it."""
    if not text or Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder")
    return _writable(text)


def new_file(text):
    """Check that `text` is the path of a file that can be written; return it."""
    if not text or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no name for a file")
    return _writable(text)


def picture(text):
    """Check that `text` is the path of an .svg or .png file that can be written; return it."""
    if not text.endswith((".svg", ".png")):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .svg or .png")
    return new_file(text)


def _writable(text):
    path = Path(text).absolute()
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if nearest != path and not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} can't be written, because of {nearest}")
    return text
