"""Python runs this when it starts under `ranklab diagnose`: in the ranks of any launcher.

It wraps init_process_group when torch.distributed is imported; ranklab is imported only when the
program calls this function. The machine's own sitecustomize, if any, runs after this one.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from multiprocessing import process
from pathlib import Path

HERE = Path(__file__).resolve()
HOME = "torch.distributed.distributed_c10d"


class Finder(importlib.abc.MetaPathFinder):
    """Find torch's module as usual, and wrap its function after the import."""

    def find_spec(self, name, path=None, target=None):
        if name != HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.init_process_group = then_observe(module.init_process_group)

        spec.loader.exec_module = exec_module
        return spec


def then_observe(real):
    @functools.wraps(real)
    def init_process_group(*args, **options):
        value = real(*args, **options)
        hooks().begin_by_itself()
        return value

    return init_process_group


def hooks():
    if (library := str(HERE.parents[3])) not in sys.path:
        sys.path.append(library)  # at the end, so that it hides nothing
    from ranklab.clinic import hooks

    return hooks


def run(self, real=process.BaseProcess.run):
    """Run a multiprocessing process, whose errors don't reach sys.excepthook."""
    error = None
    try:
        real(self)
    except BaseException as raised:
        error = raised
        raise
    finally:
        if HOME in sys.modules:
            hooks().note_end(error)


def run_the_next():
    """Run the sitecustomize that Python would have found without this one."""
    places = [place for place in sys.path if Path(place or ".").resolve() != HERE.parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def begin():
    if os.environ.get("RANKLAB_DIAGNOSE") and "ranklab.engine.server" not in " ".join(
            sys.orig_argv):  # the server observes its ranks by itself
        sys.meta_path.insert(0, Finder())
        process.BaseProcess.run = run
    run_the_next()


if __name__ == "sitecustomize":
    begin()
