"""Lab 04's hooks in torch's own DDP: values, bytes, what is kept for later, and torch's hooks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ranklab import device, launch
from ranklab.ddp import PowerSGD, TopK
from ranklab.engine import RankError
from ranklab.meter import Traffic
from ranklab.projects.ddp import compression as project

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((40, 30), (17,), (6, 5, 3, 3), (1,), (300, 7), (40, 30))


class Given(nn.Module):
    """A model whose gradients are the tensors that it is given."""

    def __init__(self, shapes=SHAPES, dtype=torch.float32):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.weights, gradients))


def gradients_of(rank, step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def through_ddp(state, hook, steps, cap_mb=25.0, gradients=gradients_of, dtype=torch.float32):
    """[(the gradients that a rank ends with, its Traffic) of each step]."""
    model = DistributedDataParallel(Given(dtype=dtype).to(device()), bucket_cap_mb=cap_mb)
    if hook:
        model.register_comm_hook(state, hook)
    seen = []
    for step in range(steps):
        mine = [g.to(device(), dtype) for g in gradients(dist.get_rank(), step)]
        model.zero_grad()
        with Traffic() as traffic:
            model(mine).backward()
        seen.append(([p.grad.cpu().clone() for p in model.module.weights], traffic))
    return seen


def mean_of(step, ranks):
    return [sum(parts) / ranks for parts in zip(*(gradients_of(r, step) for r in range(ranks)))]


def largest_difference(ours, theirs):
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(ours, theirs))


# --- top-k ----------------------------------------------------------------------------------------

def _top_k(fraction, cap_mb, dtype=torch.float32):
    state = TopK(fraction)
    seen = through_ddp(state, TopK.hook, 4, cap_mb, dtype=dtype)
    return seen, [error.cpu() for error in state.errors.values()]


@pytest.mark.parametrize("cap_mb", [25, 0.005])
def test_top_k_loses_nothing_and_sends_8_bytes_an_entry(cap_mb, ranks=3):
    seen = launch(_top_k, 0.01, cap_mb, ranks=ranks)
    entries = sum(max(1, int(0.01 * np.prod(shape))) for shape in SHAPES)
    total = [sum(parts) for parts in zip(*(seen[0][0][step][0] for step in range(4)))]
    wanted = [sum(parts) for parts in zip(*(mean_of(step, ranks) for step in range(4)))]
    # What has arrived and what is still kept is all there was, whatever DDP did to its buckets.
    missing = sum((w - t).sum().item() for w, t in zip(wanted, total))
    left = sum(error.sum().item() for _, kept in seen for error in kept) / ranks
    assert left == pytest.approx(missing, abs=1e-3)
    assert all(len(kept) == len(SHAPES) for _, kept in seen)
    for step in range(4):
        for of_rank, _ in seen:
            gradients, traffic = of_rank[step]
            assert not largest_difference(gradients, seen[0][0][step][0])
            gathers = [op for op in traffic.ops if op.name == "all_gather"]
            assert sum(op.sent_bytes for op in gathers) == (ranks - 1) * entries * 8
        for gradient, shape in zip(gradients, SHAPES):
            k = max(1, int(0.01 * np.prod(shape)))
            assert int((gradient != 0).sum()) <= ranks * k


def _without_feedback():
    state = TopK(0.01, error_feedback=False)
    power = PowerSGD(2, error_feedback=False, warm_start=False)
    through_ddp(state, TopK.hook, 2)
    first, second = (step[0] for step in through_ddp(
        power, PowerSGD.hook, 2, gradients=lambda rank, step: gradients_of(rank, 0)))
    return len(state.errors), len(power.errors), len(power.qs), largest_difference(first, second)


def test_without_feedback_nothing_is_kept():
    for errors, power_errors, qs, difference in launch(_without_feedback, ranks=2):
        assert errors == power_errors == qs == 0
        assert difference > 0.01  # another q each time


# --- PowerSGD -------------------------------------------------------------------------------------

def _power(r, cap_mb, start, dtype=torch.float32):
    state = PowerSGD(r, start=start)
    seen = through_ddp(state, PowerSGD.hook, 4, cap_mb, dtype=dtype)
    return seen, sum(error.sum().item() for error in state.errors.values()), state.step


def _beside_torch(r):
    """The largest difference to torch's hook in each step, from the same first q."""
    theirs = powerSGD_hook.PowerSGDState(None, r, start_powerSGD_iter=2)

    def hook(ours, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if ours.step == 2:  # draws as torch does: one shape after the other, as they lie there
            torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
            shapes = {}
            for parameter in bucket.parameters():
                if parameter.dim() > 1 and ours._is_worth_it(parameter):
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for parameter in sum(shapes.values(), []):
                ours.qs[parameter] = torch.randn(1, parameter[0].numel(), r)[0].to(device())
        return ours.hook(bucket)

    both = ((theirs, powerSGD_hook.powerSGD_hook), (PowerSGD(r, start=2), hook))
    seen = [through_ddp(state, hook, 6) for state, hook in both]
    return [largest_difference(a[0], b[0]) for a, b in zip(*seen)]


@pytest.mark.parametrize("ranks, r", [(1, 1), (3, 3), (4, 2)])
def test_power_sgd_gives_the_numbers_of_torchs(ranks, r):
    for differences in launch(_beside_torch, r, ranks=ranks):
        assert len(differences) == 6 and max(differences) < 2e-4, differences


def _half_precision():
    dense = through_ddp(None, None, 1, dtype=torch.bfloat16)[0][0]
    top = _top_k(1.0, 25, torch.bfloat16)[0][0][0]
    power = _power(30, 25, 0, torch.bfloat16)[0][0][0]
    return largest_difference(top, dense), largest_difference(power, dense), power[0].dtype


def test_gradients_in_bfloat16_pass_too():
    for top, power, dtype in launch(_half_precision, ranks=2):
        assert top < 0.05 and power < 0.05 and dtype == torch.bfloat16


# --- bad input, and the project -------------------------------------------------------------------

@pytest.mark.parametrize("make, sentence", [
    (lambda: TopK(0), "fraction=0 must be above 0 and at most 1"),
    (lambda: TopK(1.5), "fraction=1.5 must be above 0"),
    (lambda: PowerSGD(0), "rank=0 must be at least 1"),
    (lambda: project.compare(["float31"]), "hook 'float31' is not one of float32, fp16"),
    (lambda: project.compare(steps=2), "steps=2 must be at least 3"),
])
def test_bad_input_is_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
    if "hook" not in sentence and "steps" not in sentence:
        with pytest.raises(RankError, match=sentence):
            launch(lambda: make() and None, ranks=2)


@pytest.mark.timeout(180)
def test_error_feedback_is_worth_more_than_it_costs():
    names = ["float32", "top-k 1%", "top-k 1%, no feedback", "PowerSGD 1",
             "PowerSGD 1, no feedback", "PowerSGD 1 (torch)"]
    rows = project.compare(names, ranks=2)
    loss = {row.name: row.loss for row in rows}
    sent = {row.name: row.sent for row in rows}
    for name in ("top-k 1%", "PowerSGD 1"):
        assert loss[name] < loss[f"{name}, no feedback"] - 0.02
        assert sent[name] == sent[f"{name}, no feedback"] < sent["float32"] / 20
    assert sent["PowerSGD 1"] == sent["PowerSGD 1 (torch)"]
    lines = project.table(rows).splitlines()
    assert len(lines) == 7 and "held-out loss" in lines[0] and "1.0x" in lines[1]


def test_the_projects_hooks_run_what_they_are_given():
    def mine(*_):
        return None

    made = {name: make for name, make in project.hooks(mine, mine, mine, mine).items() if make}
    assert made["fp16"]()[1] is made["budget of 0.1%"]()[1] is mine
    assert made["top-k 1%"]()[0].compress is made["PowerSGD 1"]()[0].approximate is mine
    rows = [project.Row("float32", 10, 3.0)]
    assert "Yours: mine. The library's: TopK." in project.table(rows, half=mine, top_k=TopK)
