"""ColumnParallelLinear and RowParallelLinear."""

import copy
import gc
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ranklab.checks.prover import AtMost, Proof, Slip
from ranklab.checks.tensor_parallel.inputs import (
    COST, GROUP, Whole, filled, in_one_process, refusal_of, seen_of, seen_of_parameters, stages,
    whole_numbers,
)
from ranklab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from ranklab.tensor_parallel.regions import (
    copy_to_region, gather_tokens, identity, scatter_tokens,
)

B, T, C, OUT = 2, 12, 24, 48
FUSED = 24, 12, 12  # q, k and v in one matrix of OUT rows


class Case(NamedTuple):
    """A linear layer, and how x enters it or its output leaves it.

    frozen      the name of a parameter that is not trained
    is_flat     x has two dims
    has_tokens  outside the region each rank has its own tokens
    """

    name: str
    has_bias: bool = True
    dtype: str = "float32"
    frozen: str = ""
    is_flat: bool = False
    has_tokens: bool = False
    parts: tuple | None = None
    is_inside: bool = False  # x has entered the region already

    def __str__(self):
        return self.name

    def linear(self):
        return filled(nn.Linear(C, OUT, self.has_bias, dtype=getattr(torch, self.dtype)),
                      self.frozen)

    def x(self):
        x = whole_numbers(5, B, T, C, dtype=self.dtype)
        return (x.flatten(0, 1) if self.is_flat else x).requires_grad_()

    def weights(self, n):
        weights = whole_numbers(9, B, T, n, dtype=self.dtype)
        return weights.flatten(0, 1) if self.is_flat else weights


CASES = (
    Case("with bias"), Case("without bias", has_bias=False), Case("x of two dims", is_flat=True),
    Case("frozen weight", frozen="weight"), Case("frozen bias", frozen="bias"),
    Case("float64", dtype="float64"), Case("each rank its tokens", has_tokens=True))
COLUMN_CASES = (*CASES, Case(f"parts={FUSED}", parts=FUSED),
                Case("enter=identity", is_inside=True))
UNEVEN = "10 outputs or inputs"
MEMORY = ("the list of its parameters", "weight", "bias", "its bias", "bytes of the whole weight",
          *(text.format(name) for text in (
              "bytes that hold {}", "split_of({}), its dim, size and indices,",
              "linear.{} after __init__") for name in ("weight", "bias")))


def _see(layer_class, case, ranks, x, cuts, weights, one=nn.Linear.__call__, options=(), **sent):
    """Yield the observations of a layer made from a copy of case.linear(), and of its calls.

    cuts  {name: (dim, indices)} of its parameters
    one   (the linear, x) -> the value in one process
    """
    linear, local = case.linear(), x.leaf()
    layer, values = _made(layer_class, linear, ranks.keywords | dict(options))
    wholes = {name: Whole(p, *cuts.get(name, ())) for name, p in linear.named_parameters()}
    yield seen_of_parameters(layer_class, layer, wholes) | values
    yield from seen_of(
        layer_class, ranks, lambda: layer(local), {"x": local, **dict(layer.named_parameters())},
        lambda: one(linear, x.tensor), {"x": x, **wholes}, weights, **sent)


def _made(layer_class, linear, keywords):
    """Return (the layer of a copy of `linear`, the observations of that copy).

    Is the copy's weight freed when the caller drops it?
    """
    if layer_class is in_one_process:
        return linear, _after_init(linear, linear) | {"bytes of the whole weight": AtMost(0, 0)}
    original = copy.deepcopy(linear)
    weight = StorageWeakRef(original.weight.untyped_storage())
    layer = layer_class(original, **keywords)
    values = _after_init(original, layer)
    del original
    gc.collect()
    return layer, values | {"bytes of the whole weight": AtMost(
        0 if weight.expired() else linear.weight.nbytes, 0,
        "keeps the whole weight, {:,.0f} bytes, after the caller has dropped `linear`; {:.0f} are "
        "enough")}


def _after_init(linear, layer):
    bias = "linear.bias" if getattr(layer, "bias", None) is linear.bias else "another Parameter"
    return {"its bias": bias, **{f"linear.{name} after __init__": p.detach().clone()
                                 for name, p in linear.named_parameters()}}


# --- outputs are cut ------------------------------------------------------------------------------

def _see_columns(layer_class, case, ranks):
    if case == UNEVEN:
        yield refusal_of(layer_class, lambda: layer_class(nn.Linear(4, 10), **ranks.keywords))
        return
    at, x, options, tokens = ranks.at(OUT), Whole(case.x()), {}, ()
    one, backward = nn.Linear.__call__, (x.tensor.nbytes,)
    weights = case.weights(OUT)
    if case.parts:
        options = {"parts": case.parts}
        at = torch.cat([sum(case.parts[:n]) + ranks.at(size) for n, size in enumerate(case.parts)])
    weights = Whole(weights, -1, at)
    if case.has_tokens:
        x, options, tokens = Whole(x.tensor, 1, ranks.at(T)), {"enter": gather_tokens}, backward
    if case.is_inside:  # x has the gradient of this rank's outputs alone
        options, backward = {"enter": identity}, ()
        weights, one = Whole(weights.part(weights.tensor)), partial(_outputs, at)
    for values in _see(layer_class, case, ranks, x, {"weight": (0, at), "bias": (0, at)}, weights,
                       one, options, forward=tokens, backward=backward):
        values.pop("its bias", None)
        yield values


def _outputs(at, linear, x):
    return F.linear(x, linear.weight[at], linear.bias[at])


def gather_outputs(y, group):
    parts = [torch.empty_like(y) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, y.detach(), group=group)
    parts[dist.get_rank(group)] = y
    return torch.cat(parts, -1)


def divisible(size, group):
    """Return the largest multiple of the ranks up to `size`."""
    return size - size % dist.get_world_size(group)


ENTER = "self.enter(x, self.group)"
ROWS, BIAS_ROWS = (f"split_parameter(linear.{name}, 0, group, parts)" for name in
                   ("weight", "bias"))
KEEP = "self.group, self.enter = group, enter"
CHUNK = "linear.{}.chunk(dist.get_world_size(group), {})[dist.get_rank(group)]"
SUBMODULE = ("self.linear = linear registers a submodule, so the whole weight becomes a parameter "
             "of this layer as well.")
TRAINED = "linear.weight.requires_grad"
WHOLE_STAYS = ("A reference to `linear` keeps the whole weight in memory. Keep only this rank's "
               "parts.")
SPEC = ("split_of() of a Parameter made by hand is None, but the gradient norm and checkpoints "
        "need it; and such a Parameter may ignore requires_grad. Use split_parameter.")
AROUND = ("Keep split_parameter's result as it is: split_of() of a new Parameter around it is "
          "None, and a frozen one becomes trainable.")
VIEW = ("A slice or a chunk is a view of the whole weight, and a new Parameter may ignore "
        "requires_grad. Use split_parameter, which copies the part.")
DETACHED = ("A detached tensor does not require grad, so the new parameter is frozen. Pass the "
            "Parameter itself.")
CALLERS = "`linear` belongs to the caller: do not modify it."
DIVIDE = ("The remainder is dropped silently. Refuse sizes that the number of ranks does not "
          "divide, as split_parameter does.")
TYPE = "Compute in x's dtype: float64 must stay float64."
NO_BIAS = "If `linear` has no bias, self.bias is None."
COLUMN = Proof(
    ColumnParallelLinear,
    *stages({"this rank's outputs, and all gradients: as in one process, on 4 ranks": (),
             "with and without bias, frozen or not; parts of a fused q, k, v; x enters by `enter`":
             (), "only its part in memory, which knows its ShardSpec; sends what `enter` sends":
             (*MEMORY, *COST), "10 outputs on 4 ranks are an error": ("what it raises",)},
            _see_columns, COLUMN_CASES, also=(UNEVEN,)),
    mistakes=(
        Slip("x must enter through self.enter(x, self.group). Otherwise its gradient is only this "
             "rank's part.",
             (ENTER, "x")),
        Slip("torch's weight is (out, in): outputs are its rows, dim 0.",
             (ROWS, "split_parameter(linear.weight, 1, group, parts)")),
        Slip("A column layer splits the bias as well: it has one number per output.",
             (BIAS_ROWS, "linear.bias")),
        Slip("`parts` must reach split_parameter, for both the weight and the bias.",
             (ROWS, ROWS.replace(", parts", ""), BIAS_ROWS, BIAS_ROWS.replace(", parts", "")),
             (ROWS, ROWS.replace(", parts", "")), (BIAS_ROWS, BIAS_ROWS.replace(", parts", ""))),
        Slip("Use the `enter` that was passed in: x may already be in the region, or arrive split "
             "by tokens.",
             (ENTER, "copy_to_region(x, self.group)"),
             (KEEP, "self.group, self.enter = group, copy_to_region")),
        Slip(SUBMODULE, (KEEP, f"{KEEP}\n        self.linear = linear")),
        Slip(WHOLE_STAYS, (KEEP, f"{KEEP}\n        self.whole = [linear]")),
        Slip(VIEW, (ROWS, f"torch.nn.Parameter({CHUNK.format('weight', 0)})"),
             (ROWS, f"torch.nn.Parameter({CHUNK.format('weight', 0)}, {TRAINED})"), torch=torch),
        Slip(SPEC,
             (ROWS, f"torch.nn.Parameter({CHUNK.format('weight', 0)}.detach().clone())"),
             (ROWS, f"torch.nn.Parameter({CHUNK.format('weight', 0)}.detach().clone(), {TRAINED})"),
             torch=torch),
        Slip(AROUND, (ROWS, f"torch.nn.Parameter({ROWS}.detach())"), torch=torch),
        Slip(DETACHED, (ROWS, ROWS.replace("linear.weight", "linear.weight.detach()")),
             (ROWS, ROWS.replace("linear.weight", "linear.weight.data"))),
        Slip(GROUP, (ROWS, ROWS.replace("group", "None"), BIAS_ROWS,
                     BIAS_ROWS.replace("group", "None")), (ENTER, "self.enter(x)")),
        Slip(NO_BIAS, ("self.weight, self.bias)", "self.weight) + self.bias")),
        Slip("x may have any number of dims before its last one.",
             ("self.weight, self.bias)", "self.weight, self.bias if x.dim() == 3 else None)"),
             (f"F.linear({ENTER}, self.weight, self.bias)",
              f"F.linear({ENTER}.flatten(0, 1), self.weight, self.bias).unflatten("
              "0, x.shape[:2])")),
        Slip(CALLERS, ("self.weight = split", "self.weight = linear.weight = split")),
        Slip(TYPE, ("self.weight, self.bias)", "self.weight, self.bias).float()")),
        Slip("x enters twice, so its gradient is summed twice.",
             (ENTER, "self.enter(self.enter(x, self.group), self.group)")),
        Slip("Return only this rank's outputs: the next layer's inputs are split the same way.",
             (f"F.linear({ENTER}, self.weight, self.bias)",
              f"gather_outputs(F.linear({ENTER}, self.weight, self.bias), self.group)"),
             gather_outputs=gather_outputs),
        Slip(DIVIDE, (ROWS, ROWS.replace("linear.weight", "linear.weight[:divisible(len("
                                         "linear.weight), group)]"),
                      BIAS_ROWS, "None if linear.bias is None else " + BIAS_ROWS.replace(
                          "linear.bias", "linear.bias[:divisible(len(linear.bias), group)]")),
             divisible=divisible),
    ), hints=(
        "Which elements of the weight and the bias does one output need?",
        "weight is (out, in): outputs are rows, dim 0, in the bias as well. x enters through "
        "self.enter.",
        "self.weight = split_parameter(linear.weight, 0, group, parts); bias likewise; forward: "
        "F.linear(self.enter(x, self.group), self.weight, self.bias)",
    ))


# --- inputs are cut -------------------------------------------------------------------------------

def _see_rows(layer_class, case, ranks):
    if case == UNEVEN:
        yield refusal_of(layer_class, lambda: layer_class(nn.Linear(10, 4), **ranks.keywords))
        return
    at, weights, options, backward = ranks.at(C), Whole(case.weights(OUT)), {}, ()
    nbytes = weights.tensor.nbytes
    if case.has_tokens:
        weights = Whole(weights.tensor, 1, ranks.at(T))
        options = {"leave": scatter_tokens, "outside": copy_to_region}
        backward = nbytes, OUT * weights.tensor.itemsize
    yield from _see(layer_class, case, ranks, Whole(case.x(), -1, at), {"weight": (1, at)}, weights,
                    options=options, forward=(nbytes,), backward=backward)


COLUMNS = "split_parameter(linear.weight, 1, group)"
LEAVE = "self.leave(F.linear(x, self.weight), self.group)"
OUTSIDE = "self.outside(self.bias, self.group)"
RETURN = f"y if self.bias is None else y + {OUTSIDE}"
KEEP_ROW = "self.group, self.leave, self.outside = group, leave, outside"
ROW = Proof(
    RowParallelLinear,
    *stages({"all outputs, the bias added once, and all gradients: as in one process, on 4 ranks":
             (),
             "with and without bias, frozen or not; y leaves by `leave`, the bias through "
             "`outside`": (),
             "only its part in memory, which knows its ShardSpec; sends what `leave` sends":
             (*MEMORY, *COST), "10 inputs on 4 ranks are an error": ("what it raises",)},
            _see_rows, CASES, also=(UNEVEN,)),
    mistakes=(
        Slip("Each rank adds the bias before the sum, so y gets it R times. Add it once, after the "
             "sum.",
             (LEAVE, "self.leave(F.linear(x, self.weight, self.bias), self.group)", RETURN, "y")),
        Slip("Only one rank adds the bias, so the others get no gradient for it. Each rank must "
             "add the whole bias, after the sum.",
             (LEAVE, "self.leave(F.linear(x, self.weight, self.bias if dist.get_rank(self.group) "
              "== 0 else None), self.group)", RETURN, "y")),
        Slip("Each rank adds 1/R of the bias before the sum, so the bias gets 1/R of its gradient. "
             "Add the whole bias, after the sum.",
             (LEAVE, "self.leave(F.linear(x, self.weight, None if self.bias is None else self.bias "
              "/ dist.get_world_size(self.group)), self.group)", RETURN, "y")),
        Slip("Keep linear.bias itself: a copy is a new Parameter, unknown to anything that already "
             "holds linear.bias.",
             ("self.bias = linear.bias", "self.bias = None if linear.bias is None else torch.nn."
              "Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)")),
        Slip(SUBMODULE, (KEEP_ROW, f"{KEEP_ROW}\n        self.linear = linear")),
        Slip(WHOLE_STAYS, (KEEP_ROW, f"{KEEP_ROW}\n        self.whole = [linear]")),
        Slip("y is only this rank's part of the sum. It must leave through self.leave(y, "
             "self.group).",
             (LEAVE, "F.linear(x, self.weight)")),
        Slip("torch's weight is (out, in): inputs are its columns, dim 1.",
             (COLUMNS, "split_parameter(linear.weight, 0, group)")),
        Slip("Pass the bias through self.outside(self.bias, self.group): where each rank has its "
             "own tokens, that sums the bias's gradient.", (OUTSIDE, "self.bias")),
        Slip("Use the `outside` that was passed in: where all ranks have all tokens, the bias's "
             "gradient needs no sum.", (OUTSIDE, "copy_to_region(self.bias, self.group)")),
        Slip("Use the `leave` that was passed in: outside the region, y may be split by tokens.",
             (LEAVE, "reduce_from_region(F.linear(x, self.weight), self.group)")),
        Slip("A row layer keeps the bias whole: each rank has all outputs.",
             ("self.bias = linear.bias", "self.bias = split_parameter(linear.bias, 0, group)")),
        Slip("x needs no copy_to_region: each rank has its own inputs, and their complete "
             "gradient.",
             ("F.linear(x,", "F.linear(copy_to_region(x, self.group),")),
        Slip(GROUP, (LEAVE, "self.leave(F.linear(x, self.weight))"),
             (COLUMNS, "split_parameter(linear.weight, 1)")),
        Slip("`outside` needs the group as well: self.outside(self.bias, self.group).",
             (OUTSIDE, "self.outside(self.bias)")),
        Slip(NO_BIAS, (RETURN, f"y + {OUTSIDE}")),
        Slip("The bias is missing. Add it after the sum.", (RETURN, "y")),
        Slip("x may have any number of dims before its last one.",
             ("if self.bias is None", "if self.bias is None or x.dim() == 2")),
        Slip(VIEW, (COLUMNS, f"torch.nn.Parameter({CHUNK.format('weight', 1)})"),
             (COLUMNS, f"torch.nn.Parameter({CHUNK.format('weight', 1)}, {TRAINED})")),
        Slip(SPEC,
             (COLUMNS, f"torch.nn.Parameter({CHUNK.format('weight', 1)}.detach().clone())"),
             (COLUMNS, f"torch.nn.Parameter({CHUNK.format('weight', 1)}.detach().clone(), "
              f"{TRAINED})")),
        Slip(AROUND, (COLUMNS, f"torch.nn.Parameter({COLUMNS}.detach())")),
        Slip(DETACHED, (COLUMNS, COLUMNS.replace("linear.weight", "linear.weight.detach()"))),
        Slip(CALLERS, ("self.weight = split", "self.weight = linear.weight = split")),
        Slip(TYPE, (LEAVE, f"{LEAVE}.float()")),
        Slip(DIVIDE, (COLUMNS, COLUMNS.replace("linear.weight", "linear.weight[:, :divisible("
                                               "linear.weight.shape[1], group)]")),
             divisible=divisible),
    ), hints=(
        "Each rank has some of the inputs of every output. What is missing, and when is the bias "
        "added?",
        "weight is split along dim 1. y is the sum over ranks of x @ weight.T; then add the bias, "
        "once.",
        "split_parameter(linear.weight, 1, group); self.bias = linear.bias; forward: y = self.leave"
        "(F.linear(x, self.weight), self.group), and y + self.outside(self.bias, self.group)",
    ))
