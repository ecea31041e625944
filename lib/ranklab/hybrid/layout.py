"""A layout: how many ranks each axis has, and the options."""

import functools
import os
import re
from dataclasses import dataclass

import torch.distributed as dist

from ranklab.mesh import Mesh, build_mesh
from ranklab.pipeline_parallel import (
    gpipe_schedule, interleaved_schedule, one_f_one_b_schedule, zb_v_schedule,
    zero_bubble_schedule,
)

SCHEDULES = {"gpipe": gpipe_schedule, "1f1b": one_f_one_b_schedule,
             "zb-h1": zero_bubble_schedule, "zb-v": zb_v_schedule}  # fmt: skip
WORDS = {"sp": {"sequence_parallel": True}, "zero": {"zero": 1}, "full": {"zero": 3},
         "recompute": {"recompute": True}, "outermost=data": {"outermost": "data"},
         **{name: {"schedule": name} for name in SCHEDULES}}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """dp x tp x pp x cp x ep ranks; checked when it is made.

    schedule   one of SCHEDULES; zero bubble gains nothing with tp > 1, because tensor-parallel
               layers compute the gradients of their weights in I
    virtual    stages on each rank; above 1 the schedule is interleaved
    zero       1 shards the optimizer's state over the data ranks (lab 06). 3 also shards weights
               and gradients, in rows that are gathered for each micro-batch (lab 07). 2, which
               Llama 3 used (arXiv 2407.21783, 3.3.2), is missing: it reduces the gradients of each
               micro-batch, but a tied matrix's gradients must first be summed over two stages.
               (Llama 3 has no tied matrix.)
    outermost  the axis whose ranks are furthest apart, "pipeline" or "data"
    cp         ranks that share a sequence, by zigzag ring attention (lab 10)
    ep         ranks that each have some of the experts, and take different rows (lab 11)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    virtual: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    recompute: bool = False
    outermost: str = "pipeline"
    cp: int = 1
    ep: int = 1

    def __post_init__(self):
        for name in ("dp", "tp", "pp", "virtual", "cp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is not one of {', '.join(SCHEDULES)}")
        if self.zero not in (0, 1, 3):
            raise ValueError(f"zero={self.zero} must be 0, 1 or 3: stage 2 would reduce the "
                             "gradients of a tied matrix before its two ends are summed")
        if self.zero == 3 and self.schedule.startswith("zb"):
            raise ValueError(f"schedule={self.schedule!r} computes gradients of weights later, "
                             "when with zero=3 the weights are gone")
        if self.outermost not in ("pipeline", "data"):
            raise ValueError(f"outermost={self.outermost!r} must be pipeline or data: tensor ranks "
                             "talk most, and are neighbours")
        if self.zero and self.ep > 1:
            raise ValueError(f"ep={self.ep} needs zero=0, not {self.zero}: experts and all else "
                             "would be sharded over different ranks, and here they are not")
        if self.virtual > 1 and self.schedule != "1f1b":
            raise ValueError(f"virtual={self.virtual} stages need schedule='1f1b', interleaved")

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp * self.cp * self.ep

    def new_schedule(self, parts=None):
        """Return the function (pipeline ranks, micro-batches) -> a schedule.

        parts  a learner's own: {name of the function: function}
        """
        if self.virtual > 1:
            return functools.partial(interleaved_schedule, virtual=self.virtual)
        schedule = SCHEDULES[self.schedule]
        return (parts or {}).get(schedule.__name__, schedule)

    @property
    def mesh(self):
        """The places of all ranks, as a Mesh without groups. Tensor ranks are neighbours, then
        context ranks, then expert ranks; with cp=1 or ep=1 that axis is left out.
        """
        optional = {"expert": self.ep, "context": self.cp}
        axes = {"pipeline": self.pp, "data": self.dp,
                **{name: size for name, size in optional.items() if size > 1}, "tensor": self.tp}
        return Mesh({self.outermost: axes.pop(self.outermost), **axes})

    def new_mesh(self, build=build_mesh, per_node=None):
        """Return the Mesh of all ranks of this job, with groups.

        build     build_mesh, or a learner's own
        per_node  consecutive ranks joined by NVLink; None: the ranks of a host. An NVL72 rack has
                  72 in 18 hosts of 4 (NVIDIA's Multi-Node NVLink guide)
        Raises ValueError if the sizes do not multiply to the number of ranks, or if tensor ranks
        would be on several nodes.
        Collective: call it on every rank.
        """
        if dist.get_world_size() == self.ranks:
            hosts = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
            self.refuse_nodes_of(hosts if per_node is None else per_node)
        rows = self.axes_of_gradients
        several = [axes for axes in (rows, self.axes_of_experts) if len(axes) > 1]
        return build(self.mesh.axes, joined=[("pipeline", *rows), *dict.fromkeys(several)])

    @property
    def axes_of_gradients(self):
        """The axes whose ranks take different rows or tokens, but have the same weights (except for
        experts).
        """
        return tuple(axis for axis in ("data", "expert", "context") if axis in self.mesh.axes)

    @property
    def axes_of_experts(self):
        """The axes among axes_of_gradients whose ranks hold the same experts."""
        return tuple(axis for axis in self.axes_of_gradients if axis != "expert")

    def refuse_nodes_of(self, per_node):
        """Raise ValueError if tensor ranks would be on several nodes of `per_node` ranks."""
        if "tensor" not in self.mesh.axes_inside(per_node):
            raise ValueError(f"tp={self.tp} tensor ranks would be on several nodes of {per_node}: "
                             "they talk in every layer, so tp must divide the ranks of a node")

    def words(self):
        """Return the options, in parse_layout's words."""
        plain = Layout()
        named = [word for word, options in WORDS.items() for name, value in options.items()
                 if getattr(self, name) == value != getattr(plain, name)]
        return named + [f"{name}={getattr(self, name)}" for name in ("virtual", "cp", "ep")
                        if getattr(self, name) > 1]

    def __str__(self):
        return " ".join([f"dp {self.dp} x tp {self.tp} x pp {self.pp}", *self.words()])


def parse_layout(text):
    """Return the Layout that `text` describes.

    "2x2x2" is dp 2, tp 2, pp 2; "2x2x2,zero,sp,virtual=2" also has options: see WORDS.
    Raises ValueError, which lists the known words.
    """
    sizes, *words = text.split(",")
    if not re.fullmatch(r"\d+x\d+x\d+", sizes):
        raise ValueError(f"{sizes!r} is no layout: write dp x tp x pp as 2x2x2")
    options = dict(zip(("dp", "tp", "pp"), map(int, sizes.split("x"))))
    for word in words:
        number = re.fullmatch(r"(virtual|cp|ep)=(\d+)", word)
        if not number and word not in WORDS:
            raise ValueError(f"{word!r} is not one of {', '.join(WORDS)}, virtual=2, cp=2, ep=2")
        options |= {number[1]: int(number[2])} if number else WORDS[word]
    return Layout(**options)
