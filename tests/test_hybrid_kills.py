"""Ranks that save again and again are killed: the last good checkpoint goes on, in any layout."""

import contextlib
import math
import os
import random
import shutil
import signal
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.checkpoint.files import complete
from ranklab.data import Text
from ranklab.engine import RankError
from ranklab.hybrid import Hybrid, Layout
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.text_trainer import TextTrainer, TrainConfig

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

SHAPE = {"vocab_size": 64, "n_ctx": 8, "n_layer": 2, "n_head": 4, "n_embd": 16}
TOKENS = np.random.default_rng(0).integers(0, 64, 400).astype(np.uint8)
ZERO = Layout(2, 1, 2, zero=1)
LAYOUTS = [ZERO, Layout(1, 2, 2), ZERO, Layout(4, 1, 1, zero=3), ZERO, Layout(1, 1, 4)]
WORST = 0.4  # seconds of saving before a kill


def new_trainer(layout, folder, **changes):
    torch.manual_seed(0)
    with torch.device("meta" if layout else "cpu"):
        model = GPT(GPTConfig(**SHAPE | changes))
    config = TrainConfig(steps=100, batch=4, micro_batch=1, eval_batch=4, warmup=1,
                         checkpoint=str(folder))
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


def _live(layout, folder, names, least):
    """On each rank: checkpoints are saved until it is killed. names/RANK has its process, and
    names/step the last step of which all is saved.
    """
    trainer, rank = new_trainer(layout, folder), dist.get_rank()
    if least:
        goes_on(trainer, least)
    else:
        trainer.step()  # makes Adam's moments
    (names / str(rank)).write_text(f"{os.getpid()}\n")
    while True:
        trainer.steps_done += 1
        for piece in pieces(trainer):
            piece.tensor.copy_(numbers(piece, trainer.steps_done))
        trainer.save()
        if rank == 0:
            (names / "new").write_text(str(trainer.steps_done))
            os.replace(names / "new", names / "step")


def kill_all(names, seconds, over):
    """The ranks are killed, so long after the first save; unless they have ended by themselves."""
    while not (names / "step").exists() and not over.is_set():
        time.sleep(0.01)
    if not over.wait(seconds):
        for rank in range(ZERO.ranks):
            with contextlib.suppress(ProcessLookupError):  # the others' end was its end too
                os.kill(int((names / str(rank)).read_text()), signal.SIGKILL)


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=(
    pytest.mark.sweep, pytest.mark.timeout(1800)))])  # fmt: skip
def test_killed_at_any_moment_it_goes_on_in_another_layout(kills, tmp_path):
    seed, least = random.SystemRandom().randrange(10**6), 0
    print("seed", seed)
    moments = random.Random(seed)
    for life in range(kills):
        names = tmp_path / f"life-{life}"
        names.mkdir()
        over, seconds = threading.Event(), moments.uniform(0, WORST)
        killer = threading.Thread(target=kill_all, args=(names, seconds, over))
        killer.start()
        with pytest.raises(RankError) as ended:
            launch(_live, LAYOUTS[life % len(LAYOUTS)], tmp_path / "saved", names, least, ranks=4)
        over.set()
        killer.join()
        assert "SIGKILL" in str(ended.value), ended.value
        least = int((names / "step").read_text())
    goes_on(new_trainer(None, tmp_path / "saved"), least)
    assert least > kills


# --- what one rank meets --------------------------------------------------------------------------

def _dies(folder, where):
    """Rank 2 of a good run is killed in a step, or in a save, after one checkpoint."""
    trainer = new_trainer(ZERO, folder)
    trainer.fit(until=2)
    if dist.get_rank() == 2:
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "step":
            trainer.parallel.norm_of = die
        else:
            torch.save = die
    trainer.fit(until=4)


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_rank_that_is_killed_is_named_and_nothing_is_lost(where, tmp_path):
    with pytest.raises(RankError, match=r"rank 2 .*SIGKILL"):
        launch(_dies, tmp_path, where, ranks=4)
    trainer, whole = (new_trainer(None, tmp_path) for _ in range(2))
    trainer.resume()
    assert trainer.steps_done == 2
    for _ in range(2):
        whole.step()
    for mine, right in zip(trainer.model.parameters(), whole.model.parameters()):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=0)


def _saved(folder):
    new_trainer(ZERO, folder).fit(until=1)


def _refused(folder):
    """What each rank says of each folder; its weights stay as they were."""
    said = []
    for name, changes in (("missing", {}), ("changed", {}), ("good", {"n_layer": 3})):
        trainer = new_trainer(Layout(1, 2, 2), folder / name, **changes)
        before = [piece.tensor.clone() for piece in pieces(trainer)]
        with pytest.raises((ValueError, RuntimeError)) as error:
            trainer.resume()
        said.append(str(error.value).removeprefix("rank 0: "))
        assert all(map(torch.equal, before, (piece.tensor for piece in pieces(trainer))))
    return said


def test_what_cannot_be_loaded_is_the_same_sentence_on_every_rank(tmp_path):
    launch(_saved, tmp_path / "good", ranks=4)
    for name in ("missing", "changed"):
        shutil.copytree(tmp_path / "good", tmp_path / name)
        file = Path(complete(tmp_path / name)[-1], "rank-00003.pt")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.unlink() if name == "missing" else file.write_bytes(data)
    for said in launch(_refused, tmp_path, ranks=4):
        for sentence, words in zip(said, (
                "is damaged: rank-00003.pt is missing", "is damaged: rank-00003.pt has",
                "the checkpoint is of another model: it has no blocks.2"), strict=True):
            assert words in sentence
