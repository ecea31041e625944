"""Shared by projects that train: the arguments of `run`, the model, and the cost of a step."""

import contextlib
import functools
import statistics
from dataclasses import dataclass, fields, replace

import torch

from ranklab.engine import device, launch
from ranklab.expert_parallel import MoEConfig, moe_gpt
from ranklab.meter import MemoryCurve, Traffic
from ranklab.models.gpt import GPT, GPTConfig, count_parameters
from ranklab.projects.command import LAUNCH_LIMIT
from ranklab.trainer.text import TextTrainer

# A GPT like large ones. Its vocabulary is GPT-2's 50257, padded to a multiple of 128: odd sizes
# leave tensor cores idle. The byte text uses 256 of them; a token costs as much as in published
# runs.
large_gpt = functools.partial(GPTConfig, vocab_size=50304, n_ctx=1024, rotary_base=10000.0)


@dataclass(frozen=True)
class Session:
    """The settings of a training run: every project's `run` takes these arguments by name.

    ranks     None: the ranks of the job, or as many as `launch` starts
    resume    continue from the checkpoint
    until     stop after this step
    progress  show a progress bar
    timeout   for `launch`, in seconds
    """

    ranks: int | None = None
    resume: bool = False
    until: int | None = None
    progress: bool = False
    timeout: float = LAUNCH_LIMIT

    @classmethod
    def divide(cls, arguments, parts, config):
        """Divide the arguments of `run` by name among a Session, functions and a config.

        parts   {name: the library's function}; a learner's function replaces it
        config  a dataclass, whose fields all other arguments change
        Returns (Session, {name: function}, config). Raises TypeError for an unknown name.
        """
        names = {field.name for field in fields(cls)}
        functions = {name: value for name, value in arguments.items()
                     if name in parts and callable(value)}
        session = {name: value for name, value in arguments.items() if name in names}
        changes = {name: value for name, value in arguments.items()
                   if name not in functions and name not in session}
        return cls(**session), parts | functions, replace(config, **changes)

    def launch(self, work, *arguments, **options):
        """Run work(session, *arguments) on all ranks; return a list of one value per rank."""
        return launch(work, self, *arguments, ranks=self.ranks, timeout=self.timeout,
                      stream=self.progress, **options)

    def fit(self, trainer):
        """Train to the end or to step `until`, resuming if requested; return the History."""
        if self.resume:
            trainer.resume()
        return trainer.fit(self.until)

    def train(self, model, text, config, parallel=None):
        """Train a model on a Text, on one process without `parallel`; return its TextTrainer."""
        trainer = TextTrainer(model, text, config, device(), parallel=parallel,
                              progress=self.progress)
        self.fit(trainer)
        return trainer


def trained_alone(model, text, config, parallel=None, progress=False):
    """Train a model without a checkpoint, on one process without `parallel`; return its trainer."""
    return Session(progress=progress).train(model, text, replace(config, checkpoint=None), parallel)


def new_model(shape, place="cpu"):
    """Make a GPT, with the same weights on all ranks; on "meta" it takes no memory."""
    torch.manual_seed(0)
    with torch.device(place):
        return moe_gpt(shape) if isinstance(shape, MoEConfig) else GPT(shape)


def must_divide(ranks, **sizes):
    """Raise ValueError if the number of ranks does not divide each of the sizes, {name: number}."""
    for name, size in sizes.items():
        if size % ranks:
            raise ValueError(f"{ranks} ranks must divide {name}={size}")


def sent_in_a_step(trainer, *names):
    """Do one more step; return the bytes that this rank sends by the ops of these names."""
    with Traffic() as traffic:
        trainer.step()
    return sum(op.sent_bytes for op in traffic.ops if op.name in names)


def counted_step(trainer, optimizer, look, bytes_of=lambda memory: memory.total, **held):
    """Do one more step; return ([look() before each optimizer step], peak bytes, bytes sent).

    bytes_of  Memory -> the bytes that count for the peak. It is measured only on rank 0, whose
              numbers are shown, because it slows every op. A GPU counts its peak itself
    held      arguments of MemoryCurve: shards=, gathered=, communication=
    """
    looks, curve, on_gpu = [], None, device().type == "cuda"
    hook = optimizer.register_step_pre_hook(lambda *_: looks.append(look()))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    elif trainer.parallel.rank == 0:
        curve = MemoryCurve(trainer.model, optimizer, **held)
    with Traffic() as traffic, curve or contextlib.nullcontext():
        trainer.step()
    hook.remove()
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return looks, max(map(bytes_of, curve.points)) if curve else peak, traffic.sent_bytes


def median_speed(history):
    """Return the median speed of all logged intervals; NaN without any."""
    return statistics.median([speed for speed in history.speed if speed] or [float("nan")])


def fit_counted(trainer, count, until=None):
    """Train to the end, or to step `until`; return (the result of count(), the score at the end).

    count  does and counts one step, the second one: the first creates the optimizer's state,
           and shows a sharded model the order of its parts
    Returns None for a missing value: the costs if there are fewer than three steps, the score if
    a SIGTERM stopped the run, because then there is no time left.
    """
    costs, score, last = None, None, trainer.schedule.steps
    if min(until or last, last) - trainer.steps_done > 2:
        trainer.step()
        costs = count()
    history = trainer.fit(until)
    if not trainer.stopped:
        score = history.held_out.get(trainer.steps_done) or trainer.evaluate()
    return costs, score


def model_line(shape):
    """Describe a GPT in one line for a report."""
    return (f"model     {count_parameters(shape):,} parameters: {shape.n_layer} layers, "
            f"{shape.n_head} heads, width {shape.n_embd}, {shape.n_ctx} tokens, "
            f"V={shape.vocab_size}")


def bytes_table(title, rows):
    """Return a table of bytes as text. rows: (name, by formula, counted); None: not known"""
    lines = [f"{title:28}{'formula':>18}{'counted':>18}"]
    for name, *numbers in rows:
        cells = ("-" if number is None else f"{number:,.0f}" for number in numbers)
        lines.append(f"{name:28}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
