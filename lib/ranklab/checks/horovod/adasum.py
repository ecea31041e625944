"""The check of adasum: against its definition, in one process and in double."""

import itertools
from functools import partial

import torch

from ranklab.checks.beside import GROUP, beside, expect, on_groups, refused
from ranklab.engine import device
from ranklab.horovod import adasum_of_two
from ranklab.meter import Traffic

SIZES = [5, 1, 3, 8]  # several tensors in one buffer; the halves cut through them
PARTS = ("A rank holds part of the two vectors, so its dot products are only part of the sum: swap "
         "the running sums with rank ^ 1, rank ^ 2, rank ^ 4, ... rank ^ distance, and add them.")
ZERO = ("A gradient of zeros has |a|^2 = 0: there the coefficient is 1, not 1 - 0/0, whichever of "
        "a and b is zero. torch.where(aa > 0, ab / (2 * aa), 0).")
DOUBLE = ("300 * 300 does not fit into float16, and 1e20 * 1e20 not into float32: dot products "
          "need float64, from the first sum to the coefficients.")
CASES = {  # (this rank's x of R, what is wrong where all before is right)
    "random": (lambda rank, R: torch.randn(17, generator=torch.Generator().manual_seed(rank)),
               PARTS),
    "the first has nothing": (lambda rank, R: torch.ones(6) * (rank > 0), ZERO),
    "the last has nothing": (lambda rank, R: torch.ones(6) * (rank < R - 1), ZERO),
    "tiny": (lambda rank, R: torch.full((4,), 1e-6 * (1 + rank)), "Nothing is added to |a|^2."),
    "huge": (lambda rank, R: torch.full((4,), 1e20 * (1 + rank)), DOUBLE),  # its square is too much
    "large float16": (lambda rank, R: torch.full((16,), 300.0 + rank, dtype=torch.float16), DOUBLE),
    "one number": (lambda rank, R: torch.tensor([2.0 - rank]), PARTS),
    "transposed": (lambda rank, R: torch.arange(6.0).view(3, 2).t() + rank, "Elements keep their "
                   "order: x.flatten() before, .view(x.shape) after."),
    f"sizes={SIZES}": (lambda rank, R: CASES["random"][0](rank, R), "Each element takes the "
                       "coefficient of its own tensor, of_a[tensor_of], cut as the vector is."),
}
COEFFICIENTS = (  # (what two ranks get ..., by a.b, this vector's square and the other's; a hint)
    ("without the 2", lambda ab, aa, bb: 1 - ab / aa, "Each coefficient takes off *half*."),
    ("with a plus", lambda ab, aa, bb: 1 + ab / (2 * aa), "A minus: what agrees counts once."),
    ("without the 1", lambda ab, aa, bb: ab / (2 * aa), "The coefficient is what is left."),
    ("without brackets", lambda ab, aa, bb: 1 - ab / 2 * aa, "It is ab / (2 * aa)."),
    ("with a root", lambda ab, aa, bb: 1 - ab / (2 * aa**0.5), "aa and bb are squares already."),
    ("with |a||b|", lambda ab, aa, bb: 1 - ab / (2 * (aa * bb)**0.5),
     "Each vector has its own coefficient, with its own square."),
)
AGREE = ("The ranks of a pair must agree which vector is a and which is b: a is the left one's, on "
         "both. Else the sums over ranks mix |a|^2 of one with |b|^2 of the other.")
FAILURES = {
    "RuntimeError: The size of tensor a .* must match .*": "There is one coefficient for each "
    "tensor, but the parts have elements: of_a[tensor_of] is each element's own.",
    ".* is torch.float64, not torch.float.*": "The coefficients are float64: bring the result back "
    "with .to(x.dtype).",
}


def pairwise(vectors):
    """The oracle, in double: the definition for two, and a tree for more."""
    while len(vectors) > 1:
        vectors = [adasum_of_two(a.double(), b.double()) for a, b in zip(*[iter(vectors)] * 2)]
    return vectors[0]


def _slips(ranks, name, turn):
    """{what a usual mistake gets: (tensor, hint)}"""
    if name not in CASES:
        return {}
    found, vectors = {}, _all_x(ranks, name, turn)
    if "sizes" in name:
        found["that of the whole buffer"] = pairwise(vectors), (
            "One coefficient for all of them mixes layers: the layer with the largest gradients "
            "would decide.")
    if name == "random" and ranks.size == 2:
        a, b = (each.double() for each in vectors)
        dots = {"a.b": a @ b, "a.a": a @ a, "b.b": b @ b}
        ab, aa, bb = dots.values()
        found |= {f"what one gets {what}": (of(ab, aa, bb) * a + of(ab, bb, aa) * b, hint)
                  for what, of, hint in COEFFICIENTS}
        for order in list(itertools.permutations(dots))[1:]:
            x, of_a, of_b = (dots[each] for each in order)
            found[f"what one gets with the rows as {', '.join(order)}"] = (
                (1 - x / (2 * of_a)) * a + (1 - x / (2 * of_b)) * b,
                "The rows of dot_products: the order is a.b, a.a, b.b.")
        # Where each rank's own is a, their |a|^2 are of different vectors.
        (low_a, high_a), (low_b, high_b) = a.tensor_split(2), b.tensor_split(2)
        of_a, of_b = (1 - ab / 2 / (low @ low + high @ high)
                      for low, high in ((low_a, high_b), (low_b, high_a)))
        found["what one gets when each rank takes its own vector as a"] = torch.cat(
            [of_a * low_a + of_b * low_b, of_a * high_b + of_b * high_a]), AGREE
    return {what: (value.to(vectors[0].dtype), hint) for what, (value, hint) in found.items()}


def _all_x(ranks, name, turn):
    return [(1 + turn) * CASES[name][0](rank, ranks.size) for rank in ranks.members]


def _trial(fn, ranks):
    def call(turn):
        seen = {}
        for name in CASES:
            x = _all_x(ranks, name, turn)[ranks.index].to(device())
            seen |= {name: fn(x, *[SIZES] * ("sizes" in name), **ranks.keywords), f"x, {name}": x}
        return seen

    def right(turn):
        found = {}
        for name in CASES:
            vectors = _all_x(ranks, name, turn)
            parts = zip(*(each.split(SIZES if "sizes" in name else len(each)) for each in vectors))
            whole = torch.cat([pairwise(each) for each in parts]).to(vectors[0].dtype)
            found |= {name: [whole] * ranks.size, f"x, {name}": vectors}
        return found

    yield from beside(str(ranks), ranks, call, right, slips=partial(_slips, ranks), advice=lambda
                      name: CASES.get(name, ("", "Work on new tensors: flatten() may be x."))[1])
    with Traffic() as traffic:
        fn(torch.ones(4096, device=device()), **ranks.keywords)
    times, least = traffic.sent_bytes / 4096 / 4, 2 * (ranks.size - 1) / ranks.size
    yield partial(expect, times <= 1.1 * least, f"{ranks} sends {times:.2f} times the vector; "
                  f"{least:.2f} times is enough", "Swap halves: keep one, and give the other away.")


def _refuses(fn, ranks):
    yield refused(f"{ranks}, which is no power of two", partial(fn, torch.ones(4, device=device())))


def check_adasum(fn):
    for ranks in (2, 4, 1, 8):  # only with 8 do three ranks hold the other parts of a vector
        on_groups(_trial, fn, ranks=ranks, groupings=[(tuple(range(ranks)),)], failures=FAILURES)
        if ranks == 2:
            yield "two ranks: what agrees is averaged, the rest is added"
    yield "four and eight ranks are combined in pairs, then the pairs; alone nothing changes"
    yield "several tensors in one buffer: each with its own coefficients; x is unchanged"
    yield "each rank sends 2(R-1)/R of the vector, as a ring does, and a few dot products"
    on_groups(_trial, fn, groupings=[((0, 2), (1, 3))], failures={".*": f"{GROUP} Also for the dot "
              "products and in gather_halves."})
    on_groups(_refuses, fn, ranks=3, failures={".*": "On every rank: raise a ValueError unless R "
              "is a power of two: R & (R - 1) is 0 only then."})
    yield "inside a group it talks to nobody outside; 3 ranks are a ValueError on every rank"
