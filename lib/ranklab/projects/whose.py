"""Whose functions a project has run: the learner's, or the library's in their place."""


def whose(functions):
    """A sentence for {name: function}: a function of the library's modules is the library's."""
    return owners([name for name, function in functions.items()
                   if not function.__module__.startswith("ranklab.")], functions)


def owners(mine, names):
    """The same for all `names`, of which some are the learner's."""
    of = {"Yours": [name for name in names if name in mine],
          "The library's": [name for name in names if name not in mine]}
    return " ".join(f"{owner}: {', '.join(theirs)}." for owner, theirs in of.items() if theirs)
