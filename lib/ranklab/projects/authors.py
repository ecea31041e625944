"""Who wrote the functions that a project has run: the learner, or the library in their place."""

import functools


def by_learner(functions):
    """The names of those of {name: function} that do not come from the library's modules."""
    return [name for name, function in functions.items() if not _is_library(function)]


def _is_library(function):
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", "").startswith("ranklab.")


def authors(functions):
    """A sentence about each of {name: function}: every project's report has it."""
    return authors_of(by_learner(functions), functions)


def authors_of(learner_names, names):
    """The same for all `names`, of which some are the learner's."""
    of = {"Yours": [name for name in names if name in learner_names],
          "The library's": [name for name in names if name not in learner_names]}
    return " ".join(f"{owner}: {', '.join(owned)}." for owner, owned in of.items() if owned)
