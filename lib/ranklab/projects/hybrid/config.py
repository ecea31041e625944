"""The project's models and settings: five GPTs with their layouts, and how they are trained."""

import re
from dataclasses import dataclass, replace

from ranklab.basics.options import option
from ranklab.expert_parallel import MoEConfig
from ranklab.hybrid import Job, Layout, parse_layout
from ranklab.hybrid.legal import refuse_misfits
from ranklab.models.gpt import GPTConfig
from ranklab.projects.runner import OnText, Resumed
from ranklab.projects.training import large_gpt
from ranklab.trainer.text import TrainConfig


@dataclass(frozen=True)
class Config(TrainConfig):
    """The training settings, validated when created. The defaults suit a laptop."""

    steps: int = 20
    lr: float = 3e-3
    warmup: int = 5
    batch: int = 16  # sequences
    micro_batch: int = 2
    eval_batch: int = 32
    log_every: int = 5
    compare: bool = option(True, "rank 0 trains the same model alone, too")
    per_node: int = option(0, "ranks in a row that NVLink joins; 0: those of a host", least=0)

    def job(self, shape):
        """Return the Job of this shape, for the formulas."""
        return Job(shape, self.batch, self.micro_batch, self.precision)

    def refuse_what_does_not_fit(self, shape, layout):
        """Raise ValueError if the ranks can't divide the model or a batch."""
        for batch in (self.batch, self.eval_batch):
            refuse_misfits(layout, replace(self.job(shape), batch=batch),
                           self.per_node or layout.ranks)


LAPTOP = GPTConfig(n_ctx=32, n_embd=64, n_head=8, n_layer=8)
LARGE = Config(steps=1000, lr=1e-4, warmup=100, micro_batch=1, log_every=1, eval_batch=128,
               precision="bf16", compare=False)
SIZES = {  # name -> (the GPT, Config, Layout): a laptop; 8, 64, 128 and 64 A100s, eight in a node
    "laptop": (LAPTOP, Config(), Layout(2, 2, 2)),
    "10b": (large_gpt(n_ctx=2048, n_layer=32, n_embd=5120, n_head=40),
            replace(LARGE, batch=512, micro_batch=2),
            Layout(2, 2, 2, sequence_parallel=True, virtual=2, zero=1)),
    "100b": (large_gpt(n_ctx=2048, n_layer=80, n_embd=10240, n_head=80),
             replace(LARGE, batch=1024, micro_batch=2),
             Layout(2, 4, 8, sequence_parallel=True, virtual=2, zero=1, recompute=True)),
    "130b": (large_gpt(vocab_size=150528, n_ctx=2048, n_layer=70, n_embd=12288, n_head=96),
             # GLM-130B's shape
             replace(LARGE, batch=2048), Layout(1, 8, 16, sequence_parallel=True)),
    # Mixtral 8x7B's shape (arXiv 2401.04088), but all heads have keys, and an expert has two
    # matrices instead of three of 14336, and is as large
    "mixtral": (MoEConfig(32000, 4096, 32, 32, 4096, rotary_base=1e6, expert_width=14336 * 3 // 2),
                replace(LARGE, batch=1024), Layout(1, 2, 4, sequence_parallel=True, ep=8)),
}
JOBS = {name: config.job(shape) for name, (shape, config, _) in SIZES.items()}


def parse_shape(text):
    """Parse the shape of a GPT.

    "8x64x8x32x256" is a GPT of 8 layers, 64 wide, 8 heads, 32 tokens, a vocabulary of 256.
    Raises: ValueError if these are not five numbers
    """
    if not re.fullmatch(r"\d+(x\d+){4}", text):
        raise ValueError(f"{text!r} is no GPT: write layers x width x heads x tokens x vocabulary "
                         "as 8x64x8x32x256")
    layers, width, heads, tokens, vocabulary = map(int, text.split("x"))
    return GPTConfig(vocabulary, tokens, layers, heads, width, rotary_base=max(100.0, tokens))


def with_experts(shape, n_expert):
    """Return the GPT with n_expert experts in each block, two per token; 0: the GPT itself."""
    return MoEConfig(**vars(shape), n_expert=n_expert) if n_expert else shape


@dataclass(frozen=True)
class Options(Resumed, OnText):
    """The command's options besides Config's."""

    size: str = option("laptop", "of the GPT, with its layout", SIZES)
    layout: str | None = option(None, "dp x tp x pp and more: 2x2x2,zero,sp,virtual=2")
    shape: str | None = option(None, "layers x width x heads x tokens x vocabulary of a GPT of "
                               "your own: 8x64x8x32x256")
    export: str | None = option(None, "a folder: Prometheus finds each rank's metrics by files "
                                "in it")
    dry_run: bool = option(False, "one process plays rank 0")

    def settings(self):
        return SIZES[self.size][1]

    def chosen_shape(self):
        """Return the GPT of the command line, or else the one of the size."""
        return SIZES[self.size][0] if self.shape is None else parse_shape(self.shape)

    def chosen_layout(self):
        """Return the Layout of the command line, or else the one of the size."""
        return SIZES[self.size][2] if self.layout is None else parse_layout(self.layout)
