"""The check of top_k_compress: nothing is lost, and what is sent is the largest."""

import torch

from ranklab.checks.exercise import Mistake

CASES = (  # shape, k
    ((8,), 3), ((1000,), 10), ((4, 5), 6), ((2, 3, 4), 5), ((1,), 1), ((), 1),
)


def check_top_k_compress(fn):
    for shape, k in CASES:
        _compare(fn, *_inputs(shape), k)
    yield "values, places and error: the k largest in size of gradient + error, in any shape"
    yield "sent + error left = gradient + error, exactly; the inputs are unchanged"
    for shape, k in (((6,), 6), ((6,), 50), ((2, 2), 5)):
        _compare(fn, *_inputs(shape), k)
    zero = torch.zeros(6)
    values, _, left = _compare(fn, zero, zero.clone(), 2)
    if values.any() or left.any():
        raise Mistake("of a zero gradient something is sent, or left", "Nothing comes of nothing.")
    yield "with k of all entries or more nothing is left; zeros stay zeros"
    _compare(fn, *(x.mT for x in _inputs((4, 5))), 6, ", transposed")
    _compare(fn, *(x.double() for x in _inputs((9,))), 3, ", float64")
    yield "right for a tensor that is not contiguous; and in float64 to the last bit"
    error = torch.zeros(40)
    for step in range(50):  # whole numbers, so that sums are exact
        gradient = ((torch.arange(40) * 7 + step * 5) % 13 - 6).float()
        _, _, error = _compare(fn, gradient, error, 2, f", step {step}")
    yield "over 50 steps all that is not sent is still there"


def _call(fn, gradient, error, k):
    try:
        result = fn(gradient, error, k)
    except RuntimeError as problem:
        if "view size is not compatible" in str(problem):
            raise Mistake(f"a {tuple(gradient.shape)} gradient that is not contiguous raises: "
                          f"{problem}", "A gradient may be transposed, or channels-last, and so "
                          "is what is made of it: .flatten() copies where .view can't.") from None
        if "out of range" not in str(problem):
            raise
        raise Mistake(f"k={k} of {gradient.numel()} entries in shape {tuple(gradient.shape)} "
                      f"raises: {problem}", "Take the largest of the flattened tensor; and never "
                      "more than there are: min(k, n).") from None
    if not isinstance(result, tuple) or len(result) != 3:
        raise Mistake(f"it returns a {type(result).__name__}, not three tensors",
                      "Return values, indices, error.")
    return result


def _inputs(shape):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape[:1]))
    gradient, error = (torch.randn(shape, generator=generator) for _ in range(2))
    gradient.view(-1)[0] = -5.0  # the largest in size is negative
    error.view(-1)[-1] = 7.0  # and one is large only with what was left before
    return gradient, error


def _compare(fn, gradient, error, k, kind=""):
    """What fn returned, which is right."""
    given = gradient.clone(), error.clone()
    values, indices, left = _call(fn, gradient, error, k)
    for name, now, then in zip(("gradient", "error"), (gradient, error), given):
        if not torch.equal(now, then):
            raise Mistake(f"`{name}` itself is changed",
                          "gradient + error is a new tensor: work on that one.")
    n, wanted = gradient.numel(), (gradient + error).flatten()
    case = f"{k} of {n} entries, shape {tuple(gradient.shape)}{kind}"
    _shapes(case, values, indices, left, gradient, min(k, n))
    _largest(case, values, indices, wanted, gradient.flatten())
    sent = torch.zeros_like(wanted)
    sent[indices] = values.to(sent.dtype)
    if not torch.equal(sent + left.flatten(), wanted):
        raise Mistake(f"{case}: sent + error left differs from gradient + error by "
                      f"{(sent + left.flatten() - wanted).abs().max():.3g}",
                      _hint_lost(values, left.flatten(), sent, wanted, gradient.flatten()))
    return values, indices, left


def _shapes(case, values, indices, left, gradient, count):
    if len(indices.shape) != 1 or indices.is_floating_point() or values.shape != indices.shape:
        raise Mistake(f"{case}: values have shape {tuple(values.shape)}, places "
                      f"{tuple(indices.shape)} and {indices.dtype}",
                      "Two vectors of one length: flatten first, then indices count in the "
                      "flattened tensor.")
    if len(indices) != count or len(indices.unique()) != count:
        raise Mistake(f"{case}: {len(indices)} entries are sent, {count} are asked",
                      "Each place once, k of them, but no more than there are: min(k, n). topk "
                      "gives that many also where entries are 0, or equally large.")
    if int(indices.min()) < 0 or int(indices.max()) >= gradient.numel():
        raise Mistake(f"{case}: place {int(indices.max())} does not exist",
                      "Places count in the flattened tensor, from 0.")
    if left.shape != gradient.shape:
        raise Mistake(f"{case}: the error has shape {tuple(left.shape)}",
                      "The error has the gradient's shape: .view(gradient.shape).")


def _largest(case, values, indices, wanted, gradient):
    others = wanted.clone()
    others[indices] = 0
    largest = int(others.abs().argmax())
    if others[largest].abs() > wanted[indices].abs().min():
        hint = "topk(k) of (gradient + error).abs() gives the places."
        for taken, slip in (
                (gradient.abs(), "Add the error first, and choose then: an entry that was left "
                                 "behind often enough must get its turn."),
                (wanted, "Largest in size: -5 counts as 5. Take topk of .abs().")):
            if set(indices.tolist()) == set(taken.topk(len(values)).indices.tolist()):
                hint = slip
        raise Mistake(f"{case}: {wanted[largest]:.4g} is not sent, but something smaller is", hint)
    right = wanted[indices]
    for slip, what, hint in (
            (right.abs(), "the values lost their sign", "abs() is for choosing only: take the "
             "values from gradient + error at those places."),
            (gradient[indices], "what was left before is not sent",
             "Send gradient + error at those places, not the gradient alone.")):
        if torch.equal(values, slip) and not torch.equal(slip, right):
            raise Mistake(f"{case}: {what}", hint)


def _hint_lost(values, left, sent, wanted, gradient):
    for name, x in (("values", values), ("error", left)):
        if torch.finfo(x.dtype).bits < torch.finfo(wanted.dtype).bits:
            return f"The {name} became {x.dtype} and the gradient is {wanted.dtype}: bits are lost."
    if not left.any():
        return "The error is zero everywhere: what is not sent must be kept."
    if torch.equal(left, wanted):
        return ("What is sent must not be kept as well: set the error to 0 at those places. (And "
                "of a tensor that is not contiguous flatten() is a copy: return what you changed.)")
    right, error = wanted - sent, wanted - gradient
    if torch.allclose(left, right - error):
        return "The old error is lost: what is left is gradient + error minus what is sent."
    if torch.allclose(left, right + error):
        return "The old error is in it twice: what is left is gradient + error minus what is sent."
    return "What is left is gradient + error, with 0 at the places that are sent."
