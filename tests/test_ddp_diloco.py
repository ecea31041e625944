"""DiLoCo: equal to DDP with H = 1, to torch's model averaging without momentum; DDP's bytes / H."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from ranklab import device, launch
from ranklab.ddp import DiLoCo, compare_trainers
from ranklab.meter import Traffic

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("one_thread")]
WIDTH = 32


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def train(make, ddp=False, inner=sgd, steps=12):
    """Return this rank's parameters, the inner state, and the bytes that it sends in each step."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)).to(device())
    model, optimizer = DistributedDataParallel(layers) if ddp else layers, inner(
        layers.parameters())
    trainer, sent = make(optimizer), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, WIDTH, generator=generator).to(device())
        with Traffic() as traffic:
            model(x).square().mean().backward()
            trainer.step()
        sent.append(traffic.sent_bytes)
    return ([p.detach().cpu() for p in layers.parameters()],
            [value.cpu() for p in layers.parameters() for value in optimizer.state[p].values()
             if isinstance(value, torch.Tensor)], sent)


def apart(some, others):
    return max((one - other).abs().max().item() for one, other in zip(some, others))


def test_every_step_without_momentum_is_ddp_with_sgd():
    ddp, ours = (launch(train, make, ddp, ranks=4)[0] for make, ddp in (
        (lambda inner: inner, True), (lambda inner: DiLoCo(inner, 1, 1.0, 0.0), False)))
    assert apart(ddp[0], ours[0]) < 1e-6
    assert ddp[2][2:] == ours[2][2:]  # in the second step DDP broadcasts the order of its buckets


def averaged(inner, every):
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(every, warmup_steps=every - 1))


@pytest.mark.parametrize("every", [2, 4])
def test_without_momentum_it_is_torchs_model_averaging(every):
    theirs, ours = (launch(train, make, ranks=3)[0] for make in (
        lambda inner: averaged(inner, every), lambda inner: DiLoCo(inner, every, 1.0, 0.0)))
    assert apart(theirs[0], ours[0]) < 1e-6
    assert [bool(n) for n in theirs[2]] == [bool(n) for n in ours[2]]


def test_it_sends_the_parameters_once_in_h_steps_and_the_state_stays():
    of_rank = launch(train, lambda inner: DiLoCo(inner, 4), False, torch.optim.AdamW, ranks=4)
    numbers = WIDTH * WIDTH + WIDTH + 4 * WIDTH + 4
    for parameters, state, sent in of_rank:
        assert sent == [0, 0, 0, 2 * 3 * numbers] * 3  # 2 (R-1)/R of 4 bytes a number
        assert all(map(torch.equal, parameters, of_rank[0][0]))
    assert not any(map(torch.equal, of_rank[0][1][1:3], of_rank[1][1][1:3]))


def test_the_outer_step_is_nesterovs():
    def two_outer_steps():
        p = torch.zeros(1, requires_grad=True)
        trainer = DiLoCo(torch.optim.SGD([p], 1.0), 1, 0.5, 0.9)
        for _ in range(2):
            p.grad = torch.ones(1) * (1 + 2 * dist.get_rank())
            trainer.step()
        return p.item()

    # delta is the mean of 1 and 3; velocities 2 and 3.8
    due = -0.5 * (2 + 0.9 * 2) - 0.5 * (2 + 0.9 * 3.8)
    assert launch(two_outer_steps, ranks=2) == pytest.approx([due, due])


def test_it_holds_two_more_numbers_for_each_parameter():
    def held():
        p = torch.zeros(5, 3, requires_grad=True)
        p.grad = torch.ones(5, 3)
        trainer = DiLoCo(torch.optim.SGD([p], 1.0), 1)
        trainer.step()
        velocity = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
        assert all(outer.grad is None for outer in trainer.outer)
        return sum(x.numel() for x in trainer.outer + velocity)

    assert launch(held, ranks=2) == [30, 30]


def test_bad_input_is_a_sentence():
    with pytest.raises(ValueError, match="every=0 must be 1 or more"):
        DiLoCo(torch.optim.SGD([torch.zeros(1)], 0.1), 0)


@pytest.mark.slow
def test_one_sixteenth_of_the_bytes():
    ddp, ours = compare_trainers({"DDP": None, "H = 16": lambda inner: DiLoCo(inner, 16)}, steps=32)
    assert ddp.steps == ours.steps == [16, 32]
    assert 15 < ddp.sent[-1] / ours.sent[-1] <= 16.1
    assert ours.loss[-1] < ours.loss[0]
