"""Lab 10: gradients that do not come home, or are those of some keys alone."""

from mutants import mutant

from ranklab.context_parallel import ring_attention_backward

HIDDEN = ("    for step in range(R):\n        if not len(visible[(rank - step) % R].rows):\n"
          "            break\n")
HOME = "dk, dv = grad_hop.wait() if grad_hop else gradients  # the last hop brought my block's home"

WRONG = [mutant(ring_attention_backward, *edits, says=says, called=called)
         for *edits, says, called in (
    ("grad_hop = Hop(gradients, group) if R > 1 else None",
     "grad_hop = Hop(gradients, group) if step < R - 1 else None", "in 6 messages", "not_home"),
    (HOME, "dk, dv = gradients", "never waited", "stays_at_the_last"),
    ("gradients += grad_hop.wait()", "grad_hop.wait()", "dk is", "never_added"),
    ("dq + grads[0]", "grads[0]", "dq is", "last_dq"),
    ("visible[(rank - step) % R]", "visible[rank]", " is ", "own_mask"),
    ("visible[(rank - step) % R]", "visible[(rank + step) % R]", " is ", "other_way"),
    ("range(R)", "range(R - 1)", "Unbound|messages", "one_step_too_few"),
    ("torch.stack(grads[1:])", "torch.stack(grads[1:]).bfloat16()", "bytes in 7",
     "sixteen_bits"),
    ("Hop(gradients, group)", "Hop(gradients)", "does not end", "all_ranks"),
    ("return dq, dk, dv", "return dq, dv, dk", "dk is", "swapped"),
    ("if step < R - 1 else None", "", r"messages, not", "one_hop_too_many"),
    ("    for step in range(R):\n", HIDDEN, "consecutive parts|does not end", "stops_where_hidden"),
    ("dq, block, grad_hop = 0,", "dq, block, grad_hop = torch.zeros_like(q),", "dq + grads[0]",
     "dq.add_(grads[0])", "dq is torch.bfloat16", "dq_in_the_type_of_q"),
    ("return dq, dk, dv", "return (x.to(q.dtype).float() for x in (dq, dk, dv))",
     "bfloat16: dq is", "rounded"),
)]  # fmt: skip


def ring_attention_backward__all_reduce(grad_out, q, k, v, out, lse, visible, group=None):
    """in 0 messages"""
    import torch
    import torch.distributed as dist

    from ranklab.context_parallel import block_gradients

    rank, R = dist.get_rank(group), dist.get_world_size(group)
    blocks = [torch.empty_like(torch.stack([k, v])) for _ in range(R)]
    dist.all_gather(blocks, torch.stack([k, v]), group=group)
    parts = [block_gradients(grad_out, q, *block, out, lse, seen)
             for block, seen in zip(blocks, visible)]
    dkv = torch.stack([torch.stack(part[1:]) for part in parts])
    dist.all_reduce(dkv, group=group)
    return sum(part[0] for part in parts), *dkv[rank]
