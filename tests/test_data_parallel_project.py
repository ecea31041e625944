"""Lab 03's project: the same accuracy on any number of ranks, and what each piece is good for."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from ranklab.data_parallel import replicas_agree, shard_sampler
from ranklab.engine import torchrun
from ranklab.meter import Event
from ranklab.plots import data_parallel as plots
from ranklab.plots.style import save
from ranklab.projects.data_parallel import __main__ as command
from ranklab.projects.data_parallel import comparing as project
from ranklab.projects.data_parallel import training
from ranklab.projects.data_parallel.config import PIECES, Settings
from ranklab.projects.data_parallel.training import Run

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Settings(epochs=1, warmup=0)


# --- the same on any number of ranks --------------------------------------------------------------

@pytest.fixture(scope="module")
def found():
    return project.scale(ranks=(1, 4), seeds=(0, 1))


def test_one_and_four_ranks_reach_the_same_accuracy(found):
    assert project.ranges_overlap(found), project.scale_table(found)
    for R, runs in found.items():
        for run in runs:
            assert run.ranks == R and 0.9 < run.accuracy == run.worst
            assert run.agree == [True] * 3 and run.spread == 0
            assert run.loss[0] > run.loss[1] > run.loss[2]
            assert run.images == -(-1437 // R) * R  # the sampler fills the last step up


def test_without_batch_norm_every_loss_is_that_of_one_process():
    """And with batch norm over all ranks. 1437 = 3 * 479: nothing is filled up."""
    many = [replace(SHORT, batch=60, norm=norm) for norm in ("group", "none", "sync", "batch")]
    one, three = training.run_all(many, 1), training.run_all(many, 3)
    for settings, (alone,), (split,) in zip(many, one, three):
        difference = abs(alone.loss[0] - split.loss[0])
        if settings.norm == "batch":
            assert difference > 1e-3  # 20 images have another mean than 60
        else:
            assert difference < 1e-4, settings.norm
            assert alone.accuracy == pytest.approx(split.accuracy, abs=0.01)


def test_torchs_engine_gives_the_same_run():
    ours, theirs = training.run_all([SHORT, replace(SHORT, engine="torch")], 2)
    assert ours[0].loss == pytest.approx(theirs[0].loss, abs=1e-5)
    assert ours[0].accuracy == theirs[0].accuracy and theirs[0].agree == [True]


def test_a_learners_own_functions_are_run_and_named():
    def own_sampler(n, rank, ranks, epoch=0, seed=0):
        return shard_sampler(n, rank, ranks, 0, seed)  # every epoch has the same order

    two = replace(SHORT, epochs=2)
    mine, = training.run(two, 2, sampler=own_sampler, agree=replicas_agree)
    same, = training.run(replace(two, without=("epoch",)), 2)
    assert (mine.own, same.own) == (("sampler",), ()) and mine.loss == same.loss
    assert project.scale_table({2: [mine]}).endswith(
        "Yours: sampler. The library's: replica, scale, agree.")
    mine = training.Functions(replica=torch.nn.Module)
    assert mine.own(SHORT) == ["replica"] and not mine.own(replace(SHORT, engine="torch"))
    with pytest.raises(TypeError, match="tester"):
        training.run(two, 2, tester=own_sampler)


# --- pieces ---------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def missing():
    settings = Settings(epochs=2)
    left_out = [(), *((name,) for name in PIECES), ("mean", "scaling", "warmup")]
    many = [replace(settings, without=out) for out in left_out]
    return {"+".join(out): runs[0] for out, runs in zip(left_out, training.run_all(many, 4))}


def test_a_missing_piece_shows(missing):
    whole = missing[""]
    for name in ("broadcast", "average"):  # replicas that differ from the first epoch on
        assert not any(missing[name].agree) and missing[name].spread > 0.1
    for name in ("mean", "shard", "epoch", "scaling", "warmup", "buffers"):
        assert all(missing[name].agree), name  # weights alike on all ranks, and yet it is wrong
        assert (missing[name].spread > 0) == (name == "buffers")
        assert (missing[name].loss == whole.loss) == (name == "buffers")  # training reads none
    assert missing["mean"].loss[-1] > 2 * whole.loss[-1]
    assert missing["broadcast"].worst < whole.worst - 0.02


def test_what_is_the_same_mistake_gives_the_same_numbers(missing):
    # rank 0 alone with its own images, or four ranks that all have these images
    assert missing["average"].accuracy == missing["shard"].accuracy
    # four times the gradient, or four times the learning rate
    assert missing["mean+scaling+warmup"].loss == missing["warmup"].loss


# --- settings, schedule, pictures -----------------------------------------------------------------

def test_images_are_shifted_and_mirrored_and_nothing_else():
    torch.manual_seed(0)
    x = torch.randn(40, 3, 6, 6)
    seen = training.shifted_and_mirrored(x, most=1)
    padded = torch.nn.functional.pad(x, (1,) * 4)
    shifts, mirrored = set(), 0
    for old, new in zip(padded, seen):
        ways = [(down, right, flip) for down, right in itertools.product(range(3), repeat=2)
                for flip in (False, True)
                if torch.equal(new.flip(2) if flip else new,
                               old[:, down:down + 6, right:right + 6])]  # fmt: skip
        assert len(ways) == 1
        shifts.add(ways[0][:2])
        mirrored += ways[0][2]
    assert len(shifts) == 9 and 10 < mirrored < 30


# --- tables and figures ---------------------------------------------------------------------------

def canned(accuracy, ranks=1, seconds=(2.0, 1.0), worst=None, spread=0.0):
    return Run(ranks, 0, accuracy, accuracy if worst is None else worst, spread, [True, False],
               [1.0, 0.5], list(seconds), 100)  # fmt: skip


def test_the_tables_say_what_was_found():
    one = [canned(0.9), canned(0.92)]
    two = [canned(0.91, 2, (0.5, 0.4)), canned(0.95, 2)]
    lines = project.scale_table({1: one, 2: two}).splitlines()
    assert lines[1].split() == "1 0.910 (0.900-0.920) 2 of 4 1.000 100 1.00".split()
    assert lines[2].split() == "2 0.930 (0.910-0.950) 2 of 4 0.400 250 2.50".split()
    assert lines[3] == "The ranges over 2 seeds overlap."
    assert "DO NOT OVERLAP" in project.scale_table({1: one, 2: [canned(0.93, 2)] * 2})
    assert "0.910 (0.900-0.920)    0.500" in project.learning_rate_table({"batch 16": one})
    table = project.pieces_table({"nothing": one, "mean": [canned(0.5, worst=0.25, spread=0.125)]})
    assert "0.500 (0.500-0.500)    0.250 (0.250-0.250)" in table
    assert table.endswith("0.125  gradients are summed, not averaged")


def test_exposed_is_what_no_computing_hides():
    events = [Event("aten::mm", "compute", 5.0, 5.1, "main"),
              Event("aten::mm_backward", "compute", 5.15, 5.2, "main"),
              Event("gloo:all_reduce", "communication", 5.05, 5.18, "gloo 1"),
              Event("gloo:all_reduce", "communication", 5.16, 5.3, "gloo 2"),
              Event("read", "loader", 5.3, 5.4, "main")]  # fmt: skip
    text = {t.get_text() for t in plots.timeline([events]).axes[0].texts}
    assert {"150 ms\nexposed", " backward", "1", "2"} <= text  # 50 in the gap, 100 after it


def test_every_figure_is_drawn(tmp_path, found, missing):
    seen = {name or "nothing": [run.accuracy] for name, run in missing.items()}
    worst = {name or "nothing": [run.worst] for name, run in missing.items()}
    times = {R: project.best_seconds(runs) for R, runs in found.items()}
    for draw in (plots.replicas, lambda: plots.speed_up({"digits": times}),
                 lambda: plots.accuracy_ranges({R: [r.accuracy for r in runs]
                                                for R, runs in found.items()}),
                 lambda: plots.pieces(seen, worst),
                 lambda: plots.bucket_plans({"one": [(0.1, 0.3)], "two": [(0, 0.1), (0.1, 0.3)]},
                                            [0.05, 0.1]),
                 lambda: plots.timeline([[Event("aten::mm", "compute", 0, 1, "main")]] * 3)):
        path = save(draw(), tmp_path / "figure.svg")
        assert path.stat().st_size > 5000


# --- the command ----------------------------------------------------------------------------------

def test_the_command_prints_tables_and_draws(tmp_path, capsys):
    common = ["--epochs", "1", "--seeds", "1", "--warmup", "0", "--ranks", "2"]
    path = tmp_path / "figure.svg"
    assert command.main([*common, "--norm", "none", "--figure", str(path)]) == 0
    assert command.main([*common, "--learning-rate", "--figure", str(path)]) == 0
    assert command.main([*common, "--without", "mean,buffers"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("speed-up") == 2 and path.stat().st_size > 5000
    assert "batch 64, lr 0.48, warm-up" in printed
    for wrong, sentence in (("--without luck", "the pieces are broadcast"),
                            ("--data imagenet", "invalid choice"), ("--epochs 0", "at least 1"),
                            ("--data mnist", "--data mnist needs --folder")):  # fmt: skip
        with pytest.raises(SystemExit):
            command.main(wrong.split())
        assert sentence in capsys.readouterr().err


def write_cifar(folder, n=24):
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = rng.integers(0, 10, (n, 1))
        pixels = rng.integers(0, 256, (n, 3072))
        (folder / f"{name}.bin").write_bytes(np.c_[labels, pixels].astype(np.uint8).tobytes())


def test_cifar_files_under_torchrun_train_on_the_ranks_there_are(tmp_path):
    write_cifar(tmp_path)
    output = torchrun("-m", "ranklab.projects.data_parallel", "--data", "cifar10", "--folder",
                      tmp_path, "--epochs", "2", "--batch", "24", "--base-batch", "24", "--width",
                      "4", "--warmup", "1", "--seeds", "1", "--precision", "bf16", ranks=2)
    assert output.count("images/s") == 1 and "    2  0." in output
    assert "2 of 2" in output and "seed 0" in output  # in agreement; the progress bar
