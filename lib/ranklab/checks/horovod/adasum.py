"""The check of adasum: against its definition, in one process and in double."""

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import TOLERANCE, on_ranks, rank_name
from ranklab.collectives import node_groups
from ranklab.engine import device
from ranklab.meter import Traffic

SIZES = [5, 1, 3, 8]  # several tensors in one buffer; the halves cut through them
CASES = {
    "random": lambda rank, R: torch.randn(17, generator=torch.Generator().manual_seed(rank)),
    "orthogonal": lambda rank, R: torch.eye(8)[rank] * (rank + 1),
    "equal": lambda rank, R: torch.tensor([3.0, 4.0, 0.0, 0.0]),
    "the first has nothing": lambda rank, R: torch.ones(6) * (rank > 0),
    "the last has nothing": lambda rank, R: torch.ones(6) * (rank < R - 1),
    "tiny": lambda rank, R: torch.full((4,), 1e-6 * (1 + rank)),
    "huge": lambda rank, R: torch.full((4,), 1e20 * (1 + rank)),  # its square is no float32
    "large float16": lambda rank, R: torch.full((16,), 300.0 + rank, dtype=torch.float16),
    "one number": lambda rank, R: torch.tensor([2.0 - rank]),
    "a transposed matrix": lambda rank, R: torch.arange(6.0).view(3, 2).t() + rank,
}

AGREE = ("The ranks of a pair must agree which vector is a and which is b: a is the left one's, on "
         "both. Else the sums over ranks mix |a|^2 of one with |b|^2 of the other.")
OF_ELEMENTS = ("There is one coefficient for each tensor, but the parts have elements: "
               "of_a[tensor_of] is each element's own.")
SLIPS = (  # (what a coefficient becomes of a.b, its own and the other one's square, a hint)
    (lambda ab, own, other: 1 - ab / (2 * other),
     "a is divided by |b|^2 and b by |a|^2: it is the other way round."),
    (lambda ab, own, other: 1 - ab / own,
     "Each coefficient takes off *half*: 1 - a.b / (2 |a|^2)."),
    (lambda ab, own, other: 1 + ab / (2 * own),
     "The sign: 1 - a.b / (2 |a|^2), so that what agrees is not counted twice."),
    (lambda ab, own, other: ab / (2 * own),
     "The coefficient is what is left: 1 - a.b / (2 |a|^2), not what is taken off."),
    (lambda ab, own, other: 1 - ab / 2 * own,
     "Brackets: ab / 2 * aa is a.b / 2 times |a|^2. It is ab / (2 * aa)."),
    (lambda ab, own, other: 1 - ab / (2 * own**0.5),
     "aa and bb are squares already: a.a is |a|^2, without a root."),
    (lambda ab, own, other: 1 - ab / (2 * (own * other)**0.5),
     "Each vector has its own coefficient: |a|^2 is in that of a, not |a||b| in both."),
    (lambda ab, own, other: (1 - ab / (2 * own)) / 2,
     "Nothing is divided by the number of ranks: the coefficients do all of it."),
)


def pairwise(vectors):
    """The oracle: the formula for two, and a tree for more."""
    if len(vectors) == 1:
        return vectors[0].double()
    half = len(vectors) // 2
    return combine(pairwise(vectors[:half]), pairwise(vectors[half:]))


def combine(a, b):
    ab, aa, bb = ((x * y).sum() for x, y in ((a, b), (a, a), (b, b)))
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def _cases(ranks, per_node=None):
    """All of them, or one: in the largest launch, and in groups, it tells as much."""
    return {"random": CASES["random"]} if ranks == 8 or per_node else CASES


def trial(fn, per_node):
    """Runs on every rank: {case: (result, was the input changed?)}, the fused one, the bytes."""
    rank, R = dist.get_rank(), dist.get_world_size()
    group = node_groups(per_node)[1] if per_node else None
    seen = {}
    for name, make in _cases(R, per_node).items():
        x = make(rank, R).to(device())
        before = x.clone()
        result = fn(x, group=group)
        seen[name] = result.cpu(), not torch.equal(x, before)
    x = CASES["random"](rank, R).to(device())
    seen["fused"] = fn(x, SIZES, group=group).cpu(), False
    with Traffic() as traffic:
        if R == 4:
            fn(torch.ones(4096, device=device()), group=group)
    seen["bytes"] = traffic.sent_bytes
    return seen


def odd(fn):
    try:
        fn(torch.ones(4, device=device()))
    except ValueError as error:
        return str(error)
    return None


def check_adasum(fn):
    seen = {}
    for ranks in (2, 4, 1, 8):  # only with 8 do three ranks hold the other parts of a vector
        with hinted({"RuntimeError: The size of tensor a .* must match .*": OF_ELEMENTS}):
            seen[ranks] = on_ranks(trial, fn, None, ranks=ranks)
        for name in _cases(ranks):
            _values(name, seen[ranks], ranks)
        if ranks == 2:
            yield "two ranks: orthogonal gradients are added, equal ones averaged, and all between"
    yield "four ranks are combined in pairs, then the pairs; alone nothing changes; all ranks agree"
    _fused(seen[4])
    yield "several tensors in one buffer: each with its own coefficients"
    _bytes(seen[4])
    yield "each rank sends 2(R-1)/R of the vector, as a ring does, and a few dot products"
    _grouped(fn)
    _refused(fn)
    yield "inside a group it meets nobody else; 3 ranks are a ValueError on every rank"


def _refused(fn):
    hint = "Raise a ValueError unless R is a power of two: R & (R - 1) is 0 only then."
    with hinted({".*": hint}):  # whatever it is
        said = on_ranks(odd, fn, ranks=3)
    if None in said:
        raise Mistake("three ranks are accepted, though the third has no partner",
                      f"On every rank: {hint}")


def _values(name, seen, ranks):
    gradients = [CASES[name](rank, ranks) for rank in range(ranks)]
    right = pairwise(gradients)
    for rank, one in enumerate(seen):
        got, changed = one[name]
        where = f"{name}, {rank_name(rank, ranks)}"
        if changed:
            raise Mistake(f"{where}: x itself is changed", "Work on new tensors: x.flatten() may "
                          "be x itself, so never write into it.")
        if got.shape != gradients[0].shape or got.dtype != gradients[0].dtype:
            raise Mistake(f"{where}: shape {tuple(got.shape)}, {got.dtype} came out of "
                          f"{tuple(gradients[0].shape)}, {gradients[0].dtype}",
                          "The coefficients are float64: bring the result back with .to(x.dtype).")
        if not torch.equal(got, seen[0][name][0]) and got.isfinite().all():
            raise Mistake(f"{where} does not have what rank 0 has", AGREE)
        close = TOLERANCE[got.dtype]
        if not torch.allclose(got.double(), right, rtol=close, atol=close * right.abs().max()):
            at = int((got.double() - right).abs().nan_to_num(torch.inf).argmax())
            raise Mistake(f"{where}: {got.flatten()[at]:.6g} at element {at}, not "
                          f"{right.flatten()[at]:.6g}", _hint(name, got, gradients))


def _hint(name, got, gradients):
    if not got.isfinite().all():
        if name in ("large float16", "huge"):
            return ("300 * 300 does not fit into float16, and 1e20 * 1e20 not into float32: dot "
                    "products need float64, from the first sum to the coefficients, whatever type "
                    "the gradients have.")
        return ("A gradient of zeros has |a|^2 = 0: there the coefficient is 1, not 1 - 0/0, be it "
                "a or b that is zero. torch.where(aa > 0, ab / (2 * aa), 0).")
    if name == "tiny":
        return ("Nothing is added to |a|^2, and it has no lower limit: 1e-6 squared is far below "
                "1e-8. Ask whether it is 0: torch.where(aa > 0, ...).")
    total = sum(gradients).double()
    slips = [(total, "That is the plain sum: are the coefficients applied?"),
             (total / len(gradients), "That is the plain average: are the coefficients applied?")]
    if name == "equal":
        slips += [(0 * total, "Equal vectors cancel out: the coefficient is 1 - a.b / (2 |a|^2), "
                              "with a 2.")]
    if name == "random" and len(gradients) == 2:
        slips += _slips(*(one.double() for one in gradients))
    for wrong, hint in slips:
        if torch.allclose(got.double(), wrong, rtol=1e-3):
            return hint
    return ("A rank holds only part of the two vectors, so its dot products are only part of the "
            "sum: add those of all ranks that hold the other parts, rank ^ 1, rank ^ 2, rank ^ 4, "
            "... rank ^ distance (doubling), each time the running sum.")


def _slips(a, b):
    """(what two ranks get by a mistake in the two coefficients, a hint)."""
    ab, aa, bb = a @ b, a @ a, b @ b
    for of, hint in SLIPS:
        yield of(ab, aa, bb) * a + of(ab, bb, aa) * b, hint
    # a is "mine" on both ranks: their |a|^2 are of different vectors.
    (low_a, high_a), (low_b, high_b) = a.tensor_split(2), b.tensor_split(2)
    mine = 1 - ab / 2 / (low_a @ low_a + high_b @ high_b)
    theirs = 1 - ab / 2 / (low_b @ low_b + high_a @ high_a)
    yield torch.cat([mine * low_a + theirs * low_b, mine * high_b + theirs * high_a]), AGREE
    for x, y, z in ((aa, ab, bb), (aa, bb, ab), (bb, aa, ab), (bb, ab, aa)):
        yield ((1 - x / (2 * y) if y > 0 else 1) * a + (1 - x / (2 * z) if z > 0 else 1) * b,
               "The rows of dot_products have other names here: the order is a.b, a.a, b.b.")


def _fused(seen):
    gradients = [CASES["random"](rank, 4).split(SIZES) for rank in range(4)]
    right = torch.cat([pairwise(list(parts)) for parts in zip(*gradients)])
    whole = pairwise([torch.cat(parts) for parts in gradients])
    for rank, one in enumerate(seen):
        got = one["fused"][0].double()
        if torch.allclose(got, right, rtol=1e-5, atol=1e-5):
            continue
        what = f"sizes={SIZES}, rank {rank} of 4: not what each tensor for itself would give"
        if torch.allclose(got, whole, rtol=1e-5, atol=1e-5):
            raise Mistake(what, "One coefficient for the whole buffer mixes layers: a layer with "
                          "large gradients would decide for all. dot_products(a, b, tensor_of, n) "
                          "gives one for each tensor, and ab[tensor_of] one for each element.")
        raise Mistake(what, "Each element takes the coefficient of its own tensor, "
                      "of_a[tensor_of]; and tensor_of is cut as the vector is: the same half.")


def _bytes(seen):
    ring = 2 * 3 * 4096 * 4 // 4
    for rank, one in enumerate(seen):
        if one["bytes"] > 1.1 * ring:
            raise Mistake(f"rank {rank} of 4 sends {one['bytes'] / 4096 / 4:.2f} times the vector; "
                          f"{ring / 4096 / 4:.2f} times is enough",
                          "Swap halves: keep one half of what you have and give the other one. "
                          "The vector gets shorter as the distance doubles.")


def _grouped(fn):
    hint = ("Hand `group` on: get_rank(group), get_world_size(group), sendrecv(..., group), also "
            "for the dot products, gather_halves(..., group).")
    with hinted({".*": hint}):
        seen = on_ranks(trial, fn, 2, ranks=4, nodes=2)
    for rank, one in enumerate(seen):
        members = (rank % 2, rank % 2 + 2)
        right = pairwise([CASES["random"](r, 4) for r in members])
        if not torch.allclose(one["random"][0].double(), right, rtol=1e-5, atol=1e-5):
            raise Mistake(f"in the group of ranks {members} rank {rank} does not get the Adasum of "
                          "these two", hint)
