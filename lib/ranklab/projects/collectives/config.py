"""The options of the benchmark's command."""

from dataclasses import dataclass

from ranklab.basics.options import comma_list, number, option, positive
from ranklab.projects.collectives.timing import DTYPES, VERBS
from ranklab.projects.runner import Drawn, OnNodes


def size_of(text):
    """ "64K" -> 65536 bytes: powers of two, as in nccl-tests."""
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper())
    value = number(float, above=0)(text[:-1] if scale else text)
    return number(least=1, most=2**40)(int(value * (scale or 1)))


@dataclass(frozen=True)
class Config(OnNodes, Drawn):
    """What the command takes."""

    verbs: tuple = option(VERBS, "which of them, with commas", kind=comma_list(choices=VERBS))
    sizes: tuple = option((2**10, 2**14, 2**18, 2**22), "bytes, as 64M, with commas",
                          kind=comma_list(size_of))
    max: int | None = option(None, "up to this size in steps of 4, from 1K", kind=size_of)
    kind: str = option("float", "of the elements", DTYPES, flag="type")
    iters: int = option(5, "times, of which the median counts", kind=positive)
    mpi: bool = option(False, "under mpirun: MPI's own collectives")

    def __post_init__(self):
        super().__post_init__()
        if not self.all_sizes():
            raise ValueError(f"--max {self.max} bytes is less than 1K, the first size")
        if self.figure and ("all_reduce" not in self.verbs or len(self.all_sizes()) < 2):
            raise ValueError("--figure draws all_reduce of two sizes or more: see --verbs, --sizes")

    def all_sizes(self):
        if not self.max:
            return self.sizes
        return [4**k * 1024 for k in range(20) if 4**k * 1024 <= self.max]
