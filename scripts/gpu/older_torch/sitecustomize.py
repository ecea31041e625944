"""What the course uses of torch 2.13 and an older torch lacks: on PYTHONPATH, before torch comes.

`make gpu` puts this folder there where torch is older. Python runs it first in every process, the
ranks' too, and it adds the names as soon as torch.distributed is imported.
"""

import importlib.abc
import sys

NEWER = {"all_gather_single": "all_gather_into_tensor",  # the same function under its older name
         "reduce_scatter_single": "reduce_scatter_tensor"}


class After(importlib.abc.MetaPathFinder):
    """Add the names to torch.distributed when that has been imported."""

    def find_spec(self, name, path, target=None):
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_add(module):
            load(module)
            add_names(module)

        spec.loader.exec_module = load_and_add
        return spec


def add_names(module):
    for newer, older in NEWER.items():
        if hasattr(module, older) and not hasattr(module, newer):
            setattr(module, newer, getattr(module, older))


sys.meta_path.insert(0, After())
