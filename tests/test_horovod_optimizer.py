"""Optimizers of ranklab.horovod: equal to one process and to torch DDP; what Horovod checks."""

import warnings

import pytest
import torch
from test_horovod import hvd_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranklab import launch
from ranklab.checks.horovod.distributed_optimizer import Net

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, BATCH = 4, 12
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
}


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 4, generator=draw), torch.randn(BATCH, 4, generator=draw)


def make(seed=0):
    torch.manual_seed(seed)
    return Net()


def alone(kind, R=1):
    """What one process gets: {name: value}. The part of the last rank goes through `seldom`."""
    net = make()
    optimizer = OPTIMIZERS[kind](net.parameters())
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        parts = zip(x.tensor_split(R), y.tensor_split(R))
        losses = [nn.functional.mse_loss(net(a, r == R - 1), b) for r, (a, b) in enumerate(parts)]
        (sum(losses) / R).backward()
        if net.unused.grad is None:  # on several ranks nobody's gradient is zero, not nothing
            net.unused.grad = torch.zeros(3)
        optimizer.step()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def test_equals_torch_ddp():
    def ddp():
        import ranklab.horovod as hvd

        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        other.load_state_dict(net.state_dict())
        theirs = DistributedDataParallel(other)
        hvd.init()
        ours = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()),
                                        net.named_parameters())
        plain = OPTIMIZERS["sgd"](other.parameters())
        for step in range(STEPS):
            x, y = (t.tensor_split(hvd.size())[hvd.rank()] for t in batch(step))
            for model, optimizer in ((net, ours), (theirs, plain)):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        hvd.shutdown()
        return max((a - b).abs().max().item()
                   for a, b in zip(net.parameters(), other.parameters()))

    assert max(launch(ddp, ranks=4)) < 1e-6


# --- what DistributedOptimizer offers -----------------------------------------------------------

def one_weight(hvd, **how):
    w = nn.Parameter(torch.zeros(2))
    return w, hvd.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), [("w", w)], **how)


def test_compression_predivision_sum_and_several_passes():
    def steps(hvd):
        rank, R, seen = hvd.rank(), hvd.size(), {}
        for name, how in {"fp16": {"compression": hvd.Compression.fp16}, "sum": {"op": hvd.Sum},
                          "predivided": {"gradient_predivide_factor": 2.0},
                          "twice": {"backward_passes_per_step": 2}}.items():
            w, optimizer = one_weight(hvd, **how)
            for _ in range(2 if name == "twice" else 1):
                (w * torch.tensor([1.0, rank])).sum().backward()
            optimizer.step()
            seen[name] = w.tolist(), w.grad.dtype
            optimizer.zero_grad()
        # An average of 1024 ranks would overflow in 16 bits; divided before, it does not.
        w, optimizer = one_weight(hvd, compression=hvd.Compression.fp16,
                                  gradient_predivide_factor=float(R))
        (w * 60000.0).sum().backward()
        optimizer.step()
        return seen, w.tolist()

    for seen, large in hvd_ranks(steps, ranks=3):
        single = torch.float32
        assert seen == {"fp16": ([-1.0, -1.0], single), "sum": ([-3.0, -3.0], single),
                        "predivided": ([-1.0, -1.0], single), "twice": ([-2.0, -2.0], single)}
        assert large == [-60000.0] * 2


def test_synchronize_then_clip_then_step():
    def clip(hvd):
        w, optimizer = one_weight(hvd)
        (w * (hvd.rank() + 1.0)).sum().backward()
        optimizer.synchronize()
        average = w.grad.clone()
        nn.utils.clip_grad_norm_([w], 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
        (w * 1.0).sum().backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="averages once more"):
            optimizer.step()
        return average.tolist(), w.norm().item()

    for average, norm in hvd_ranks(clip, ranks=2):
        assert average == [1.5, 1.5] and norm == pytest.approx(0.5 + 2**0.5, rel=1e-4)


def test_step_with_a_closure_averages_what_the_closure_made():
    def closes(hvd):
        w, optimizer = one_weight(hvd)

        def closure():
            optimizer.zero_grad()
            loss = (w * (hvd.rank() + 1.0)).sum() + 5
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            with pytest.raises(ValueError, match="which nobody averages in skip_synchronize"):
                optimizer.step(closure)
        return losses, w.tolist()

    assert hvd_ranks(closes) == [([5.0, 2.0], [-3.0] * 2), ([5.0, -1.0], [-3.0] * 2)]


def test_races_are_errors():
    def race(hvd):
        w, optimizer = one_weight(hvd)
        (w * 1.0).sum().backward()
        with pytest.raises(AssertionError, match=r"zero_grad\(\) came after backward\(\)"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step=1 times"):
            (w * 1.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(2)
        for _ in range(2):
            (w * 1.0).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return True

    assert hvd_ranks(race) == [True] * 2


def test_bad_arguments():
    def bad(hvd):
        net = nn.Linear(2, 2)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        for sentence, how in (
            (r"give it model.named_parameters\(\)", {"named_parameters": net.parameters()}),
            ("given twice: w", {"named_parameters": [("w", net.weight), ("w", net.bias)]}),
            ("1 of the optimizer's 2 parameters have no name",
             {"named_parameters": [("w", net.weight)]}),
            ("=0 must be 1 or more", {"backward_passes_per_step": 0}),
            ("it needs op=Average", {"op": hvd.Sum, "gradient_predivide_factor": 2.0}),
            ("not built here", {"groups": 2}),
        ):
            with pytest.raises(ValueError, match=sentence):
                hvd.DistributedOptimizer(sgd, **how)
        return True

    assert hvd_ranks(bad, ranks=1) == [True]


def test_state_and_scheduler_live_on():
    def wrap(hvd):
        w = nn.Parameter(torch.zeros(1))
        sgd = torch.optim.SGD([w], lr=1.0, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.1)
        w.grad = torch.ones(1)
        sgd.step()
        optimizer = hvd.DistributedOptimizer(sgd)
        (w * 2.0).sum().backward()  # on top of the gradient that is there: 3
        optimizer.step()  # momentum 0.5 * 1 + 3
        scheduler.step()
        return w.item(), optimizer.param_groups[0]["lr"]

    assert hvd_ranks(wrap) == [(-4.5, 0.1)] * 2


def test_adasum_combines_steps():
    def combine(hvd):
        w, optimizer = one_weight(hvd, op=hvd.Adasum)
        (w * torch.eye(2)[hvd.rank()]).sum().backward()
        optimizer.step()  # orthogonal steps are added
        with pytest.raises(AssertionError, match="can't be skipped"):
            optimizer.skip_synchronize()
        first = w.tolist()
        optimizer.zero_grad()
        (w * 3.0).sum().backward()
        optimizer.step()  # equal steps are averaged
        return first, w.tolist()

    assert hvd_ranks(combine) == [([-1.0, -1.0], [-4.0, -4.0])] * 2


def test_adasum_in_a_fused_buffer_is_taken_tensor_by_tensor():
    def fused(hvd):
        r = hvd.rank()
        a, b = torch.eye(2)[r], torch.ones(3)
        with hvd.counted() as counts:
            alone = [hvd.allreduce(t, name=n, op=hvd.Adasum) for n, t in (("a", a), ("b", b))]
            both = hvd.grouped_allreduce([a, b], op=hvd.Adasum)
        return [t.tolist() for t in alone], [t.tolist() for t in both], counts.data.calls["send"]

    for alone, both, sends in hvd_ranks(fused):
        assert alone == both == [[1.0, 1.0], [1.0, 1.0, 1.0]] and sends == 3 * 3


# --- the same start -----------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["sgd", "adam", "groups"])
def test_a_fresh_optimizer_takes_over_the_state_of_rank_0(kind):
    def take_over(hvd):
        net = make(seed=hvd.rank())
        if kind == "groups":
            groups = [{"params": net.one.parameters(), "lr": 0.1 + hvd.rank()},
                      {"params": net.two.parameters(), "betas": (0.5, 0.9)}]
            optimizer = torch.optim.AdamW(groups, amsgrad=True)
        else:
            optimizer = OPTIMIZERS[kind](net.parameters())
        if hvd.rank() == 1:  # the others have no state yet
            for _ in range(3):
                net(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        hvd.broadcast_parameters(net.named_parameters(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        return optimizer.state_dict(), list(net.parameters())

    seen = hvd_ranks(take_over, ranks=3)
    right, weights = seen[1]
    assert right["state"]
    for state, theirs in seen:
        assert state["param_groups"] == right["param_groups"]
        assert all(torch.equal(a, b) for a, b in zip(weights, theirs))
        for key, values in right["state"].items():
            for name, value in values.items():
                mine = state["state"][key][name]
                assert type(mine) is type(value)
                assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else \
                    mine == value


def test_a_stateless_optimizer_gets_the_options():
    def options(hvd):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5 + hvd.rank())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return optimizer.param_groups[0]["lr"]

    assert hvd_ranks(options) == [0.5, 0.5]
