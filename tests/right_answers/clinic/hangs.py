"""Lab 16: other ways to mend what hangs or is slow. Each must pass."""

import contextlib

from ranklab.checks.prover.slips import edited
from ranklab.clinic.hangs import train_on_a_grid, train_with_owners
from ranklab.clinic.slowdowns import SENT, SHARE, train_large_batch, train_on_functions

MICRO_STEP = """            part = model(x, y) / len(numbers)
            part.backward()
"""
WRAPPED = """    bare = model
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = """
NO_SYNC = """            is_last = number == numbers[-1]
            with contextlib.nullcontext() if is_last else model.no_sync():
                part = model(x, y) / len(numbers)
                part.backward()
"""
BY_FLOPS = "in_a_row(piles, rank, ranks)"
COUNTS = """    for digit in range(10):
        count = torch.tensor(right.get(digit, 0), device=device())
        dist.all_reduce(count, group=group)
        right[digit] = count.item()
"""
GATHERED = """    all_of = [None] * ranks
    dist.all_gather_object(all_of, right, group=group)
    right = {digit: sum(of.get(digit, 0) for of in all_of) for digit in range(10)}
"""
GRADIENTS = """        for part in parts:
            dist.all_reduce(part.grad, group=columns)
"""


def in_a_row(piles, rank, ranks):
    """The sorted piles in as many rows of about equal FLOPs."""
    work = [pile.numel() * (224 + pile.shape[1]) for pile in piles]
    middle = [sum(work[:number]) + each / 2 for number, each in enumerate(work)]
    return [pile for pile, at in zip(piles, middle) if int(at * ranks / sum(work)) == rank]


RIGHT = {kind: edited(program, edits, contextlib=contextlib, in_a_row=in_a_row)
         for program, *edits, kind in (
    (train_large_batch, "    optimizer = ", WRAPPED, SENT, "", MICRO_STEP, NO_SYNC,
     "dict(model.named", "dict(bare.named", "torchs_no_sync"),
    (train_on_functions, f"for pile in {SHARE}", "for pile in piles[rank::ranks]",
     f"map(loss_of, {SHARE})", "map(loss_of, piles[rank::ranks])", "every_nth_pile"),
    (train_on_functions, "sorted(texts, key=len)", "sorted(texts, key=len)[rank::ranks]",
     f"for pile in {SHARE}", "for pile in piles", f"loss_of, {SHARE}", "loss_of, piles",
     "dealt_out"),
    (train_with_owners, COUNTS, GATHERED, "gathers_the_counts"),
    (train_with_owners, "dist.reduce(weights[name].grad, group_dst=owner[name], group=group)",
     "dist.all_reduce(weights[name].grad, group=group)", "all_have_the_gradients"),
    (train_on_functions, f"for pile in {SHARE}", f"for pile in {BY_FLOPS}",
     f"map(loss_of, {SHARE})", f"map(loss_of, {BY_FLOPS})", "fair_in_flops"),
    (train_on_a_grid, GRADIENTS + "        size = norm()\n", "        size = norm()\n" + GRADIENTS,
     "norm_first"),
)}
