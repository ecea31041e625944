"""Lab 03's project: the same accuracy on any number of ranks, and what each piece is good for."""

from dataclasses import replace

import numpy as np
import pytest

from ranklab.data_parallel import shard_sampler
from ranklab.meter import Event
from ranklab.plots import data_parallel as plots
from ranklab.projects import data_parallel as project
from ranklab.projects.data_parallel import __main__ as command
from ranklab.projects.data_parallel.comparison import PIECES, Config

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Config(epochs=1, warmup=0)


def test_loss_and_accuracy_are_those_of_one_process():
    """Without batch norm, or with one over all ranks. 1437 = 3 * 479: none is filled up."""
    configs = {norm: replace(SHORT, batch=60, norm=norm) for norm in ("group", "sync")}
    one, three = project.run(configs, 1), project.run(configs, 3)
    for (alone,), (split,) in zip(one.values(), three.values()):
        assert abs(alone.loss[0] - split.loss[0]) < 1e-4 and split.agree == [True]
        assert alone.accuracy == pytest.approx(split.accuracy, abs=0.01)


def test_a_missing_piece_shows_and_a_learners_own_function_is_run_and_named():
    def own_sampler(n, rank, ranks, epoch=0, seed=0):
        return shard_sampler(n, rank, ranks, 0, seed)  # every epoch has the same order

    two = Config(epochs=2)
    configs = {"whole": two} | {name: replace(two, without=(name,)) for name in PIECES}
    results = project.run(configs, 4)
    results |= project.run({"own": two}, 4, sampler=own_sampler)
    runs = {name: run for name, (run,) in results.items()}
    whole = runs["whole"]
    assert all(whole.agree) and whole.spread == 0 and whole.accuracy == whole.worst
    for name in ("broadcast", "average"):  # replicas that differ from the first epoch on
        assert not any(runs[name].agree) and runs[name].spread > 0.1
    for name in ("mean", "shard", "epoch", "buffers"):
        assert all(runs[name].agree), name  # weights alike on all ranks, and yet it is wrong
        assert (runs[name].spread > 0) == (name == "buffers")
        assert (runs[name].loss == whole.loss) == (name == "buffers")  # training reads none
    # rank 0 alone with its own images, or four ranks that all have these images
    assert runs["average"].accuracy == runs["shard"].accuracy
    assert runs["own"].loss == runs["epoch"].loss
    text = project.table({"own": results["own"]})
    assert text.endswith("Yours: sampler. The library's: replica, scale, agree.")


def test_exposed_is_what_no_computing_hides():
    events = [Event("aten::mm", "compute", 5.0, 5.1, "main"),
              Event("aten::mm_backward", "compute", 5.15, 5.2, "main"),
              Event("gloo:all_reduce", "communication", 5.05, 5.18, "gloo 1"),
              Event("gloo:all_reduce", "communication", 5.16, 5.3, "gloo 2"),
              Event("read", "loader", 5.3, 5.4, "main")]  # fmt: skip
    text = {t.get_text() for t in plots.timeline([events]).axes[0].texts}
    assert {"150 ms\nexposed", " backward", "1", "2"} <= text  # 50 in the gap, 100 after it


def test_the_command_prints_a_table_and_draws(tmp_path, capsys):
    path = tmp_path / "figure.svg"
    assert command.project.main(["--epochs", "1", "--seeds", "2", "--warmup", "0", "--ranks", "2",
                         "--without", "mean,buffers", "--figure", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "speed-up" in printed and "The ranges over 2 seeds" in printed
    assert path.stat().st_size > 5000


def test_cifar_files_train(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels, pixels = rng.integers(0, 10, (24, 1)), rng.integers(0, 256, (24, 3072))
        (tmp_path / f"{name}.bin").write_bytes(np.c_[labels, pixels].astype(np.uint8).tobytes())
    assert command.project.main([
        "--data", "cifar10", "--folder", str(tmp_path), "--epochs", "2", "--batch", "24",
        "--base-batch", "24", "--width", "4", "--warmup", "1", "--seeds", "1",
        "--precision", "bf16", "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("speed-up") == 1 and "2 ranks" in printed
    assert "2 of 2" in printed and "seed 0" in printed  # in agreement; the progress bar
