"""Lab 10: keys and values that go round wrongly, or too late."""

from mutants import mutant

from ranklab.context_parallel import ring_attention

HOP = "hop = Hop(block, group) if step < R - 1 else None  # while this block is computed"
SEEN = "part = block_attention(q, *block, visible[(rank - step) % R])"
MERGE = "out, lse = online_softmax_merge(out, lse, *part)"
WAIT = "block = hop and hop.wait()"
HIDDEN = ("    for step in range(R):\n        if not len(visible[(rank - step) % R].rows):\n"
          "            break\n")

WRONG = [mutant(ring_attention, *edits, says=says, called=called) for *edits, says, called in (
    ("visible[(rank - step) % R]", "visible[(rank + step) % R]", " is ", "other_way"),
    ("visible[(rank - step) % R]", "visible[rank]", " is ", "own_mask"),
    ("visible[(rank - step) % R]", "visible[step]", " is ", "step_as_owner"),
    ("range(R)", "range(R - 1)", " is ", "one_step_too_few"),
    ("if step < R - 1 else None  #", " #", "bytes in 4 messages", "one_hop_too_many"),
    (MERGE, "out, lse = out + part[0], part[1]", "weighs them", "added"),
    (MERGE, "out, lse = part", " is ", "last_block"),
    (WAIT, "block = torch.stack([k, v])", "never waited", "own_block_again"),
    (WAIT, "", "never waited", "block_never_changes"),
    (HOP, "", WAIT, "hop = Hop(block, group) if step < R - 1 else None; " + WAIT,
     "the next block travels meanwhile", "no_overlap"),
    (HOP, "hop = Hop(block, group).wait() if step < R - 1 else None", WAIT, "block = hop",
     "waited for before block 0", "waits_at_once"),
    ("torch.stack([k, v])", "torch.stack([k, v]).float()", "bfloat16.*bytes in", "float32_travels"),
    ("return out, lse", "return out.to(q.dtype), lse", "out is torch.bfloat16", "in_the_type_of_q"),
    ("    for step in range(R):\n", HIDDEN, "consecutive parts|does not end", "stops_where_hidden"),
    (SEEN, SEEN.replace("block_attention", "(x.to(q.dtype) for x in block_attention") + ")", MERGE,
     f"{MERGE}\n        out, lse = out.to(q.dtype), lse.to(q.dtype)", "return out, lse",
     "return out.float(), lse.float()", "bfloat16: out is", "adds_up_in_16_bits"),
    ("torch.stack([k, v])", "torch.cat([k.view(-1), v.view(-1)]).view(2, *k.shape)", "view size",
     "needs_contiguous"),
    ("Hop(block, group)", "Hop(block)", "does not end", "all_ranks"),
    ("dist.get_rank(group), dist.get_world_size(group)", "dist.get_rank(), dist.get_world_size()",
     "IndexError", "global_rank"),
)]  # fmt: skip


def ring_attention__all_gather(q, k, v, visible, group=None):
    """in 0 messages"""
    import torch
    import torch.distributed as dist

    from ranklab.context_parallel import block_attention, online_softmax_merge

    R = dist.get_world_size(group)
    blocks = [torch.empty_like(torch.stack([k, v])) for _ in range(R)]
    dist.all_gather(blocks, torch.stack([k, v]), group=group)
    out, lse = block_attention(q, *blocks[0], visible[0])
    for block, seen in zip(blocks[1:], visible[1:]):
        out, lse = online_softmax_merge(out, lse, *block_attention(q, *block, seen))
    return out, lse


def ring_attention__two_messages(q, k, v, visible, group=None):
    """k and v go in one message"""
    import torch.distributed as dist

    from ranklab.context_parallel import block_attention, online_softmax_merge
    from ranklab.context_parallel.ring import Hop

    rank, R = dist.get_rank(group), dist.get_world_size(group)
    found = None
    for step in range(R):
        hops = [Hop(x, group) for x in (k, v)] if step < R - 1 else []
        part = block_attention(q, k, v, visible[(rank - step) % R])
        found = online_softmax_merge(*found, *part) if found else part
        k, v = [hop.wait() for hop in hops] or (None, None)
    return found
