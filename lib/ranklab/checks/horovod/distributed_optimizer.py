"""The check of distributed_optimizer: its steps beside one process that sees all batches."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import ranklab.horovod as hvd
from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.trial import refuses
from ranklab.engine import device
from ranklab.horovod.world import background

ROWS = 12
WAIT = ("step() must wait for every handle, and put what synchronize() returns into p.grad, also "
        "where that was None, before the optimizer's own step begins.")
SMALL = ("With fp16 the average is in the small copy, not in p.grad: p.grad = "
         "compression.decompress(synchronize(handle), ctx).")
CLEAR = ("Are the handles of the last step still there, so that nothing new is asked for? "
         "handles.clear() at the end of wait.")
RAISED = {  # what was raised, and a hint about it
    ".* has waited .*": f"In the first step all ranks asked for it, and now some did not. {CLEAR}",
    ".*noname.*": "Without a name tensors are matched by their number, and ranks are ready in "
    "different orders: pass name=.",
    "RuntimeError: .*doesn't require grad.*": "A frozen parameter takes no hook: skip those with "
    "requires_grad False.",
    "ValueError: .*still in the works.*": "A name is asked for again before anybody waited for it: "
    "by step() after a hook, or by every hook, as a lambda in a loop does: it finds the last one.",
    "RuntimeError: .*dtype.*": "Each parameter has its own type, and its own ctx: zeros_like(p) "
    "where there is no gradient, and the ctx that compress gave for this very gradient.",
}


def _sgd(parameters):
    """With momentum, and two groups of different learning rates."""
    every = list(parameters)
    groups = [{"params": every[:3]}, {"params": every[3:], "lr": 0.05}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


OPTIMIZERS = {"SGD with momentum": _sgd, "Adam": partial(torch.optim.Adam, lr=0.01)}


class Net(nn.Module):
    """A tied and a frozen parameter, one in float64 that the last rank uses, and an unused one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 4)
        self.tied = nn.Linear(4, 6, bias=False)
        self.tied.weight = self.one.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.seldom = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3))
        self.to(device())

    def loss(self, step, rank, R):
        """The mean over the rows of `rank` in this step."""
        draw = torch.Generator().manual_seed(step)
        rows = torch.randn(ROWS, 8, generator=draw).tensor_split(R)[rank].to(device())
        x, y = rows.split(4, dim=1)
        x = self.two(torch.tanh(self.frozen(self.one(x)) + self.tied(x)))
        return nn.functional.mse_loss(x + self.seldom.float() if rank == R - 1 else x, y)

    def trained(self):
        return {name: p for name, p in sorted(self.named_parameters()) if p.requires_grad}

    def gradients(self, dtype):
        return {f"the gradient of {name}": p.grad if p.grad is None else p.grad.to(dtype, copy=True)
                for name, p in self.trained().items()}

    def weights(self, dtype):
        return {f"{name} after the step": p.detach().to(dtype, copy=True)
                for name, p in self.named_parameters()}


def _asks(fn, ranks):
    """What is asked for in one step, and when; here all ranks are ready in one order."""
    net, thread = Net(), background()
    given = _sgd(net.parameters())
    optimizer = fn(given, net.named_parameters(), hvd.Compression.fp16)
    yield partial(expect, optimizer is given, f"it returns another object than the optimizer, a "
                  f"{type(optimizer).__name__}", "Hook into that optimizer itself, and return it: "
                  "a scheduler may hold it already.")
    submit, asked, waited, is_backward = thread.submit, [], [], True

    def watched(*handles):
        for handle in handles:
            handle.finished.wait = lambda wait=handle.finished.wait: (
                waited.append(is_backward), wait())
            asked.append(handle.request)
        submit(*handles)

    thread.submit = watched
    net.loss(0, 0, 2).backward()
    is_backward, in_time, trained = False, len(asked), net.trained()
    had = {name for name, p in trained.items() if p.grad is not None}
    optimizer.step()
    thread.submit = submit
    names, dtypes = sorted(each.name for each in asked), {each.dtype for each in asked}
    lacks = sorted(trained.keys() - {*names})
    for is_so, what, hint in (
        (in_time, "asks for no average before backward() has ended", "Then nothing travels while "
         "it computes. Ask in the parameter's hook."),
        (not any(waited), "waits in backward()", "In the hook only ask: step() waits."),
        (not lacks or had & {*lacks}, f"does not ask for {lacks}", "Their hooks never ran, and "
         "other ranks may wait: before step() waits it asks for zeros, where it has no gradient."),
        (names == [*trained], f"asks for {names}, not for {[*trained]}", "Each parameter with "
         "requires_grad once."),
        (dtypes == {torch.float16}, f"asks with Compression.fp16 for averages of {dtypes}",
         "small, ctx = compression.compress(p.grad): ask for the average of `small`."),
    ):
        yield partial(expect, is_so, f"{ranks} {what}", hint)


class TwoSteps:
    """The same two steps on this rank, and in one process that does the work of all ranks.

    In the second one `unused` has a gradient that no hook has seen.
    """

    def __init__(self, fn, ranks, kind, *compression):
        self.rank, self.R, self.net, self.one = dist.get_rank(), ranks.size, Net(), Net()
        self.at_step, self.rights, self.owns = {}, [], []
        self.dtype = torch.float16 if compression else torch.float32  # as exact as it can be
        self.optimizer = fn(OPTIMIZERS[kind](self.net.parameters()), self.net.named_parameters(),
                            *compression)
        self.optimizer.register_step_pre_hook(
            lambda *_: self.at_step.update(self.net.gradients(self.dtype)))
        self.alone = OPTIMIZERS[kind](self.one.parameters())

    def call(self, turn):
        self.optimizer.zero_grad()
        self.net.loss(turn, self.rank, self.R).backward()
        if turn:
            self.net.unused.grad = torch.full_like(self.net.unused, self.rank + 1)
        self.optimizer.step()
        return self.at_step | self.net.weights(self.dtype)

    def right(self, turn):
        losses = [self.one.loss(turn, r, self.R) for r in range(self.R)]
        self.owns.append(self._gradients(losses[self.rank], None))
        unused = torch.full_like(self.one.unused, (self.R + 1) / 2 * turn)
        gradients = self._gradients(sum(losses) / self.R, unused)
        self.alone.step()
        self.rights.append(gradients | self.one.weights(self.dtype))
        return {name: [value] * self.R for name, value in self.rights[-1].items()}

    def _gradients(self, loss, unused):
        self.one.zero_grad()
        loss.backward(retain_graph=True)
        self.one.unused.grad = unused
        return self.one.gradients(self.dtype)

    def slips(self, name, turn):
        found = {}
        if (own := self.owns[turn].get(name)) is not None:
            hint = SMALL if self.dtype == torch.float16 else WAIT
            found["this rank's own when the optimizer steps"] = own, hint
        if "unused" in name:
            found["zeros, though it had a gradient"] = torch.zeros(3, dtype=self.dtype), (
                "What no hook has asked for: zeros only where p.grad is None.")
        elif turn:
            found["that of the first step"] = self.rights[0][name], CLEAR
        return found


def _steps(fn, ranks, kind, *compression):
    steps = TwoSteps(fn, ranks, kind, *compression)
    where = f"{ranks}, {kind}{', Compression.fp16' * bool(compression)}"
    yield from beside(where, ranks, steps.call, steps.right, slips=steps.slips,
                      advice=lambda name: WAIT)


def _trial(fn, ranks):
    hvd.init(stall_check=1, stall_shutdown=4)
    yield from _asks(fn, ranks)
    for kind in OPTIMIZERS:
        yield from _steps(fn, ranks, kind)
    yield from _steps(fn, ranks, "SGD with momentum", hvd.Compression.fp16)
    net = Net()
    optimizer = fn(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    net.loss(0, 0, 1).backward()
    hvd.barrier()  # asked for later than all of them: they are done
    is_refused = refuses(net.loss(1, 0, 1).backward)
    optimizer.step()
    yield partial(expect, is_refused, f"{ranks}: a second backward before step() raises no "
                  "ValueError", "In the hook ask whether the parameter is in `handles` already.")
    hvd.barrier()
    hvd.shutdown()


def check_distributed_optimizer(fn):
    for ranks in (3, 4, 1):
        on_groups(_trial, fn, ranks=ranks, groupings=[(tuple(range(ranks)),)], failures=RAISED,
                  at_once=True)
    yield "equal to one process over 2 steps, with momentum and with Adam, on 1, 3, 4 ranks"
    yield "tied, frozen and unused parameters too, and one that only one rank uses"
    yield "each gradient is asked for once, by its name, while backward goes on"
    yield "with Compression.fp16 half the bytes travel, and the ranks agree as without it"
    yield "a second backward before step() is a ValueError"
