"""The check of distributed_optimizer: against one process that sees all batches."""

import time

import torch
import torch.distributed as dist
from torch import nn

import ranklab.horovod as hvd
from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.horovod.asking import (
    RAISED, agrees_in_fp16, asks_once, counts_bytes, refuses_a_second, returns_it,
)
from ranklab.checks.trial import on_ranks, rank_name
from ranklab.engine import device
from ranklab.horovod.world import background

STEPS, ROWS = 3, 12
HELD = 2.0  # seconds for which nothing is averaged; backward takes milliseconds
OPTIMIZERS = {
    "SGD with momentum": lambda ps: torch.optim.SGD(_two_groups(ps), lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
}


def _two_groups(parameters):
    """The second half of the parameters has a learning rate of its own."""
    every = list(parameters)
    half = len(every) // 2
    return [{"params": every[:half]}, {"params": every[half:], "lr": 0.05}]


class Net(nn.Module):
    """A tied and a frozen parameter, one that nobody uses, one that only the last rank uses."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 4)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.one.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused, self.seldom = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))

    def forward(self, x, is_last=False):
        x = self.two(torch.tanh(self.frozen(self.one(x)) + self.tied(x)))
        return x + self.seldom.to(x.dtype) if is_last else x


def new_net():
    """Net, with one parameter of float64: zeros in its place, and what comes back, must be so."""
    torch.manual_seed(5)
    net = Net()
    net.seldom = nn.Parameter(net.seldom.detach().double())
    return net


def loss_of(net, step, rank, R):
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, 4, generator=draw).tensor_split(R)[rank].to(device())
            for _ in "xy")
    return nn.functional.mse_loss(net(x, rank == R - 1), y)


def alone(kind, R):
    """The oracle: [weights after each step] of one process that does the work of all ranks."""
    net = new_net()
    optimizer, weights = OPTIMIZERS[kind](net.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(net, step, rank, R) for rank in range(R)) / R).backward()
        # Zeros, not None: all ranks ask for it, and Adam counts its steps.
        net.unused.grad = torch.full_like(net.unused, (R + 1) / 2 if step == STEPS - 1 else 0)
        optimizer.step()
        weights.append(_weights(net))
    return weights


def _weights(net):
    return {name: p.detach().cpu().clone() for name, p in net.named_parameters()}


def trial(fn):
    """Runs on every rank: {optimizer: [weights after each step]}, and what was asked for when."""
    hvd.init(stall_check=1, stall_shutdown=4)
    net = new_net().to(device())
    optimizer = OPTIMIZERS["Adam"](net.parameters())
    returned = fn(optimizer, net.named_parameters())
    if returned is not optimizer:
        return {"returned": type(returned).__name__}
    seen = {"returned": "", "asked": _watch_one_step(fn)}
    if seen["asked"][2]:  # in the training below, where orders differ, it would wait for ever
        return seen
    seen |= {kind: _train(fn, kind) for kind in OPTIMIZERS}
    seen["bytes"] = [_bytes_of_a_step(fn, one) for one in (hvd.Compression.none,
                                                            hvd.Compression.fp16)]
    seen["twice"] = _second_backward(fn)
    hvd.barrier()
    hvd.shutdown()
    return seen


def _made(fn, *compression, make=lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
    net = new_net().to(device())
    return net, fn(make(net.parameters()), net.named_parameters(), *compression)


def _train(fn, kind):
    net, optimizer = _made(fn, make=OPTIMIZERS[kind])
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step, dist.get_rank(), dist.get_world_size()).backward()
        if step == STEPS - 1:  # a gradient that no hook has seen
            net.unused.grad = torch.full_like(net.unused, dist.get_rank() + 1)
        optimizer.step()
        weights.append(_weights(net))
    return weights


def _watch_one_step(fn):
    """(names asked for in backward, all names asked for, did backward wait for an average?)."""
    thread, during, names, stood_still = background(), [False], [[], []], [False]
    submit, cycle = thread.submit, thread._cycle

    def watched_submit(*handles):
        names[during[0]] += [handle.request.name for handle in handles]
        submit(*handles)

    def held_cycle():  # no average is ready as long as backward goes on
        begin = time.perf_counter()
        while during[0] and not stood_still[0]:
            stood_still[0] = time.perf_counter() - begin > HELD
            time.sleep(0.001)
        return cycle()

    net, optimizer = _made(fn)
    thread.submit, thread._cycle = watched_submit, held_cycle
    loss = net(torch.ones(2, 4, device=device()), is_last=False).sum()  # one order on all ranks
    during[0] = True
    loss.backward()
    during[0] = False
    optimizer.step()
    thread.submit, thread._cycle = submit, cycle
    return names[True], names[True] + names[False], stood_still[0]


def _bytes_of_a_step(fn, compression):
    net, optimizer = _made(fn, compression)
    with hvd.counted() as counts:
        loss_of(net, 0, dist.get_rank(), dist.get_world_size()).backward()
        optimizer.step()
    # Of the tensors, not on the wire: what is fused with what, and so each ring's rounding, varies.
    return sum(op.payload_bytes for op in counts.data.ops), counts.tensors, _weights(net)


def _second_backward(fn):
    """What a second backward before step() raises, when the averages of the first are there."""
    net, optimizer = _made(fn)
    said = ""
    loss_of(net, 0, 0, 1).backward()
    hvd.barrier()  # asked for later than all of them: they are done
    try:
        loss_of(net, 1, 0, 1).backward()
    except Exception as error:
        said = type(error).__name__
    optimizer.step()
    return said


def check_distributed_optimizer(fn):
    trained = {name: p for name, p in new_net().named_parameters() if p.requires_grad}
    for ranks in (3, 4, 1):
        with hinted(RAISED):
            seen = on_ranks(trial, fn, ranks=ranks)
        returns_it(seen)
        asks_once(seen, set(trained), ranks)
        for kind in OPTIMIZERS:
            _equal(seen, kind, ranks)
        if ranks > 1:
            counts_bytes(seen, trained.values())
            agrees_in_fp16(seen, ranks)
        refuses_a_second(seen, ranks)
    yield f"equal to one process over {STEPS} steps, with momentum and with Adam, on 1, 3, 4 ranks"
    yield "tied, frozen and unused parameters too, and one that only one rank uses"
    yield "each gradient is asked for once, by its name, while backward goes on"
    yield "with Compression.fp16 half the bytes travel, and the ranks agree as without it"
    yield "a second backward before step() is a ValueError"


def _equal(seen, kind, ranks):
    begin, right = _weights(new_net()), alone(kind, ranks)
    for step in range(STEPS):
        for rank, one in enumerate(seen):
            for name, value in one[kind][step].items():
                if _is_near(value, right[step][name]):
                    continue
                agree = all(_is_near(value, other[kind][step][name]) for other in seen)
                moved, wanted = ((x - begin[name]).norm()
                                 for x in (seen[0][kind][step][name], right[step][name]))
                what, hint = _unequal(kind, step, name, ranks, agree, (moved / wanted).item())
                raise Mistake(f"{kind}, step {step + 1}, {rank_name(rank, ranks)}: {name} {what}",
                              hint)


def _is_near(got, right):
    return torch.allclose(got, right, rtol=1e-4, atol=1e-5)


def _unequal(kind, step, name, ranks, agree, factor):
    """What is wrong with a weight that has moved `factor` times as far as it should; and a hint."""
    if kind.startswith("SGD") and step == 0 and agree and abs(factor - ranks) < 0.01 * ranks:
        return (f"has moved {factor:.3g} times as far as it should",
                "That is the sum of the gradients: op=Average is wanted.")
    if not agree and step == 0:
        return ("is not the same on all ranks",
                "step() must wait for every handle, and put what synchronize() returns into "
                "p.grad, also where that was None, before the optimizer's own step begins.")
    if name == "unused" and step == STEPS - 1:
        return ("is wrong: it had a gradient, but no hook saw it",
                "What no hook has asked for is asked for as it is: zeros only where p.grad is "
                "None.")
    if step:
        return ("is wrong, though the first step was right",
                "What was asked for in this step must be forgotten at its end: clear the handles, "
                "or the next step finds the old ones.")
    return ("is not what one process gets",
            "Average the gradients (not the weights), and let the optimizer's own step use them: "
            "momentum and Adam do the rest.")
