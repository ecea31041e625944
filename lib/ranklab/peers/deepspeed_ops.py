"""Compile DeepSpeed's C++ once, in a folder of this course, or fall back to torch's Adam."""

import fcntl
import os
import shutil
import sys
from pathlib import Path

import torch

from ranklab.engine import device, is_main_process

FOLDER = ".ext"  # next to labs/; git ignores it


def compiled_adam(new_optimizer, offload=None):
    """Return DeepSpeed's CPUAdam or FusedAdam, with the options of new_optimizer.

    CPUAdam is used with offload, or without a GPU. Without a C++ compiler, print a sentence and
    return new_optimizer itself.
    new_optimizer: partial(torch.optim.AdamW, lr=..., ...)
    """
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        if is_main_process():
            print(f"There is no C++ compiler ({compiler}): torch's {new_optimizer.func.__name__} "
                  "steps in place of DeepSpeed's.", file=sys.stderr)
        return new_optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # here: takes two seconds

    on_cpu = offload or device().type == "cpu"
    load("CPUAdamBuilder" if on_cpu else "FusedAdamBuilder")
    known = ("lr", "betas", "eps", "weight_decay")
    options = {name: value for name, value in new_optimizer.keywords.items() if name in known}
    return lambda groups: (DeepSpeedCPUAdam if on_cpu else FusedAdam)(groups, **options)


def load(builder):
    """Compile DeepSpeed's op if that has not been done yet, and load it.

    One rank compiles while the others wait. A lock that a killed process left behind is removed.
    """
    from deepspeed.accelerator import get_accelerator

    op, folder = get_accelerator().create_op_builder(builder), extensions()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{op.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_stale_lock(folder / op.name)
        if not any((folder / op.name).glob("*.so")):
            print(f"DeepSpeed compiles {op.name}: some minutes, once.", file=sys.stderr, flush=True)
        return op.load(verbose=False)


def extensions():
    """Return the folder for code compiled with this Python and this torch."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "labs").is_dir():  # not a checkout
        root = Path(os.environ.get("RANKLAB_HOME", ".ranklab")).expanduser()
    version = "py{}{}-torch{}".format(*sys.version_info[:2], torch.__version__)
    return root.absolute() / FOLDER / version


def remove_stale_lock(folder):
    """Remove torch's own lock left by a killed build: the next build would wait for it forever.

    The caller holds our lock, so no other process builds, and any lock of torch's is stale.
    """
    if (folder / "lock").exists():
        (folder / "lock").unlink()
        print(f"A build of {folder.name} was stopped half-way: its lock is removed, and it starts "
              "again.", file=sys.stderr, flush=True)
