"""The check of top_k_compress: nothing is lost, and what is sent is the largest."""

import torch

from ranklab.checks.beside import expect
from ranklab.checks.ddp.calls import called
from ranklab.checks.trial import explain

CASES = {  # what is said of the inputs: shape and k of each
    "": (((8,), 3), ((1000,), 10), ((2, 3, 4), 5), ((), 1), ((6,), 50)),
    ", transposed": (((4, 5), 6),), ", float64": (((9,), 3),), ", zeros": (((6,), 2),)}
FAILURES = {
    "RuntimeError: view size is not compatible.*": "A gradient may be transposed: .flatten() "
    "copies where .view can't.",
    "RuntimeError: .*out of range.*": "Take the largest of the flattened tensor; and never more "
    "than there are: min(k, n)."}
VECTORS = ("Two vectors of min(k, n) entries in the flattened tensor, each index once. topk gives "
           "that many also where entries are 0, or equally large.")


def check_top_k_compress(fn):
    for kind, cases in CASES.items():
        for shape, k in cases:
            _compare(fn, *_inputs(shape, kind), k, kind)
    yield "values, indices and error: the k largest in size of gradient + error, in any shape"
    yield "sent + error left = gradient + error, to the last bit; the inputs are unchanged"
    error = torch.zeros(40)
    for step in range(50):  # whole numbers, so that sums are exact
        gradient = ((torch.arange(40) * 7 + step * 5) % 13 - 6).float()
        error = _compare(fn, gradient, error, 2, f", step {step}")
    yield "over 50 steps all that is not sent is still there"


def _inputs(shape, kind):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape[:1]))
    gradient, error = (torch.randn(shape, generator=generator) for _ in range(2))
    gradient.view(-1)[0] = -5.0  # the largest in size is negative
    error.view(-1)[-1] = 7.0  # and one is large only with what was left before
    change = {", transposed": torch.t, ", float64": torch.Tensor.double,
              ", zeros": torch.zeros_like}.get(kind, torch.clone)
    return change(gradient), change(error)


def _compare(fn, gradient, error, k, kind):
    """The error that fn returned, which is right, and so is all else."""
    whole = gradient + error
    wanted, only, count = whole.flatten(), gradient.flatten(), min(k, whole.numel())
    case = f"{k} of {len(wanted)} entries, shape {tuple(gradient.shape)}{kind}"
    values, indices, left = called(case, FAILURES, fn,
                                   {"gradient": gradient, "error": error, "k": k})
    expect(indices.shape == values.shape == (count,) and len(indices.unique()) == count
           and set(indices.tolist()) <= set(range(len(wanted))), f"{case}: values have shape "
           f"{tuple(values.shape)}, indices {tuple(indices.shape)}", VECTORS)

    def by_size(indices):
        return wanted[indices].abs().sort().values

    explain(f"{case}: the size of what is sent", by_size(indices),
            by_size(wanted.abs().topk(count).indices), {
        "that of the largest in the gradient": (by_size(only.abs().topk(count).indices), "Add the "
                                                "error first, and choose then."),
        "that of the largest above zero": (by_size(wanted.topk(count).indices), "Largest in size: "
                                           "-5 counts as 5. Take topk of .abs()."),
    })
    explain(f"{case}: what is sent", values, wanted[indices], {
        "without its sign": (wanted[indices].abs(), "abs() is for choosing only."),
        "that of the gradient alone": (only[indices], "What was left before must be sent as well."),
    }, "Take it from gradient + error at those indices, in its type, or bits are lost.")
    right = wanted.index_fill(0, indices, 0).view(gradient.shape)
    explain(f"{case}: the error", left, right, {
        "zeros": (0 * right, "What is not sent must be kept."),
        "all of gradient + error": (whole, "What is sent must not be kept as well. (flatten() of a "
                                    "tensor that is not contiguous is a copy.)"),
        "what is left of the gradient alone": (right - error, "The old error is lost."),
    }, "The error has the gradient's shape: it is gradient + error, with 0 where it is sent.")
    expect(torch.equal(values, wanted[indices]) and torch.equal(left, right), f"{case}: sent + "
           "error left is near gradient + error, but not the same to the last bit", "Don't round.")
    return left
