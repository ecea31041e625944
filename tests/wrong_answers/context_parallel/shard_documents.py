"""Lab 10: plans for packed documents by which some rank waits, or tokens are lost."""

import torch
from mutants import mutant

from ranklab.context_parallel import shard_documents, zigzag_shard
from ranklab.context_parallel.shard import contiguous_shard

WRONG = [mutant(shard_documents, *edits, says=says, called=called) for *edits, says, called in (
    ("n * (n + 1) / 2 <= max_pairs", "True", "the fullest rank", "never_cut"),
    ("min(part, 2 * ranks - 1 - part)", "part // 2", "the fullest rank", "parts_in_a_row"),
    ("            single += [(i + 1, begin + i) for i in range(rest)]\n", "", "shape|stack expects",
     "rest_is_lost"),
    (".sort().values", "", "ascending", "unsorted"),
    ("torch.arange(start, stop)", "torch.arange(start - begin, stop - begin)",
     "there twice|ascending", "counted_in_the_document"),
)]  # fmt: skip


def shard_documents__zigzag_of_all(lengths, ranks):
    """the fullest rank"""
    return zigzag_shard(sum(lengths), ranks)


def shard_documents__contiguous(lengths, ranks):
    """the fullest rank"""
    return contiguous_shard(sum(lengths), ranks)


def shard_documents__changes_lengths(lengths, ranks):
    """`lengths` is changed"""
    lengths.sort()
    return zigzag_shard(sum(lengths), ranks)


def shard_documents__whole_documents(lengths, ranks):
    """shape|Error"""
    where, rows = 0, [[] for _ in range(ranks)]
    for n in lengths:
        rows[min(range(ranks), key=lambda r: len(rows[r]))] += range(where, where + n)
        where += n
    return torch.tensor(rows)


def shard_documents__zigzag_in_each(lengths, ranks):
    """documents of .31, 1, 1, 1. .*the fullest rank"""
    if sum(lengths) % ranks:
        raise ValueError("tokens")
    rows, rest, where = [[] for _ in range(ranks)], [], 0
    for n in lengths:
        part = n // (2 * ranks)
        for r in range(ranks):
            for at in (r, 2 * ranks - 1 - r):
                rows[r] += range(where + at * part, where + (at + 1) * part)
        rest += range(where + 2 * ranks * part, where + n)  # late tokens, in blocks
        where += n
    for row in rows:
        free = sum(lengths) // ranks - len(row)
        row += rest[:free]
        del rest[:free]
    return torch.tensor([sorted(row) for row in rows])


def shard_documents__shuffle(lengths, ranks):
    """the fullest rank"""
    if sum(lengths) % ranks:
        raise ValueError("tokens")
    order = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(0))
    return order.view(ranks, -1).sort(1).values
