"""The check of elastic_batch: the plan's rules, and its gradients on 1 to 5 ranks."""

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from ranklab.checks.beside import expect, on_groups, refused
from ranklab.checks.trial import explain
from ranklab.engine import device

# batch, ranks, micro_batch
CASES = ((24, 1, 4), (25, 4, 3), (24, 4, 3), (24, 5, 2), (7, 2, 8), (23, 3, 3), (5, 4, 1),
         (2, 3, 4), (9, 4, 2), (1000, 7, 16))
GROUPINGS = ((0, 1, 2, 3, 4),), ((0,), (1, 2, 3, 4)), ((0, 1), (2, 3, 4))
WEIGHT = ("In the mean over the batch all positions count the same: a micro-batch of n positions "
          "has the weight n / batch, whatever the number of ranks.")
FAILURES = {"(TypeError: cannot unpack|ValueError: .*values to unpack).*": "A rank's plan is a "
            "list of pairs: (positions, weight).",
            "TypeError: .*'int' object .*": "positions is a range, not a number."}


def _rules(batch, ranks, micro_batch, plan):
    def rule(is_so, seen, hint):
        expect(is_so, f"batch={batch}, ranks={ranks}, micro_batch={micro_batch}: {seen}", hint)

    rule(isinstance(plan, (list, tuple)) and len(plan) == ranks and all(
        isinstance(of, (list, tuple)) for of in plan), "not a list for each rank",
        "[[(positions, weight), ...] of rank 0, of rank 1, ...]: a list can be read twice.")
    odd = {type(each).__name__ for of in plan for positions, weight in of for each, kind in
           ((positions, range), (weight, (int, float))) if not isinstance(each, kind)}
    rule(not odd, f"there is a {', '.join(odd)}", "positions are a range, weight is a float.")
    sizes = [[len(positions) for positions, _ in of] for of in plan]
    there = sorted(p for of in plan for positions, _ in of for p in positions)
    twice = sorted({a for a, b in pairwise(there) if a == b})
    rule(not twice, f"positions {twice[:4]} are there more than once", "Each counts once: the "
         "parts must not overlap.")
    missing = sorted(set(range(batch)) - set(there))
    rule(not missing, f"{len(missing)} positions are in no micro-batch", "Without the rest it "
         "is another batch: let the first ranks take one more.")
    rule(there == list(range(batch)), "there are positions outside the batch", "")
    largest = max(map(max, filter(None, sizes)), default=0)
    rule(largest <= micro_batch, f"a micro-batch has {largest} positions", "More than "
         "`micro_batch` of them may not fit into memory.")
    counts, least = {len(of) for of in sizes}, -(-(-(-batch // ranks)) // micro_batch)
    rule(len(counts) == 1, f"ranks have {sorted(counts)} micro-batches", "Sharded models "
         "communicate in each one, so a rank with fewer makes the others wait. Cut each rank's "
         "part into the same number of pieces.")
    rule(counts == {least}, f"{len(plan[0])} micro-batches a rank; {least} are enough", "As many "
         "as the fullest rank needs: its positions / micro_batch, rounded up.")
    shares = [sum(of) for of in sizes]
    rule(max(shares) - min(shares) <= 1, f"ranks take {shares[:5]} positions", "All ranks wait for "
         "the fullest one: the numbers may differ by one at most.")
    weights, right = [w for of in plan for _, w in of], [n / batch for of in sizes for n in of]
    of_rank = [n / max(1, share) for of, share in zip(sizes, shares) for n in of]
    for what, wrong in (("alike for all", [1 / len(right)] * len(right)),
                        ("n / the rank's own number", of_rank),
                        ("a mean over ranks of means", [w / ranks for w in of_rank]),
                        ("n", [w * batch for w in right]),
                        ("n / batch times the ranks", [ranks * w for w in right])):
        alike = all(abs(a - b) < 1e-12 for a, b in zip(weights, wrong))
        rule(not alike or wrong == right, f"the weights are {what}", WEIGHT)
    for a, b in zip(weights, right):
        rule(abs(a - b) < 1e-9, f"a weight is {a:.4g}, not {b:.4g}", WEIGHT)


def _losses(w, x):
    return (x @ w).tanh() + (x @ w) ** 2


def _trial(elastic_batch, ranks):
    for batch, micro_batch in ((23, 3), (4, 1), (7, 10)):
        x = torch.randn(batch, 3, generator=torch.Generator().manual_seed(0)).to(device())
        x = x * torch.arange(1, batch + 1, device=device())[:, None]
        w = torch.full((3,), 0.1, device=device(), requires_grad=True)
        right, = torch.autograd.grad(_losses(w, x).mean(), w)
        w.grad = torch.zeros_like(w)
        for positions, weight in elastic_batch(batch, ranks.size, micro_batch)[ranks.index]:
            if len(positions):
                (weight * _losses(w, x[list(positions)]).mean()).backward()
        dist.all_reduce(w.grad, group=ranks.group)
        yield partial(explain, f"{ranks}, batch={batch}: the gradient", w.grad.cpu(), right.cpu(),
                      {}, WEIGHT)


def check_elastic_batch(elastic_batch):
    for case in CASES:
        plan = elastic_batch(*case)
        _rules(*case, plan)
    yield "each position once, at most micro_batch of them together; ranks differ by one at most"
    yield "all ranks have the same number of micro-batches, and no more than needed; n / batch"
    on_groups(_trial, elastic_batch, ranks=5, groupings=GROUPINGS, failures=FAILURES)
    yield "the gradients of 1 to 5 ranks are those of one process"
    for case in ((0, 2, 1), (4, 0, 1), (4, 2, 0)):
        refused(f"(batch, ranks, micro_batch) = {case}", partial(elastic_batch, *case))()
    yield "numbers below 1 are a ValueError"
