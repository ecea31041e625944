"""Which rank has which tokens: positions (R, T/R); row r lists the tokens of rank r, ascending.

In causal attention token i attends to i + 1 keys, so equal parts of a sequence are not equal parts
of the work. A range is split as in lab 00 (ranks).
"""

import torch
import torch.nn.functional as F

from ranklab.ranks import shard_range


def contiguous_shard(tokens, ranks):
    """Give rank r the r-th part, so that the first rank has the least work, and the last the most.
    """
    refuse_uneven(tokens, ranks)
    return torch.arange(tokens).view(ranks, -1)


def zigzag_shard(tokens, ranks):
    """Give rank r parts r and 2R - 1 - r of 2R equal parts, so that all ranks have the same work.

    Shape: (R, T/R); row r has the positions of rank r's tokens, in ascending order.
    Raises: ValueError if 2R does not divide T.
    Paper: Llama 3 (arXiv 2407.21783), section 3.3.2
    Lab: 10
    """
    refuse_uneven(tokens, 2 * ranks)
    head, tail = torch.arange(tokens).view(2, ranks, -1)
    return torch.cat([head, tail.flip(0)], dim=1)


def refuse_uneven(tokens, parts):
    if tokens % parts:
        raise ValueError(f"{parts} parts must divide the {tokens} tokens of a sequence: pad it "
                         "with tokens whose targets do not count")


# --- documents packed in one sequence -------------------------------------------------------------

def begins_of(lengths):
    """Return the start of each token's document, for consecutive documents of these lengths: (T,).
    """
    lengths = torch.as_tensor(lengths)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def begins_in(tokens, end):
    """Return the start of each token's document, if each document ends with `end`: (B, T)."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return (F.pad(tokens[:, :-1] == end, (1, 0)) * places).cummax(1).values


def pairs_of(positions, begins):
    """Count the scores that each rank computes: (R,).

    A score belongs to a query and a key of its document, at most as late as the query.
    """
    return (positions - begins[positions] + 1).sum(1)


def fetched_of(positions, begins):
    """Count, for each rank, the keys that its queries need from other ranks: (R,)."""
    T, counts = positions.numel(), []
    for row in positions:
        change = torch.zeros(T + 1, dtype=torch.long)  # where a query's keys begin, and end
        ones = torch.ones_like(row)
        change.index_add_(0, begins[row], ones).index_add_(0, row + 1, -ones)
        is_key = change.cumsum(0)[:T] > 0
        counts.append(is_key.sum() - len(row))  # each token is a key of its own query
    return torch.stack(counts)


def plan_score(plan, lengths, ranks):
    """Score a plan by its balance and its messages: plan(lengths, ranks) -> positions.

    Returns: (largest number of pairs on a rank / mean; tokens fetched by all ranks together).
    """
    begins, positions = begins_of(lengths), plan(list(lengths), ranks)
    pairs = pairs_of(positions, begins).double()
    return (pairs.max() / pairs.mean()).item(), int(fetched_of(positions, begins).sum())


def shard_documents(lengths, ranks):
    """Return positions (R, T/R) for packed documents of these lengths, with nearly equal work.

    A rank's work is its (query, key) pairs: a query sees its document's tokens up to itself. The
    rank with most has at most 1.1 times the mean, unless one token has too many keys for that.
    Each token is on one rank; all ranks have the same number of tokens, and few documents are on
    several ranks.
    Raises: ValueError if the ranks do not divide the tokens.
    Lab: 10
    """
    refuse_uneven(sum(lengths), ranks)
    begins, total = begins_of(lengths).unique().tolist(), sum(n * (n + 1) / 2 for n in lengths)

    def plan(max_pairs):
        """Return (positions, pairs of each rank).

        A document of more than max_pairs goes to all ranks in zigzag, the others go whole to the
        rank with the fewest pairs.
        """
        space, pairs = [sum(lengths) // ranks] * ranks, [0] * ranks
        parts = [[] for _ in range(ranks)]

        def give(rank, begin, start, stop):
            parts[rank].append(torch.arange(start, stop))
            space[rank] -= stop - start
            pairs[rank] += (start + stop + 1 - 2 * begin) * (stop - start) / 2

        spans, single = [], []  # (tokens, their document's begin, their own); (keys, position)
        for n, begin in sorted(zip(lengths, begins), reverse=True):
            if n * (n + 1) / 2 <= max_pairs:
                spans.append((n, begin, begin))
                continue
            rest = n % (2 * ranks)  # the first tokens, which have few keys
            single += [(i + 1, begin + i) for i in range(rest)]
            for part in range(2 * ranks):
                span = shard_range(n - rest, part, 2 * ranks)
                give(min(part, 2 * ranks - 1 - part), begin, begin + rest + span.start,
                     begin + rest + span.stop)
        while spans:
            n, begin, start = spans.pop(0)
            roomy = [rank for rank in range(ranks) if space[rank] >= n]
            if roomy:
                give(min(roomy, key=pairs.__getitem__), begin, start, start + n)
            else:  # no rank can hold it whole
                rank = max(range(ranks), key=space.__getitem__)
                spans.insert(0, (n - space[rank], begin, start + space[rank]))
                give(rank, begin, start, start + space[rank])
        for keys, position in sorted(single, reverse=True):  # tokens with most keys first
            rank = min((rank for rank in range(ranks) if space[rank]), key=pairs.__getitem__)
            give(rank, position + 1 - keys, position, position + 1)
        return torch.stack([torch.cat(part).sort().values for part in parts]), pairs

    for part in (1 / 2, 1 / 8, 0):  # of a rank's share: the less, the more documents are cut
        positions, pairs = plan(part * total / ranks)
        if max(pairs) <= 1.1 * total / ranks:
            break
    return positions
