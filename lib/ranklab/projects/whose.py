"""Whose functions a project has run: the learner's, or the library's in their place."""

import functools


def learners(functions):
    """The names of those of {name: function} that do not come from the library's modules."""
    return [name for name, function in functions.items() if not _is_ours(function)]


def _is_ours(function):
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", "").startswith("ranklab.")


def whose(functions):
    """A sentence that says whose each of {name: function} is: every project's report has it."""
    return owners(learners(functions), functions)


def owners(mine, names):
    """The same for all `names`, of which some are the learner's."""
    of = {"Yours": [name for name in names if name in mine],
          "The library's": [name for name in names if name not in mine]}
    return " ".join(f"{owner}: {', '.join(theirs)}." for owner, theirs in of.items() if theirs)
