"""Lab 11: rows that go to the wrong place, or lie in the wrong order."""

import torch.distributed as dist
from mutants import mutant

from ranklab.expert_parallel import dispatch_tokens
from ranklab.expert_parallel.dispatch import all_to_all_rows

ORDER = "flat.argsort(stable=True)[(flat < 0).sum():]"
ASK = "dist.all_to_all_single(received, counts, group=group)"
EXPERT = "torch.arange(n_experts // R, device=x.device).repeat(R).repeat_interleave(received)"
SENT = "Sent(order, to, came, by_expert, received.view(R, -1).sum(0))"

WRONG = [mutant(dispatch_tokens, *edits, says=says, called=called, all_to_all_rows=all_to_all_rows)
         for *edits, says, called in (
    (ORDER, "flat.argsort(stable=True)", "bincount|Split|order", "sends_none"),
    (ORDER, "flat.argsort(descending=True, stable=True)[:(flat >= 0).sum()]", "rows|order",
     "sorted_down"),
    (ORDER, "(flat >= 0).nonzero().flatten()", "order|rows", "not_sorted"),
    ("x[order // k]", "x[order % len(x)]", "rows", "token_by_remainder"),
    ("x[order // k]", "x[order // 2]", "rows|IndexError", "always_two_choices"),
    ("x[order // k]", "x.float()[order // k]", "float32", "float32_travels"),
    ("rows[by_expert]", "rows", "rows", "sorted_by_rank"),
    (f"    {ASK}\n", "    received = counts.clone()\n", "came|[Ss]plit|rows|bytes of a message",
     "does_not_ask"),
    ("by_expert = expert.argsort(stable=True)", "by_expert = expert.argsort(descending=True, "
     "stable=True)", "by_expert", "experts_from_the_last"),
    (EXPERT, "torch.arange(R, device=x.device).repeat(n_experts // R).repeat_interleave(received)",
     "rows|by_expert", "ranks_for_experts"),
    (SENT, "Sent(order, came, to, by_expert, received.view(R, -1).sum(0))", "to|came", "exchanged"),
    (SENT, "Sent(order, to, came, by_expert, counts)", "counts", "its_own_counts"),
    (SENT, "Sent(order, to, came, by_expert, received.view(R, -1).sum(1))", "counts",
     "counts_of_ranks"),
    (SENT, "Sent(order, to, came, by_expert.argsort(), received.view(R, -1).sum(0))", "by_expert",
     "inverse_order"),
    (SENT, "Sent(order.tolist(), to, came, by_expert.tolist(), received.view(R, -1).sum(0))",
     "can't use this Sent", "lists"),
    (SENT, "Sent(order, received.new_tensor(to), received.new_tensor(came), by_expert, "
     "received.view(R, -1).sum(0))", "can't use this Sent", "tensors"),
    ("by_expert = expert.argsort(stable=True)", "by_expert = (expert * len(expert) - "
     "expert.new_tensor(range(len(expert)))).argsort()", "not stably", "not_stable"),
    ("AllToAll.apply(", "all_to_all_rows(", "rows have no gradient", "no_gradient"),
    ("    if n_experts % R:\n        raise ValueError(f\"{R} ranks must divide the {n_experts} "
     "experts\")\n", "", "no ValueError|Error", "not_refused"),
    (ASK, "dist.all_to_all_single(received, counts)", "Pass `group` on|does not end|Error",
     "asks_all_ranks"),
    ("to, came, group)", "to, came, None)", "Pass `group` on|does not end|Error", "to_all_ranks"),
)]  # fmt: skip


def dispatch_tokens__all_gather(x, chosen, n_experts, group=None):
    """order|bytes|calls|dx|Return rows"""
    import torch

    R = dist.get_world_size(group)
    if n_experts % R:
        raise ValueError("experts")
    sizes = [None] * R
    dist.all_gather_object(sizes, (x.detach(), chosen), group=group)
    rank, each = dist.get_rank(group), n_experts // R
    rows = [tokens[t] for e in range(rank * each, (rank + 1) * each) for tokens, want in sizes
            for t, row in enumerate(want.tolist()) for c in row if c == e]
    return torch.stack(rows) if rows else x[:0], None
