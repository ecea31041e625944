"""What the pipeline project trains and how: the GPTs, the schedules, and one frozen dataclass."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from ranklab import pipeline_parallel as pp
from ranklab.basics.options import option, positive
from ranklab.models.gpt import GPTConfig
from ranklab.projects.runner import OnRanks, OnText, Resumed
from ranklab.trainer.text import TrainConfig

SCHEDULES = {"gpipe": pp.gpipe_schedule, "1f1b": pp.one_f_one_b_schedule,
             "interleaved": pp.interleaved_schedule, "zb-h1": pp.zero_bubble_schedule,
             "zb-v": pp.zb_v_schedule}  # fmt: skip


def schedule_of(name, virtual=None):
    """(ranks, micro_batches) -> the schedule; `virtual` is for interleaved alone, 2 by default."""
    if name == "interleaved":
        return functools.partial(SCHEDULES[name], virtual=virtual or 2)
    if virtual is not None:
        raise ValueError(f"--virtual {virtual} is for --schedule interleaved, not for {name}")
    return SCHEDULES[name]


@dataclass(frozen=True)
class Config(TrainConfig):
    """How to train; checked when it is made. The defaults suit a laptop."""

    steps: int = 40
    lr: float = 3e-3
    batch: int = 16  # sequences
    micro_batches: int = option(8, "pieces of a batch", least=1)
    eval_batch: int = option(64, "held-out sequences: whole batches")
    compare: bool = option(True, "rank 0 trains the same model alone, too")
    slow_stage: int = option(-1, "this one sleeps twice as long in the emulated run; -1: none",
                             least=-1)

    def __post_init__(self):
        super().__post_init__()
        for name, of in (("batch", "micro_batches"), ("eval_batch", "batch")):
            if getattr(self, name) % getattr(self, of):
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of "
                                 f"{of}={getattr(self, of)}")


LARGE = Config(steps=200, batch=64, micro_batches=32, lr=2e-4, precision="bf16", compare=False)
SIZES = {  # the laptop's head costs as much as 2.3 blocks, like that of GPT-2 XL
    "laptop": (GPTConfig(vocab_size=2048, n_layer=8), Config()),
    "gpt2-xl": (GPTConfig(50304, n_ctx=1024, n_layer=48, n_head=25, n_embd=1600,
                          rotary_base=10000.0), LARGE),
}


@dataclass(frozen=True)
class Options(OnRanks, Resumed, OnText):
    """What the command takes beside Config."""

    size: str = option("laptop", "of the GPT", SIZES)
    schedule: str = option("1f1b", "of micro-batches", SCHEDULES)
    virtual: int | None = option(None, "interleaved: stages of a rank (2)", kind=positive)
    without: ClassVar = ("micro_batch",)  # it follows from micro_batches

    def settings(self):
        return SIZES[self.size][1]
