"""The check of sharded_muon_step: equal to torch.optim.Muon; the busiest rank's cost is printed."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.flops import FORMULAS
from ranklab.checks.looks import expect, on_groups
from ranklab.checks.prover import GROUPS, Slip
from ranklab.checks.trial import on_ranks
from ranklab.engine import device
from ranklab.formulas.muon import muon_cost, newton_schulz_flops
from ranklab.meter import Traffic
from ranklab.ranks import shard_range
from ranklab.zero.muon import COEFFICIENTS, newton_schulz, sharded_muon_step

LR, WEIGHT_DECAY = 0.5, 0.3  # large, so that each term is seen; not the default
ROUNDINGS = 3  # times what torch's bfloat16 is away from the same polynomial in float64
CASES = {
    "six matrices of different sizes": [(6, 10), (10, 6), (8, 8), (7, 5), (3, 9), (40, 12)],
    "one matrix": [(9, 4)],
    "two matrices, one with fewer rows than ranks": [(2, 12), (13, 6)],
}
SCORED = {
    "a GPT of 3 blocks, width 32": [(96, 32), (32, 32), (128, 32), (32, 128)] * 3,
    "one large matrix, six small ones": [(96, 96), *[(32, 48)] * 6],
}
# What is said.
OWN_ROWS = ("Each rank has orthogonalised its own rows as if they were a whole matrix. Combined, "
            "they are not orthogonal: Newton-Schulz needs all rows.")
RATIO = ("max(1, m/n)**0.5 refers to the whole matrix: take m and n from `shapes`, not from the "
         "shard.")
NO_RATIO = "The learning rate of an m x n matrix is lr * max(1, m/n)**0.5."
NO_DECAY = "Weight decay is missing: before the step, W <- (1 - lr * weight_decay) W."
DECAY = "Multiply weight_decay by lr, and by nothing else: (1 - lr * weight_decay) W."
DEFAULT = "The weight decay is the argument weight_decay, and not always 0.1."
AFTER = "Weight decay is for W alone, before the step: here the update has shrunk as well."
SIGN = "A step goes downhill: subtract the orthogonal matrix."
ORDER = ("These are another rank's rows. Concatenate in rank order, and give each rank its own "
         "rows back, shard_range(m, rank, R).")
EXACT = ("U V^T is exactly orthogonal, but Muon's result is not: five steps of newton_schulz leave "
         "singular values between 0.5 and 1.5.")
BACK = ("Some matrices are unchanged on this rank: every rank must update its rows of every "
        "matrix, also of those that another rank orthogonalises.")
IN_PLACE = ("Write into the tensors of `weights`, with mul_, add_ or copy_: those are the ones the "
            "model uses.")
MOMENTA = "`momenta` belong to the optimizer: its next step needs them unchanged."


def exactly(momentum):
    """Compute Newton-Schulz of the momentum in float64, from the numbers in bfloat16."""
    a, b, c = COEFFICIENTS
    x = momentum.bfloat16().double()
    x = x / x.norm()
    for _ in range(5):
        gram = x.mT @ x if len(x) > len(x.mT) else x @ x.mT
        change = b * gram + c * gram @ gram
        x = a * x + (x @ change if len(x) > len(x.mT) else change @ x)
    return x


def by_torch(weight, momentum):
    """Step one whole matrix in one process."""
    parameter = nn.Parameter(weight.clone())
    parameter.grad = momentum.clone()  # without momentum torch orthogonalises the gradient itself
    torch.optim.Muon([parameter], lr=LR, weight_decay=WEIGHT_DECAY, momentum=0).step()
    return parameter.detach()


def stepped(weight, update, shape, decay=LR * WEIGHT_DECAY, sign=-1):
    m, n = shape
    return (1 - decay) * weight + sign * LR * max(1, m / n) ** 0.5 * update


def polar(momentum):
    u, _, v = torch.linalg.svd(momentum.double(), full_matrices=False)
    return u @ v


# (this rank's rows of W, of M, of Newton-Schulz of M, of M's polar factor; the shape) -> its rows
MISTAKEN = {
    OWN_ROWS: lambda w, m, o, p, shape: stepped(w, newton_schulz(m).double(), shape),
    f"{OWN_ROWS} {RATIO}": lambda w, m, o, p, shape: stepped(w, newton_schulz(m).double(), w.shape),
    RATIO: lambda w, m, o, p, shape: stepped(w, o, w.shape),
    NO_RATIO: lambda w, m, o, p, shape: stepped(w, o, (1, 1)),
    NO_DECAY: lambda w, m, o, p, shape: stepped(w, o, shape, decay=0),
    DECAY: lambda w, m, o, p, shape: stepped(w, o, shape, decay=WEIGHT_DECAY),
    DEFAULT: lambda w, m, o, p, shape: stepped(w, o, shape, decay=LR * 0.1),
    AFTER: lambda w, m, o, p, shape: (1 - LR * WEIGHT_DECAY) * stepped(w, o, shape, decay=0),
    SIGN: lambda w, m, o, p, shape: stepped(w, o, shape, sign=1),
    EXACT: lambda w, m, o, p, shape: stepped(w, p, shape),
}


def _matrices(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device()) for shape in shapes]


def _rows(matrix, rank, ranks):
    part = shard_range(len(matrix), rank, ranks)
    return matrix[part.start : part.stop]


def _trial(fn, ranks):
    own = partial(_rows, rank=ranks.index, ranks=ranks.size)
    for case, shapes in CASES.items():
        whole, momenta = _matrices(shapes, 1), _matrices(shapes, 2)
        weights, shards = [own(w).clone() for w in whole], [own(m).clone() for m in momenta]
        fn([*weights], shards, [*shapes], LR, weight_decay=WEIGHT_DECAY, **ranks.keywords)
        where = f"{case}, {ranks}"
        yield partial(expect, all(map(torch.equal, shards, map(own, momenta))),
                      f"{where}: the momenta have changed", MOMENTA)
        yield partial(_compare, where, own, weights, whole, momenta)


def _compare(where, own, weights, whole, momenta):
    """Raise a Mistake unless this rank's rows equal those of the updated whole matrices."""
    due = [by_torch(*each) for each in zip(whole, momenta)]
    updates = [exactly(M) for M in momenta]
    room = [ROUNDINGS * (right - stepped(W, update, W.shape)).abs().max()
            for right, W, update in zip(due, whole, updates)]

    def agree(results):
        return [not len(new) or bool((result - new).abs().max() <= most)
                for result, new, most in zip(results, weights, room)]

    before, right = [own(W) for W in whole], agree(map(own, due))
    if all(right):
        return
    at = right.index(False)
    message = (f"{where}: its rows of a {len(whole[at])} x {whole[at].shape[1]} matrix are up to "
               f"{(weights[at] - own(due[at])).abs().max():.3g} away from torch.optim.Muon's; "
               f"bfloat16 explains {room[at]:.2g}")
    for hint, mistaken in MISTAKEN.items():
        if all(agree([mistaken(own(W), own(M), own(update), own(polar(M)), W.shape)
                      if len(own(W)) else W[:0]
                      for W, M, update in zip(whole, momenta, updates)])):
            raise Mistake(message, hint)
    same = [*map(torch.equal, weights, before)]
    if all(same):
        raise Mistake(message, IN_PLACE)
    if all(map(any, zip(same, right))):
        raise Mistake(message, BACK)
    moved = [(new - stepped(w, 0, W.shape), stepped(0, update, W.shape), most)
             for new, w, W, update, most in zip(weights, before, whole, updates, room)]
    of_others = all((rows - row).abs().amax(1).min() <= most
                    for each, rows, most in moved for row in each)
    raise Mistake(message, ORDER if of_others else "")


def _cost(fn, shapes):
    """Count the FLOPs of this rank, and the bytes that it sends."""
    member = dist.get_rank(), dist.get_world_size()
    weights, momenta = ([_rows(x, *member).clone() for x in _matrices(shapes, seed)]
                        for seed in (1, 2))
    flops = FlopCounterMode(display=False)
    flops.flop_registry.update(FORMULAS)
    with Traffic() as traffic, flops:
        fn(weights, momenta, [*shapes], LR)
    return flops.get_total_flops(), traffic.sent_bytes


def check_sharded_muon_step(fn):
    for ranks in (1, 4, 3, 2):  # alone first: there only the formula can be wrong
        on_groups(_trial, fn, ranks)
    yield ("1 to 4 ranks, rows that R does not divide, more ranks than matrices and the reverse: "
           "equal to torch.optim.Muon on whole matrices, in place")
    for grouping in GROUPS:
        on_groups(_trial, fn, 4, grouping)
    yield "in groups it talks only to ranks of the group; the momenta are unchanged"
    for name, shapes in SCORED.items():
        flops, sent = map(max, zip(*on_ranks(_cost, fn, shapes, ranks=4)))
        own, on_all = muon_cost(shapes, 4), muon_cost(shapes, 4, on_all=True)
        share = sum(newton_schulz_flops(*shape) for shape in shapes) / 4
        yield (f"{name}, the busiest of 4 ranks: {flops / 1e6:.2f} MFLOPs (library "
               f"{own.flops / 1e6:.2f}, all on each {on_all.flops / 1e6:.2f}, a quarter "
               f"{share / 1e6:.2f}); it sends {sent / 1e3:.1f} kB (library "
               f"{own.sent_bytes / 1e3:.1f}, all on each {on_all.sent_bytes / 1e3:.1f})")


def by_own_rows(weights, momenta, shapes, lr, weight_decay=0.1, group=None):
    for weight, momentum, (m, n) in zip(weights, momenta, shapes):
        weight.mul_(1 - lr * weight_decay)
        weight.add_(newton_schulz(momentum), alpha=-lr * max(1, m / n) ** 0.5)


def by_torch_on_shards(weights, momenta, shapes, lr, weight_decay=0.1, group=None):
    for weight, momentum in zip(weights, momenta):
        parameter = nn.Parameter(weight)
        parameter.grad = momentum.clone()
        torch.optim.Muon([parameter], lr, weight_decay, momentum=0).step()


def gathered_in_any_order(weights, momenta, shapes, lr, weight_decay=0.1, group=None):
    """Put this rank's rows first."""
    ranks = dist.get_world_size(group)
    for weight, momentum, (m, n) in zip(weights, momenta, shapes):
        padded = momentum.new_zeros(-(-m // ranks), n)
        padded[: len(momentum)] = momentum
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=group)
        parts = [x[: len(shard_range(m, r, ranks))] for r, x in enumerate(parts)]
        update = newton_schulz(torch.cat(parts))
        weight.mul_(1 - lr * weight_decay)
        weight.add_(update[m - len(weight) :], alpha=-lr * max(1, m / n) ** 0.5)


SHAPE, STEP = "m, n = shapes[i]", ".add_(update, alpha=-lr * max(1, m / n) ** 0.5)"
ITERATE = "whole = [newton_schulz(torch.cat(of_ranks)) for of_ranks in zip(*rows)]"
MUON = Exercise(
    sharded_muon_step, check_sharded_muon_step, mistakes=(
        Slip(OWN_ROWS, by_own_rows, by_torch_on_shards),
        Slip(RATIO, (SHAPE, "m, n = weights[i].shape")),
        Slip(NO_RATIO, (STEP, ".add_(update, alpha=-lr)")),
        Slip(NO_DECAY, (".mul_(1 - lr * weight_decay)", "")),
        Slip(DECAY, ("lr * weight_decay", "weight_decay")),
        Slip(DEFAULT, ("lr * weight_decay", "lr * 0.1")),
        Slip(AFTER, (f".mul_(1 - lr * weight_decay){STEP}", f"{STEP}.mul_(1 - lr * weight_decay)")),
        Slip(SIGN, ("alpha=-lr", "alpha=lr")),
        Slip(ORDER, gathered_in_any_order),
        Slip(EXACT, (ITERATE, "whole = [polar(torch.cat(of_ranks).float()).bfloat16() for of_ranks "
                     "in zip(*rows)]"), polar=polar),
        Slip(BACK, ("in zip(sum(owned, []), sum(rows, [])):",
                    "in zip(owned[rank], rows[rank]):")),
        Slip(IN_PLACE, (".mul_(", ".mul(")),
        Slip(MOMENTA, ("    for i, update", "    for momentum in momenta:\n        momentum /= 2\n"
                       "    for i, update")),
    ), hints=(
        "Which rank needs which rows before newton_schulz, and which after? Does every rank have "
        "to compute every matrix?",
        "Give each matrix an owner, by a rule that every rank can compute on its own, such as "
        "muon_owners. The owner receives all rows of the matrix, and sends each rank its "
        "orthogonal rows back.",
        "Call exchange_matrices twice. First, to_ranks[r] is this rank's rows of what rank r owns, "
        "and what comes from r has len(shard_range(m, r, R)) rows of each matrix that this rank "
        "owns: torch.cat them, then newton_schulz. Second, to_ranks[r] is rank r's rows of the "
        "results. Finally, weight.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * max(1, m / "
        "n) ** 0.5).",
    ))
