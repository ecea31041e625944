"""What the project trains and how: the GPT, how ranks share it, and one frozen dataclass."""

import importlib.util
from dataclasses import dataclass, replace

from ranklab.hybrid import Job, Layout, parse_layout
from ranklab.hybrid.choose import refuse_misfits
from ranklab.models.gpt import GPTConfig
from ranklab.options import new_folder, option, positive
from ranklab.projects.hybrid.sizes import SIZES
from ranklab.projects.runner import OnText, Resumed
from ranklab.text_trainer import TrainConfig

LAPTOP = GPTConfig(n_ctx=32, n_embd=64, n_head=8, n_layer=8)


@dataclass(frozen=True)
class Config(TrainConfig):
    """How to train; checked when it is made. The defaults suit a laptop."""

    steps: int = 20
    lr: float = 3e-3
    warmup: int = 5
    batch: int = 16  # sequences
    micro_batch: int = 2
    eval_batch: int = 32
    log_every: int = 5
    compare: bool = option(True, "rank 0 trains the same model alone, too")
    tensorboard: str | None = option(None, "a folder for its curves", kind=new_folder)
    per_node: int = option(0, "ranks in a row that NVLink joins; 0: those of a host")

    def __post_init__(self):
        super().__post_init__()
        if self.tensorboard and not importlib.util.find_spec("tensorboard"):
            raise ValueError("tensorboard is not installed: "
                             ".venv/bin/pip install -c constraints.txt tensorboard")

    def job(self, shape):
        """What is trained, as formulas know it."""
        return Job(shape, self.batch, self.micro_batch, self.precision)

    def refuse_what_does_not_fit(self, shape, layout):
        """Raises ValueError where ranks cannot divide the model or a batch."""
        for batch in (self.batch, self.eval_batch):
            refuse_misfits(layout, replace(self.job(shape), batch=batch),
                           self.per_node or layout.ranks)


def usual(size):
    """(the GPT, Config, Layout) of a size; all but the laptop's want GPUs."""
    if size == "laptop":
        return LAPTOP, Config(), Layout(2, 2, 2)
    job, layout = SIZES[size]
    return job.config, Config(
        steps=1000, lr=1e-4, warmup=100, batch=job.batch, micro_batch=job.micro_batch, log_every=1,
        eval_batch=8 * layout.dp * layout.pp * job.micro_batch, precision=job.precision,
        compare=False), layout


@dataclass(frozen=True)
class Options(Resumed, OnText):
    """What the command takes beside Config."""

    size: str = option("laptop", "of the GPT, with its layout", ("laptop", *SIZES))
    layout: str | None = option(None, "dp x tp x pp and more: 2x2x2,zero,sp,virtual=2")
    dp: int | None = option(None, "data-parallel ranks", kind=positive)
    tp: int | None = option(None, "tensor-parallel ranks", kind=positive)
    pp: int | None = option(None, "pipeline-parallel ranks", kind=positive)
    dry_run: bool = option(False, "one process poses as rank 0")

    def settings(self):
        return usual(self.size)[1]

    def chosen_layout(self):
        """The Layout of the command line; the size's where it names none."""
        sizes = {axis: n for axis in ("dp", "tp", "pp") if (n := getattr(self, axis))}
        if not (self.layout or sizes):
            return usual(self.size)[2]
        return replace(parse_layout(self.layout or "1x1x1"), **sizes)
