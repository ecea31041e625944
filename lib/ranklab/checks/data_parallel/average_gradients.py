"""The check of average_gradients: compared with the mean of known gradients."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.data_parallel.sent import COST, OUTSIDE, Sent
from ranklab.checks.data_parallel.toys import toy_with_more
from ranklab.checks.prover import ALL, GROUPS, Proof, Slip, Stage, Told
from ranklab.data_parallel import average_gradients

LACKED = "wide.weight", "first.bias", "twice.bias"  # on rank 0; two are of one shape and type
LIMIT = 5  # seconds; a rank that skips a parameter waits for ever


def gradient_of(name, p, rank, turn):
    """Return the gradient that `rank` has for a parameter: sums and means of these are exact.

    They are not whole numbers, and R does not divide them.
    """
    random = torch.Generator().manual_seed(1000 * rank + 7 * turn + sum(map(ord, name)))
    most = 10 if p.dtype == torch.bfloat16 else 100
    return 1.5 * torch.randint(1 - most, most, p.shape, generator=random).to(p.dtype)


def _see(fn, case, ranks):
    """Look at calls without messages first: they may not depend on which gradients a rank has."""
    yield _call(fn, ranks, 0, rehearsed=True)
    yield from [_call(fn, ranks, turn) for turn in (0, 1)]  # what is kept from the first is seen


def _call(fn, ranks, turn, rehearsed=False):
    model = toy_with_more(dist.get_rank())  # not equal: averaging weights would show
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if dist.get_rank() or name not in LACKED:
            p.grad = torch.empty_like(p).copy_(gradient_of(name, p, dist.get_rank(), turn))
    with Sent(rehearsed=rehearsed) as sent:
        fn(model, **ranks.keywords)
    cost = sent.cost(trained.values(), ranks)
    return cost if rehearsed else cost | {
        f"the gradient of `{name}`": Told(p.grad, partial(_as_own, name, dist.get_rank(), turn))
        for name, p in model.named_parameters()} | {
        f"`{name}`": p for name, p in model.named_parameters()}


def _as_own(name, rank, turn, got, due):
    if got is None or due is None:
        return ""
    return "still this rank's own" * torch.equal(got, gradient_of(name, due, rank, turn))


def by_gathering(model, group=None):
    for p in model.parameters():
        if p.requires_grad:
            own = torch.zeros_like(p) if p.grad is None else p.grad
            of_ranks = [torch.empty_like(own, memory_format=torch.contiguous_format)
                        for _ in range(dist.get_world_size(group))]
            dist.all_gather(of_ranks, own.contiguous(), group=group)
            p.grad = torch.stack(of_ranks).mean(0)


CALL = "dist.all_reduce(parameter.grad, group=group)"
DIVIDE = "parameter.grad /= R"
MADE = """        if parameter.grad is None:  # others may have one, and wait for ours
            parameter.grad = torch.zeros_like(parameter)
"""
SKIP = "if not parameter.requires_grad"
AVERAGE = Proof(
    average_gradients,
    Stage({"every gradient is the mean over ranks, on 1, 2, 3, 4 ranks; in three types": (),
           "where a rank has no gradient, it counts as zeros; frozen parameters get none": (),
           "at most one all-reduce for each parameter; gradients travel once, and every handle is "
           "waited for": COST,
           "inside a group it talks only to that group's ranks": (OUTSIDE,)},
          _see, ("a model with frozen, tied and float64 parameters",), (4,), (ALL, *GROUPS),
          oracle=by_gathering, launch={"timeout": LIMIT}),
    mistakes=(
        Slip("That is the sum over ranks: divide it by the number of ranks.", (DIVIDE, "pass")),
        Slip("Divide with /=, not with //=, which rounds down.", (DIVIDE, "parameter.grad //= R")),
        Slip("Average parameter.grad, not the parameter: the weights are already equal, and equal "
             "gradients keep them equal.",
             (DIVIDE, "parameter.data /= R", "all_reduce(parameter.grad",
              "all_reduce(parameter.data")),
        Slip("All ranks must call the same all-reduces in the same order. If this rank has no "
             "gradient, use zeros.",
             (SKIP, "if parameter.grad is None"),
             (MADE, "        if parameter.grad is None:\n            continue\n"),
             (MADE, "", DIVIDE, "parameter.grad.div_(R)")),
        Slip("A rank without a gradient takes part, but it needs the mean as well: create its "
             "parameter.grad.",
             (MADE, "        grad = torch.zeros_like(parameter) if parameter.grad is None else "
              "parameter.grad\n", DIVIDE, "grad /= R", CALL, CALL.replace("parameter.grad", "grad")
              )),
        Slip("Divide by the number of ranks in the group, including those that had no gradient.",
             (MADE, f"        having = torch.tensor(float(parameter.grad is not None))\n{MADE}",
              DIVIDE, "dist.all_reduce(having, group=group)\n        parameter.grad /= having")),
        Slip("Skip parameters with requires_grad=False: if they get a gradient of zeros, an "
             "optimizer with weight decay moves them.", (SKIP, "if False")),
        Slip("The mean must end up in parameter.grad: here you average a copy of it.",
             (DIVIDE, "mean = parameter.grad / R", "all_reduce(parameter.grad", "all_reduce(mean"),
             (CALL, CALL.replace("grad,", "grad.clone(),"))),
        Slip("This gradient is channels-last, so .contiguous(), .flatten() and .reshape(-1) copy "
             "it, but the mean must end up in parameter.grad itself.",
             ("all_reduce(parameter.grad", "all_reduce(parameter.grad.contiguous()")),
        Slip("Some parameters may be float64: torch.zeros_like(parameter) has the right dtype, "
             "shape and device.", ("torch.zeros_like(parameter)", "torch.zeros(parameter.shape)")),
        Slip("Something is left over from an earlier call: make new buffers inside the function on "
             "every call.",
             ("group=None", "group=None, kept={}", "parameter in model.parameters()",
              "i, parameter in enumerate(model.parameters())", CALL,
              "buffer = kept.setdefault((i, parameter.shape), torch.zeros_like(parameter))\n"
              "        dist.all_reduce(buffer.copy_(parameter.grad), group=group)\n"
              "        parameter.grad = buffer")),
        Slip("One all_reduce of each whole gradient is enough: every message pays its own latency.",
             (CALL, "for row in parameter.grad:\n            "
              "dist.all_reduce(row, group=group)")),
        Slip("Send each tensor in its own dtype: float64 loses digits in float32.",
             (DIVIDE, "mean = parameter.grad.float() / R", CALL,
              "dist.all_reduce(mean, group=group)\n        parameter.grad.copy_(mean)")),
        Slip("Send gradients in their own dtype: float32 has twice the bytes of bfloat16.",
             (CALL, "mean = parameter.grad.to(max(parameter.dtype, torch.float32, key=lambda "
              f"dtype: dtype.itemsize))\n        {CALL.replace('parameter.grad', 'mean')}\n"
              "        parameter.grad.copy_(mean)")),
        Slip("Send gradients in their own dtype: float64 takes twice the bytes of float32.",
             (CALL, f"mean = parameter.grad.double()\n        "
              f"{CALL.replace('parameter.grad', 'mean')}\n        parameter.grad.copy_(mean)")),
        Slip("The tied weight is sent twice: model.parameters() lists it once, but state_dict(), "
             "named_parameters(remove_duplicate=False) and a walk over the modules do not.",
             ("model.parameters()",
              "dict(model.named_parameters(remove_duplicate=False)).values()")),
        Slip("Wait for every handle, not just the last: until its wait() returns, a message may be "
             "only half done.", (CALL, f"work = {CALL[:-1]}, async_op=True)\n    work.wait()"),
             (CALL, f"{CALL[:-1]}, async_op=True)")),
        Slip("Until wait() returns, the message is still being read and written: divide before you "
             "send it.",
             ("R = dist.get_world_size(group)", "R, works = dist.get_world_size(group), []", DIVIDE,
              f"works.append({CALL[:-1]}, async_op=True))", CALL,
              "parameter.grad /= R\n    for work in works:\n        work.wait()")),
        Slip("Divide by the number of ranks in the group: dist.get_world_size(group).",
             ("get_world_size(group)", "get_world_size()")),
        Slip("Pass `group` to every collective.", (CALL, CALL.replace(", group=group", ""))),
    ), hints=(
        "For each parameter: one all-reduce of its gradient, in place.",
        "A rank whose gradient is None must send zeros, or the others wait for it. Frozen "
        "parameters have no gradient anywhere: skip them.",
        "for parameter in model.parameters(): if requires_grad: make zeros_like where grad is "
        "None; parameter.grad /= R; dist.all_reduce(parameter.grad, group=group)",
    ))
