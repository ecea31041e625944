"""ulysses_attention: all tokens of some heads, and back."""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab.checks.context_parallel.attention import (
    IN_GROUPS, KEPT, T, as_in_a_model, attention, gathered, gradients, inputs,
)
from ranklab.checks.prover import GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.context_parallel import ulysses_attention
from ranklab.context_parallel.ulysses import trade
from ranklab.engine import device
from ranklab.meter import Traffic

TURNS = 0, 1
SHAPES, BYTES = "shapes of what attend gets", "bytes sent"
RAISES = "what it raises"


class Case(NamedTuple):
    """Heads of q, and of k and v: 4, 3, 2 and 1 ranks divide 12, and only 1 divides 5.

    Where the ranks do not divide n_kv_head, q has n_head for each rank.
    """

    n_head: int
    n_kv_head: int
    dtype: torch.dtype = torch.float32

    def __str__(self):
        each = " for each rank" * bool(self.n_kv_head % 12)
        return f"{self.n_head} heads{each} and {self.n_kv_head} of k, {str(self.dtype)[6:]}"


CASES = Case(12, 12), Case(24, 12), Case(24, 12, torch.bfloat16), Case(5, 5)


def _see(fn, case, ranks):
    for turn in TURNS:
        if case.n_kv_head % ranks.size:
            yield _refusal(fn, case, ranks)
        else:
            yield _values(fn, case, ranks, turn)


def _refusal(fn, case, ranks):
    """Return what is raised with a q whose heads the ranks divide."""
    q, k = (torch.ones(1, heads, 4, 2, device=device())
            for heads in (case.n_head * ranks.size, case.n_kv_head))
    try:
        fn(q, k, k, _causal, **ranks.keywords)
        kind = "nothing"
    except (ValueError, RuntimeError, IndexError, AssertionError) as error:
        kind = type(error).__name__
    return {RAISES: Must(kind, "ValueError")}


def _values(fn, case, ranks, turn):
    *qkv, grad_out = [as_in_a_model(x[:, :, ranks.at(T)])
                      for x in inputs(turn, case.dtype, (case.n_head, case.n_kv_head))]
    q, k, v = (x.requires_grad_() for x in qkv)
    shapes, R = [], ranks.size

    def attend(*heads):
        shapes.append([[*x.shape] if isinstance(x, torch.Tensor) else type(x).__name__
                       for x in heads])
        return _causal(*heads)

    with Traffic() as traffic:
        out = fn(q, k, v, attend, **ranks.keywords)
        if isinstance(out, torch.Tensor) and out.requires_grad and out.shape == grad_out.shape:
            out.backward(grad_out)
    numbers = sum(x.numel() for x in (q, k, v, grad_out))
    right = [[x.shape[0], x.shape[1] // R, T, x.shape[3]] for x in qkv]
    return {SHAPES: Must(shapes[:1], [right]), "out": out, "dq": q.grad, "dk": k.grad,
            "dv": v.grad, BYTES: AtMost(
                traffic.sent_bytes, 2 * case.dtype.itemsize * numbers * (R - 1) // R,
                "sends {:,.0f} bytes, forward and backward; {:,.0f} are enough")}


def _causal(q, k, v):
    """Compute in float32, and return in q's type."""
    typed = (x.float() for x in (q, k, v))
    return F.scaled_dot_product_attention(*typed, is_causal=True, enable_gqa=True).to(q.dtype)


class Whole(torch.autograd.Function):
    """The attention of one process, forward and backward: every rank gathers all tokens."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group = group
        whole = [gathered(x, group) for x in (q, k, v)]
        ctx.save_for_backward(*whole)
        return own_part(attention(*whole, torch.arange(T))[0], group, q.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        whole = gradients(gathered(grad_out, ctx.group), *ctx.saved_tensors)
        return *(own_part(x, ctx.group, grad_out.dtype) for x in whole), None


def own_part(x, group, dtype):
    return x.tensor_split(dist.get_world_size(group), dim=2)[dist.get_rank(group)].to(dtype)


def in_one_process(q, k, v, attend, group=None):
    if k.shape[1] % dist.get_world_size(group):
        raise ValueError("heads")
    return Whole.apply(q, k, v, group)


THERE, BACK = "Trade.apply(x, 1, 2, group)", "Trade.apply(attend(*heads), 2, 1, group)"
REFUSES = "    if q.shape[1] % R or k.shape[1] % R:"
ULYSSES = Proof(
    ulysses_attention,
    Stage({"attention and gradients of one process; attend has all tokens of some heads, k and v "
           "may have fewer heads than q": (),
           "(R-1)/R of q, k, v and the result are sent, forward and backward": (BYTES,),
           "heads that the ranks do not divide are a ValueError": (RAISES,)},
          _see, CASES, (4,), oracle=in_one_process),
    Stage("inside groups of 1, 2 and 3 ranks it talks only to ranks of its group", _see, CASES,
          (4,),
          GROUPS, oracle=in_one_process, note=IN_GROUPS),
    mistakes=(
        Slip("attend gets only this rank's own tokens: trade first.", (THERE, "x")),
        Slip("Trade the result back as well: split its tokens (dim 2) and join the heads (dim 1).",
             (BACK, "attend(*heads)"), (BACK, "Trade.apply(attend(*heads), 1, 2, group)")),
        Slip("Split the heads (dim 1) and join the tokens (dim 2); do the reverse for the result.",
             (THERE, "Trade.apply(x, 2, 1, group)"),
             (THERE, "Trade.apply(x, 2, 1, group)", BACK, BACK.replace("2, 1", "1, 2"))),
        Slip("The heads are dim 1: (B, H, T/R, D).", (THERE, "Trade.apply(x, 3, 2, group)")),
        Slip("Join the tokens along dim 2.",
             (THERE, "Trade.apply(x, 1, 0, group)"), (THERE, "Trade.apply(x, 1, 1, group)")),
        Slip("Autograd must know about both trades: the gradient of an all-to-all is the reverse "
             "all-to-all.", (THERE, "trade(x, 1, 2, group)"),
             (BACK, "trade(attend(*heads), 2, 1, group)"), trade=trade),
        Slip("k and v need gradients as well: trade them as they are.",
             ("for x in (q, k, v)", "for x in (q, k.detach(), v.detach())")),
        Slip("One of q, k and v is traded twice, and another not at all.",
             ("for x in (q, k, v)", "for x in (q, k, k)"),
             ("for x in (q, k, v)", "for x in (q, q, v)")),
        Slip("q, k and v reach attend in the wrong order.",
             ("for x in (q, k, v)", "for x in (q, v, k)"),
             ("for x in (q, k, v)", "for x in (k, q, v)")),
        Slip("Send k and v with just the heads that they have: attend lets heads of q share them.",
             ("for x in (q, k, v)", "for x in (q, *(x.repeat_interleave(q.shape[1] // x.shape[1], "
              "1) for x in (k, v)))")),
        Slip("attend must get q, k and v in their own dtype, and the result must have that dtype "
             "as well.",
             (THERE, "Trade.apply(x, 1, 2, group).float()"),
             (BACK, BACK.replace("attend(*heads)", "attend(*heads).float()"))),
        Slip("Trade in the dtype of q, k and v: float32 has twice the bytes of bfloat16.",
             (THERE, "Trade.apply(x.float(), 1, 2, group)", f"return {BACK}",
              f"return {BACK}.to(q.dtype)"),
             (THERE, "Trade.apply(x.float(), 1, 2, group).to(x.dtype)")),
        Slip(KEPT, ("group=None):", "group=None, kept={}):", "heads = [", "heads = kept[R, q.dtype,"
                    " q.shape] = kept.get((R, q.dtype, q.shape)) or [")),
        Slip("Every rank receives all heads of all tokens but uses only its own heads: that sends "
             "R times as many bytes of q, k and v as needed.",
             (THERE, "Trade.apply(x.repeat(1, R, 1, 1), 1, 2, group).chunk(R, 1)"
                               "[dist.get_rank(group)]")),
        Slip("Raise ValueError if R does not divide the heads of q, k or v: each rank needs whole "
             "heads.", (REFUSES, "    if False:"), (REFUSES, "    if q.shape[1] % R:"),
             (REFUSES, "    if (q.shape[1] + 2 * k.shape[1]) % R:")),
        Slip("Pass `group` on: get_world_size(group), Trade.apply(x, 1, 2, group).",
             (THERE, "Trade.apply(x, 1, 2, None)"),
             (BACK, "Trade.apply(attend(*heads), 2, 1, None)"),
             ("get_world_size(group)", "get_world_size()")),
    ), hints=(
        "Heads are independent of each other. What must a rank have to compute some of them?",
        "Split the heads (dim 1) and join the tokens (dim 2); do the reverse for the result.",
        "q, k, v = (Trade.apply(x, 1, 2, group) for x in (q, k, v)); return "
        "Trade.apply(attend(q, k, v), 2, 1, group)",
    ))
