"""Lab 14: intervals, goodput and policies beside what is published; a neighbour's copy for real."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from resilience_killed import STEPS, update

from ranklab import launch
from ranklab.formulas.resilience import (
    GPU_HOURS, NODE_RATE, OPT_HOURS, expected_ettr, goodput, poisson_tail, spares_needed,
)
from ranklab.meter import Traffic
from ranklab.planner import failures, published
from ranklab.resilience import (
    Neighbour, lemon_nodes, make_job_log, optimal_interval, recovery_policy,
)
from ranklab.resilience.cluster import Decision, Event, Job, run_policy
from ranklab.resilience.gaps import random_gaps, simulate
from ranklab.resilience.policy import daly_policy, oracle
from ranklab.resilience.traces import DAY, REGIMES, make_trace

pytestmark = pytest.mark.timeout(120)


def test_formulas_are_beside_what_is_published():
    for hours, minutes in ((24, 117), (6, 57), (0.25, 9.1)):  # figures 3 to 5 of Daly's paper
        assert optimal_interval(300, 3600 * hours) / 60 == pytest.approx(minutes, abs=0.5)
    counts = {row["component"]: float(row["count"]) for row in published.table("failures")}
    assert GPU_HOURS == failures.hours_between_failures(1)
    assert OPT_HOURS == 24 / counts["OPT-175B machines lost per day"] * 992 / 8
    assert failures.good_share(16384, 5) > counts["effective training time above"] / 100


def test_traces_have_the_rates_of_their_regimes():
    for regime in REGIMES.values():
        job, days, _, rate, (every, lasts, times) = regime
        events = [event for seed in range(20) for event in make_trace(regime, seed)]
        fails = sum(event.away is not None and event.node < job.nodes for event in events)
        due = 20 * days * DAY / job.mean_seconds * rate * (1 + lasts / every * (times - 1))
        assert abs(fails - due) < 4 * due**0.5 + 0.03 * due  # a node that is away can't fail
        warned = sum(event.away is None for event in events)
        assert warned == pytest.approx(0.4 * (len(events) - warned), rel=0.25)
    assert make_trace(regime, 3) == make_trace(regime, 3) != make_trace(regime, 4)


def test_two_simulations_agree_where_nodes_come_back_at_once():
    gaps = random_gaps(4000, 3000)
    trace = [Event(at, i % 8, 0.0) for i, at in enumerate(gaps.cumsum())]
    job = Job(8, 8, 4000, 50, 300, 0, 0, 0, 0)
    score = run_policy(lambda state: Decision(8, 700), job, trace, float(gaps.sum()))
    assert score == pytest.approx(simulate(700, 50, gaps, 300), rel=1e-9)


def test_a_day_by_hand():
    job, seen = Job(8, 2, 1e5, 10, 100, 50, 0, 0, 0), []
    trace = [Event(1000, 0, 5000), Event(2000, 1, 1500), Event(3000, 7, None), Event(3200, 2, 0)]

    def policy(state):
        seen.append((state.event, state.now, state.up, state.running, state.unsaved, state.ahead,
                     tuple(round(t) for t in state.back)))
        return Decision(min(8, state.up // 2 * 2), 400, 1, state.event == "warning")

    # 100 start; 410 a round: 510, 920 saved; 80 lost. The spare: 1100, 1510, 1920 saved; 80 lost.
    # 6 nodes from 2150: 2560, 2970 saved; 30 more are saved at once: 3010. 3200: 190 are lost.
    # 3300: 200 until node 1 is back, saved until 3510; 8 nodes from 3660: 340 are not saved.
    saved = 8 * 4 * 400 + 6 * (2 * 400 + 30 + 200)
    assert run_policy(policy, job, trace, 4000) == saved / (9 * 4000)
    assert seen[1:] == [
        ("start", 0, 9, 0, 0, 0, ()), ("failure", 1000, 8, 0, 0, 0, (5000,)),
        ("failure", 2000, 7, 0, 0, 0, (1500, 4000)), ("warning", 3000, 7, 6, 30, 0, (500, 3000)),
        ("failure", 3200, 7, 0, 0, 0, (300, 2800)), ("back", 3500, 8, 6, 200, 0, (2500,))]


def test_scores_are_between_dalys_and_the_oracles():
    for regime in REGIMES.values():
        run = regime.job, make_trace(regime, 1), regime.days * DAY
        daly, score = (run_policy(policy, *run) for policy in (daly_policy, recovery_policy))
        assert max(daly, regime.reach * oracle(*run)[0]) < score < oracle(*run)[0]


def _copies(distance):
    rank = dist.get_rank()
    shard = [torch.randn(5 + rank), torch.randn(2, 3).bfloat16().t(), torch.tensor(rank)]
    was, neighbour = [each.clone() for each in shard], Neighbour(distance)
    with Traffic() as traffic:
        for step in (2, 4):
            neighbour.keep(step, shard)
    if rank == 2:  # the others were interrupted: 4 is the last step that all have
        neighbour.kept[6] = neighbour.kept[4]
    shard = [torch.zeros_like(each) for each in shard]
    step = (Neighbour(distance) if rank in (1, 4) else neighbour).recover(shard)
    same = all(map(torch.equal, shard, was))
    with pytest.raises(RuntimeError, match="load the last checkpoint from the disk"):
        Neighbour(distance).recover(shard)  # all are new
    return step, same, traffic.sent_bytes, sum(op.messages for op in traffic.ops)


@pytest.mark.parametrize("distance", [1, 2])
def test_dead_ranks_have_their_state_again(distance):
    for rank, seen in enumerate(launch(_copies, distance, ranks=6)):
        assert seen == (4, True, 2 * (8 + 4 * (5 + rank) + 2 * 6 + 8), 4)


def test_a_killed_rank_goes_on_from_its_neighbour(tmp_path):
    script = Path(__file__).with_name("resilience_killed.py")
    subprocess.run([sys.executable, script, tmp_path], check=True, timeout=100)
    w, m = torch.arange(12.0), torch.zeros(12)
    for _ in range(STEPS):
        update(w, m, w.clone())
    states = [torch.load(tmp_path / f"rank{rank}") for rank in range(3)]
    assert all(map(torch.equal, map(torch.cat, zip(*states)), (w, m)))


def test_meta_s_model_gives_the_papers_projections_and_ettr_is_goodput_to_first_order():
    for gpus, hours in ((16384, 1.8), (131072, 14 / 60)):
        assert 24 / (gpus / 8 * NODE_RATE) == pytest.approx(hours, rel=0.05)
    for mean, near in ((1e4, 0.03), (1e5, 3e-3), (1e6, 1e-4)):
        assert expected_ettr(900, 60, mean, 300) == pytest.approx(goodput(900, 60, mean, 300),
                                                                  rel=near)


def test_the_tail_is_what_is_drawn_and_spares_are_enough():
    drawn = np.random.default_rng(0).poisson(3.0, 200_000)
    for count in range(9):
        share = float((drawn >= count).mean())
        assert poisson_tail(count, 3.0) == pytest.approx(share, abs=4 * 0.5 / len(drawn)**0.5)
    for mean in (0.01, 1, 13.3):
        spares = spares_needed(mean)
        assert poisson_tail(spares + 1, mean) <= 0.01
        assert not spares or poisson_tail(spares, mean) > 0.01
    assert poisson_tail(0, 5.0) == 1 and poisson_tail(60, 1.0) == 0


def test_lemons_are_found_and_healthy_nodes_are_rarely_named():
    quiet = [lemon_nodes(make_job_log(100, 28, 0, seed=seed)[0], 0.5) for seed in range(100)]
    assert sum(map(len, quiet)) <= 50  # 0.5 in each log, on average, at most
    log, lemons = make_job_log(400, 112, 6, 40)
    named = lemon_nodes(log)
    assert {*named} <= {*lemons} and len(named) >= 4
    assert lemon_nodes(log[::-1]) == named
    per_node = sum(job.days * len(job.nodes) for job in log)
    rate = 6.5e-3 * (1 + 6 / 400 * 39)
    assert sum(job.failed is not None for job in log) == pytest.approx(per_node * rate, rel=0.2)
    with pytest.raises(ValueError, match="false_alarms is 200, of 400 nodes"):
        lemon_nodes(log, 200)
