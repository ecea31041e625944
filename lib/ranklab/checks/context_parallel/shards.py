"""The checks of zigzag_shard and shard_documents: who has which tokens."""

import random
from functools import partial

import torch

from ranklab.checks.beside import expect, refused
from ranklab.context_parallel.shard import (
    contiguous_shard, pairs_of, plan_score, shard_documents, zigzag_shard,
)
from ranklab.engine.report import count_ranks

TOKENS, MOST = 8192, 1.1  # of the mean: pairs of the fullest rank


def _is_plan(where, positions, tokens, ranks):
    """A Mistake unless each rank has as many tokens, and each token one rank."""
    expect(isinstance(positions, torch.Tensor) and positions.dtype == torch.long,
           f"{where}: not a tensor of whole numbers", "torch.arange, stacked: (R, T/R).")
    expect(positions.shape == (ranks, tokens // ranks), f"{where}: its shape is "
           f"{tuple(positions.shape)}, not {(ranks, tokens // ranks)}", "A row for each rank, and "
           "all ranks have as many tokens.")
    expect(torch.equal(positions.flatten().sort().values, torch.arange(tokens)), f"{where}: some "
           "tokens are there twice, or not at all", "Each token is on one rank.")
    expect(bool((positions.diff(dim=1) > 0).all()), f"{where}: a row is not ascending",
           "Ranks keep their tokens in the order of the sequence.")


def check_zigzag_shard(shard):
    for tokens, ranks in ((16, 2), (16, 1), (24, 3), (64, 4), (160, 5)):
        where, got = f"{tokens} tokens, {count_ranks(ranks)}", shard(tokens, ranks)
        _is_plan(where, got, tokens, ranks)
        parts = torch.arange(tokens).view(2 * ranks, -1)
        right = torch.stack([parts[[r, 2 * ranks - 1 - r]].flatten() for r in range(ranks)])
        if not torch.equal(got, right):
            _explain(where, got, parts)
    yield "each token on one rank; parts r and 2R - 1 - r; 1 to 5 ranks"
    yield "all ranks compute equally many scores"
    for tokens in (12, 10):
        refused(f"{tokens} tokens on 4 ranks", partial(shard, tokens, 4))()
    yield "where 2R does not divide the tokens it is a ValueError"


def _explain(where, got, parts):
    tokens, ranks = parts.numel(), len(parts) // 2
    pairs = pairs_of(got, torch.zeros(tokens, dtype=torch.long))
    hint = "Cut the sequence into 2R equal parts; rank r has parts r and 2R - 1 - r."
    if torch.equal(got, contiguous_shard(tokens, ranks)):
        hint = "Those are consecutive parts: rank 0 has early tokens, which see few keys. " + hint
    elif torch.equal(got, torch.arange(tokens).view(-1, ranks).T):
        hint = ("That is every R-th token: nearly even, but no block of keys is wholly visible or "
                "wholly hidden, so that nothing can be left out. " + hint)
    elif torch.equal(got, torch.cat([parts[:ranks], parts[ranks:]], dim=1)):
        hint = "That is parts r and R + r: the late one must be counted from the end. " + hint
    expect(False, f"{where}: the ranks compute {pairs.tolist()} scores", hint)


def lengths_of(seed, tokens=TOKENS):
    """Lengths of documents, from 16 to 8,192 tokens, as web pages and books are mixed."""
    draw, lengths = random.Random(seed), []
    while sum(lengths) < tokens:
        lengths.append(min(tokens - sum(lengths), int(2 ** draw.uniform(4, 13))))
    return lengths


def check_shard_documents(plan):
    cases = [(lengths_of(seed), ranks) for seed in range(3) for ranks in (2, 4, 8)]
    cases += [([64] * 64, 4), ([4096], 4), ([8, 4088], 2), ([1000, 24, 3072], 8), ([16], 1),
              ([8] * 512, 4), ([1000, 20, 3], 3), ([31] + [1] * 33, 4), ([63] + [1] * 65, 8)]
    for lengths, ranks in cases:
        where = f"documents of {lengths[:4]}{' ...' * (len(lengths) > 4)} tokens, {ranks} ranks"
        given = list(lengths)
        _is_plan(where, plan(given, ranks), sum(lengths), ranks)
        expect(given == lengths, f"{where}: `lengths` is changed", "Work on a copy: sorted().")
        fullest, _ = plan_score(plan, lengths, ranks)
        expect(fullest <= MOST, f"{where}: the fullest rank computes {fullest:.2f} times the mean, "
               f"more than {MOST}", "")
    yield f"each token on one rank, as many on each; the fullest rank at most {MOST} times the mean"
    refused("10 tokens on 4 ranks", partial(plan, [3, 7], 4))()
    yield "where the ranks do not divide the tokens it is a ValueError"
    for lengths, ranks in cases[:3]:
        (fullest, fetched), library, zigzag = (
            plan_score(each, lengths, ranks) for each in (
                plan, shard_documents, lambda lengths, R: zigzag_shard(sum(lengths), R)))
        yield (f"{ranks} ranks: the fullest computes {fullest:.3f} times the mean (library "
               f"{library[0]:.3f}, zigzag {zigzag[0]:.3f}); {fetched:,} tokens are fetched "
               f"(library {library[1]:,}, zigzag {zigzag[1]:,}, "
               f"ring {(ranks - 1) * sum(lengths):,})")
