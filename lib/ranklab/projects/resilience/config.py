"""What the project trains and how, and what the command takes."""

from dataclasses import dataclass

from ranklab.basics.options import option, positive, seed
from ranklab.hybrid import parse_layout
from ranklab.models.gpt import GPTConfig
from ranklab.projects.hybrid.config import Config as HybridConfig
from ranklab.projects.runner import OnText

SHAPE = GPTConfig(n_ctx=32, n_embd=32, n_head=4, n_layer=4)
LAYOUTS = "2x1x2,zero 1x1x3 2x1x1 1x1x1"


@dataclass(frozen=True)
class Config(HybridConfig):
    """How to train; checked when it is made. The defaults suit a laptop."""

    steps: int = 24
    batch: int = 8  # sequences
    eval_batch: int = 16
    checkpoint_every: int = 4


@dataclass(frozen=True)
class Options(OnText):
    """What the command takes beside Config."""

    without = ("compare", "per_node", "checkpoint", "eval_every", "seed")
    faults: int = option(5, "in a run", least=0)
    monkey: int = option(1, "of the monkey; of the first run, with --soak", kind=seed, flag="seed")
    soak: int = option(1, "runs, each with its own seed", kind=positive)
    layouts: str = option(LAYOUTS, "dp x tp x pp and more: the first one that fits on the ranks "
                          "that are left is taken")

    def settings(self):
        return Config()

    def chosen_layouts(self):
        return [*map(parse_layout, self.layouts.split())]
