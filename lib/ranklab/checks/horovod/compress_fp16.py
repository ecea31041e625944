"""The check of compress_fp16. Nothing is launched: bytes and types tell it all."""

import torch

from ranklab.checks.exercise import Mistake

FLOATS = (torch.float32, torch.float64)
OTHERS = {  # what must stay as it is, and why
    torch.int64: "", torch.int32: "", torch.uint8: "", torch.bool: "",
    torch.complex64: "It loses its imaginary part. Ask dtype.is_floating_point: complex numbers "
                     "are none.",
    torch.float16: "",
    torch.bfloat16: "bfloat16 has 16 bits already. Casting it saves nothing, and what is above "
                    "65504 is lost.",
    torch.float8_e5m2: "It has 8 bits: float16 would be twice as much. Ask dtype.itemsize, and "
                       "compress only above 2 bytes.",
}


def check_compress_fp16(fn):
    for dtype in FLOATS:
        x = torch.linspace(-3, 3, 24, dtype=dtype)
        for one in (x, x.view(4, 6).t(), x[0], x[:0]):
            _travels(fn, one)
    yield "float32 and float64 travel as float16, rounded as torch rounds; any shape"
    for dtype in FLOATS:
        _restores(fn, dtype)
    yield "the *result* gets its type again; contexts of two tensors do not mix"
    for dtype, hint in OTHERS.items():
        _stays(fn, dtype, hint or "Ask tensor.dtype.is_floating_point, and leave the others alone: "
                                  "float16 can't hold whole numbers above 2048 exactly.")
    yield "whole numbers, and what has 16 bits already, stay as they are"
    x = torch.tensor([1.0, 65504.0, 7e4, -1e5, 1e-9])
    small, restore = _pair(fn, x.clone())
    if not torch.equal(restore(small), x.half().float()):
        raise Mistake(f"{x.tolist()} comes back as {restore(small).tolist()}",
                      "A plain cast: above 65504 it is infinite. That must be seen, not hidden.")
    yield "what does not fit is infinite: nothing is clipped or scaled behind one's back"


def _pair(fn, x):
    got = fn(x)
    if not isinstance(got, tuple) or len(got) != 2:
        raise Mistake(f"it returns {type(got).__name__}, not (small, restore)",
                      "Return two things: the tensor that travels, and a function.")
    if not isinstance(got[0], torch.Tensor) or not callable(got[1]):
        raise Mistake("it returns (" + ", ".join(type(one).__name__ for one in got) + "), not a "
                      "tensor and a function", "`restore` is called with the reduced tensor.")
    return got


def _is_same(a, b):
    """Equal in shape and in every bit: not every type can be compared."""
    return a.shape == b.shape and torch.equal(*(x.contiguous().view(torch.uint8) for x in (a, b)))


def _has_its_type(result, dtype, hint):
    kind = getattr(result, "dtype", type(result).__name__)
    if kind != dtype:
        raise Mistake(f"{dtype} went out, {kind} came back", hint)


def _travels(fn, x):
    before = x.clone()
    small, _ = _pair(fn, x)
    if not torch.equal(x, before) or x.dtype != before.dtype:
        raise Mistake("the tensor itself is changed", "`to` makes a new tensor: use that one.")
    if small.dtype == torch.bfloat16:
        raise Mistake(f"{x.dtype} travels as bfloat16, not float16", "Both have 16 bits, but "
                      "bfloat16 keeps 8 bits of precision and float16 keeps 11; asked for is fp16.")
    if small.dtype != torch.float16:
        raise Mistake(f"{x.dtype} travels as {small.dtype}: {small.element_size()} bytes a number",
                      "tensor.to(torch.float16), for every floating point type above 16 bits.")
    if small.shape != x.shape or not torch.equal(small, x.to(torch.float16)):
        raise Mistake(f"what travels of a tensor of shape {tuple(x.shape)} is not its float16",
                      "Only the type changes.")


def _restores(fn, dtype):
    first, restore = _pair(fn, torch.ones(3, dtype=dtype))
    _pair(fn, torch.ones(3, dtype=FLOATS[dtype == FLOATS[0]]))  # and another one in between
    result = restore(first * 3)
    _has_its_type(result, dtype, "restore must remember the type of *its* tensor: keep dtype = "
                  "tensor.dtype in this call and use it in the inner function.")
    if not torch.equal(result, torch.full((3,), 3.0, dtype=dtype)):
        raise Mistake(f"1 was sent and the sum over ranks was 3, but restore gives "
                      f"{result[0].item():g}", "restore gets the reduced tensor as its argument: "
                      "that one it must bring back, not the one that was sent.")
    restore(first)
    if result[0] != 3:
        raise Mistake("what restore gave first is changed when it is called again",
                      "Each result is a tensor of its own: reduced.to(dtype) makes one.")


def _stays(fn, dtype, hint):
    x, reduced = torch.tensor([[[0, 1, 1]], [[1, 0, 1]]]).to(dtype)
    small, restore = _pair(fn, x)
    if small.dtype != dtype:
        raise Mistake(f"{dtype} travels as {small.dtype}", hint)
    if not _is_same(small, x):
        raise Mistake(f"a tensor of {dtype} and shape {tuple(x.shape)} travels changed, in shape "
                      f"{tuple(small.shape)}", "Return the tensor as it is.")
    result = restore(reduced)
    _has_its_type(result, dtype, "What is not compressed needs no restoring.")
    if not _is_same(result, reduced):
        raise Mistake(f"{dtype}: restore does not give the reduced tensor back", "Also where "
                      "nothing was compressed restore gets the reduced tensor, and returns that "
                      "one, not the one that was sent.")
