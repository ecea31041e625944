"""The check of compress_fp16. Nothing is launched: bytes and types show everything."""

from typing import NamedTuple

import numpy as np
import torch

from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.horovod import compress_fp16

FLOATS = torch.float32, torch.float64
STAYS = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float16,
         torch.bfloat16, torch.float8_e5m2)
SHAPES = {"24 elements": lambda x: x, "a matrix that is not contiguous": lambda x: x.view(4, 6).t(),
          "a step of 3": lambda x: x[::3], "one number": lambda x: x[0], "empty": lambda x: x[:0]}
ONES = torch.tensor([[[0, 1, 1]], [[1, 0, 1]]])  # exact in every type
LIMITS = 1.0, 65504.0, 7e4, -1e5, 1e-9, 6e-8  # float16 goes to 65504, and down to 6e-8
TRAVELS, RESTORED, AGAIN = "what travels", "what restore gives", "what a second restore gives"


class Case(NamedTuple):
    """A tensor of this type; shape: one of SHAPES, or ONES."""

    dtype: torch.dtype
    shape: str = ""

    def __str__(self):
        return str(self.dtype).removeprefix("torch.") + f", {self.shape}" * bool(self.shape)

    def x(self):
        if self.shape:
            return SHAPES[self.shape](torch.linspace(-3, 3, 24, dtype=self.dtype))
        return ONES.to(self.dtype)


def _see(fn, case):
    """Look at two restores: each returns a new tensor, different from the one sent."""
    x = case.x()
    small, restore = _pair(fn(x))
    fn(torch.ones(2, dtype=FLOATS[case.dtype == FLOATS[0]]))  # another one in between
    reduced = [_times(2, small), small.new_zeros(small.shape)]
    restored = [restore(each) for each in reduced]
    yield {name: value for key, each in zip((TRAVELS, RESTORED, AGAIN, "x afterwards"),
                                            (small, *restored, x))
           for name, value in ((f"the type of {key}", _type_of(each)), (key, _comparable(each)))}


def _pair(result):
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"a {type(result).__name__} is returned, and not (small, restore)")
    small, restore = result
    if not isinstance(small, torch.Tensor) or not callable(restore):
        kinds = ", ".join(type(each).__name__ for each in result)
        raise TypeError(f"({kinds}) is returned, and not (small, restore)")
    return result


def _times(number, small):
    """Return number * small in the type of `small`; some types cannot be multiplied."""
    wide = torch.complex64 if small.is_complex() else torch.float64
    return (number * small.to(wide)).to(small.dtype)


def _type_of(value):
    return str(getattr(value, "dtype", type(value).__name__))


def _comparable(value):
    """Convert 8-bit types to float32, in which they are exact."""
    is_small = isinstance(value, torch.Tensor) and value.dtype.itemsize == 1
    return value.float() if is_small else value


def _see_limits(fn, dtype):
    x = torch.tensor(LIMITS, dtype=dtype)
    small, restore = _pair(fn(x))
    yield {"what travels": small.tolist(), "what comes back": restore(small).tolist()}


# --- right for another reason ---------------------------------------------------------------------

def by_numpy(tensor):
    if tensor.dtype not in FLOATS:
        return tensor, lambda reduced: reduced
    with np.errstate(over="ignore"):
        small = torch.from_numpy(tensor.numpy().astype(np.float16))
    wide = str(tensor.dtype).removeprefix("torch.")
    return small, lambda reduced: torch.from_numpy(reduced.numpy().astype(wide))


# --- mistakes -------------------------------------------------------------------------------------

NO_FLOAT, ENOUGH = "not dtype.is_floating_point", "dtype.itemsize <= 2"
BACK, CAST, AS_IT_IS = "reduced.to(dtype)", "tensor.to(torch.float16)", "lambda reduced: reduced\n"
COMPRESS = Proof(
    compress_fp16,
    Stage({"float32 and float64 travel as float16, rounded as torch rounds; any shape": (),
           "the *result* gets its type back; contexts of two tensors do not mix":
           (f"the type of {RESTORED}", RESTORED, f"the type of {AGAIN}", AGAIN)},
          _see, tuple(Case(dtype, shape) for dtype in FLOATS for shape in SHAPES),
          oracle=by_numpy),
    Stage("whole numbers, complex ones, and types that already have 16 bits or fewer stay as they "
          "are",
          _see, tuple(Case(dtype) for dtype in STAYS), oracle=by_numpy,
          note=("Compress only floating-point tensors of more than 16 bits: return anything else "
                "unchanged.")),
    Stage("what does not fit becomes infinite: nothing is clipped or scaled silently", _see_limits,
          FLOATS, oracle=by_numpy),
    mistakes=(
        # what travels
        Slip("float32 is sent uncompressed: use tensor.to(torch.float16) for every floating-point "
             "dtype above 16 bits.", (ENOUGH, "dtype.itemsize <= 4")),
        Slip("Compress float64 as well: check is_floating_point and itemsize, not for one "
             "particular dtype.",
             (f"{NO_FLOAT} or {ENOUGH}", "dtype != torch.float32"),
             (ENOUGH, "dtype.itemsize != 4")),
        Slip("Compress float64 to 16 bits, not to 32.",
             (CAST, "tensor.to({4: torch.float16, 8: torch.float32}[dtype.itemsize])")),
        Slip("Use torch.float16, not bfloat16.", ("torch.float16", "torch.bfloat16")),
        Slip("view(dtype) reinterprets the same bytes as different numbers; to() rounds each "
             "number.",
             (CAST, "tensor.contiguous().view(-1).view(torch.float16)")),
        Slip("Keep the shape: to() changes only the dtype.",
             (CAST, "tensor.flatten().to(torch.float16)"), (CAST, "tensor.half()[None]")),
        Slip("Compress small tensors as well: the code that reduces them expects 16 bits.",
             (NO_FLOAT, "tensor.numel() < 2 or not dtype.is_floating_point")),
        Slip("Use a plain cast: don't divide before it or multiply after it.",
             (CAST, "(tensor / 2).to(torch.float16)", BACK, "2 * reduced.to(dtype)")),
        Slip("Use a plain cast: values above 65504 become infinite, and that must be seen, not "
             "hidden.",
             (CAST, "tensor.clamp(-65504, 65504).to(torch.float16)"),
             (CAST, "tensor.to(torch.float16).nan_to_num(posinf=65504.0, neginf=-65504.0)"),
             (BACK, "reduced.to(dtype).clamp(-65504, 65504)"),
             (BACK, "reduced.nan_to_num().to(dtype)")),
        Slip("Use a plain cast: float16 goes down to 6e-8, with fewer digits below 6e-5. Do not "
             "round such small values to 0.",
             (CAST, "tensor.where(tensor.abs() > 6.1e-5, 0).to(torch.float16)")),
        # what stays
        Slip("Leave tensors that are not floating point alone: float16 can't hold all whole "
             "numbers above 2048 exactly, or an imaginary part. Check "
             "tensor.dtype.is_floating_point.",
             (NO_FLOAT, "False"), (f"{NO_FLOAT} or {ENOUGH}", "False")),
        Slip("A complex tensor loses its imaginary part: check dtype.is_floating_point.",
             (NO_FLOAT, "dtype in (torch.int64, torch.int32)"),
             (NO_FLOAT, "not dtype.is_floating_point and not dtype.is_complex")),
        Slip("Don't cast what already has 16 bits: nothing is saved, and bfloat16 values above "
             "65504 are lost.", (f" or {ENOUGH}", ""), (ENOUGH, "dtype.itemsize < 2"),
             (ENOUGH, "dtype == torch.float16")),
        Slip("float8 has only 8 bits: float16 would double the bytes. Check dtype.itemsize.",
             (ENOUGH, "dtype.itemsize == 2"),
             (ENOUGH, "dtype in (torch.float16, torch.bfloat16)")),
        Slip("If nothing is compressed, return the tensor as it is.",
             ("return tensor, ", "return tensor.flatten(), "),
             ("return tensor, ", "return tensor.float(), ")),
        Slip("A tensor that is not compressed is still reduced: restore must return its argument.",
             (AS_IT_IS, "lambda reduced: tensor\n"), (AS_IT_IS, "lambda reduced: None\n"),
             (AS_IT_IS, "lambda reduced: reduced.float()\n")),
        Slip("Even if nothing is compressed, return two things: the tensor and a function.",
             (f"tensor, {AS_IT_IS}", "tensor\n"), (AS_IT_IS, "None\n")),
        # restore
        Slip("restore must remember the dtype of *its* tensor: set dtype = tensor.dtype in this "
             "call, and use it in the inner function.",
             (BACK, "reduced.float()"), (BACK, "reduced.double()"),
             ("(tensor):", "(tensor, of_all={}):", BACK, "reduced.to(of_all[0])",
              CAST, "of_all.setdefault(0, dtype) and tensor.to(torch.float16)")),
        Slip("Two tensors share the dtype that restore remembers: each call needs its own.",
             ("(tensor):", "(tensor, of_all={}):", BACK, "reduced.to(of_all[0])",
              "dtype = tensor.dtype", "dtype = of_all[0] = tensor.dtype")),
        Slip("restore must convert its argument, which is the reduced tensor, not the tensor that "
             "was sent.", (BACK, "tensor"), (BACK, "tensor.clone()")),
        Slip("The result is not converted back: use reduced.to(dtype).", (BACK, "reduced")),
        Slip("restore must return its result.", (BACK, "None"),
             (BACK, "[reduced.to(dtype)]")),
        Slip("Don't overwrite the tensor that was sent: to(dtype) makes a new one.",
             (BACK, "tensor.copy_(reduced)")),
        Slip("Return two things: the tensor that travels, and a function of the reduced tensor.",
             (f"return {CAST}, lambda reduced: {BACK}", f"return {CAST}"),
             (f"lambda reduced: {BACK}", "dtype"),
             (f"return {CAST}, lambda reduced: {BACK}",
              f"return [{CAST}, lambda reduced: {BACK}]"),
             (f"return {CAST}, lambda reduced: {BACK}",
              f"return (lambda reduced: {BACK}), {CAST}")),
    ), hints=(
        "What must restore know that the small tensor does not tell it? The original dtype.",
        "An inner function remembers the names around it: dtype = tensor.dtype, and then "
        "lambda reduced: reduced.to(dtype).",
        "if not dtype.is_floating_point or dtype.itemsize <= 2: return tensor, lambda reduced: "
        "reduced. Otherwise: return tensor.to(torch.float16), lambda reduced: reduced.to(dtype).",
    ))
