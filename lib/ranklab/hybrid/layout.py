"""A layout: how many ranks along each axis, and what else is done."""

import functools
from dataclasses import dataclass

from ranklab.mesh import build_mesh
from ranklab.pipeline_parallel import (
    gpipe_schedule, interleaved_schedule, one_f_one_b_schedule, zb_v_schedule,
    zero_bubble_schedule,
)

SCHEDULES = {"gpipe": gpipe_schedule, "1f1b": one_f_one_b_schedule,
             "zb-h1": zero_bubble_schedule, "zb-v": zb_v_schedule}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """dp x tp x pp ranks; checked when it is made.

    virtual   stages on each rank; more than 1 with the interleaved schedule
    zero      1: the optimizer's state is shared out over the data ranks (lab 06)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    virtual: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    recompute: bool = False

    def __post_init__(self):
        for name in ("dp", "tp", "pp", "virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not one of {', '.join(SCHEDULES)}")
        if self.zero not in (0, 1):
            raise ValueError(f"zero={self.zero} must be 0 or 1: with micro-batches, stages 2 and 3 "
                             "would send all gradients or parameters once for each of them")
        if self.virtual > 1 and self.schedule != "1f1b":
            raise ValueError(f"virtual={self.virtual} stages need schedule='1f1b', interleaved")

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp

    def new_schedule(self):
        """(ranks of the pipeline, micro-batches) -> a schedule"""
        if self.virtual > 1:
            return functools.partial(interleaved_schedule, virtual=self.virtual)
        return SCHEDULES[self.schedule]

    def new_mesh(self):
        """The Mesh of all ranks: tensor ranks next to each other, so inside a node.
        error  ValueError where the sizes do not multiply to the number of ranks
        """
        axes = {"pipeline": self.pp, "data": self.dp, "tensor": self.tp}
        return build_mesh(axes, joined=[("pipeline", "data")])

    def words(self):
        """What it has besides its sizes, in words."""
        more = [name for name in ("sequence_parallel", "recompute") if getattr(self, name)]
        more += [f"zero={self.zero}"] * bool(self.zero)
        more += [self.schedule] * (self.schedule != "1f1b")
        return more + [f"virtual={self.virtual}"] * (self.virtual > 1)

    def __str__(self):
        return " ".join([f"dp {self.dp} x tp {self.tp} x pp {self.pp}", *self.words()])
