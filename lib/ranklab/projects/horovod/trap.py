"""The trap of transformers' Trainer: gradients that grow with the number of ranks.

Trainer multiplies the loss by the number of ranks, because it takes it for a sum divided by the
examples of *all* ranks. That is what a loss is only in models that look at num_items_in_batch; a
BERT for classification takes that argument and ignores it, and its loss is the mean over its own
examples already. Adam hides it, for it divides by the size of the gradient; SGD and clipping don't.
"""

import os
import tempfile
import warnings
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.engine import device, launch
from ranklab.projects.horovod.bert import (
    PRELOAD, FineTuning, make_bert, offline_transformers,
)
from ranklab.projects.horovod.guard import GradientsGrow, gradient_norm, guard_gradient_scale

NO_TRAINER = ("transformers' Trainer is not here. After pip install -c constraints.txt "
              "-e '.[hf]' this runs: python -m ranklab.projects.horovod --trap")
MENDED = {"average_tokens_across_devices": False}


class Row(NamedTuple):
    """What one way of training does with the same examples."""

    who: str
    loss: float  # as it is reported
    norm: float  # of the gradient that the weights go along
    verdict: str  # of the guard


def is_here():
    """True when transformers and what its Trainer needs are installed; nothing is imported."""
    return bool(find_spec("transformers") and find_spec("accelerate"))


def run(ranks=None, nodes=1):
    """The Rows of one rank alone, of Trainer on all ranks as it comes, and of Trainer mended; or
    None where Trainer is not installed.
    """
    if not is_here():
        return None
    return launch(fall_into_it, ranks=ranks, nodes=nodes, timeout=120, preload=PRELOAD)[0]


def fall_into_it():
    """On one rank; all ranks have the same weights and the same examples."""
    torch.manual_seed(0)
    config, ranks = FineTuning(width=32, n_layer=1), dist.get_world_size()
    model = make_bert(config, classes=2, vocab_size=64, pad=0).to(device())
    example = {"input_ids": torch.arange(4, 4 + config.n_ctx), "labels": torch.tensor(1)}
    steps = {"one rank alone": plain_step(example),
             f"Trainer, ranks: {ranks}": trainer_step(example),
             f"Trainer mended, ranks: {ranks}": trainer_step(example, **MENDED)}
    rows = []
    for who, step in steps.items():
        losses = []
        norm = gradient_norm(model, lambda *args, step=step: losses.append(step(*args)))
        rows.append(Row(who, losses[0], norm, verdict(rows[0].norm if rows else norm, norm, ranks)))
    return rows


def verdict(one_rank, all_ranks, ranks):
    try:
        guard_gradient_scale(one_rank, all_ranks, ranks)
    except GradientsGrow as error:
        return str(error)
    return "as on one rank"


def plain_step(example):
    """A step on `example` as it is without any framework; it returns the loss."""
    def step(model, optimizer):
        loss = model(**{name: x[None].to(device()) for name, x in example.items()}).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def trainer_step(example, **arguments):
    """A step of transformers' Trainer on copies of `example`; it returns the loss it reports."""
    transformers = offline_transformers()
    if device().type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # accelerate loads DeepSpeed, which would guess aloud

    def step(model, optimizer):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
            trainer = transformers.Trainer(
                model=model, train_dataset=[example] * 1024, optimizers=(optimizer, None),
                args=transformers.TrainingArguments(
                    folder, use_cpu=device().type == "cpu", max_steps=1, max_grad_norm=0.0,
                    per_device_train_batch_size=4, lr_scheduler_type="constant", report_to=[],
                    save_strategy="no", logging_strategy="no", disable_tqdm=True,
                    ddp_find_unused_parameters=False, **arguments))
            trainer.remove_callback(transformers.PrinterCallback)
            return trainer.train().training_loss

    return step


def table(rows):
    """`rows` as text, with what the guard says of each; or what to install."""
    if rows is None:
        return NO_TRAINER
    lines = [f"{'':24}{'loss':>8}{'gradient':>10}   the guard"]
    lines += [f"{r.who:24}{r.loss:8.4f}{r.norm:10.4f}   {r.verdict}" for r in rows]
    return "\n".join(lines)
