"""What the context project trains and how: the GPTs, and one frozen dataclass."""

from dataclasses import dataclass

from ranklab.basics.options import option
from ranklab.models.gpt import GPTConfig
from ranklab.projects.runner import Drawn, OnRanks, OnText, Resumed
from ranklab.trainer.text import TrainConfig

METHODS = ("ring", "ulysses", "both")


@dataclass(frozen=True)
class Config(TrainConfig):
    """How to train; checked when it is made. The defaults suit a laptop."""

    steps: int = 80
    lr: float = 6e-3
    batch: int = 16  # long sequences
    micro_batch: int = 16
    eval_batch: int = option(64, "held-out sequences")
    method: str = option("ring", "of attention; both: Ulysses in pairs, a ring between them",
                         METHODS)
    documents: bool = option(False, "no token sees past the beginning of its file")
    compare: bool = option(True, "rank 0 trains on short windows, too")


SIZES = {  # the long sequence; a rank is allowed an eighth of it
    "laptop": (GPTConfig(n_ctx=128, n_head=8), Config()),
    "gpt2": (GPTConfig(50304, 65536, 12, 12, 768, rotary_base=500_000.0),
             Config(steps=200, batch=1, micro_batch=1, eval_batch=8, lr=6e-4, precision="bf16",
                    compare=False)),
}
SHARE = 8  # a rank's memory budget is what 1/SHARE of the sequence needs, and a quarter more


@dataclass(frozen=True)
class Options(OnRanks, Resumed, OnText, Drawn):
    """What the command takes beside Config."""

    size: str = option("laptop", "of the GPT", SIZES)

    def settings(self):
        return SIZES[self.size][1]
