"""Lab 10: plans for packed documents by which some rank waits, or tokens are lost."""

import torch
from mutants import mutant

from ranklab.context_parallel import shard_documents, zigzag_shard
from ranklab.context_parallel.shard import contiguous_shard

WRONG = [mutant(shard_documents, *edits, says=says, called=called) for *edits, says, called in (
    ("n * (n + 1) / 2 < share / 2 or n < 2 * ranks", "True", "alone is more than a rank's share",
     "never_cut"),
    ("min(part, 2 * ranks - 1 - part)", "part // 2", "the fullest rank", "parts_in_a_row"),
    ("        if rest := n % (2 * ranks):\n"
     "            spans.append((rest, begin, begin + n - rest))\n", "", "shape|stack expects",
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
