"""Lab 09's project: equal to one process, counts as predicted, the slow stage found, refusals."""

import types

import pytest
import torch
import torch.distributed as dist

from ranklab import launch
from ranklab.models.gpt import count_parameters
from ranklab.pipeline_parallel import (
    PipelineExecutor, bubble_fraction, flush_bubble, one_f_one_b_schedule, simulate,
)
from ranklab.pipeline_parallel.deferred import WeightQueue
from ranklab.projects import pipeline_parallel as project
from ranklab.projects.pipeline_parallel import peers, training
from ranklab.projects.pipeline_parallel.training import (
    SCHEDULES, above_mean, layer_names, monitor, schedule_of,
)

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]

FEW = {"steps": 3, "batch": 8, "micro_batches": 4, "eval_batch": 8, "log_every": 1, "timeout": 170}


# --- training -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, ranks", [("1f1b", 3), ("interleaved", 2), ("zb-v", 2)])
def test_equal_to_one_process_with_counts_as_predicted(name, ranks):
    # The pipeline's model is made on meta, that of one process on the CPU: the same weights.
    results = project.run(ranks=ranks, schedule=schedule_of(name), **FEW)
    first, shape = results["ranks"][0], results["shape"]
    assert first["loss"] == pytest.approx(first["alone"], abs=1e-4)
    for rank in results["ranks"]:
        for counts in ("messages", "bytes", "activations"):
            counted, predicted = rank[counts]
            assert counted == predicted > 0
    twice = 0 if name == "zb-v" else shape.vocab_size * shape.n_embd  # a V has both ends on rank 0
    numbers = [rank["parameters"] for rank in results["ranks"]]
    assert sum(numbers) == count_parameters(shape) + twice


# --- the monitor ----------------------------------------------------------------------------------

def test_the_monitor_adds_up_what_is_in_the_spans():
    schedule = one_f_one_b_schedule(4, 8)
    spans = simulate(schedule, [1, 1, 3, 1], [2, 2, 6, 2])
    busy, (measured, simulated, formula) = monitor(spans, schedule)
    assert busy == [24, 24, 72, 24]
    assert measured == simulated == bubble_fraction(spans)
    assert formula == pytest.approx(flush_bubble(4, 8))
    assert above_mean(busy) == 1.0
    assert [layer_names(layers, 3) for layers in (range(0, 3), range(3, 4), range(4, 5))] == [
        "embedding to block 1", "block 2", "head"]


def _asleep(plan, slow_stage, longer):
    training.SECONDS *= longer  # in this launch only
    parallel = types.SimpleNamespace(queue=WeightQueue(), stages=[dist.get_rank()],
                                     executor=PipelineExecutor)
    return training.asleep(parallel, plan, [1] * 4, slow_stage)


@pytest.mark.parametrize("slow_stage", [-1, 2])
def test_an_emulated_run_shows_the_bubble_and_the_slow_stage(slow_stage):
    plan, off = one_f_one_b_schedule(4, 8), []
    times = [2 if stage == slow_stage else 1 for stage in range(4)]
    predicted = bubble_fraction(simulate(plan, times, [2 * time for time in times]))
    assert slow_stage == 2 or predicted == pytest.approx(flush_bubble(4, 8))
    for longer in (1, 2, 4, 8, 16):  # a busy machine wakes a sleeping rank late: that matters less
        spans = launch(_asleep, plan, slow_stage, longer, ranks=4, timeout=120)
        busy, (measured, *_) = monitor(sum(spans, []), plan)
        assert slow_stage == -1 or busy.index(max(busy)) == slow_stage
        off.append(abs(measured - predicted))
        if off[-1] < 0.05:
            return
    raise AssertionError(f"bubble {predicted:.3f}; measured it is off by {off}")


# --- torch's pipelining ---------------------------------------------------------------------------

def _by_both():
    return {name: [peers.train(way, name, 2) for way in (peers.ours, peers.torch_pipelining)]
            for name in SCHEDULES}


@pytest.mark.sweep
def test_torchs_pipelining_gives_the_same():
    for rank in launch(_by_both, ranks=4, timeout=170):
        for name, (ours, torchs) in rank.items():
            assert ours[0] == pytest.approx(torchs[0], abs=1e-5), name
            assert ours[2] == torchs[2], name
            for parameter, gradient in ours[1].items():
                assert gradient.abs().max() > 0
                torch.testing.assert_close(gradient, torchs[1][parameter], atol=1e-5, rtol=0)
