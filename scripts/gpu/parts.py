"""The parts of `make gpu`, in their order: what is worth most comes first."""

import importlib
from typing import NamedTuple


class LeftOut(Exception):
    """A part can't run here; its words say what is missing."""


class Part(NamedTuple):
    section: str
    what: str
    seconds: int  # at most
    function: str  # module.function, (job) -> {name: number or text}; AssertionError: it is wrong

    def load(self):
        module, name = self.function.split(".")
        return getattr(importlib.import_module(module), name)


MACHINE, EQUAL, SPEED, LABS = ("The machine", "Equal to one process", "Memory and time",
                               "The solved labs")
PARTS = {
    "machine": Part(MACHINE, "versions, GPUs, links, NCCL", 60, "machine.machine"),
    "all_reduce": Part(MACHINE, "our ring and the backend's all-reduce, by size", 60,
                       "machine.all_reduce"),
    "data": Part(EQUAL, "data parallel, torch's DDP", 60, "equal.data"),
    "zero": Part(EQUAL, "ZeRO 1 to 3", 60, "equal.zero"),
    "fsdp": Part(EQUAL, "FSDP and torch's FSDP2", 60, "equal.fsdp"),
    "tensor": Part(EQUAL, "tensor, with sequence; torch's DTensor", 60, "equal.tensor"),
    "pipeline": Part(EQUAL, "GPipe, 1F1B, interleaved, zero bubble", 60, "equal.pipeline"),
    "context": Part(EQUAL, "ring attention, Ulysses", 60, "equal.context"),
    "mesh": Part(EQUAL, "layouts of lab 12, experts, 2 x 2 x 2", 120, "equal.mesh"),
    "deepspeed": Part(EQUAL, "DeepSpeed's ZeRO 1 to 3", 120, "equal.deepspeed"),
    "mfu": Part(SPEED, "lab 01's training from 124M to what fits: MFU, memory", 150, "speed.mfu"),
    "sharded": Part(SPEED, "ZeRO-3 and FSDP beside FSDP2, tensor beside DTensor: time of a step",
                    90, "speed.sharded"),
    "labs": Part(LABS, "02, 03, 06, 08, 12, then the others", 600, "notebooks.labs"),
}
