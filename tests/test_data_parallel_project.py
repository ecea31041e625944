"""Lab 03's project: the same accuracy on any number of ranks, and what each piece is good for."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ranklab.data_parallel import shard_sampler
from ranklab.engine import torchrun
from ranklab.meter import Event
from ranklab.plots import data_parallel as plots
from ranklab.projects.data_parallel import __main__ as command
from ranklab.projects.data_parallel import comparing as project
from ranklab.projects.data_parallel import training
from ranklab.projects.data_parallel.config import PIECES, Config

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Config(epochs=1, warmup=0)


def test_without_batch_norm_every_loss_is_that_of_one_process():
    """And with batch norm over all ranks, and torch's engine. 1437 = 3 * 479: none is filled up."""
    configs = {norm: replace(SHORT, batch=60, norm=norm)
               for norm in ("group", "none", "sync", "batch")}
    configs["torch"] = replace(configs["group"], engine="torch")
    one, three = training.run(configs, 1), training.run(configs, 3)
    for name, (alone,), (split,) in zip(configs, one.values(), three.values()):
        difference = abs(alone.loss[0] - split.loss[0])
        if name == "batch":
            assert difference > 1e-3  # 20 images have another mean than 60
        else:
            assert difference < 1e-4 and split.agree == [True], name
            assert alone.accuracy == pytest.approx(split.accuracy, abs=0.01)


def test_a_learners_own_functions_are_run_and_named():
    def own_sampler(n, rank, ranks, epoch=0, seed=0):
        return shard_sampler(n, rank, ranks, 0, seed)  # every epoch has the same order

    two = replace(SHORT, epochs=2)
    mine = training.run({2: two}, 2, sampler=own_sampler)
    same = training.run({2: replace(two, without=("epoch",))}, 2)
    assert mine[2][0].loss == same[2][0].loss and "Yours" not in project.scale_table(same)
    assert project.scale_table(mine).endswith(
        "Yours: sampler. The library's: replica, scale, agree.")
    with pytest.raises(TypeError, match="tester"):
        training.run({2: two}, 2, tester=own_sampler)


def test_a_missing_piece_shows():
    left_out = [(), *((name,) for name in PIECES), ("mean", "scaling", "warmup")]
    configs = {"+".join(out): Config(epochs=2, without=out) for out in left_out}
    missing = {name: run for name, (run,) in training.run(configs, 4).items()}
    whole = missing[""]
    assert all(whole.agree) and whole.spread == 0 and whole.accuracy == whole.worst
    assert whole.images == 1440  # of 1437: the sampler fills up
    for name in ("broadcast", "average"):  # replicas that differ from the first epoch on
        assert not any(missing[name].agree) and missing[name].spread > 0.1
    for name in ("mean", "shard", "epoch", "scaling", "warmup", "buffers"):
        assert all(missing[name].agree), name  # weights alike on all ranks, and yet it is wrong
        assert (missing[name].spread > 0) == (name == "buffers")
        assert (missing[name].loss == whole.loss) == (name == "buffers")  # training reads none
    assert missing["mean"].loss[-1] > 2 * whole.loss[-1]
    assert missing["broadcast"].worst < whole.worst - 0.02
    # rank 0 alone with its own images, or four ranks that all have these images
    assert missing["average"].accuracy == missing["shard"].accuracy
    # four times the gradient, or four times the learning rate
    assert missing["mean+scaling+warmup"].loss == missing["warmup"].loss


def test_images_are_shifted_and_mirrored_and_nothing_else():
    torch.manual_seed(0)
    x = torch.randn(40, 3, 6, 6)
    seen, padded = training.shifted_and_mirrored(x, most=1), torch.nn.functional.pad(x, (1,) * 4)
    found = [(down, right, flip) for old, new in zip(padded, seen) for flip in (False, True)
             for down in range(3) for right in range(3)
             if torch.equal(new.flip(2) if flip else new,
                            old[:, down:down + 6, right:right + 6])]
    assert len(found) == 40 and len({shift[:2] for shift in found}) == 9
    assert 10 < sum(flip for *_, flip in found) < 30


def test_exposed_is_what_no_computing_hides():
    events = [Event("aten::mm", "compute", 5.0, 5.1, "main"),
              Event("aten::mm_backward", "compute", 5.15, 5.2, "main"),
              Event("gloo:all_reduce", "communication", 5.05, 5.18, "gloo 1"),
              Event("gloo:all_reduce", "communication", 5.16, 5.3, "gloo 2"),
              Event("read", "loader", 5.3, 5.4, "main")]  # fmt: skip
    text = {t.get_text() for t in plots.timeline([events]).axes[0].texts}
    assert {"150 ms\nexposed", " backward", "1", "2"} <= text  # 50 in the gap, 100 after it


def test_the_command_prints_tables_and_draws(tmp_path, capsys):
    common = ["--epochs", "1", "--seeds", "1", "--warmup", "0", "--ranks", "2"]
    path = tmp_path / "figure.svg"
    assert command.main([*common, "--norm", "none", "--figure", str(path)]) == 0
    assert command.main([*common, "--learning-rate"]) == 0
    assert command.main([*common, "--without", "mean,buffers"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("speed-up") == 2 and path.stat().st_size > 5000
    assert "batch 64, lr 0.48, warm-up" in printed


def test_cifar_files_under_torchrun_train_on_the_ranks_there_are(tmp_path):
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels, pixels = rng.integers(0, 10, (24, 1)), rng.integers(0, 256, (24, 3072))
        (tmp_path / f"{name}.bin").write_bytes(np.c_[labels, pixels].astype(np.uint8).tobytes())
    output = torchrun("-m", "ranklab.projects.data_parallel", "--data", "cifar10", "--folder",
                      tmp_path, "--epochs", "2", "--batch", "24", "--base-batch", "24", "--width",
                      "4", "--warmup", "1", "--seeds", "1", "--precision", "bf16", ranks=2)
    assert output.count("images/s") == 1 and "    2  0." in output
    assert "2 of 2" in output and "seed 0" in output  # in agreement; the progress bar
