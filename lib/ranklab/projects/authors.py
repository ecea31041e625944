"""Who wrote the functions that a project ran: the learner, or else the library."""

import functools


def by_learner(functions):
    """Return the names in {name: function} whose function is not from the library's modules."""
    return [name for name, function in functions.items() if not _is_library(function)]


def _is_library(function):
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", "").startswith("ranklab.")


def authors(functions):
    """Say which of {name: function} are the learner's and which the library's.

    Every project's report has this sentence.
    """
    return authors_of(by_learner(functions), functions)


def authors_of(learner_names, names):
    """Say which of all `names` are the learner's (learner_names) and which the library's."""
    groups = {"Yours": [name for name in names if name in learner_names],
              "The library's": [name for name in names if name not in learner_names]}
    return " ".join(f"{owner}: {', '.join(group)}." for owner, group in groups.items() if group)
