"""The check of all_ranks_finite: one answer for all ranks, by one collective."""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ranklab.checks.data_parallel.sent import OUTSIDE, UNENDED, Sent
from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.ranks import all_ranks_finite

FINITE_LOSS, HUGE = 1.5, 1.5e308  # the largest float64 is 1.8e308
LIMIT = 5  # seconds of a launch
TAKES_PART, CALLS = "whether it takes part in a collective", "collectives that it calls"
ANSWER, TYPE = "the answer", "the type of the answer"
ALONE = "what it calls that leaves the result on one rank"


class Case(NamedTuple):
    """The losses of some of the four ranks; all others are finite."""

    name: str
    losses: dict = {}  # never changed
    dtype: torch.dtype = torch.float32

    def __str__(self):
        return self.name


CASES = (
    Case("all losses are finite"),
    Case("rank 3 has infinity", {3: math.inf}),
    Case("rank 0 has NaN", {0: math.nan}),
    Case("rank 3 has NaN", {3: math.nan}),
    Case("rank 1 has minus infinity", {1: -math.inf}),
    Case("all losses are finite again"),
    Case("ranks 0 and 3 have 1.5e308 in float64, which is finite", {0: HUGE, 3: HUGE},
         torch.float64),
)


def _see(fn, case, ranks):
    """Look without messages first where ranks differ: calls may not depend on a rank's loss."""
    weight = torch.tensor(case.losses.get(dist.get_rank(), FINITE_LOSS), dtype=case.dtype,
                          device=device(), requires_grad=True)
    if not all(map(math.isfinite, case.losses.values())):
        with Sent(rehearsed=True) as sent:
            fn(weight * 1, **ranks.keywords)
        takes_part = sent.tensors or sent.traffic.ops or ranks.size == 1
        yield {TAKES_PART: Must(bool(takes_part), True)}
    loss = weight * 1  # as a model's loss, it has a graph
    with Sent() as sent:
        answer = fn(loss, **ranks.keywords)
    calls, afterwards = sent.traffic.calls, loss.detach().clone()
    if loss.requires_grad:
        loss.backward()
    yield {"the loss afterwards": afterwards,
           "the gradient of loss.backward() afterwards": weight.grad,
           TYPE: Must(type(answer).__name__, "bool"),
           ALONE: Must(sorted({"reduce", "gather"} & {*calls}), []), ANSWER: answer,
           **sent.ended(ranks), CALLS: AtMost(calls.total(), 1)}


def by_math(loss, group=None):
    losses = [None] * dist.get_world_size(group)
    dist.all_gather_object(losses, loss.item(), group=group)
    return all(map(math.isfinite, losses))


FLAG = "torch.isfinite(loss).all().to(torch.int32)"
REDUCE, MIN = "dist.all_reduce(finite, dist.ReduceOp.MIN, group=group)", "dist.ReduceOp.MIN"
RETURN, LOOKS = "return bool(finite)", "return bool(torch.isfinite(finite))"
FINITE = Proof(
    all_ranks_finite,
    Stage({"the loss, with its graph, is unchanged": (),
           "the same answer on all of 1, 2, 3, 4 ranks: NaN and infinity on one rank are seen by "
           "all": (TAKES_PART, TYPE, ALONE, ANSWER),
           "one collective; right in a group that is not all ranks": (UNENDED, CALLS, OUTSIDE)},
          _see, CASES, (4,), (ALL, *GROUPS), oracle=by_math, launch={"timeout": LIMIT}),
    mistakes=(
        Slip("Each rank looks only at its own loss: reduce the flag over all ranks, then look at "
             "it.",
             (REDUCE, "")),
        Slip("All ranks must make the same calls: reduce on every rank first, then look at the "
             "result.",
             ("finite =", "if not torch.isfinite(loss):\n        return False\n    finite ="),
             ("finite =", "if torch.isfinite(loss):\n        return True\n    finite =")),
        Slip("One non-finite loss decides for all ranks: the MIN of the flags is 0 if any flag is "
             "0.",
             (MIN, MIN.replace("MIN", "MAX")), (f", {MIN}", "")),
        Slip("Pass `group` on: dist.all_reduce(flag, op, group=group).", (", group=group", "")),
        Slip("In a group there are fewer ranks: dist.get_world_size(group).",
             (f", {MIN}", "", RETURN, "return finite.item() == dist.get_world_size()")),
        Slip("The answer is not the reduced flag. all_reduce works in place and returns None: "
             "reduce, then return bool(flag).",
             (REDUCE, f"finite = {REDUCE}"), (REDUCE, "", RETURN, f"return {REDUCE}")),
        Slip("Return a bool, on every rank: bool(flag).", (RETURN, "return finite"),
             (RETURN, "return finite.item()")),
        Slip("Only one rank decides or gets the result. all_reduce combines the flags of all ranks "
             "and leaves the result on every rank.",
             (REDUCE, f"dist.reduce(finite, op={MIN}, group=group, group_dst=0)"),
             (REDUCE, "dist.broadcast(finite, group=group, group_src=0)")),
        Slip("Infinity and minus infinity are not finite either: torch.isfinite catches both.",
             ("torch.isfinite(loss)", "(~torch.isnan(loss))"),
             ("torch.isfinite(loss)", "(loss < torch.inf)")),
        Slip("NaN is not finite either: torch.isfinite catches it.",
             ("torch.isfinite(loss)", "(~torch.isinf(loss))")),
        Slip("1.5e308 is finite, but too large for float32, and sums of it overflow. Check whether "
             "each loss is finite in its own dtype, and reduce a flag (0 or 1).",
             ("(loss)", "(loss.float())"),
             (FLAG, "loss.detach().clone()", MIN, "dist.ReduceOp.SUM", RETURN, LOOKS)),
        Slip("backward still needs the loss's graph, and detach_() cuts the loss off from it. "
             "torch.isfinite(loss) already returns a separate tensor.",
             ("(loss)", "(loss.detach_())")),
        Slip("The loss has a graph, so loss.numpy() fails. torch.isfinite(loss) returns a separate "
             "tensor without a graph.",
             ("torch.isfinite(loss)", "torch.tensor(np.isfinite(loss.numpy()))"), np=np),
        Slip("all_reduce works in place, and here it changes the loss. Reduce a separate flag.",
             (FLAG, "loss", MIN, "dist.ReduceOp.SUM", RETURN, LOOKS),
             (FLAG, "loss.detach()", MIN, "dist.ReduceOp.SUM", RETURN, LOOKS)),
        Slip("MIN over losses hides infinity, MAX hides minus infinity, and comparisons can lose "
             "NaN. Reduce a flag (0 or 1) with MIN.",
             (FLAG, "loss.detach().abs()", MIN, "dist.ReduceOp.MAX", RETURN, LOOKS),
             (FLAG, "loss.detach().clone()", RETURN, LOOKS)),
        Slip("A value is kept from an earlier call: make a new flag in every call.",
             ("group=None", "group=None, kept=torch.ones((), dtype=torch.int32)",
              FLAG, "kept.mul_(torch.isfinite(loss))")),
        Slip("async_op=True returns a handle: the flag is ready only after the handle's wait() has "
             "returned.",
             (REDUCE, f"{REDUCE[:-1]}, async_op=True)"),
             (REDUCE, f"finite = {REDUCE[:-1]}, async_op=True)")),
        Slip("One all_reduce of one number is enough: every collective costs latency, and "
             "gathering objects takes two.", by_math,
             (REDUCE, f"{REDUCE}\n    dist.barrier(group=group)")),
    ), hints=(
        "Turn the loss into a flag first: 1 for finite, 0 for not.",
        "Which reduction of the flags is 1 only if all are 1? Look through dist.ReduceOp.",
        "dist.all_reduce(flag, dist.ReduceOp.MIN, group=group), then bool(flag)."))
