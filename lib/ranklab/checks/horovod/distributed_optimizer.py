"""The check of distributed_optimizer: its steps beside one process that sees all batches."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import ranklab.horovod as hvd
from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.trial import refuses
from ranklab.engine import device

WAIT = ("step() must wait for every handle, and put what synchronize() returns into p.grad, also "
        "where that was None, before the optimizer's own step begins.")
SMALL = ("With fp16 the average is in the small copy, not in p.grad: p.grad = "
         "compression.decompress(synchronize(handle), ctx).")
CLEAR = "Are the handles of the last step still there? handles.clear() at the end of wait."
HINTS = {  # what was raised or seen, and a hint about it
    ".*fp16: p.grad of .* still this rank's own": SMALL, ".*still this rank's own": WAIT,
    ".* is that of the first call": CLEAR,
    ".*p.grad of unused is zeros": "What no hook has asked for: zeros only where p.grad is None.",
    ".* has waited .*": f"In the first step all ranks asked for it, and now some did not. {CLEAR}",
    ".*noname.*": "Without a name tensors are matched by their number, and ranks are ready in "
    "different orders: pass name=.",
    "RuntimeError: .*doesn't require grad.*": "A frozen parameter takes no hook: skip those with "
    "requires_grad False.",
    "ValueError: .*still in the works.*": "It is asked for twice before anybody waits: by a hook "
    "and then by step(), or by every hook, because a lambda in a loop sees the last parameter "
    "only.",
    "RuntimeError: .*dtype.*": "Each parameter has its own type, and its own ctx: zeros_like(p) "
    "where there is no gradient, and the ctx of this very gradient.",
}


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
        self.trained = {n: p for n, p in sorted(self.to(device()).named_parameters())
                        if p.requires_grad}

    def backward(self, step, rank, R):
        """Gradients of `rank` in this step; in step 1 `unused` has one that no hook has seen."""
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, 8, generator=draw).tensor_split(R)[rank].to(device()).split(4, dim=1)
        x = self.two(torch.tanh(self.frozen(self.one(x)) + self.tied(x)))
        nn.functional.mse_loss(x + self.seldom.float() if rank == R - 1 else x, y).backward()
        if step == 1:
            self.unused.grad = torch.full_like(self.unused, rank + 1)

    def sgd(self):
        """With momentum, and two groups of different learning rates; `unused` is in the first."""
        seldom, *others = self.parameters()
        return torch.optim.SGD([{"params": others[:3]},
                                {"params": [seldom, *others[3:]], "lr": 0.05}], lr=0.1,
                               momentum=0.9)


def _asks(fn, ranks):
    """What is asked for in one step, and when; here all ranks are ready in one order."""
    net, thread = Net(), hvd.world.background()
    given = net.sgd()
    optimizer = fn(given, net.named_parameters(), hvd.Compression.fp16)
    yield partial(expect, optimizer is given, f"it returns another object than the optimizer, a "
                  f"{type(optimizer).__name__}", "Hook into it, and return it.")
    submit, asked, waited, is_backward = thread.submit, [], [], True

    def watched(*handles):
        for handle in handles:
            handle.finished.wait = lambda wait=handle.finished.wait: (
                waited.append(is_backward), wait())
            asked.append(handle.request)
        submit(*handles)

    thread.submit = watched
    net.backward(0, 0, 2)
    is_backward, in_time = False, len(asked)
    had = {name for name, p in net.trained.items() if p.grad is not None}
    optimizer.step()
    thread.submit = submit
    names, dtypes = sorted(each.name for each in asked), {each.dtype for each in asked}
    lacks = sorted(net.trained.keys() - {*names})
    for is_so, what, hint in (
        (in_time, "asks for no average in backward()", "Nothing travels while it computes."),
        (not any(waited), "waits in backward()", "In the hook only ask: step() waits."),
        (not lacks or had & {*lacks}, f"does not ask for {lacks}", "Their hooks never ran, and "
         "other ranks may wait: before step() waits, it must ask for these too, with zeros where "
         "this rank has no gradient."),
        (names == [*net.trained], f"asks for {names}, not for {[*net.trained]}",
         "Each parameter with requires_grad once."),
        (dtypes == {torch.float16}, f"asks with Compression.fp16 for averages of {dtypes}",
         "small, ctx = compression.compress(p.grad): ask for the average of `small`."),
    ):
        yield partial(expect, is_so, f"{ranks} {what}", hint)


def _steps(fn, ranks, *compression):
    """Two steps beside one process that computes the gradients of all ranks, and takes the mean."""
    rank, R, net, one, at_step, owns = dist.get_rank(), ranks.size, Net(), Net(), {}, []
    optimizer, alone = fn(net.sgd(), net.named_parameters(), *compression), one.sgd()
    optimizer.register_step_pre_hook(lambda *_: at_step.update(
        {f"p.grad of {name}": p.grad if p.grad is None else p.grad.clone()
         for name, p in net.trained.items()}))

    def call(turn):
        optimizer.zero_grad()
        net.backward(turn, rank, R)
        optimizer.step()
        return dict(at_step)

    def right(turn):
        of_rank = []
        for r in range(R):
            one.zero_grad()
            one.backward(turn, r, R)
            of_rank.append({name: torch.zeros_like(p) if p.grad is None else p.grad
                            for name, p in one.trained.items()})
        for name, p in one.trained.items():
            p.grad = sum(each[name] for each in of_rank) / R
        alone.step()
        owns.append({f"p.grad of {name}": own for name, own in of_rank[rank].items()})
        return {f"p.grad of {name}": [p.grad.clone()] * R for name, p in one.trained.items()}

    yield from beside(f"{ranks}{', Compression.fp16' * bool(compression)}", ranks, call, right,
                      own=lambda turn: owns[turn], advice=lambda name: WAIT,
                      through=torch.float16 if compression else torch.float32)


def _trial(fn, ranks):
    hvd.init(stall_check=1, stall_shutdown=4)
    yield from _asks(fn, ranks)
    yield from _steps(fn, ranks)
    yield from _steps(fn, ranks, hvd.Compression.fp16)
    net = Net()
    optimizer = fn(net.sgd(), net.named_parameters())
    net.backward(0, 0, 1)
    hvd.barrier()  # asked for later than all of them: they are done
    is_refused = refuses(net.backward, 0, 0, 1)
    optimizer.step()
    yield partial(expect, is_refused, f"{ranks}: a second backward before step() raises no "
                  "ValueError", "In the hook ask whether the parameter is in `handles` already.")
    hvd.barrier()
    hvd.shutdown()


def check_distributed_optimizer(fn):
    for ranks in (3, 1):
        on_groups(_trial, fn, ranks=ranks, groupings=[(tuple(range(ranks)),)], failures=HINTS,
                  at_once=True)
    yield "equal to one process over 2 steps, with momentum, on 1 and 3 ranks"
    yield "tied, frozen and unused parameters too, and one that only one rank uses"
    yield "each gradient is asked for once, by its name, while backward goes on"
    yield "with Compression.fp16 half the bytes travel, and the ranks agree as without it"
    yield "a second backward before step() is a ValueError"
