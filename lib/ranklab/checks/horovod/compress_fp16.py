"""The check of compress_fp16. Nothing is launched: bytes and types tell it all."""

import torch

from ranklab.checks.beside import expect
from ranklab.checks.trial import explain

FLOATS = (torch.float32, torch.float64)
WHOLE = ("Ask tensor.dtype.is_floating_point, and leave the others alone: float16 can't hold whole "
         "numbers above 2048 exactly.")
BITS = "It has 16 bits already: nothing is saved, and what bfloat16 holds above 65504 is lost."
STAYS = {  # what must stay as it is, and why
    torch.int64: WHOLE, torch.int32: WHOLE, torch.uint8: WHOLE, torch.bool: WHOLE,
    torch.complex64: "It loses its imaginary part: ask dtype.is_floating_point.",
    torch.float16: BITS, torch.bfloat16: BITS,
    torch.float8_e5m2: "It has 8 bits: float16 would be twice as much. Ask dtype.itemsize.",
}
CAST = ("tensor.to(torch.float16), for every floating point type above 16 bits: it makes a new "
        "tensor, and changes only the type.")
REDUCED = ("restore must convert its argument, which is the reduced tensor, and not the tensor "
           "that was sent.")


def check_compress_fp16(fn):
    for dtype in FLOATS:
        x = torch.linspace(-3, 3, 24, dtype=dtype)
        for one in (x, x.view(4, 6).t(), x[0], x[:0]):
            before = one.clone()
            small, _ = _pair(fn, one)
            explain("the tensor itself", one, before, hint=CAST)
            explain(f"what travels of {dtype}", small, before.half(), hint=CAST)
    yield "float32 and float64 travel as float16, rounded as torch rounds; any shape"
    for dtype, other in (FLOATS, FLOATS[::-1]):
        _restores(fn, dtype, other)
    yield "the *result* gets its type again; contexts of two tensors do not mix"
    for dtype, hint in STAYS.items():
        x, reduced = torch.tensor([[[0, 1, 1]], [[1, 0, 1]]]).to(dtype)
        small, restore = _pair(fn, x)
        _is_same(f"what travels of {dtype}", small, x, f"{hint} Return the tensor as it is.")
        _is_same(f"what restore gives of {dtype}", restore(reduced), reduced, REDUCED)
    yield "whole numbers, and what has 16 bits already, stay as they are"
    x = torch.tensor([1.0, 65504.0, 7e4, -1e5, 1e-9])
    small, restore = _pair(fn, x.clone())
    expect(torch.equal(restore(small), x.half().float()),
           f"{x.tolist()} comes back as {restore(small).tolist()}",
           "A plain cast: above 65504 it is infinite. That must be seen, not hidden.")
    yield "what does not fit becomes infinite: nothing is clipped or scaled silently"


def _pair(fn, x):
    got = fn(x)
    is_pair = (isinstance(got, tuple) and len(got) == 2 and isinstance(got[0], torch.Tensor)
               and callable(got[1]))
    expect(is_pair, f"it returns {got}, not (small, restore)", "Return two things: the tensor that "
           "travels, and a function of the reduced tensor.")
    return got


def _restores(fn, dtype, other):
    sent = torch.ones(3, dtype=dtype)
    small, restore = _pair(fn, sent.clone())
    _pair(fn, sent.to(other))  # another one in between
    result = restore(3 * small)
    restore(5 * small)
    explain(f"what restore gives of {dtype}", result, 3 * sent, {
        "what was sent": (sent, REDUCED),
        "that of its next call": (5 * sent, "Each result is a tensor of its own: to(dtype)."),
    }, "restore must remember the type of *its* tensor: keep dtype = tensor.dtype in this call, "
       "and use it in the inner function.")


def _is_same(where, got, right, hint):
    """Also in types that explain() can't compare: then by their bytes."""
    if isinstance(got, torch.Tensor) and got.dtype == right.dtype:
        got, right = (x.contiguous().view(torch.uint8) for x in (got, right))
    explain(where, got, right, hint=hint)
