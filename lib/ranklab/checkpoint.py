"""A checkpoint on disk: all that a run needs to go on as if it had never stopped.

Small for now: one process, one file. Sharded, asynchronous and verified: lab 14.
"""

import os
from pathlib import Path

import torch

from ranklab.baseline.checkpointing import random_state, set_random_state


def save_checkpoint(path, model, optimizer, step, **more):
    """`path` holds weights, optimizer state, step, random state and `more` (each a state dict).
    It is the old file or the new one, never half of one: written beside it, then renamed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "random": random_state(),
        **{name: part.state_dict() for name, part in more.items()},
    }
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before the name points at it
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def load_checkpoint(path, model, optimizer, device="cpu", **more):
    """Model, optimizer, `more` and torch's random numbers are as they were; returns the step."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for name, part in more.items():
        part.load_state_dict(state[name])
    # map_location moved these as well, and torch wants both on the CPU
    random = {name: r if r is None else r.cpu() for name, r in state["random"].items()}
    set_random_state(random)
    return state["step"]


class SameRun:
    """What must be alike before and after: else step 1,000 is not the same place in the data.
    A part of the checkpoint, like the optimizer: it can be saved and loaded.
    """

    def __init__(self, **what):
        self.what = what  # name -> number

    def state_dict(self):
        return self.what

    def load_state_dict(self, saved):
        differ = [f"{name}={saved.get(name)}, this run has {value}"
                  for name, value in self.what.items() if saved.get(name) != value]
        if differ:
            raise ValueError("the checkpoint is of another run: it has " + "; ".join(differ))
