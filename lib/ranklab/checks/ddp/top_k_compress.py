"""top_k_compress: nothing is lost, and the largest values are sent."""

from typing import NamedTuple

import torch

from ranklab.checks.prover import Must, Proof, Slip, Stage
from ranklab.ddp import top_k_compress

LOST, INPUTS = "what is lost", ("`gradient` afterwards", "`error` afterwards")


class Gradient(NamedTuple):
    """A gradient and the previous error; no two of their sums are equally large."""

    shape: tuple
    k: int
    change: str = ""  # "transposed", "with steps", or the name of a type

    def __str__(self):
        return f"k={self.k}, shape {self.shape}" + f", {self.change}" * bool(self.change)

    def inputs(self):
        generator = torch.Generator().manual_seed(len(self.shape) + sum(self.shape[:1]))
        gradient, error = (torch.randn(self.shape, generator=generator) for _ in range(2))
        gradient.view(-1)[0] = -5.0  # the largest in size is negative
        error.view(-1)[-1] = 7.0  # and one is large only with what was left before
        return [self._changed(x) for x in (gradient, error)]

    def _changed(self, x):
        if self.change == "transposed":
            return x.t()
        if self.change == "with steps":
            return x.repeat_interleave(2)[::2]
        return x.to(getattr(torch, self.change)) if self.change else x


class Equal(NamedTuple):
    """Zeros: any places are right, each at most once."""

    n: int
    k: int

    def __str__(self):
        return f"k={self.k}, {self.n} zeros"

    def inputs(self):
        return [torch.zeros(self.n), torch.zeros(self.n)]


def _see(fn, case):
    gradient, error = case.inputs()
    whole = gradient + error
    sent, values = _shown(fn, gradient, error, case.k, whole)
    if sent is not None and isinstance(case, Gradient):
        values |= {"what is sent, at its places": sent}
    yield dict(zip(INPUTS, (gradient, error))) | values


def _shown(fn, gradient, error, k, whole):
    """Return (the values sent, at their places; the observations of one call)."""
    result = fn(gradient, error, k)
    count, n = min(k, whole.numel()), whole.numel()
    if not isinstance(result, tuple | list) or len(result) != 3:
        return None, {"what it returns": f"a {type(result).__name__}"}
    values, places, residual = result
    shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__
              for each in (values, places, residual)]
    due = [(count,), (count,), tuple(whole.shape)]
    shown = {"what it returns": "three tensors", "the list of shapes of values, indices and error":
             Must(shapes, due)}
    if shapes != due:
        return None, shown
    inside = {*places.tolist()} & {*range(n)}
    shown |= {"the number of different indices in the flattened tensor": Must(len(inside), count)}
    if len(inside) < count:
        return None, shown
    sent = values.new_zeros(n).scatter(0, places.long(), values).view(whole.shape)
    sizes, largest = (x.abs().double().sort().values[-count:].tolist()
                      for x in (values, whole.flatten()))
    return sent, shown | {"the list of sizes of what is sent": Must(sizes, largest),
                          "the error": residual, LOST: whole - sent - residual}


def _see_steps(fn, case):
    error = torch.zeros(40)
    for step in range(50):  # whole numbers, so that sums are exact
        gradient = ((torch.arange(40) * 7 + step * 5) % 13 - 6).float()
        whole = gradient + error
        sent, values = _shown(fn, gradient, error, 2, whole)
        values.pop("the error", None)  # of equal sizes any may stay
        yield values
        if sent is None:
            return
        error = whole - sent


def by_sorting(gradient, error, k):
    whole = (gradient + error).flatten()
    numbers = whole.tolist()
    places = sorted(range(len(numbers)), key=lambda i: -abs(numbers[i]))[:k]
    places = torch.tensor(places, dtype=torch.int64)
    return whole[places], places, whole.index_fill(0, places, 0).view(gradient.shape)


FLAT, LEFT = "target = (gradient + error).flatten()", "target.view(gradient.shape)"
CHOICE = "target.abs().topk(min(k, target.numel())).indices"
VALUES, ZEROS = "values = target[indices]", "    target[indices] = 0\n"
RETURN = f"return values, indices, {LEFT}"
TOP_K = Proof(
    top_k_compress,
    Stage({"values, indices and error: the k largest in size of gradient + error, in any shape": (),
           "sent + error left = gradient + error, to the last bit; the inputs are unchanged":
           (LOST,)},
          _see, (Gradient((8,), 3), Gradient((1000,), 10), Gradient((2, 3, 4), 5), Gradient((), 1),
                 Gradient((6,), 50), Gradient((4, 5), 6, "transposed"),
                 Gradient((9,), 4, "with steps"), Gradient((9,), 3, "float64"),
                 Gradient((7,), 3, "bfloat16"), Equal(6, 2)), oracle=by_sorting),
    Stage("over 50 steps, everything that was not sent is still there", _see_steps, ("50 steps",),
          oracle=by_sorting),
    mistakes=(
        Slip("Take the largest by absolute value: -5 counts as 5. Use topk of .abs().",
             (".abs()", "")),
        Slip("Take the largest by absolute value, not the smallest: use topk without "
             "largest=False.",
             ("target.numel()))", "target.numel()), largest=False)")),
        Slip("Add the error first, then choose.",
             ("target.abs().topk", "gradient.flatten().abs().topk")),
        Slip("Choose from gradient + error, not from the error alone.",
             ("target.abs().topk", "error.flatten().abs().topk")),
        Slip("Use abs() only to choose: the values that are sent keep their signs.",
             (VALUES, "values = target.abs()[indices]")),
        Slip("What was left over before must be sent as well: take the values from gradient + "
             "error.",
             (VALUES, "values = gradient.flatten()[indices]")),
        Slip("What is sent must not stay in the error. (flatten() of a non-contiguous tensor is a "
             "copy.)", (ZEROS, ""),
             (FLAT, "whole = gradient + error\n    target = whole.flatten()", LEFT, "whole")),
        Slip("What is not sent must be kept.", (LEFT, "torch.zeros_like(error)"),
             torch=torch),
        Slip("The old error is lost: the new error is gradient + error, with 0 at the entries that "
             "are sent.",
             (LEFT, f"{LEFT} - error"), (LEFT, "gradient.flatten().index_fill(0, indices, 0)"
                                               ".view(gradient.shape)")),
        Slip("The gradient is lost: the new error is gradient + error, with 0 at the entries that "
             "are sent.",
             (LEFT, "error.flatten().index_fill(0, indices, 0).view(gradient.shape)")),
        Slip("Read the values before you write the zeros: target[indices] copies what is there at "
             "that moment.",
             (f"{VALUES}\n{ZEROS}", f"{ZEROS[4:]}    {VALUES}\n")),
        Slip("Don't write into the inputs: gradient + error makes a new tensor.",
             ("(gradient + error)", "gradient.add_(error)"),
             ("(gradient + error)", "error.add_(gradient)"),
             (FLAT, "target = gradient.add_(error).flatten().clone()"),
             (FLAT, "target = error.add_(gradient).flatten().clone()")),
        Slip("Never take more entries than there are: min(k, n).", ("min(k, target.numel())", "k")),
        Slip("The error has the gradient's shape.", (LEFT, "target")),
        Slip("A gradient may be transposed or strided: .flatten() and .reshape() copy where "
             ".view() fails.",
             ("(gradient + error).flatten()", "gradient.view(-1) + error.view(-1)"),
             ("(gradient + error).flatten()", "(gradient + error).view(-1)")),
        Slip("Keep the dtype: float32 loses bits of float64, and turns 16 bits into 32.",
             ("(gradient + error).flatten()", "(gradient + error).float().flatten()")),
        Slip("values and error have the gradient's dtype: cast back what you computed in another "
             "dtype.", ("(gradient + error).flatten()", "(gradient.double() + error.double())"
                                                      ".flatten()")),
        Slip("topk gives exactly k entries even if some are 0 or tied; a threshold does not.",
             (CHOICE, "(target.abs() >= target.abs().sort().values[-min(k, target.numel())"
                              "]).nonzero().flatten()"),
             (CHOICE, "(target.abs() > target.abs().sort(descending=True).values[min(k, "
                      "target.numel() - 1)]).nonzero().flatten()")),
        Slip("Take the largest of the flattened tensor, not of each row.",
             (FLAT, "target = gradient + error", CHOICE, "target.abs().topk(k).indices",
              "target[indices]\n", "target.gather(-1, indices)\n", ZEROS, "",
              LEFT, "target.scatter(-1, indices, 0)"),
             (FLAT, "target = gradient + error", CHOICE, "target.abs().topk(min(k, "
              "target.shape[-1] if target.dim() else 1)).indices", "target[indices]\n",
              "target.gather(-1, indices)\n", ZEROS, "", LEFT, "target.scatter(-1, indices, 0)")),
        Slip("Return (values, indices, error), in this order.",
             (RETURN, f"return indices, values, {LEFT}"), (RETURN, f"return {LEFT}, values, "
                                                                   "indices"),
             (RETURN, "return values, indices")),
    ), hints=(
        "First add what was left over before. Then choose what to send, and keep the rest.",
        "target = (gradient + error).flatten(); the indices are target.abs().topk(k).indices, and "
        "the values come from target. k can be larger than the number of entries.",
        "indices = target.abs().topk(min(k, target.numel())).indices; values = target[indices]; "
        "target[indices] = 0; return values, indices, target.view(gradient.shape)",
    ))
