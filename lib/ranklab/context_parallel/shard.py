"""Which rank holds which tokens. Each of these gives positions (R, T/R): row r are rank r's.

Causal attention makes a late token dearer than an early one: token i has i + 1 keys to look at.
So equal parts of the sequence are no equal parts of the work.
"""

import torch
import torch.nn.functional as F


def contiguous_shard(tokens, ranks):
    """Rank r has the r-th part: the last rank has most of the work, the first the least."""
    refuse_uneven(tokens, ranks)
    return torch.arange(tokens).view(ranks, -1)


def zigzag_shard(tokens, ranks):
    """Rank r has part r and part 2R - 1 - r of 2R equal parts: all have the same work.

    shape  (R, T/R), each row ascending
    error  ValueError where 2R does not divide T
    paper  Llama 3 (arXiv 2407.21783), section 3.3.2
    lab    10
    """
    refuse_uneven(tokens, 2 * ranks)
    early, late = torch.arange(tokens).view(2, ranks, -1)
    return torch.cat([early, late.flip(0)], dim=1)


def refuse_uneven(tokens, parts):
    if tokens % parts:
        raise ValueError(f"{parts} parts must divide the {tokens} tokens of a sequence: pad it, "
                         "with targets that do not count")


def begins_of(documents):
    """(T,): at which position each token's document begins; `documents` are lengths, in order."""
    lengths = torch.as_tensor(documents)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def pairs_of(positions, begins=None):
    """(R,): the pairs of a query and a key that each rank computes scores of."""
    keys = positions + 1 if begins is None else positions - begins[positions] + 1
    return keys.sum(1)


def fetched(positions, begins):
    """(R,): the tokens of other ranks whose keys and values each rank must be sent."""
    R, T = len(positions), positions.numel()
    counts = []
    for mine in positions:
        needed = torch.zeros(T + 1, dtype=torch.long)  # +1 where a span of keys begins, -1 after it
        needed.index_add_(0, begins[mine], torch.ones_like(mine))
        needed.index_add_(0, mine + 1, -torch.ones_like(mine))
        is_needed = needed.cumsum(0)[:T] > 0
        is_needed[mine] = False
        counts.append(is_needed.sum())
    return torch.stack(counts) if R else torch.empty(0)


def begins_in(tokens, end):
    """(B, T): where the document of each token begins, if `end` is the last token of each."""
    T = tokens.shape[1]
    after = F.pad(tokens[:, :-1] == end, (1, 0)) * torch.arange(T, device=tokens.device)
    return after.cummax(1).values
