"""The check of distributed_optimizer: its steps compared with gradients averaged by torch."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import ranklab.horovod as hvd
from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told
from ranklab.engine import device
from ranklab.horovod import Compression, Sum, distributed_optimizer, size
from ranklab.meter import Traffic

CASES = FIRST, ASKED, STEPS, SMALL, IDLE, TWICE = (
    "one backward with Compression.fp16", "one step with Compression.fp16", "two steps",
    "two steps, Compression.fp16", "one step without a backward on rank 0",
    "a second backward before step()")
RETURNED, OWN = "the optimizer that is returned", "messages that it sends itself"
EARLY, WAITED = "the averages asked for in backward()", "waits in backward()"
LATE = "averages that are not waited for before the optimizer's own step"
NAMES, TYPES = "all averages that are asked for", "the types of what it asks for"
REFUSED, RAISED = "what it raises", "what backward() raises"
TRAINED = "one.bias", "one.weight", "seldom", "two.bias", "two.weight", "unused"
FROZEN = "frozen.bias", "frozen.weight"


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
        """Compute the gradients of `rank` in this step.

        In step 1 `unused` has a gradient that no hook has seen.
        """
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, 8, generator=draw).tensor_split(R)[rank].to(device()).split(4, dim=1)
        factors = torch.randn(4, generator=draw, dtype=torch.float64).to(device())
        x = self.two(torch.tanh(self.frozen(self.one(x)) + self.tied(x)))
        loss = nn.functional.mse_loss(x, y)
        (loss + self.seldom @ factors if rank == R - 1 else loss).backward()
        if step == 1:
            self.unused.grad = torch.full_like(self.unused, rank + 1)

    def sgd(self):
        """Make SGD with momentum and two groups of different learning rates.

        `unused` is in the first group.
        """
        seldom, *rest = self.parameters()
        return torch.optim.SGD([{"params": rest[:3]},
                                {"params": [seldom, *rest[3:]], "lr": 0.05}], lr=0.1,
                               momentum=0.9)


# --- what is seen ---------------------------------------------------------------------------------

class Error(str):
    """The name of an error's class. Its `text` is shown, but not compared."""

    text = ""


def _error_of(call, kind):
    try:
        call()
    except kind as error:
        name = Error(type(error).__name__)
        name.text = str(error)
        return name
    return Error("nothing")


def _told(got, due):
    return f"{got}: {got.text}" if got.text else ""


def _see(fn, case, ranks):
    """Look at a case. All cases share one Horovod; requests before a barrier are done after it."""
    if case == CASES[0]:
        hvd.init(stall_check=1, stall_shutdown=4)
    else:
        hvd.barrier()
    if case == FIRST:
        net = Net()
        fn(net.sgd(), net.named_parameters(), Compression.fp16)
        yield {RAISED: Told(_error_of(lambda: net.backward(0, 0, 2), ValueError), _told)}
    elif case == ASKED:
        yield from _asks(fn)
    elif case == TWICE:
        yield from _twice(fn)
    else:
        yield from _steps(fn, ranks, case == IDLE, *[Compression.fp16] * (case == SMALL))
    if case == CASES[-1]:
        hvd.barrier()
        hvd.shutdown()


def _asks(fn):
    """Record the requests of one step, and when; here all ranks are ready in the same order."""
    net, thread = Net(), hvd.world.background()
    sgd = net.sgd()
    optimizer = fn(sgd, net.named_parameters(), Compression.fp16)
    yield {RETURNED: Must("the one that was given" if optimizer is sgd else
                          f"a {type(optimizer).__name__}", "the one that was given")}
    submit, requests, waits, at_step = thread.submit, [], [], []
    optimizer.register_step_pre_hook(lambda *_: at_step.extend({*waits}))

    def watched(*handles):
        for handle in handles:
            name, wait = handle.request.name, handle.finished.wait
            handle.finished.wait = lambda name=name, wait=wait: (waits.append(name), wait())
            requests.append(handle.request)
        submit(*handles)

    thread.submit = watched
    with Traffic() as traffic:
        outcome = _error_of(lambda: net.backward(0, 0, 2), ValueError)
        early, in_backward = sorted(each.name for each in requests), len(waits)
        had = [name for name, p in net.trained.items() if p.grad is not None]
        if outcome == "nothing":
            optimizer.step()
    thread.submit = submit
    names = sorted(each.name for each in requests)
    yield {RAISED: Told(outcome, _told),
           EARLY: Must(early, had),
           WAITED: AtMost(in_backward, 0),
           NAMES: Must(names, [*net.trained]),
           TYPES: Must(sorted({str(each.dtype) for each in requests}), ["torch.float16"]),
           LATE: AtMost(len(names) - len(at_step), 0),
           OWN: AtMost(len(traffic.ops), 0)}


def _steps(fn, ranks, idle, *compression):
    """Run two steps; or one, in which rank 0 has nothing to do and none of its hooks runs. Values
    sent in 16 bits are compared in 16 bits.
    """
    net, alone, at_step = Net(), Net(), {}
    optimizer = fn(net.sgd(), net.named_parameters(), *compression)
    optimizer.register_step_pre_hook(lambda *_: at_step.update(
        {name: p.grad if p.grad is None else p.grad.clone() for name, p in net.trained.items()}))

    def shown(x):
        return x.half() if compression and isinstance(x, torch.Tensor) else x

    def backward(net, step):
        if not idle or ranks.index > 0:
            net.backward(step, ranks.index, ranks.size)

    for step in (0,) if idle else (0, 1):
        alone.load_state_dict(net.state_dict())  # its gradients stay this rank's own
        alone.zero_grad()
        backward(alone, step)
        own = {name: torch.zeros_like(p) if p.grad is None else p.grad
               for name, p in alone.trained.items()}
        optimizer.zero_grad()
        outcome = _error_of(lambda: backward(net, step), ValueError)
        if outcome != "nothing":
            yield {RAISED: Told(outcome, _told)}
            return
        optimizer.step()
        yield {f"p.grad of {name}": Told(shown(at_step.get(name)), partial(
                   _as_own, shown(own[name]).cpu())) for name in net.trained} | {
            f"{name} afterwards": shown(p) for name, p in net.named_parameters()} | {
            "the types of p.grad": Must(
                [str(getattr(at_step.get(name), "dtype", None)) for name in net.trained],
                [str(p.dtype) for p in net.trained.values()]), RAISED: Told(outcome, _told)}


def _as_own(own, got, due):
    return "still this rank's own" * (got is not None and torch.equal(got, own))


def _twice(fn):
    net = Net()
    optimizer = fn(net.sgd(), net.named_parameters())
    net.backward(0, 0, 1)
    hvd.barrier()
    outcome = _error_of(lambda: net.backward(0, 0, 1), Exception)
    optimizer.step()
    yield {REFUSED: Must(outcome, "ValueError")}


# --- right for another reason ---------------------------------------------------------------------

def by_torch(optimizer, named_parameters, compression=None):
    """Average in step(), by torch's all-reduce, and without Horovod."""
    parameters = [p for _, p in named_parameters if p.requires_grad]

    def average(*_):
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    optimizer.register_step_pre_hook(average)
    return optimizer


# --- mistakes -------------------------------------------------------------------------------------

HOOKED = "register_post_accumulate_grad_hook(ask)"
ASK = "handles[p] = allreduce_async_(small, name=names[p], op=Average), ctx"
COMPRESS = "compression.compress(p.grad)"
AVERAGE = "compression.decompress(synchronize(handle), ctx)"
PUT, CLEAR = f"p.grad = {AVERAGE}", "handles.clear()"
FILLED = "torch.zeros_like(p) if p.grad is None else p.grad"
IN_TURN = "for p, (handle, ctx) in handles.items()"
REFUSES, LACKS, IS_TRAINED = "if p in handles:", "if p not in handles", "if p.requires_grad"
GROUP = 'p in {{*optimizer.param_groups[{}]["params"]}}'.format
OPTIMIZER = Proof(
    distributed_optimizer,
    Stage({"each gradient's average is requested once, by its name, during backward; with "
           "Compression.fp16 half the bytes travel": (RETURNED, EARLY, WAITED, NAMES, TYPES, LATE,
                                                      OWN, RAISED),
           "equal to one process over 2 steps, with momentum, on 1 and 3 ranks; also tied, frozen "
           "and unused parameters, and one that only one rank uses": (
               *(name.format(each) for each in (*TRAINED, *FROZEN)
                 for name in ("p.grad of {}", "{} afterwards")), "the types of p.grad"),
           "a second backward before step() is a ValueError": (REFUSED,)},
          _see, CASES, (1, 3), oracle=by_torch),
    mistakes=(
        # the average
        Slip("That is the sum instead of the mean: use op=Average.", ("op=Average", "op=Sum"),
             Sum=Sum),
        Slip("You divide twice: op=Average already divides by the number of ranks.",
             (AVERAGE, f"{AVERAGE} / size()"), (COMPRESS, COMPRESS.replace("p.grad",
                                                                          "p.grad / size()")),
             size=size),
        Slip("Ask for the average of the gradient p.grad, not of the parameter p.",
             (COMPRESS, "compression.compress(p.detach().clone())")),
        Slip("The average is in the tensor that you sent, which with fp16 is the small copy: "
             "p.grad = compression.decompress(synchronize(handle), ctx).", (PUT, AVERAGE)),
        Slip("The average is in the copy: decompress what synchronize() returns, and set p.grad to "
             "it.",
             (PUT, AVERAGE, COMPRESS, COMPRESS.replace("p.grad", "p.grad.clone()"))),
        Slip("Put the average into p.grad, even where p.grad was None.",
             ("wait(*_):", "wait(*_):\n        had = {p for p in names if p.grad is not None}",
              AVERAGE, f"[None, {AVERAGE}][p in had]")),
        Slip("All gradients must be averaged before the optimizer's own step begins.",
             ("register_step_pre_hook", "register_step_post_hook")),
        # when, and how often
        Slip("No communication overlaps with backward: ask in the hook of each parameter.",
             (f"p.{HOOKED}", "p")),
        Slip("Don't wait in the hook, only ask: step() waits.",
             (ASK, f"{ASK}\n        synchronize(handles[p][0])"),
             (ASK, f"{ASK}\n        p.grad = compression.decompress(synchronize(handles[p][0]), "
                   "ctx)")),
        Slip("Already the first backward() raises a ValueError. Each hook refuses only its own "
             "parameter, and only if it was asked for before: if p in handles. (A lambda in a "
             "loop sees only the last p.)",
             (HOOKED, HOOKED.replace("ask", "lambda _: ask(p)"), REFUSES, "if False:"),
             (HOOKED, HOOKED.replace("ask", "lambda _: ask(p)"))),
        Slip("This hook runs before p.grad is set: use register_post_accumulate_grad_hook.",
             (HOOKED, "register_hook(lambda _, p=p: ask(p))")),
        Slip("A second backward before step() must raise a ValueError: raise it in the hook if "
             "this parameter's average was already asked for in this step.",
             ("raise ValueError", "str"), (REFUSES, "if False:"),
             (REFUSES, "if p in handles and not handles[p][0].finished.is_set():")),
        Slip("This is the caller's mistake, so raise a ValueError.",
             ("raise ValueError", "raise RuntimeError")),
        # what no hook has asked for
        Slip("Some hooks never ran, and other ranks may be waiting: before step() waits, it must "
             "ask for the rest, with zeros where this rank has no gradient.", (LACKS, "if False"),
             (LACKS, f"{LACKS} and p.grad is not None")),
        Slip("In wait, p.grad is None if backward did not use p: set it to torch.zeros_like(p) "
             "before you ask.", (f"p.grad = {FILLED}", "p.grad = p.grad")),
        Slip("A rank on which no hook ran must still ask for all its parameters: other ranks may "
             "have a gradient and be waiting.",
             ("wait(*_):", "wait(*_):\n        if not handles:\n            return")),
        Slip("Ask for the parameters of all parameter groups, including those that no hook has "
             "asked for.",
             *((LACKS, f"{LACKS} and {GROUP(group)}") for group in (0, 1))),
        Slip("Use zeros only where p.grad is None: a script may have set p.grad without a hook.",
             (FILLED, "torch.zeros_like(p)")),
        # for this step only
        Slip("The last step's handles are still there: at the end of wait, call handles.clear().",
             (CLEAR, "pass"), (REFUSES, "if False:", CLEAR, "pass"),
             (REFUSES, "if False:", CLEAR, "pass", ASK,
              "handles.setdefault(p, (allreduce_async_(small, name=names[p]), ctx))")),
        # names and types
        Slip("Without a name, tensors are matched by their number, but ranks are ready in "
             "different orders: pass name=.", ("name=names[p], ", "")),
        Slip("Ask for the average of `small`: small, ctx = compression.compress(p.grad).",
             (COMPRESS, "p.grad, None", AVERAGE, "synchronize(handle)"),
             (ASK, ASK.replace("(small", "(p.grad"))),
        Slip("Use the compression that you are given, not a fixed one.",
             (COMPRESS, "Compression.fp16.compress(p.grad)",
              AVERAGE, "Compression.fp16.decompress(synchronize(handle), ctx)")),
        Slip("Convert the average back to the gradient's dtype: compression.decompress(reduced, "
             "ctx).",
             (AVERAGE, "synchronize(handle)")),
        Slip("Each parameter has its own dtype and ctx: use zeros_like(p) where there is no "
             "gradient, and the ctx that belongs to this gradient.",
             (FILLED, FILLED.replace("zeros_like(p)", "zeros(p.shape, device=p.device)")),
             (IN_TURN, f"*_, (_, ctx) = handles.values()\n        {IN_TURN.replace('ctx', '_')}")),
        # which parameters
        Slip("A frozen parameter can't have a hook: skip parameters whose requires_grad is False.",
             (f" {IS_TRAINED}", "")),
        Slip("Hook each parameter with requires_grad once, in all parameter groups.",
             *((IS_TRAINED, f"{IS_TRAINED} and {GROUP(group)}") for group in (0, 1))),
        Slip("Hook into the optimizer, and return that same optimizer.",
             ("return optimizer", "return names"),
             ("return optimizer", "return None")),
    ), hints=(
        "Act at two moments: when backward has computed a gradient (ask for its average, keep the "
        "handle), and just before the optimizer's own step (wait for all handles).",
        "In wait, first ask for every average that no hook asked for, with zeros where p.grad is "
        "None.",
        "ask: small, ctx = compression.compress(p.grad); handles[p] = allreduce_async_(small, "
        "name=names[p], op=Average), ctx. wait: p.grad = compression.decompress("
        "synchronize(handle), ctx) for all; handles.clear().",
    ))
