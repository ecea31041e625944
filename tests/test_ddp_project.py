"""Lab 04's project: equal to one process, exact scores, bit-equal after a restart, clean stops."""

import json
import os
import re
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ranklab import launch
from ranklab.data.image_folder import Normalise
from ranklab.ddp import compress_fp16_hook, scaling_efficiency
from ranklab.models.resnet import ResNet
from ranklab.projects import ddp as project
from ranklab.projects.ddp import __main__ as command
from ranklab.projects.ddp.training import new_trainer, open_data

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

TINY = replace(project.LAPTOP, model="resnet18", width=8, images=44, held_out=7, batch_per_rank=4,
               epochs=3, warmup_epochs=1, log_every=1)


def tiny_trainer(**changes):
    return new_trainer(replace(TINY, **changes))


def state(trainer):
    """All that a step changes, as one list of tensors."""
    momenta = [s["momentum_buffer"] for s in trainer.optimizer.state.values()]
    return [x.detach().cpu().clone() for x in (*trainer.model.state_dict().values(), *momenta)]


def assert_same(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _three_steps(total):
    trainer = tiny_trainer(norm="group", batch_per_rank=total // dist.get_world_size())
    return trainer.fit(until=3).loss, [p.detach() for p in trainer.model.parameters()]


def test_ranks_equal_one_process():
    """Eight images a step on 1 and 4 ranks. Group norm: batch norm sees a rank's images only."""
    (losses, weights), = launch(_three_steps, 8, ranks=1)
    assert losses[-1] != losses[0]
    by_rank = launch(_three_steps, 8, ranks=4)
    for of_rank, rank_weights in by_rank:
        assert of_rank == pytest.approx(losses, rel=1e-5)
        for a, b in zip(rank_weights, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert_same(rank_weights, by_rank[0][1])


def _scores(sizes):
    scores = []
    for held_out in sizes:
        trainer = tiny_trainer(held_out=held_out, batch_per_rank=2)
        trainer.fit(until=2)
        for buffer in trainer.model.buffers():  # as after steps on different images
            if buffer.is_floating_point():
                buffer += 0.1 * dist.get_rank()
        scores.append(trainer.evaluate())
        assert trainer.model.training
    return scores, trainer.model.state_dict()


def test_each_held_out_image_counts_once(sizes=(1, 7)):
    """7 images for 3 ranks of 2: one rank has a batch more. One image: two ranks have none."""
    by_rank = launch(_scores, sizes, ranks=3)
    model = ResNet(TINY.shape(TINY.classes)).eval()  # rank 0's last one, in one process
    model.load_state_dict(by_rank[0][1])
    images = open_data(TINY)[1]
    pixels, labels = zip(*(images[0, i] for i in range(7)))
    right = model(Normalise()(torch.stack(pixels))).argmax(1) == torch.tensor(labels)
    assert [scores[1] for scores, _ in by_rank] == [right.sum().item() / 7] * 3
    assert all(scores[0] in (0, 1) for scores, _ in by_rank)


def _interrupted(path):
    """Straight to step 8; and stopped at step 3 in the middle of an epoch, then gone on."""
    straight, first = tiny_trainer(workers=1), tiny_trainer(workers=1, checkpoint=path)
    straight.fit(until=8)
    first.fit(until=3)
    dist.barrier()  # in life the first run has ended long before
    second = tiny_trainer(workers=1, checkpoint=path)
    torch.manual_seed(dist.get_rank())
    second.resume()
    assert second.steps_done == 3 and first.steps_per_epoch == 5
    second.fit(until=8)
    return state(straight), state(second), straight.history, second.history


def test_a_resumed_run_is_bit_equal(tmp_path):
    for straight, resumed, before, after in launch(_interrupted, str(tmp_path / "run"), ranks=2):
        assert_same(straight, resumed)
        assert before.loss[3:] == after.loss and before.held_out == after.held_out
        assert list(before.held_out) == [5]


def _terminated(path):
    trainer = tiny_trainer(checkpoint=path, log_every=3)
    step = trainer.step

    def step_and_be_told():
        loss = step()
        if trainer.steps_done == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    trainer.step = step_and_be_told
    trainer.fit()
    return trainer.steps_done, trainer.stopped


def test_a_sigterm_to_one_rank_ends_all_after_the_same_step(tmp_path):
    assert launch(_terminated, str(tmp_path / "run"), ranks=2) == [(5, True)] * 2


def test_the_project_runs_a_learners_hook_and_reports():
    changes = {"model": "resnet18", "images": 512, "held_out": 96, "epochs": 2, "lr": 0.4}
    results = project.run(ranks=2, timeout=100, **changes, compress=True,
                          half=lambda group, bucket: compress_fp16_hook(group, bucket))
    assert results["top1"] > 0.3 and results["history"].loss[-1] < results["history"].loss[0]
    text = project.report(results)
    assert "Yours: compress_fp16_hook." in text
    assert "16 of 16 steps of 64 images: 2 ranks with 32 each" in text
    assert re.search(r"top-1 \d+.\d% of 96 images", text)


def test_the_command_prints_once_and_goes_on_from_its_checkpoint(tmp_path, capsys):
    path = str(tmp_path / "run")
    assert command.project.main(["--model", "resnet18", "--images", "64", "--held-out", "8",
                         "--batch-per-rank", "8", "--checkpoint", path, "--ranks", "2"]) == 0
    first = capsys.readouterr().out
    assert first.count("8 of 8 steps of 16 images") == first.count("epoch 2:") == 1
    again = project.run(ranks=2, resume=True, timeout=60, model="resnet18", images=64, held_out=8,
                        batch_per_rank=8, checkpoint=path)
    assert again["steps"] == 8 and again["history"].steps == []
    last = re.search(r"held out .* images", first).group()  # what other ranks say may follow
    assert last in project.report(again)


def test_scaling_measures_both_kinds_in_one_run():
    rows = project.scaling(TINY, ranks=2, steps=1, efficiency=lambda seconds, kind: {
        R: 0.5 * share for R, share in scaling_efficiency(seconds, kind).items()})
    assert [(r.kind, r.ranks, r.batch) for r in rows] == [
        ("strong", 1, 4), ("strong", 2, 2), ("weak", 1, 4), ("weak", 2, 4)]
    for row in rows:
        base = rows[0].seconds / (row.ranks if row.kind == "strong" else 1)
        assert row.efficiency == pytest.approx(0.5 * base / row.seconds)
    assert project.scaling_report(rows).count("50%") >= 2


def test_a_trace_of_all_ranks_is_written_and_judged(tmp_path):
    path = tmp_path / "trace.json"
    verdict = project.profile(TINY, path, ranks=2, steps=2)
    assert re.match(r"[a-z-]+: loader-bound \d+%, communication-bound \d+%, straggler \d+%",
                    verdict)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert any("gloo:" in event["name"] for event in events)
