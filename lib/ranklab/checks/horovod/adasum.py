"""The check of adasum: against its definition, in one process and in float64."""

import torch
import torch.distributed as dist

from ranklab.checks.collectives.inputs import watched
from ranklab.checks.prover import ALL, AtMost, Proof, Slip, Stage, must_refuse
from ranklab.engine import device
from ranklab.horovod import adasum, adasum_of_two

SIZES = [5, 1, 3, 8]  # several tensors in one buffer; the halves cut through them
PAIRS, THREE = ((0, 2), (1, 3)), ((0, 1, 2), (3,))  # the ranks of these groups are not 0 .. n-1
LARGE = "a vector of 4096 numbers"


def _numbers(n=17):
    """Return whole numbers, different on each rank of the job."""
    rank = dist.get_rank()
    return ((torch.arange(n) * (7 + 2 * rank) + 5 * rank) % 13 - 6).float()


CASES = {  # x on the rank of these Ranks
    "17 numbers": lambda ranks: _numbers(),
    "the first rank has zeros": lambda ranks: torch.ones(6) * (ranks.index > 0),
    "the last rank has zeros": lambda ranks: torch.ones(6) * (ranks.index < ranks.size - 1),
    "numbers near 1e-10": lambda ranks: torch.full((4,), 1e-10 * (1 + ranks.index)),
    "numbers near 1e20": lambda ranks: torch.full((4,), 1e20 * (1 + ranks.index)),
    "float16, numbers near 300": lambda ranks: torch.full((16,), 300.0 + ranks.index).half(),
    "float64": lambda ranks: _numbers().double() * (1 + 2.0**-26),  # lost in float32
    "one number": lambda ranks: torch.tensor([2.0 - ranks.index]),
    "a matrix that is not contiguous": lambda ranks: _numbers(6).view(3, 2).t(),
    "a step of 2": lambda ranks: _numbers()[::2],
    f"sizes={SIZES}": lambda ranks: _numbers(),
    LARGE: lambda ranks: torch.ones(4096),
}
RESULT, CHANGED = "the result", "x afterwards"
SENT, WAITED = "bytes sent", "handles that nobody waited for"


# --- what is seen ---------------------------------------------------------------------------------

def _see(fn, case, ranks):
    """Look at two calls; with a number of ranks that is not a power of two, only at the error."""
    if ranks.size & (ranks.size - 1):
        if case == "17 numbers":
            yield {"what it raises": must_refuse(
                fn, CASES[case](ranks).to(device()), **ranks.keywords)}
        return
    sizes = [SIZES] * case.startswith("sizes")
    for turn in (0, 1):
        x = (CASES[case](ranks) * (1 + turn)).to(device())
        result, traffic, dropped = watched(lambda: fn(x, *sizes, **ranks.keywords))
        cost = {SENT: AtMost(100 * traffic.sent_bytes / x.nbytes,
                             110 * 2 * (ranks.size - 1) / ranks.size,
                             "sends {:.1f} MB of a 100 MB vector; {:.1f} MB are enough")}
        yield {RESULT: result, CHANGED: x, WAITED: AtMost(dropped, 0),
               **(cost if case == LARGE else {})}


def by_definition(x, sizes=None, group=None):
    """Gather all vectors on every rank; combine each tensor separately: two, then their pairs."""
    R = dist.get_world_size(group)
    if R & (R - 1):
        raise ValueError(f"{R} ranks")
    flat = x.contiguous().view(-1)
    vectors = [torch.empty_like(flat) for _ in range(R)]
    dist.all_gather(vectors, flat, group=group)
    tensors = zip(*(each.double().split(sizes or [len(flat)]) for each in vectors))
    return torch.cat([_pairwise(list(each)) for each in tensors]).to(x.dtype).view(x.shape)


def _pairwise(vectors):
    while len(vectors) > 1:
        vectors = [adasum_of_two(*pair) for pair in zip(vectors[::2], vectors[1::2])]
    return vectors[0]


# --- mistakes -------------------------------------------------------------------------------------

A, B = (f"torch.where({x} > 0, ab / (2 * {x}), 0)" for x in ("aa", "bb"))
ROWS, BACK = "ab, aa, bb = dots", "gather_halves(part, lengths, group).view(x.shape)"
COMBINED = "of_a[tensor_of] * a + of_b[tensor_of] * b"
STEPS, PASSED = "while step <= distance", "rank ^ step, group)"
DOTS = "len(sizes))\n        step"
ZERO = ("A gradient of zeros has |a|^2 = 0: its coefficient is 1, not 1 - 0/0, for b as well as "
        "for a. Use torch.where(aa > 0, ab / (2 * aa), 0).")


def _both(old, new):
    """Return edits that replace `old` with `new` in both coefficients; N is |a|^2, or |b|^2."""
    return sum(((old.replace("N", x), new.replace("N", x)) for x in ("aa", "bb")), ())


ADASUM = Proof(
    adasum,
    Stage({"two ranks: what agrees is averaged, the rest is added; on one rank nothing changes":
           (),
           "several tensors in one buffer: each with its own coefficients; x is unchanged":
           (CHANGED,)},
          _see, tuple(CASES), (2, 1), oracle=by_definition),
    Stage({"four ranks are combined in pairs, then the pairs": (),
           "inside a group it talks only to that group's ranks; 3 ranks are a ValueError on every "
           "rank":
           ("what it raises",)},
          _see, tuple(CASES), (4,), (ALL, PAIRS, THREE), oracle=by_definition),
    Stage({"eight ranks, too": (),
           "each rank sends 2(R-1)/R of the vector, as a ring does, and a few dot products":
           (SENT,)},
          _see, tuple(CASES), (8,), oracle=by_definition),
    mistakes=(
        # the coefficients
        Slip("Each coefficient subtracts only *half*: ab / (2 * aa).",
             _both("ab / (2 * N)", "ab / N")),
        Slip("Use a minus sign: the part that both vectors share counts once, not twice.",
             _both("1 - torch.where(N", "1 + torch.where(N")),
        Slip("The coefficient is what remains: 1 - ab / (2 * aa).",
             _both("1 - torch.where(N", "torch.where(N")),
        Slip("Brackets are missing: ab / (2 * aa).", _both("ab / (2 * N)", "ab / 2 * N")),
        Slip("Don't take the square root: the formula needs the squares, aa and bb.",
             _both("(2 * N)", "(2 * N**0.5)")),
        Slip("Each vector has its own coefficient, with its own squared length: aa for a, bb for "
             "b.",
             _both("(2 * N)", "(2 * (aa * bb)**0.5)"),
             ("ab / (2 * aa)", "ab / (2 * (aa + bb) / 2)", "ab / (2 * bb)",
              "ab / (2 * (aa + bb) / 2)")),
        Slip("Compare |a|^2 only with 0, add nothing to it, and don't clamp it: tiny gradients "
             "count like all others.",
             _both("torch.where(N > 0, ab / (2 * N), 0)", "ab / (2 * N + 1e-8)"),
             _both("where(N > 0", "where(N > 1e-8"),
             _both("(2 * N)", "(2 * N).clamp(min=1e-8)"),
             _both("(2 * N)", "(2 * N.clamp(min=1e-12))"),
             _both("torch.where(N > 0, ab / (2 * N), 0)", "ab / (2 * N.clamp(min=1e-12))")),
        Slip(ZERO, (B, "ab / (2 * bb)"), (A, "ab / (2 * aa)"),
             (A, "ab / (2 * aa)", B, "ab / (2 * bb)")),
        Slip("If one vector is all zeros, both coefficients are 1: it must not take anything from "
             "the other vector.",
             (A, "torch.where((aa > 0) & (bb > 0), ab / (2 * aa), 1)")),
        Slip("The rows of dot_products are in the order a.b, a.a, b.b.",
             *((ROWS, f"{order} = dots") for order in (
                 "aa, ab, bb", "aa, bb, ab", "bb, ab, aa", "bb, aa, ab"))),
        Slip("Multiply each vector by its own coefficient: the one for a contains |a|^2. The rows "
             "of dot_products are a.b, a.a, b.b.",
             (COMBINED, "of_b[tensor_of] * a + of_a[tensor_of] * b"),
             (ROWS, "ab, bb, aa = dots")),
        Slip("This is the plain sum: multiply each vector by its coefficient first.",
             (COMBINED, "a + b")),
        Slip("This is the mean: orthogonal parts must be added, not averaged.",
             (COMBINED, "(a + b) / 2")),
        Slip("Don't divide by the number of ranks.", (BACK, f"{BACK} / R")),
        # which numbers
        Slip("One coefficient for all tensors mixes layers: the layer with the largest gradients "
             "would decide.", ("sizes or [x.numel()]", "[x.numel()]"),
             (ROWS, "ab, aa, bb = dots.sum(1, keepdim=True).expand_as(dots)")),
        Slip("There is one coefficient per tensor, but a and b hold elements: index with tensor_of "
             "to get each element's coefficient.", (COMBINED, "of_a * a + of_b * b")),
        Slip("Each element needs the coefficient of its own tensor: index with tensor_of.",
             (COMBINED, "of_a[0] * a + of_b[0] * b"), (COMBINED, "of_a[-1] * a + of_b[-1] * b")),
        Slip("Both ranks of a pair must take the left rank's vector as a. Otherwise the sums over "
             "ranks mix |a|^2 of one with |b|^2 of the other.",
             ("(local_half, peer_half) if is_left else (peer_half, local_half)",
              "local_half, peer_half")),
        Slip("A rank holds only part of the two vectors, so its dot products are partial sums: add "
             "those from rank ^ 1, rank ^ 2, rank ^ 4, ... rank ^ distance.",
             (STEPS, "while False"), (STEPS, "while step < distance")),
        Slip("From the second round on, more than two ranks hold parts of the two vectors: add the "
             "dot products from rank ^ 1, rank ^ 2, rank ^ 4, ... rank ^ distance.",
             (STEPS, "step = distance\n        while step == distance")),
        Slip("Don't skip the steps between the first and the last: step = 1, 2, 4, ... distance.",
             ("step *= 2", "step = 2 * distance if step == distance else distance")),
        Slip("Add what arrives to your own dot products: dots += ...", ("dots += ", "dots = ")),
        # types
        Slip("300 * 300 overflows in float16, and 1e20 * 1e20 in float32: dot products need "
             "float64, from the first sum to the coefficients.",
             (DOTS, DOTS.replace("))", ")).float()")), (ROWS, "ab, aa, bb = dots.float()"),
             (DOTS, DOTS.replace("))", ")).to(x.dtype)")),
             (ROWS, "ab, aa, bb = dots.to(x.dtype)")),
        Slip("float64 vectors lose half of their digits in float32.",
             (COMBINED, "of_a[tensor_of] * a.float() + of_b[tensor_of] * b.float()")),
        Slip("The coefficients are float64: convert the result back with .to(x.dtype).",
             (").to(x.dtype)", ")")),
        Slip("The result has x's dtype, whatever it is.", (").to(x.dtype)", ").float()")),
        # x, the cost, the group
        Slip("This changes x itself: x.flatten() may share x's memory. Work on new tensors.",
             (f"part = ({COMBINED}).to(x.dtype)",
              "part = a.mul_(of_a[tensor_of]).add_(of_b[tensor_of] * b)")),
        Slip("Swap halves: keep one, and send the other.",
             ("(left, right) if is_left else (right, left)", "part, part",
              "tensor_of.tensor_split(2)[0 if is_left else 1]", "tensor_of",
              STEPS, "while False", BACK, "part.view(x.shape)")),
        Slip("Pass `group` to every call that needs it: get_rank, sendrecv and gather_halves.",
             ("rank, R =", "group = None\n    rank, R =")),
        Slip("Pass `group` for the dot products as well: sendrecv(dots, ..., group).",
             (PASSED, PASSED.replace(", group", ""))),
        Slip("Every rank must raise a ValueError unless R is a power of two: R & (R - 1) is 0 only "
             "then.", ("if R & (R - 1):", "if R == 3 and rank < 2:\n        return x.clone()\n"
                       "    if R & (R - 1):")),
    ), hints=(
        "After the swap, you hold one half of each of two vectors. On both ranks, a is the left "
        "rank's vector. What do you need to combine them, and which part of that do other ranks "
        "hold?",
        "dot_products covers only your part. For step = 1, 2, 4, ... distance, exchange dots with "
        "rank ^ step, and add what arrives.",
        "ab, aa, bb = dots; of_a = 1 - torch.where(aa > 0, ab / (2 * aa), 0), of_b likewise; "
        "part = (of_a[tensor_of] * a + of_b[tensor_of] * b).to(x.dtype)",
    ))
