"""Keep the module names of version 1 importable, for notebooks and programs that use them.

Python asks here last, after it has found no module of that name. Version 3 will drop them.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys

MOVED = {f"ranklab.{old}": f"ranklab.{new}" for old, new in {
    "text_trainer": "trainer.text",
    "image_trainer": "projects.ddp.image_trainer",
    "parallel": "trainer.parallel",
    "stop_signal": "trainer.stop_signal",
    "targets": "basics.targets",
    "flat": "basics.flat",
    "options": "basics.options",
    "files": "basics.files",
    "machine": "basics.machine",
    "data_parallel.overlapped": "data_parallel.gradients",
    "collectives.mpi": "peers.mpi",
    "zero.deepspeed_engine": "peers.deepspeed_zero",
    "zero.deepspeed_training": "peers.deepspeed_zero",
    "fsdp.fsdp2": "peers.fsdp2",
    "fsdp.hugging_face": "peers.hugging_face",
    "tensor_parallel.dtensor": "peers.dtensor",
    "tensor_parallel.llama": "peers.llama",
    "tensor_parallel.megatron": "peers.megatron",
    "pipeline_parallel.torch_pipelining": "peers.torch_pipelining",
    "context_parallel.llama": "peers.llama",
    "context_parallel.peers": "peers.deepspeed_ulysses",
    "expert_parallel.peers": "peers.experts",
    "hybrid.choose": "planner.choose",
    "hybrid.planned": "planner.hybrid_jobs",
    "hybrid.torch_hybrid": "peers.torch_hybrid",
    "hybrid.deepspeed_pipeline": "peers.deepspeed_pipeline",
    "hybrid.megatron": "peers.megatron",
    "zero.memory": "formulas.zero",
    "tensor_parallel.formulas": "formulas.tensor_parallel",
    "pipeline_parallel.formulas": "formulas.pipeline_parallel",
    "resilience.peers": "peers.torch_elastic",
}.items()}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import a module of MOVED under its old name, as the same module object."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec):
        return None  # as Python does by default

    def exec_module(self, module):
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


def install():
    """Make Python look here as well from now on, after all other finders."""
    sys.meta_path.append(Finder())
