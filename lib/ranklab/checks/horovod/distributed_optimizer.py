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
OPTIMIZERS = {
    "SGD with momentum": lambda ps: torch.optim.SGD(_two_groups(ps), lr=0.1, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
}
WAIT = ("step() must wait for every handle, and put what synchronize() returns into p.grad, also "
        "where that was None, before the optimizer's own step begins.")
SMALL = ("With fp16 the average is in the small copy, not in p.grad: p.grad = "
         "compression.decompress(synchronize(handle), ctx).")
CLEAR = "What was asked for in a step must be forgotten at its end: handles.clear()."
AS_IT_IS = "What no hook has asked for is asked for as it is: zeros only where p.grad is None."
RAISED = {  # what was raised, and a hint about it
    ".* has waited .*": "In the first step all ranks asked for it, and now some did not: are the "
                        "handles of the last step still there, so that it seems asked for? "
                        "handles.clear() at the end of wait.",
    ".*noname.*": "Without a name tensors are matched by their number, and ranks are ready in "
                  "different orders: pass name=.",
    "RuntimeError: .*doesn't require grad.*": "A frozen parameter takes no hook, and needs none: "
                                              "skip those with requires_grad False.",
    "ValueError: .*still in the works.*": "A name is asked for again before anybody waited for it: "
                                          "by step() after a hook, or by every hook, as a lambda "
                                          "in a loop does, which finds the loop's last one.",
    "RuntimeError: .*dtype.*": "Each parameter has its own type, and its own ctx: zeros_like(p) "
                               "where there is no gradient, and decompress with the ctx that "
                               "compress gave for this very gradient.",
}


def _two_groups(parameters):
    """From the fourth parameter on the learning rate is another one."""
    every = list(parameters)
    return [{"params": every[:3]}, {"params": every[3:], "lr": 0.05}]


class Net(nn.Module):
    """A tied and a frozen parameter, one that only the last rank uses, in float64, and one that
    nobody uses.
    """

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
        x, y = (torch.randn(ROWS, 4, generator=draw).tensor_split(R)[rank].to(device())
                for _ in "xy")
        x = self.two(torch.tanh(self.frozen(self.one(x)) + self.tied(x)))
        return nn.functional.mse_loss(x + self.seldom.float() if rank == R - 1 else x, y)

    def trained(self):
        """`unused` is the last of them."""
        return {name: p for name, p in sorted(self.named_parameters()) if p.requires_grad}

    def gradients(self):
        return {f"the gradient of {name}": None if p.grad is None else p.grad.clone()
                for name, p in self.trained().items()}

    def weights(self):
        return {f"{name} after the step": p.detach().clone()
                for name, p in self.named_parameters()}


def _asks(fn, ranks):
    """What is asked for in one step, and when; here all ranks are ready in one order."""
    net, thread = Net(), background()
    given = OPTIMIZERS["SGD with momentum"](net.parameters())
    optimizer = fn(given, net.named_parameters())
    yield partial(expect, optimizer is given, f"it returns another object than the optimizer, a "
                  f"{type(optimizer).__name__}", "Its step() must change: hook into that optimizer "
                  "itself, and return it. A scheduler may hold it already.")
    submit, asked, waited, is_backward = thread.submit, [], [], True

    def watched(*handles):
        for handle in handles:
            handle.finished.wait = lambda wait=handle.finished.wait: (
                waited.append(is_backward), wait())
            asked.append(handle.request.name)
        submit(*handles)

    thread.submit = watched
    net.loss(0, 0, 2).backward()
    is_backward, in_time = False, len(asked)
    had = {name for name, p in net.trained().items() if p.grad is not None}
    optimizer.step()
    thread.submit = submit
    lacks = sorted(net.trained().keys() - {*asked})
    yield partial(expect, in_time, f"{ranks} asks for no average before backward() has ended",
                  "Then nothing travels while it computes. Ask in the parameter's hook.")
    yield partial(expect, not any(waited), f"backward() on {ranks} waits until an average is there",
                  "In the hook only ask, allreduce_async_, and keep the handle; step() is the one "
                  "to synchronize.")
    yield partial(expect, not lacks or had & {*lacks}, f"{ranks} does not ask for {lacks}", "They "
                  "got no gradient here, so their hooks never ran. Other ranks may have one, and "
                  "wait: before step() waits it asks for zeros, where it has no gradient.")
    yield partial(expect, sorted(asked) == [*net.trained()], f"{ranks} asks for {sorted(asked)}, "
                  f"not for {[*net.trained()]}", "Each parameter with requires_grad once.")


class TwoSteps:
    """The same two steps on this rank, and in one process that does the work of all ranks.

    In the second one `unused` has a gradient that no hook has seen.
    """

    def __init__(self, fn, ranks, kind, *compression):
        self.rank, self.R, self.net, self.one = dist.get_rank(), ranks.size, Net(), Net()
        self.dtype = torch.float16 if compression else torch.float32  # as exact as it can be
        self.optimizer = fn(OPTIMIZERS[kind](self.net.parameters()), self.net.named_parameters(),
                            *compression)
        self.optimizer.register_step_pre_hook(lambda *_: self.at_step.update(self.net.gradients()))
        self.alone = OPTIMIZERS[kind](self.one.parameters())
        self.at_step, self.rights, self.owns, self.sent = {}, [], [], []

    def call(self, turn):
        self.optimizer.zero_grad()
        with hvd.counted() as counts:
            self.net.loss(turn, self.rank, self.R).backward()
            if turn:
                self.net.unused.grad = torch.full_like(self.net.unused, self.rank + 1)
            self.optimizer.step()
        self.sent.append(sum(op.payload_bytes for op in counts.data.ops))
        return self.rounded(self.at_step | self.net.weights())

    def right(self, turn):
        losses, one = [self.one.loss(turn, r, self.R) for r in range(self.R)], self.one
        for loss in (losses[self.rank], sum(losses) / self.R):
            one.zero_grad()
            loss.backward(retain_graph=True)
            self.owns.append(self.rounded(one.gradients()))
        self.owns.pop()  # the second one was of all ranks
        one.unused.grad = torch.full_like(one.unused, (self.R + 1) / 2 * turn)
        gradients = one.gradients()
        self.alone.step()
        self.rights.append(self.rounded(gradients | one.weights()))
        return {name: [value] * self.R for name, value in self.rights[-1].items()}

    def rounded(self, values):
        return {name: None if value is None else value.to(self.dtype)
                for name, value in values.items()}

    def slips(self, name, turn):
        found = {}
        if (own := self.owns[turn].get(name)) is not None:
            hint = SMALL if self.dtype == torch.float16 else WAIT
            found["this rank's own when the optimizer steps"] = own, hint
        if "unused" in name:
            found["zeros, though it had a gradient"] = torch.zeros(3, dtype=self.dtype), AS_IT_IS
        elif turn:
            found["that of the first step"] = self.rights[0][name], CLEAR
        return found


def _steps(fn, ranks, kind, *compression):
    steps = TwoSteps(fn, ranks, kind, *compression)
    where = f"{ranks}, {kind}{', Compression.fp16' * bool(compression)}"
    yield from beside(where, ranks, steps.call, steps.right, slips=steps.slips,
                      advice=lambda name: WAIT)
    if compression and ranks.size > 1:
        half = 2 * sum(p.numel() for p in steps.net.trained().values())
        yield partial(expect, steps.sent[0] == half, f"{where}: it averages {steps.sent[0]} bytes "
                      f"a step, not {half}", "small, ctx = compression.compress(p.grad): ask for "
                      "the average of `small`, and decompress(result, ctx) when it is there.")


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
                  "ValueError", "The average that was asked for lacks the second gradient. In the "
                  "hook ask whether the parameter is in `handles` already.")
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
