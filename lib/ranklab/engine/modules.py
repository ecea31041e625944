"""Ranklab's modules in the process that forks ranks: imported once, and again after an edit.

A rank that imports the library itself spends more time on that than on anything else. So the
server imports what a call names before it forks, and before the next launch what ranks imported.
"""

import contextlib
import importlib
import itertools
import os
import re
import sys

from ranklab.engine.cheap_forks import cheap_forks

BEGINNING = 1 << 20  # bytes of a call; tensors come later


def named_in(call):
    """List the ranklab modules of this process that a pickled call names: ranks need them, too."""
    names = {each.decode() for each in re.findall(rb"ranklab(?:\.\w+)+", call[:BEGINNING])}
    return [name for name in names if name in sys.modules and not _is_heavy(name)]


def imported(since=0):
    """List the ranklab modules of this process that are worth importing before a fork.

    since: len(sys.modules) at the time of a fork: list only later modules. To read a name
        copies its page of memory; for all names that is two fifths of the memory a fork copies
    """
    young = itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - since))
    return [name for name in young
            if name.startswith("ranklab.") and not _is_heavy(name)]


def _is_heavy(name):
    """Return whether the module's package declares that it slows forks down: HEAVY = True."""
    package = ".".join(name.split(".")[:2])
    return getattr(sys.modules.get(package), "HEAVY", False)


class Modules:
    """The modules that the server has imported since it began."""

    def __init__(self):
        self._first = set(sys.modules)
        self._stamps = {}  # ranklab module -> time and size of its file when it was imported

    def need(self, names):
        """Import these modules, as far as possible.

        If a ranklab file has changed since its import, all ranklab modules are forgotten first, so
        that none is older than its file.
        """
        if any(_stamp(name) != stamp for name, stamp in self._stamps.items()):
            self._forget()
        if new := [name for name in names if name not in sys.modules]:
            with cheap_forks():
                for name in new:
                    with contextlib.suppress(Exception):  # an error in it shows on the ranks
                        importlib.import_module(name)
        for name in imported():
            if name not in self._first and name not in self._stamps:
                self._stamps[name] = _stamp(name)

    def _forget(self):
        """Forget all ranklab modules: others may hold objects of the edited one."""
        for name in self._stamps:
            module = sys.modules.pop(name)
            package, _, child = name.rpartition(".")
            if getattr(sys.modules.get(package), child, None) is module:
                delattr(sys.modules[package], child)
        self._stamps.clear()


def _stamp(name):
    try:
        file = os.stat(sys.modules[name].__file__)
        return file.st_mtime_ns, file.st_size
    except (OSError, TypeError):  # __file__ is None for a package without __init__.py
        return None
