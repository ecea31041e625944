from mutants import mutant

from ranklab.horovod import adasum as answer

GUARDED_A, GUARDED_B = (f"torch.where({x} > 0, ab / (2 * {x}), 0)" for x in ("aa", "bb"))
HALF_A, HALF_B = "ab / (2 * aa)", "ab / (2 * bb)"
BACK = "gather_halves(part, lengths, group).view(x.shape)"


def _instead(old, new, says):
    """Both coefficients have `new` in place of `old`, in which N is |a|^2 or |b|^2."""
    edits = [part.replace("N", x) for x in ("aa", "bb") for part in (old, new)]
    return mutant(answer, *edits, says=says)


WRONG = [
    _instead("ab / (2 * N)", "ab / N", "without the 2.+takes off .half."),
    _instead("1 - torch.where(N", "1 + torch.where(N", "with a plus.+what agrees counts once"),
    _instead("1 - torch.where(N", "torch.where(N", "The coefficient is what is left"),
    _instead("ab / (2 * N)", "ab / 2 * N", r"It is ab / \(2 \* aa\)"),
    _instead("(2 * N)", "(2 * N**0.5)", "squares already"),
    _instead("(2 * N)", "(2 * (aa * bb)**0.5)", "Each vector has its own coefficient"),
    _instead("torch.where(N > 0, ab / (2 * N), 0)", "ab / (2 * N + 1e-8)", "Nothing is added to"),
    mutant(answer, GUARDED_B, HALF_B, says="whichever of a and b is zero"),
    mutant(answer, "ab, aa, bb = dots", "ab, bb, aa = dots", says="the rows as a.b, b.b, a.a"),
    mutant(answer, "ab, aa, bb = dots", "aa, bb, ab = dots", says="the order is a.b, a.a, b.b"),
    mutant(answer, BACK, f"{BACK} / R", says="1/2 of what is right.+divided twice"),
    mutant(answer, "(local_half, peer_half) if is_left else (peer_half, local_half)",
           "local_half, peer_half", says="which vector is a and which is b"),
    mutant(answer, "len(sizes))\n        step", "len(sizes)).float()\n        step",
           says=r"1e20 \* 1e20 not into float32: dot products need float64"),
    mutant(answer, "step *= 2", "step = 2 * distance if step == distance else distance",
           says="of 8: .+only part of the sum"),
    mutant(answer, "sizes or [x.numel()]", "[x.numel()]", says="mixes layers"),
    mutant(answer, "of_a[tensor_of] * a + of_b[tensor_of] * b", "of_a * a + of_b * b",
           says="is each element's own"),
    mutant(answer, "of_a[tensor_of] * a + of_b[tensor_of] * b", "of_a[0] * a + of_b[0] * b",
           says="coefficient of its own tensor"),
    mutant(answer, "(left, right) if is_left else (right, left)", "part, part",
           "tensor_of.tensor_split(2)[0 if is_left else 1]", "tensor_of",
           "while step <= distance", "while False", BACK, "part.view(x.shape)",
           says="Swap halves"),
    mutant(answer, "rank, R =", "group = None\n    rank, R =", says="Pass `group` on"),
    mutant(answer, "rank ^ step, group)", "rank ^ step)", says="also for the dot products"),
    mutant(answer, ").to(x.dtype)", ")", says="bring the result back with"),
    mutant(answer, "if R & (R - 1):", "if R == 3 and rank < 2:\n        return x.clone()\n"
           "    if R & (R - 1):", says="On every rank"),
]
