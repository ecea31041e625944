"""What the expert project trains and how: the GPTs, and one frozen dataclass."""

from dataclasses import dataclass

from ranklab.basics.options import option
from ranklab.expert_parallel import MoEConfig
from ranklab.expert_parallel.layer import BALANCE
from ranklab.models.gpt import GPTConfig
from ranklab.projects.runner import Drawn, OnRanks, OnText, Resumed
from ranklab.trainer.text import TrainConfig

RANKS = 4


@dataclass(frozen=True)
class Config(TrainConfig):
    """How to train; checked when it is made. The defaults suit a laptop."""

    steps: int = 100
    batch: int = 32
    micro_batch: int = 8
    eval_batch: int = 64
    n_expert: int = option(16, "of each layer", least=1)
    top_k: int = option(2, "experts of a token", least=1)
    balance: str = option("loss", "of the experts' loads", BALANCE)
    factor: float = option(0.0, "of the capacity; 0: no token is dropped", least=0)
    shared_width: int = option(0, "of an expert that all tokens take; 0: none", least=0)
    ep: int = option(0, "ranks over which experts are spread; 0: all", least=0)
    compare: bool = option(True, "a dense GPT is trained, too")

    def shape(self, dense):
        """The GPT with experts: as many numbers for a token in the MLPs, `dense`'s shape else."""
        return MoEConfig(**vars(dense), n_expert=self.n_expert, top_k=self.top_k,
                         balance=self.balance, factor=self.factor, shared_width=self.shared_width,
                         renormalize=self.top_k > 1)


SIZES = {
    "laptop": (GPTConfig(), Config()),
    "gpt2": (GPTConfig(50304, 1024, 12, 12, 768, rotary_base=1e4),
             Config(steps=1000, batch=128, micro_batch=4, eval_batch=64, lr=6e-4, n_expert=32,
                    precision="bf16", compare=False)),
}


@dataclass(frozen=True)
class Options(OnRanks, Resumed, OnText, Drawn):
    """What the command takes beside Config."""

    size: str = option("laptop", "of the GPT", SIZES)

    def settings(self):
        return SIZES[self.size][1]
