"""The check of adasum: against its definition, in one process and in double."""

import itertools
from functools import partial

import torch

from ranklab.checks.beside import GROUP, beside, expect, on_groups, refused
from ranklab.engine import device
from ranklab.meter import Traffic

SIZES = [5, 1, 3, 8]  # several tensors in one buffer; the halves cut through them
PARTS = ("A rank holds part of the two vectors, so its dot products are only part of the sum: with "
         "rank ^ 1, rank ^ 2, rank ^ 4, ... rank ^ distance swap the running sums, and add.")
ZERO = ("A gradient of zeros has |a|^2 = 0: there the coefficient is 1, not 1 - 0/0, be it a or b "
        "that is zero. torch.where(aa > 0, ab / (2 * aa), 0).")
DOUBLE = ("300 * 300 does not fit into float16, and 1e20 * 1e20 not into float32: dot products "
          "need float64, from the first sum to the coefficients, whatever type gradients have.")
SIGNS = "1 - a.b / (2 |a|^2), and so for b."
CASES = {  # (this rank's x of R, what is wrong where all before is right)
    "random": (lambda rank, R: torch.randn(17, generator=torch.Generator().manual_seed(rank)),
               PARTS),
    "orthogonal": (lambda rank, R: torch.eye(8)[rank] * (rank + 1), SIGNS),
    "equal": (lambda rank, R: torch.tensor([3.0, 4.0, 0.0, 0.0]), SIGNS),
    "the first has nothing": (lambda rank, R: torch.ones(6) * (rank > 0), ZERO),
    "the last has nothing": (lambda rank, R: torch.ones(6) * (rank < R - 1), ZERO),
    "tiny": (lambda rank, R: torch.full((4,), 1e-6 * (1 + rank)), "Nothing is added to |a|^2, and "
             "it has no lower limit: torch.where(aa > 0, ...)."),
    "huge": (lambda rank, R: torch.full((4,), 1e20 * (1 + rank)), DOUBLE),  # its square is too much
    "large float16": (lambda rank, R: torch.full((16,), 300.0 + rank, dtype=torch.float16), DOUBLE),
    "one number": (lambda rank, R: torch.tensor([2.0 - rank]), PARTS),
    "transposed": (lambda rank, R: torch.arange(6.0).view(3, 2).t() + rank, "Elements keep their "
                   "places: x.flatten() before, .view(x.shape) after."),
    f"sizes={SIZES}": (lambda rank, R: CASES["random"][0](rank, R), "Each element takes the "
                       "coefficient of its own tensor, of_a[tensor_of]; and tensor_of is cut as "
                       "the vector is: the same half."),
}
COEFFICIENTS = (  # (what two ranks get ..., of a.b, the own and the other square; a hint)
    ("with the other one's square", lambda ab, own, other: 1 - ab / (2 * other),
     "a is divided by |b|^2 and b by |a|^2: it is the other way round."),
    ("without the 2", lambda ab, own, other: 1 - ab / own,
     "Each coefficient takes off *half*: 1 - a.b / (2 |a|^2)."),
    ("with a plus", lambda ab, own, other: 1 + ab / (2 * own),
     "The sign: 1 - a.b / (2 |a|^2), so that what agrees is not counted twice."),
    ("without the 1", lambda ab, own, other: ab / (2 * own),
     "The coefficient is what is left: 1 - a.b / (2 |a|^2), not what is taken off."),
    ("without brackets", lambda ab, own, other: 1 - ab / 2 * own,
     "ab / 2 * aa is a.b / 2 times |a|^2. It is ab / (2 * aa)."),
    ("with a root", lambda ab, own, other: 1 - ab / (2 * own**0.5),
     "aa and bb are squares already: a.a is |a|^2, without a root."),
    ("with |a||b|", lambda ab, own, other: 1 - ab / (2 * (own * other)**0.5),
     "Each vector has its own coefficient: |a|^2 is in that of a, not |a||b| in both."),
    ("with a mean", lambda ab, own, other: (1 - ab / (2 * own)) / 2,
     "Nothing is divided by the number of ranks: the coefficients do all of it."),
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
    """The oracle: the formula for two, and a tree for more."""
    if len(vectors) == 1:
        return vectors[0].double()
    half = len(vectors) // 2
    a, b = pairwise(vectors[:half]), pairwise(vectors[half:])
    ab, aa, bb = ((x * y).sum() for x, y in ((a, b), (a, a), (b, b)))
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def _slips(ranks, name, turn):
    """{what a usual mistake gets: (tensor, hint)}"""
    if name not in CASES:
        return {}
    vectors = _all_x(ranks, name, turn)
    if "sizes" in name:
        return {"that of the whole buffer": (_of(pairwise(vectors), vectors), "One coefficient for "
                "all mixes layers: a layer with large gradients would decide for all.")}
    if name != "random" or ranks.size != 2:
        return {}
    a, b = (each.double() for each in vectors)
    ab, aa, bb = a @ b, a @ a, b @ b
    found = {f"what one gets {what}": (of(ab, aa, bb) * a + of(ab, bb, aa) * b, hint)
             for what, of, hint in COEFFICIENTS}
    # a is "mine" on both ranks: their |a|^2 are of different vectors.
    (low_a, high_a), (low_b, high_b) = a.tensor_split(2), b.tensor_split(2)
    mine = 1 - ab / 2 / (low_a @ low_a + high_b @ high_b)
    theirs = 1 - ab / 2 / (low_b @ low_b + high_a @ high_a)
    found["what one gets when each rank's own is a"] = torch.cat(
        [mine * low_a + theirs * low_b, mine * high_b + theirs * high_a]), AGREE
    rows = {"a.b": ab, "a.a": aa, "b.b": bb}
    for order in list(itertools.permutations(rows))[2:]:  # the first two are looked for above
        x, *squares = (rows[name] for name in order)
        of_a, of_b = (1 - x / (2 * each) if each > 0 else 1 for each in squares)
        found[f"what one gets with the rows as {', '.join(order)}"] = (
            of_a * a + of_b * b, "The rows of dot_products: the order is a.b, a.a, b.b.")
    return {what: (_of(value, vectors), hint) for what, (value, hint) in found.items()}


def _of(value, vectors):
    return value.to(vectors[0].dtype)


def _all_x(ranks, name, turn):
    return [(1 + turn) * CASES[name][0](rank, ranks.size) for rank in ranks.members]


def _trial(fn, ranks):
    def call(turn):
        seen = {}
        for name in CASES:
            x = _all_x(ranks, name, turn)[ranks.index].to(device())
            sizes = [SIZES] * ("sizes" in name)
            seen |= {name: fn(x, *sizes, **ranks.keywords), f"the x of {name}": x}
        return seen

    def right(turn):
        found = {}
        for name in CASES:
            vectors = _all_x(ranks, name, turn)
            parts = zip(*(each.split(SIZES if "sizes" in name else len(each)) for each in vectors))
            whole = torch.cat([pairwise(each) for each in parts])
            found |= {name: [_of(whole, vectors)] * ranks.size, f"the x of {name}": vectors}
        return found

    yield from beside(str(ranks), ranks, call, right, slips=partial(_slips, ranks), advice=_advice)


def _advice(name):
    return CASES[name][1] if name in CASES else "Work on new tensors: x.flatten() may be x itself."


def _sends(fn, ranks):
    with Traffic() as traffic:
        fn(torch.ones(4096, device=device()))
    times = traffic.sent_bytes / 4096 / 4
    yield partial(expect, times < 1.1 * 1.5, f"{ranks} sends {times:.2f} times the vector; 1.50 "
                  "times is enough", "Swap halves: keep one half, and give the other one away.")


def _refuses(fn, ranks):
    yield refused(f"{ranks}, which is no power of two", partial(fn, torch.ones(4, device=device())))


def check_adasum(fn):
    for ranks in (2, 4, 1, 8):  # only with 8 do three ranks hold the other parts of a vector
        on_groups(_trial, fn, ranks=ranks, groupings=[(tuple(range(ranks)),)], failures=FAILURES)
        if ranks == 2:
            yield "two ranks: orthogonal gradients are added, equal ones averaged, and all between"
    yield "four and eight ranks are combined in pairs, then the pairs; alone nothing changes"
    yield "several tensors in one buffer: each with its own coefficients; x is unchanged"
    on_groups(_sends, fn, groupings=[((0, 1, 2, 3),)])
    yield "each rank sends 2(R-1)/R of the vector, as a ring does, and a few dot products"
    on_groups(_trial, fn, groupings=[((0, 2), (1, 3))], failures={".*": f"{GROUP} Also for the dot "
              "products and in gather_halves."})
    on_groups(_refuses, fn, ranks=3, failures={".*": "On every rank: raise a ValueError unless R "
              "is a power of two: R & (R - 1) is 0 only then."})
    yield "inside a group it meets nobody else; 3 ranks are a ValueError on every rank"
