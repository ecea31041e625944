"""Ranks that save again and again are killed: the last good checkpoint goes on, in any layout."""

import math
import os
import random
import signal
import zlib

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.data import Text
from ranklab.engine import RankError
from ranklab.hybrid import Hybrid, Layout
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.text_trainer import TextTrainer, TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = GPTConfig(vocab_size=64, n_ctx=8, n_layer=2, n_head=4, n_embd=16)
TOKENS = np.random.default_rng(0).integers(0, 64, 400).astype(np.uint8)
LAYOUTS = [Layout(2, 1, 2, zero=1), Layout(1, 2, 2), Layout(4, 1, 1, zero=3), Layout(1, 1, 4)]
WORST = 0.4  # seconds of saving before a kill


def new_trainer(layout, folder):
    torch.manual_seed(0)
    with torch.device("meta" if layout else "cpu"):
        model = GPT(SHAPE)
    config = TrainConfig(batch=4, micro_batch=1, eval_batch=4, checkpoint=str(folder / "saved"))
    parallel = layout and Hybrid(layout.new_mesh(), layout)
    return TextTrainer(model, Text("noise", TOKENS, TOKENS, 64), config, device(),
                       parallel=parallel, progress=False)


def pieces(trainer):
    return trainer.parallel.state(trainer.model, trainer.optimizer)


def numbers(piece, step):
    """What the piece holds at this step: whole numbers, which differ by name, kind and place."""
    first = step * 4096 + zlib.crc32(f"{piece.name} {piece.kind}".encode()) % 1024
    whole = torch.arange(first, first + math.prod(piece.shape), dtype=torch.float32)
    box = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.tensor.shape))
    return whole.view(piece.shape)[box]


def goes_on(trainer, least):
    """The trainer is at the last good checkpoint: step `least` or later, bit by bit."""
    trainer.resume()
    assert trainer.steps_done >= least
    for piece in pieces(trainer):
        assert torch.equal(piece.tensor, numbers(piece, trainer.steps_done)), piece.name


def _live(layout, folder, least, seconds):
    """On each rank: checkpoints are saved until it is killed, so long after the first one. The file
    folder/step has the last step of which all is saved.
    """
    trainer, rank = new_trainer(layout, folder), dist.get_rank()
    if least:
        goes_on(trainer, least)
    else:
        trainer.step()  # makes Adam's moments
    first = trainer.steps_done + 1
    while True:
        trainer.steps_done += 1
        for piece in pieces(trainer):
            piece.tensor.copy_(numbers(piece, trainer.steps_done))
        trainer.save()
        if rank == 0:
            (folder / "new").write_text(str(trainer.steps_done))
            os.replace(folder / "new", folder / "step")
        if trainer.steps_done == first:
            dist.barrier()
            # Nobody catches this signal: the kernel ends the process, wherever it is.
            signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=(
    pytest.mark.sweep, pytest.mark.timeout(1800)))])  # fmt: skip
def test_killed_at_any_moment_it_goes_on_in_another_layout(kills, tmp_path):
    seed, least = random.SystemRandom().randrange(10**6), 0
    print("seed", seed)
    moments = random.Random(seed)
    for life in range(kills):
        seconds = moments.uniform(0.001, WORST)  # 0 would be never
        with pytest.raises(RankError, match="SIGALRM"):
            launch(_live, LAYOUTS[life % len(LAYOUTS)], tmp_path, least, seconds, ranks=4)
        least = int((tmp_path / "step").read_text())
    goes_on(new_trainer(None, tmp_path), least)
    assert least > kills
