"""Lab 04's project: equal to one process, exact scores, bit-equal after a restart, clean stops."""

import json
import os
import re
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab import launch
from ranklab.data.image_folder import Normalise, write_digits
from ranklab.ddp import compress_fp16_hook
from ranklab.engine import torchrun
from ranklab.meter import Event
from ranklab.models.resnet import ResNet
from ranklab.plots import ddp as plots
from ranklab.plots.gantt import merged
from ranklab.plots.style import save
from ranklab.projects import ddp as project
from ranklab.projects.ddp import data_parallel as ddp_data_parallel
from ranklab.projects.ddp import strong_and_weak
from ranklab.projects.ddp.compression import Row
from ranklab.projects.ddp.config import LAPTOP
from ranklab.projects.ddp.data import open_data
from ranklab.projects.ddp.trainer import ImageTrainer

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

TINY = replace(LAPTOP, model="resnet18", width=4, images=44, held_out=7, batch_per_rank=4,
               epochs=3, warmup_epochs=1, log_every=1)  # fmt: skip


def trainer(**changes):
    return ImageTrainer(replace(TINY, **changes))


def state(mine):
    """All that a step changes, as one list of tensors."""
    momenta = [s["momentum_buffer"] for s in mine.optimizer.state.values()]
    return [x.detach().cpu().clone() for x in (*mine.model.state_dict().values(), *momenta)]


def assert_same(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- equal to one process -----------------------------------------------------------------------

def _three_steps(total):
    mine = trainer(norm="group", batch_per_rank=total // dist.get_world_size())
    history = mine.fit(until=3)
    return history.loss, [p.detach() for p in mine.model.parameters()]


def test_ranks_equal_one_process():
    """Eight images a step on 1, 2 and 4 ranks. Group norm: batch norm sees a rank's images only."""
    (losses, weights), = launch(_three_steps, 8, ranks=1)
    assert losses[-1] != losses[0]
    for ranks in (2, 4):
        seen = launch(_three_steps, 8, ranks=ranks)
        for of_rank, mine in seen:
            assert of_rank == pytest.approx(losses, rel=1e-5)
            for a, b in zip(mine, weights, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            assert_same(mine, seen[0][1])


# --- scores -------------------------------------------------------------------------------------

def _scores(sizes):
    found = []
    for held_out in sizes:
        mine = trainer(held_out=held_out, batch_per_rank=2)
        mine.fit(until=2)
        for buffer in mine.model.buffers():  # as after steps on different images
            if buffer.is_floating_point():
                buffer += 0.1 * dist.get_rank()
        found.append(mine.evaluate())
        assert mine.model.training
    return found, mine.model.state_dict()


def test_each_held_out_image_counts_once(sizes=(1, 7, 12)):
    """7 images for 3 ranks of 2: one rank has a batch more. One image: two ranks have none."""
    seen = launch(_scores, sizes, ranks=3)
    for n, *scores in zip(sizes, *(found for found, _ in seen)):
        assert scores == [scores[0]] * 3 and scores[0].images == n
        assert scores[0].top1 * n == pytest.approx(round(scores[0].top1 * n))
    model = ResNet(TINY.shape(TINY.classes)).eval()  # rank 0's last one, in one process
    model.load_state_dict(seen[0][1])
    images = open_data(replace(TINY, held_out=12))[1]
    pixels, labels = zip(*(images[0, i] for i in range(12)))
    logits, labels = model(Normalise()(torch.stack(pixels))), torch.tensor(labels)
    ranked, score = logits.argsort(descending=True) == labels[:, None], seen[0][0][-1]
    assert score.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    assert score.top1 * 12 == pytest.approx(ranked[:, 0].sum().item())
    assert score.top5 * 12 == pytest.approx(ranked[:, :5].sum().item())


# --- to the disk and back -----------------------------------------------------------------------

def _interrupted(folder, changes):
    """Straight to step 8; and stopped at step 3 in the middle of an epoch, then gone on."""
    straight = trainer(**changes)
    straight.fit(until=8)
    first = trainer(**changes, checkpoint=f"{folder}/run")
    first.fit(until=3)
    dist.barrier()  # in life the first run has ended long before
    second = trainer(**changes, checkpoint=f"{folder}/run")
    torch.manual_seed(dist.get_rank())
    second.resume()
    assert second.steps_done == 3 and first.steps_per_epoch == 5
    second.fit(until=8)
    return state(straight), state(second), straight.history, second.history


@pytest.mark.parametrize("ranks, workers", [(1, 2), (4, 0)])
def test_a_resumed_run_is_bit_equal(tmp_path, ranks, workers):
    """On more than two ranks only because of the rehearsal: else buckets would be sorted later."""
    changes = {"data": write_digits(tmp_path / "digits"), "batch_per_rank": 284 // ranks,
               "workers": workers, "bucket_mb": 0.05, "image": 16}
    seen = launch(_interrupted, str(tmp_path), changes, ranks=ranks)
    for straight, resumed, before, after in seen:
        assert_same(straight, resumed)
        assert before.loss[3:] == after.loss and before.held_out == after.held_out
        assert list(before.held_out) == [5]


def _terminated(path, rank_told):
    mine = trainer(checkpoint=path, log_every=3, norm="group")
    step = mine.step

    def step_and_be_told():
        loss = step()
        if mine.steps_done == 4 and dist.get_rank() == rank_told:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    mine.step = step_and_be_told
    mine.fit()
    dist.barrier()
    again = trainer(checkpoint=path, norm="group")
    again.resume()
    assert_same(state(mine), state(again))
    return mine.steps_done, mine.stopped, again.steps_done


@pytest.mark.parametrize("rank_told", [0, 1])
def test_a_sigterm_to_one_rank_ends_all_after_the_same_step(tmp_path, rank_told):
    assert launch(_terminated, str(tmp_path / "run"), rank_told, ranks=2) == [(5, True, 5)] * 2


# --- the project --------------------------------------------------------------------------------

def test_the_project_learns_and_reports(capsys):
    changes = {"model": "resnet18", "images": 512, "held_out": 96, "epochs": 3, "lr": 0.4}
    found = project.run(ranks=2, timeout=100, **changes, compress="fp16",
                        half=lambda group, bucket: compress_fp16_hook(group, bucket))
    assert found["score"].top1 > 0.6 > 0.2 > found["history"].loss[-1] - found["history"].loss[0]
    text = project.report(found)
    assert "Yours: compress_fp16_hook." in text
    assert "24 of 24 steps of 64 images: 2 ranks with 32 each" in text
    assert re.search(r"top-1 \d+.\d%, top-5 \d+.\d%, loss \d.\d+ on 96 images", text)
    assert capsys.readouterr().out == ""


def test_the_project_under_torchrun_prints_once_and_goes_on_from_its_checkpoint(tmp_path):
    path = str(tmp_path / "run")
    options = ["--model", "resnet18", "--images", "64", "--held-out", "8", "--batch-per-rank", "8",
               "--data", "synthetic", "--workers", "1", "--checkpoint", path]  # fmt: skip
    first = torchrun("-m", "ranklab.projects.ddp", *options, "--epochs", "2", ranks=2)
    assert first.count("8 of 8 steps of 16 images") == first.count("epoch 2:") == 1
    again = project.run(ranks=2, resume=True, timeout=60, model="resnet18", images=64, held_out=8,
                        batch_per_rank=8, checkpoint=path)
    assert again["steps"] == 8 and again["history"].steps == []
    last = re.search(r"held out .* images", first).group()  # what other ranks say may follow
    assert last in project.report(again)


def test_scaling_measures_both_kinds_in_one_run():
    config = replace(TINY, norm="group")
    rows = strong_and_weak.run(config, ranks=2, steps=1)
    assert [(r.kind, r.ranks, r.batch) for r in rows] == [
        ("strong", 1, 4), ("strong", 2, 2), ("weak", 1, 4), ("weak", 2, 4)]
    for row in rows:
        base = rows[0].seconds / (row.ranks if row.kind == "strong" else 1)
        assert row.efficiency == pytest.approx(base / row.seconds)
        assert row.images_per_second == pytest.approx(row.ranks * row.batch / row.seconds)
    text = strong_and_weak.table(rows)
    assert text.count("100%") >= 2 and "efficiency" in text.splitlines()[0]
    assert len(text.splitlines()) == 5


def test_a_trace_of_all_ranks_is_written_and_judged(tmp_path):
    path = tmp_path / "trace.json"
    verdict, shares = found = project.profile(TINY, path, ranks=2, steps=2)
    assert verdict in (*shares, "healthy") and project.said(*found).startswith(f"{verdict}: ")
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert any("gloo:" in event["name"] for event in events)


def test_data_parallel_runs_or_says_why_there_is_nothing_to_measure(monkeypatch):
    # without GPUs DataParallel calls the model as it is, so at least its code runs here
    assert launch(ddp_data_parallel.best_seconds, TINY, ddp_data_parallel.in_one_process, 1,
                  ranks=1)[0] > 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "needs 2 GPUs or more to be compared with DDP, and sees 1" in \
        ddp_data_parallel.compare(TINY)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_data_parallel_is_measured_against_ddp():
    text = ddp_data_parallel.compare(replace(TINY, batch_per_rank=16))
    assert re.search(r"DDP is \d+.\d\d times as fast", text)


def test_figures_are_drawn_alike_each_time(tmp_path):
    rows = [strong_and_weak.Measured(kind, R, 8, 0.1 * R, 1 / R) for kind in ("strong", "weak")
            for R in (1, 2, 4)]
    events = [[Event("f", "compute", 5.0, 5.1, "main"), Event("l", "loader", 5.1, 5.2, "main"),
               Event("g", "communication", 5.05, 5.3, "gloo 1")]] * 2
    hooks = [Row("float32", 1000, 2.0), Row("PowerSGD 1", 50, 2.2), Row("fp16", 500, 2.0),
             Row("PowerSGD 1, no feedback", 50, 2.5), Row("bf16", 500, 2.01)]
    figures = (plots.production_step, lambda: plots.scaling(rows),
               lambda: plots.situations({"a": events, "b": events, "c": events}, {"a": "healthy"}),
               lambda: plots.loss_against_bytes(hooks))
    for number, draw in enumerate(figures):
        first, again = (save(draw(), tmp_path / f"{number}-{i}.svg") for i in range(2))
        assert first.stat().st_size > 2000 and first.read_bytes() == again.read_bytes()
    assert merged(events[0], 5.0, 10) == [(0.0, pytest.approx(300))]
