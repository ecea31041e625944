"""The check of ulysses_attention: all tokens of some heads, and back."""

from functools import partial

import torch
import torch.nn.functional as F

from ranklab.checks.beside import beside, expect, on_groups, refused
from ranklab.checks.context_parallel.attention import T, as_in_a_model, in_one_process, inputs
from ranklab.engine import device
from ranklab.meter import Traffic

HEADS = 12, 12  # of q, of k and v: 4, 3, 2 and 1 ranks divide them
SHARED = 24, 12
CASES = (HEADS, torch.float32), (SHARED, torch.float32), (SHARED, torch.bfloat16)
GRADIENT = ("Autograd must know both trades, there and back: the gradient of an all-to-all is the "
            "all-to-all back.")
GROUPED = "k and v have heads of their own, perhaps fewer: each is cut by its own number of heads."


def _trial(ulysses_attention, ranks):
    for heads, dtype in CASES:
        yield from _with_heads(ulysses_attention, ranks, heads, dtype)
    odd = [torch.ones(1, n, 4, 2, device=device()) for n in (5 * ranks.size, 5, 5)]
    call = partial(ulysses_attention, *odd, _causal, ranks.group)
    yield refused(f"{ranks}: 5 heads of k", call) if ranks.size > 1 else bool


def _causal(q, k, v):
    """Computed in float32, given in q's type."""
    typed = (x.float() for x in (q, k, v))
    return F.scaled_dot_product_attention(*typed, is_causal=True, enable_gqa=True).to(q.dtype)


def _with_heads(ulysses_attention, ranks, heads, dtype):
    at, seen, traffics, without = ranks.at(T), [], {}, set()
    where = f"{ranks}, {heads[0]} heads and {heads[1]} of k, {str(dtype)[6:]}"

    def attend(q, k, v):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return _causal(q, k, v)

    def call(turn):
        *qkv, grad_out = [as_in_a_model(x[:, :, at]) for x in inputs(turn, dtype, heads)]
        q, k, v = (x.requires_grad_() for x in qkv)
        with Traffic() as traffic:
            out = ulysses_attention(q, k, v, attend, ranks.group)
            if out.requires_grad and out.shape == grad_out.shape:
                out.backward(grad_out)
        traffics[turn] = traffic
        if out.shape == grad_out.shape:
            without.update(name for name, x in zip("qkv", (q, k, v)) if x.grad is None)
        return {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}

    def right(turn):
        found = in_one_process(turn, dtype, heads)
        indices = torch.arange(T, device=device()).tensor_split(ranks.size)
        return {name: [found[name][:, :, each].to(dtype) for each in indices]
                for name in ("out", "dq", "dk", "dv")}

    looks = list(beside(where, ranks, call, right))
    yield partial(_shapes, where, seen[0] if seen else None, ranks.size, heads)
    yield partial(expect, not without, f"{where}: {', '.join(sorted(without))} without a gradient",
                  GRADIENT)
    yield from looks
    R, numbers = ranks.size, sum(x[:, :, at].numel() for x in inputs(0, heads=heads))
    yield partial(_sent, where, traffics[0].sent_bytes,
                  2 * dtype.itemsize * numbers * (R - 1) // R)


def _shapes(where, got, R, heads):
    right = tuple((2, n // R, T, 4) for n in (heads[0], heads[1], heads[1]))
    expect(got == right, f"{where}: attend gets q, k and v of shapes {got}, not {right}",
           GROUPED if got and got[0] == right[0] else "All tokens, and the r-th part of the heads.")


def _sent(where, sent, right):
    expect(sent == right, f"{where}: forward and backward a rank sends {sent:,} bytes, not "
           f"{right:,}", "q, k, v and the result, in their type, once each way: an all-to-all "
           "sends (R-1)/R of its input.")


def check_ulysses_attention(ulysses_attention):
    on_groups(_trial, ulysses_attention, at_once=True)
    yield "attention and gradients of one process, on 4, 3, 2 and 1 ranks"
    yield "attend has all tokens of some heads; k and v may have fewer heads than q"
    yield "(R-1)/R of q, k, v and the result, forward and backward; odd heads are a ValueError"
