"""Lab 11: gradients over the wrong ranks, or divided by the wrong number."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.expert_parallel import expert_gradients

NONE = "p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
DIVIDE = "p.grad /= ranks"

WRONG = [mutant(expert_gradients, *edits, says=says, called=called) for *edits, says, called in (
    (DIVIDE, "p.grad /= dist.get_world_size(members)", "mean over the ranks that have this expert",
     "mean_over_own"),
    ("(experts, own)", "(experts, group)", "mean over all ranks", "all_ranks"),
    ("(shared, group)", "(shared, own)", "(experts, own)", "(experts, group)", "is ", "swapped"),
    ("(shared, group)", "(shared, own)", "over `own`|is ", "shared_over_own"),
    (DIVIDE, "pass", "times what is right|sum over the ranks", "sums"),
    (f"            {NONE}", "", "NoneType", "none_is_an_error"),
    (NONE, "p.grad = torch.zeros(p.shape, device=p.device) if p.grad is None else p.grad\n",
     "RuntimeError", "zeros_in_float32"),
    (NONE, "if p.grad is None:\n                continue\n", "zeros there|does not end|gradient",
     "skips_none"),
    ("ranks = dist.get_world_size(group)", "ranks = dist.get_world_size()",
     "divided by the number of all ranks|is ", "world_size"),
    ("ranks = dist.get_world_size(group)", "ranks = dist.get_world_size(own)",
     "mean over the ranks that have this expert|times what is right|is ", "size_of_own"),
    (DIVIDE, "p.grad /= ranks * dist.get_world_size(members)", " is ", "divided_twice"),
    ("dist.all_reduce(p.grad, group=members)", "dist.all_reduce(p.grad / 1, group=members)",
     " is ", "a_copy"),
    ("dist.all_reduce(p.grad, group=members)",
     "dist.all_reduce(p.grad, group=members, async_op=True)",
     "wait", "not_awaited"),
    ("dist.all_reduce(p.grad, group=members)", "dist.all_reduce(p.data, group=members)", " is ",
     "weights"),
)]  # fmt: skip


def expert_gradients__in_two_steps(shared, experts, own, group=None):
    """calls"""
    for p in [*shared, *experts]:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad /= dist.get_world_size(group)
        if any(p is each for each in experts):
            dist.all_reduce(p.grad, group=own)
        else:
            half = p.grad / 2
            dist.all_reduce(half, group=group)
            p.grad /= 2
            dist.all_reduce(p.grad, group=group)
            p.grad += half
