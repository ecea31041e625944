"""What the project trains and how: the GPT, how ranks share it, and one frozen dataclass."""

import importlib.util
from dataclasses import dataclass

from ranklab.hybrid import Layout
from ranklab.models.gpt import GPTConfig
from ranklab.pipeline_parallel import places, split_stages
from ranklab.pipeline_parallel.stages import gpt_costs
from ranklab.projects.command import option
from ranklab.projects.hybrid.sizes import SIZES
from ranklab.text_trainer import TrainConfig

LAPTOP = GPTConfig(n_ctx=32, n_embd=64, n_head=8, n_layer=8)


@dataclass(frozen=True)
class Settings(TrainConfig):
    """How to train; checked when it is made. The defaults suit a laptop."""

    steps: int = 20
    lr: float = 3e-3
    warmup: int = 5
    batch: int = 16  # sequences
    micro_batch: int = 2
    eval_batch: int = 32
    log_every: int = 5
    compare: bool = option(True, "rank 0 trains the same model alone, too")
    tensorboard: str | None = option(None, "a folder for its curves")

    def __post_init__(self):
        super().__post_init__()
        if self.tensorboard and not importlib.util.find_spec("tensorboard"):
            raise ValueError("tensorboard is not installed: "
                             ".venv/bin/pip install -c constraints.txt tensorboard")


def usual(size):
    """(the GPT, Settings, Layout) of a size; all but the laptop's want GPUs."""
    if size == "laptop":
        return LAPTOP, Settings(), Layout(2, 2, 2)
    job, layout = SIZES[size]
    return job.config, Settings(
        steps=1000, lr=1e-4, warmup=100, batch=job.batch, eval_batch=job.batch, log_every=1,
        micro_batch=job.micro_batch, precision=job.precision, compare=False), layout


def check_fit(shape, settings, layout):
    """error  ValueError where the ranks of `layout` cannot share out the model or the batch"""
    if shape.n_head % layout.tp:
        raise ValueError(f"tp={layout.tp} must divide n_head={shape.n_head}")
    for name in ("batch", "eval_batch"):
        pieces, rest = divmod(getattr(settings, name), layout.dp * settings.micro_batch)
        if rest:
            raise ValueError(f"{name}={getattr(settings, name)} must be a multiple of dp x "
                             f"micro_batch = {layout.dp} x {settings.micro_batch}")
        plan = layout.new_schedule()(layout.pp, pieces)  # refuses what it cannot do
        split_stages(gpt_costs(shape), len(places(plan)))
