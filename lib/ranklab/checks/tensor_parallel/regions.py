"""copy_to_region and reduce_from_region: a sum over ranks, one way only."""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn

from ranklab.checks.prover import Agree, Proof, Slip
from ranklab.checks.tensor_parallel.inputs import (
    COST, GROUP, Whole, in_one_process, normal, seen_of, stages, transposed, whole_numbers,
)
from ranklab.tensor_parallel.regions import copy_to_region, reduce_from_region

STRIDES = ("The tensor that you sum has x's strides (clone() keeps them), and numbers are sent in "
           "memory order: clone(memory_format=torch.contiguous_format).")


class Case(NamedTuple):
    """x of one row, or one row on each rank.

    has_outside  x is also used outside the region
    """

    name: str
    dtype: str = "float32"
    is_transposed: bool = False
    is_frozen: bool = False
    has_outside: bool = False

    def __str__(self):
        return self.name

    def x(self, rows):
        x = whole_numbers(1, rows, 3, 3, dtype=self.dtype)
        return x.requires_grad_(not self.is_frozen)

    def leaf(self, x, ranks):
        """Return this rank's part of x; ranks need not agree on strides."""
        leaf = x.leaf()
        if self.is_transposed and not ranks.index % 2:
            leaf = transposed(leaf.detach()).requires_grad_(leaf.requires_grad)
        return leaf


CASES = (Case("float32"), Case("float64", "float64"), Case("bfloat16", "bfloat16"),
         Case("x is transposed on ranks 0, 2, ...", is_transposed=True),
         Case("x needs no gradient", is_frozen=True))


# --- f --------------------------------------------------------------------------------------------

def _see_copy(fn, case, ranks):
    """Look at rows of the whole value: those each rank reads, and those that all use outside."""
    x, R = Whole(case.x(1)), ranks.size
    local = case.leaf(x, ranks)
    rows = torch.tensor([ranks.index] + [R] * case.has_outside, device=local.device)

    def call():
        y = fn(local, **ranks.keywords)
        return torch.cat([y] + [2 * local] * case.has_outside) if torch.is_tensor(y) else y

    def one():
        return torch.cat([x.tensor] * R + [2 * x.tensor] * case.has_outside)

    weights = whole_numbers(9, R + case.has_outside, 3, 3, dtype=case.dtype)
    yield from seen_of(fn, ranks, call, {"x": local}, one, {"x": x}, Whole(weights, 0, rows),
                       backward=(local.nbytes,))


def summed(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def summed_in_place(x, group):
    dist.all_reduce(x, group=group)
    return x


def gathered_and_added(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts).sum(0)


def summed_as_it_lies(x, group):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def mean(x, group):
    return summed(x, group) / dist.get_world_size(group)


def largest(x, group):
    total = x.clone()
    dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    return total


def on_one_rank(x, group):
    total = x.clone()
    dist.reduce(total, group=group, group_dst=0)
    return total


def of_this_rank(x, group):
    return x / dist.get_world_size(group)


def hook_on_x(x, group=None):
    if x.requires_grad:
        x.register_hook(lambda gradient: summed(gradient, group))
    return x


def hook_where_x_is_frozen(x, group=None):
    y = x.view_as(x)
    y.register_hook(lambda gradient: summed(gradient, group))
    return y


COPY_CALL = "RegionFunction.apply(x, group, identity, all_reduce_sum)"


def _backward(function):
    """Return the edit that puts a different function into the backward of f."""
    return COPY_CALL, f"RegionFunction.apply(x, group, identity, {function})"


COPY = Proof(
    copy_to_region,
    *stages({"x as it is; backward sums its gradient over 4 ranks": (),
             "x may also be used outside, be transposed, or need no gradient; any type": (),
             "two backwards add up; x and the gradients stay unchanged": (),
             "one all-reduce in backward, nothing in forward": COST},
            _see_copy, (CASES[0], Case("x is also used outside", has_outside=True), *CASES[1:])),
    mistakes=(
        Slip("Each rank knows only a part of x's gradient: backward must sum the parts over ranks.",
             (COPY_CALL, "x"), _backward("identity")),
        Slip("This is the wrong way round: every rank already has x, so forward sums nothing. Sum "
             "the gradients, in backward.",
             (COPY_CALL, "RegionFunction.apply(x, group, all_reduce_sum, identity)")),
        Slip("Backward is right, but forward sums x as well. Every rank already has x.",
             (COPY_CALL, "RegionFunction.apply(x, group, all_reduce_sum, all_reduce_sum)")),
        Slip(GROUP, (COPY_CALL, "RegionFunction.apply(x, None, identity, all_reduce_sum)")),
        Slip("Sum the gradients, and don't divide: they are parts of one sum.",
             _backward("mean"), mean=mean),
        Slip(STRIDES, _backward("summed_as_it_lies"), summed_as_it_lies=summed_as_it_lies),
        Slip("The gradient is summed twice. One all-reduce is enough.",
             (COPY_CALL, "RegionFunction.apply(RegionFunction.apply(x, group, identity, "
              "all_reduce_sum), group, identity, all_reduce_sum)"),
             _backward("lambda x, group: summed(summed(x, group), group)"),
             summed=summed),
        Slip("x must keep its dtype.",
             (COPY_CALL, "RegionFunction.apply(x.float(), group, identity, all_reduce_sum)")),
        Slip("all_reduce works in place, but other code still reads the gradient that backward "
             "receives. Give all_reduce a clone().", _backward("summed_in_place"),
             summed_in_place=summed_in_place),
        Slip("No gradient comes back to x: backward returns nothing, or x is cut out of the "
             "graph, as by detach().",
             (COPY_CALL, "RegionFunction.apply(x.detach().requires_grad_(), group, identity, "
              "all_reduce_sum)")),
        Slip("A hook on x itself also sees gradients from outside, and every call adds another "
             "hook. Hook x.view_as(x), or write an autograd.Function.", hook_on_x),
        Slip("x may not need a gradient, for example after a frozen embedding. Then there is "
             "nothing to hook.",
             hook_where_x_is_frozen),
        Slip("Forward must pass x on unchanged.",
             (COPY_CALL, "RegionFunction.apply(x.clone().zero_(), group, identity, "
              "all_reduce_sum)")),
        Slip("Add the gradients: use ReduceOp.SUM, the default.",
             _backward("largest"), largest=largest),
        Slip("Every rank needs the sum, not just one of them: use all_reduce.",
             _backward("on_one_rank"), on_one_rank=on_one_rank),
        Slip("This gathers all gradients, and then adds them. An all-reduce sends less.",
             _backward("gathered_and_added"), gathered_and_added=gathered_and_added),
    ), hints=(
        "All ranks read the same x, each for its own part. What does each rank know about x's "
        "gradient?",
        "In forward, x is passed on unchanged. In backward, the ranks' gradients are parts of one "
        "sum.",
        "return RegionFunction.apply(x, group, identity, ...), with `all_reduce_sum` at the end",
    ))


# --- g --------------------------------------------------------------------------------------------

def _see_reduce(fn, case, ranks):
    """Look at a sum whose row r of x is on rank r."""
    x = Whole(case.x(ranks.size), 0, ranks.at(ranks.size))
    local = case.leaf(x, ranks)
    yield from seen_of(fn, ranks, lambda: fn(local, **ranks.keywords), {"x": local},
                       lambda: x.tensor.sum(0, keepdim=True), {"x": x},
                       Whole(whole_numbers(9, 1, 3, 3, dtype=case.dtype)), (local.nbytes,))
    rounds = normal(dist.get_rank(), 3, 3)
    total = rounds if fn is in_one_process else fn(rounds, **ranks.keywords)
    yield {"the sum of numbers that round": Agree(total)}


def added_around_x(x, group=None):
    return x + (summed(x.detach(), group) - x.detach())


def gathered_around_x(x, group=None):
    return x + (gathered_and_added(x.detach(), group) - x.detach())


REDUCE_CALL = "RegionFunction.apply(x, group, all_reduce_sum, identity)"


def _forward(function):
    """Return the edit that puts a different function into the forward of g."""
    return REDUCE_CALL, f"RegionFunction.apply(x, group, {function}, identity)"


REDUCE = Proof(
    reduce_from_region,
    *stages({"the sum over 4 ranks; its gradient goes to each of them": (),
             "x may be transposed, or need no gradient; any type": (),
             "two backwards add up; x and the gradients stay unchanged": (),
             "one all-reduce in forward, nothing in backward": COST},
            _see_reduce, CASES),
    mistakes=(
        Slip("Nothing is summed, but each rank's x is one part of a sum.",
             (REDUCE_CALL, "x"), _forward("identity")),
        Slip("This is the wrong way round: forward must sum over ranks, and backward must pass the "
             "gradient on.", (REDUCE_CALL, "RegionFunction.apply(x, group, identity, "
                              "all_reduce_sum)")),
        Slip("Outside, all ranks have the same gradient, so backward passes it on unchanged. "
             "(torch.distributed.nn's all_reduce sums it again, because it assumes that each rank "
             "has its own loss.)",
             (REDUCE_CALL, "RegionFunction.apply(x, group, all_reduce_sum, all_reduce_sum)"),
             (REDUCE_CALL, "torch.distributed.nn.all_reduce(x, group=group or dist.group.WORLD)")),
        Slip(GROUP, (REDUCE_CALL, "RegionFunction.apply(x, None, all_reduce_sum, identity)")),
        Slip("Sum, and don't divide: y = x_0 + x_1 + ...",
             (REDUCE_CALL, "RegionFunction.apply(x / dist.get_world_size(group), group, "
              "all_reduce_sum, identity)")),
        Slip("This is the mean; return the sum.", _forward("mean"), mean=mean),
        Slip("The derivative of y = x_0 + x_1 + ... with respect to each x is 1, not 1/R.",
             (REDUCE_CALL, "RegionFunction.apply(x, group, all_reduce_sum, of_this_rank)"),
             of_this_rank=of_this_rank),
        Slip("all_reduce works in place, but other code may still read x. Give all_reduce a "
             "clone().",
             _forward("summed_in_place"), summed_in_place=summed_in_place),
        Slip("x is cut out of the graph, so no gradient comes back to it. all_reduce on its own "
             "has no backward.",
             (REDUCE_CALL, "RegionFunction.apply(x.detach(), group, all_reduce_sum, identity)"),
             (REDUCE_CALL, "all_reduce_sum(x.detach(), group)")),
        Slip("x must keep its dtype.",
             (REDUCE_CALL, "RegionFunction.apply(x.float(), group, all_reduce_sum, identity)")),
        Slip(STRIDES, _forward("summed_as_it_lies"), summed_as_it_lies=summed_as_it_lies),
        Slip("x + (sum - x) rounds differently on each rank, but all ranks must have the same "
             "bits.", added_around_x),
        Slip("x is summed twice. One all-reduce is enough.",
             (REDUCE_CALL, "RegionFunction.apply(RegionFunction.apply(x, group, all_reduce_sum, "
              "identity), group, all_reduce_sum, identity)")),
        Slip("Return the sum: use ReduceOp.SUM, the default.", _forward("largest"),
             largest=largest),
        Slip("Every rank needs the sum, not just one of them: use all_reduce.",
             _forward("on_one_rank"),
             on_one_rank=on_one_rank),
        Slip("This gathers every rank's x, and then adds them. An all-reduce sends less.",
             _forward("gathered_and_added"), gathered_around_x,
             gathered_and_added=gathered_and_added),
    ), hints=(
        "y = y0 + y1 + ...: what is its derivative with respect to y0?",
        "It is copy_to_region the other way round: the sum is in forward.",
        "return RegionFunction.apply(x, group, the sum over ranks, identity)",
    ))
