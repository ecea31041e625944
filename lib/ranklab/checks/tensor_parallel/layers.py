"""The checks of the layers: linear by column and by row, attention, and the norm outside."""

import copy
import gc
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ranklab.checks.beside import GROUP, expect, on_groups, refused
from ranklab.checks.tensor_parallel.one_process import FAILURES, Whole, as_one_process, seeded
from ranklab.engine import device
from ranklab.models.gpt import Attention, GPTConfig
from ranklab.tensor_parallel.regions import (
    copy_to_region, gather_tokens, identity, scatter_tokens,
)

B, T, D, H = 2, 12, 2, 12
C, OUT, FUSED = 24, 48, (24, 12, 12)  # FUSED: q, k and v in one matrix of OUT rows
X_BYTES, Y_BYTES = B * T * C * 4, B * T * OUT * 4
LINEARS = ("with bias", "without bias", "frozen weight", "frozen bias", "x of two dims",
           "each rank its tokens", "float64")
# Heads of k and v, which 4, 3, 2 and 1 ranks divide, or not; and whether there are biases.
HEADS = {"12 key heads": (12, True), "6 key heads": (6, False), "2 key heads": (2, True),
         "1 key head": (1, False), "4 key heads, k frozen": (4, False),
         "each rank its tokens": (4, False)}
NORMS = {"LayerNorm": nn.LayerNorm, "LayerNorm without bias": partial(nn.LayerNorm, bias=False),
         "RMSNorm": nn.RMSNorm, "LayerNorm, frozen weight": nn.LayerNorm}

CUT = ("torch's weight is (out, in): a column of the paper's A is a row of weight, dim 0. A bias "
       "has a number for each output, so a column layer cuts it and a row layer keeps it whole.")
STAYS = ("split_parameter copies, so `linear` stays as it is, and its weight is free when the "
         "caller drops it. The bias of a row layer is linear.bias itself.")
CUT_FAILURES = {"RuntimeError: .*(cannot be multiplied|must match).*": f"{CUT} {GROUP}",
                "(Type|Attribute)Error: .*'NoneType'.*": "There may be no bias: None stays None.",
                "ValueError: .*": f"{CUT} {GROUP}"}
COLUMN = {"value": f"F.linear(self.enter(x, self.group), this rank's rows of weight, bias). {CUT}",
          "x": "x enters by self.enter(x, self.group), whatever that is: copy_to_region sums "
          "gradients over ranks, identity does not."}
ROW = {"value": "The sum over ranks of x @ weight.T leaves by self.leave(y, self.group). The bias "
       "is added once, after it. If each rank adds it before the sum, y gets it R times.",
       "bias": "Each rank adds the whole bias outside the region: self.outside(self.bias, "
       "self.group). Where each rank has its own tokens, that sums the gradient."}
FIT = ("Each rank has H/R query heads in rank order, and for each of them `needed` names one head "
       f"of k and v. out has this rank's inputs: RowParallelLinear. {GROUP}")
ONCE = ("x enters once, for q, k and v together: enter_before(attention, enter, group), and "
        "identity in q.")
ATTENTION_FAILURES = {
    "ValueError: the query heads of rank .*": FIT,
    "ValueError: .*tokens of a sequence.*": ONCE,
    "ValueError: .*must divide the.*": "Where ranks share a key head, use "
    "KeyValueHeads.", "TypeError: 'NoneType' object is not callable": "Return the attention.",
    "(Runtime|Value)Error: .*(must match|cannot be multiplied|unflatten|non-empty).*": FIT,
    "IndexError: .*out of range in self": FIT}
SHARED = {name: "A key head that several ranks hold has the sum of their gradients: KeyValueHeads "
          "with `needed`, a head for each query head of this rank."
          for name in ("k.weight", "k.bias", "v.weight", "v.bias")}
ATTENTION = {"value": "Query head h reads key head h // (H // KV): neighbours share one. This rank "
             "has the query heads shard_range(H, rank, R). The output leaves by `leave`.",
             "x": ONCE, **SHARED}
ANY = "There may be no bias: functional_call(norm, {name: tensor}, x) computes with other tensors."
NORM_FAILURES = {"AttributeError: .*('NoneType'|no attribute 'bias').*": ANY,
                 "TypeError: cannot assign .*": ANY,
                 "RuntimeError: cannot register a hook on .*":
                 "A frozen parameter has no gradient to sum."}
DRIFT = ("Each rank knows only the gradient from its own tokens, so its weight would drift. Pass "
         "the norm's parameters through copy_to_region: one all-reduce each, and a sum.")
NORM = {"weight": DRIFT, "bias": DRIFT, "value": "norm(x), with all that the norm has: eps, bias.",
        "x": "No other rank has these tokens, so x needs no sum. The norm's parameters do."}
LEFT = {"value": "A hook on the norm's own parameter stays there. functional_call(norm, {name: "
        "tensor}, x) leaves it alone."}


def _layer(case, ranks, call, module, one, x, cuts, *rest):
    """call(x), with the parameters of `module`, beside one(x); cuts is {name: (dim, at)}."""
    mine = x.leaf()
    wholes = {name: Whole(p, *cuts.get(name, ())) for name, p in one.named_parameters()}
    return as_one_process(
        case, ranks, lambda: call(mine), {"x": mine, **dict(module.named_parameters())},
        lambda: one(x.tensor), {"x": x, **wholes}, *rest)


def _filled(module, case=""):
    """`module` with the same numbers on all ranks."""
    for place, (name, p) in enumerate(module.to(device()).named_parameters()):
        p.data.copy_(seeded(place, *p.shape) / 2)
        p.requires_grad_(not case.endswith(f"frozen {name}"))
    return module


def _linear(case):
    dtype = getattr(torch, _type(case))
    return _filled(nn.Linear(C, OUT, case != "without bias", dtype=dtype), case)


def _columns(layer_class, ranks):
    for case in (*LINEARS, f"parts={FUSED}", "enter=identity"):
        one = _linear(case)
        at, options, forward, backward = ranks.at(OUT), {}, (), (_input(case).nbytes,)
        x, y = Whole(_input(case)), Whole(None, -1, at)
        if "tokens" in case:
            options, forward = {"enter": gather_tokens}, backward
            x = Whole(x.tensor, 1, ranks.at(T))
        if "parts" in case:
            options = {"parts": FUSED}
            at = torch.cat([sum(FUSED[:n]) + ranks.at(size) for n, size in enumerate(FUSED)])
            y = Whole(None, -1, at)
        if "identity" in case:  # then x has the gradient of this rank's outputs alone
            options = {"enter": identity}
        layer, look = _made(partial(layer_class, group=ranks.group, **options), one)
        if "identity" in case:
            one.forward, y, backward = partial(_some_outputs, one, at), Whole(None), ()
        yield from _layer(case, ranks, layer, layer, one, x, {"weight": (0, at), "bias": (0, at)},
                          y, COLUMN, forward, backward)
        yield look
    if ranks.size == 4:
        yield refused("tp=4, 10 outputs", lambda: layer_class(nn.Linear(4, 10), ranks.group))


def _input(case):
    """(B, T, C), or (B * T, C)"""
    x = seeded(5, B, T, C, dtype=_type(case))
    return (x.flatten(0, 1) if "two dims" in case else x).requires_grad_()


def _type(case):
    return "float64" if case == "float64" else "float32"


def _made(new, one, is_row=False):
    """(the layer of a copy of `one`, a look at that copy, of which the weight is dropped now)"""
    given = copy.deepcopy(one)
    weight, layer = StorageWeakRef(given.weight.untyped_storage()), new(given)
    stays = all(map(torch.equal, given.parameters(), one.parameters()))
    is_its = not is_row or getattr(layer, "bias", None) is given.bias
    del given
    gc.collect()
    return layer, partial(_look_at_given, stays, is_its, weight.expired())


def _look_at_given(stays, is_its, is_free):
    for holds, what in ((stays, "`linear` is changed"), (is_its, "the bias is not that of linear"),
                        (is_free, "something keeps the whole weight")):
        expect(holds, what, STAYS)


def _some_outputs(linear, at, x):
    return F.linear(x, linear.weight[at], linear.bias[at])


def _rows(layer_class, ranks):
    for case in LINEARS:
        one, at = _linear(case), ranks.at(C)
        x, y, options, backward = _input(case), Whole(None), (), ()
        if "tokens" in case:
            y, options = Whole(None, 1, ranks.at(T)), (scatter_tokens, copy_to_region)
            backward = Y_BYTES, one.bias.nbytes
        layer, look = _made(lambda linear: layer_class(linear, ranks.group, *options), one, True)
        yield from _layer(case, ranks, layer, layer, one, Whole(x, -1, at), {"weight": (1, at)}, y,
                          ROW, (Y_BYTES * (x.itemsize // 4),), backward)
        yield look
    if ranks.size == 4:
        yield refused("tp=4, 10 inputs", lambda: layer_class(nn.Linear(10, 4), ranks.group))


def check_ColumnParallelLinear(layer_class):
    on_groups(_columns, layer_class, failures=CUT_FAILURES | FAILURES)
    yield "this rank's outputs, and all gradients: as one process, on 4, 3, 2 and 1 ranks"
    yield "with and without bias, frozen or not; parts of a fused q, k, v; x enters by `enter`"
    yield "only its part in memory, which knows its ShardSpec; 10 outputs on 4 ranks are an error"


def check_RowParallelLinear(layer_class):
    on_groups(_rows, layer_class, failures=CUT_FAILURES | FAILURES)
    yield "all outputs, the bias added once, and all gradients: as one process, on 1 to 4 ranks"
    yield "with and without bias, frozen or not; y leaves by `leave`, the bias through `outside`"
    yield "only its part in memory, which knows its ShardSpec; 10 inputs on 4 ranks are an error"


def _attention(KV, has_bias=False, H=H):
    made = Attention(GPTConfig(n_ctx=T, n_head=H, n_embd=H * D))
    for name, size in (("q", H), ("k", KV), ("v", KV), ("out", H)):
        setattr(made, name, nn.Linear(H * D, size * D, has_bias))
    return _filled(made)


def _heads(parallel_attention, ranks):
    for case, (KV, has_bias) in HEADS.items():
        one, x = _attention(KV, has_bias), Whole(seeded(8, B, T, C).requires_grad_())
        one.k.requires_grad_("frozen" not in case)
        options, tokens = (), ()  # tokens: what they send, besides
        if "tokens" in case:
            x = Whole(x.tensor, 1, ranks.at(T))
            options, tokens = (gather_tokens, scatter_tokens), (X_BYTES,)
        queries, keys = ranks.at(C), torch.cat([head * D + torch.arange(D, device=device())
                                                for head in (ranks.at(H) // (H // KV)).unique()])
        cuts = {"q.weight": (0, queries), "q.bias": (0, queries), "out.weight": (1, queries)}
        cuts |= {name: (0, keys) for name in SHARED}
        shared = [p.nbytes for name, p in one.named_parameters()
                  if name in SHARED and p.requires_grad and KV % ranks.size]
        given = copy.deepcopy(one)
        attention = parallel_attention(given, ranks.group, *options)
        yield from _layer(case, ranks, attention, given, one, x, cuts, x, ATTENTION,
                          (X_BYTES, *tokens), (X_BYTES, *shared, *tokens))
    if ranks.size == 4:
        for KV, heads in ((6, 6), (5, 12)):
            yield refused(f"tp=4, {heads} query heads, {KV} key heads", partial(
                parallel_attention, _attention(KV, H=heads), ranks.group))


def check_parallel_attention(parallel_attention):
    on_groups(_heads, parallel_attention, failures=ATTENTION_FAILURES | FAILURES)
    yield "12 query heads; 12, 6, 4 or 2 key heads: as one process, on 4, 3, 2 and 1 ranks"
    yield "all gradients, also of key heads that ranks share; biases; k frozen; enter and leave"
    yield "x enters once for q, k and v; only the needed heads are in memory"
    yield "heads that do not divide are a ValueError"


def _norms(sequence_parallel_norm, ranks):
    for case, new in NORMS.items():
        one, x = _filled(new(C), case), seeded(3, B, T, C).requires_grad_()
        norm, own, x = copy.deepcopy(one), copy.deepcopy(one), Whole(x, 1, ranks.at(T))
        yield from _layer(case, ranks, lambda x: sequence_parallel_norm(norm, x, ranks.group), norm,
                          one, x, {}, x, NORM, (),
                          [p.nbytes for p in one.parameters() if p.requires_grad])
        norm.zero_grad()
        yield from _layer(f"{case}, by itself afterwards", ranks, norm, norm, own,
                          Whole(x.leaf()), {}, Whole(None), LEFT)


def check_sequence_parallel_norm(sequence_parallel_norm):
    on_groups(_norms, sequence_parallel_norm, failures=NORM_FAILURES | FAILURES)
    yield "this rank's tokens; gradients of the norm are sums: as one process, on 1 to 4 ranks"
    yield "LayerNorm with and without bias, RMSNorm, frozen; one all-reduce for each parameter"
    yield "twice in a row, and afterwards the norm is as before"
