"""Whose functions a project has run: the learner's, or the library's in their place."""


def whose(functions):
    """A sentence for {name: function}: a function that is the library's object is the library's."""
    owners = {"Yours": [], "The library's": []}
    for name, function in functions.items():
        is_library = function.__module__.startswith("ranklab.")
        owners["The library's" if is_library else "Yours"].append(name)
    return " ".join(f"{owner}: {', '.join(names)}." for owner, names in owners.items() if names)
