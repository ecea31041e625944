"""zigzag_shard and shard_documents: who has which tokens."""

import random
from functools import partial
from typing import NamedTuple

import torch

from ranklab.checks.exercise import Exercise, Mistake
from ranklab.checks.looks import expect, refused
from ranklab.checks.prover import Proof, Slip, Stage, Told, must_refuse
from ranklab.context_parallel.shard import (
    contiguous_shard, pairs_of, plan_score, refuse_uneven, shard_documents, zigzag_shard,
)
from ranklab.engine.report import count_ranks

ROWS = ("Return one row per rank: all ranks have the same number of tokens, and no token is left "
        "out.")
ONE_RANK = "Each token must be on exactly one rank."
ORDER = "Each rank must keep its tokens in sequence order."

def fault_of(positions, tokens, ranks):
    """Return (what is wrong with a plan, what it must be), or None where nothing is wrong.

    All ranks must have equally many tokens, and each token must be on exactly one rank.
    """
    if not isinstance(positions, torch.Tensor) or positions.dtype != torch.long:
        return "not a tensor of torch.long", "torch.arange, stacked: (R, T/R)."
    if positions.shape != (ranks, tokens // ranks):
        return (f"of shape {tuple(positions.shape)}, not {(ranks, tokens // ranks)}",
                ROWS)
    if not torch.equal(positions.flatten().sort().values, torch.arange(tokens)):
        return "one in which some tokens appear twice, or not at all", ONE_RANK
    if not bool((positions.diff(dim=1) > 0).all()):
        return "one in which a row is not in ascending order", ORDER
    return None


# --- zigzag ---------------------------------------------------------------------------------------

class Case(NamedTuple):
    tokens: int
    ranks: int

    def __str__(self):
        return f"{self.tokens} tokens, {count_ranks(self.ranks)}"


EVEN = Case(16, 2), Case(16, 1), Case(24, 3), Case(64, 4), Case(160, 5)
UNEVEN = Case(12, 4), Case(10, 4)


def _see(fn, case):
    yield {"the plan": Told(fn(*case), _told)}


def _see_refusal(fn, case):
    yield {"what it raises": must_refuse(fn, *case)}


def _told(got, due):
    if fault := fault_of(got, due.numel(), len(due)):
        return fault[0]
    pairs = pairs_of(got, torch.zeros(due.numel(), dtype=torch.long)).tolist()
    return f"one by which the ranks compute {pairs} scores" * (len({*pairs}) > 1)


def by_parts(tokens, ranks):
    parts = torch.arange(tokens).chunk(2 * ranks)
    return torch.stack([torch.cat([parts[r], parts[2 * ranks - 1 - r]]) for r in range(ranks)])


def in_lists(tokens, ranks):
    refuse_uneven(tokens, 2 * ranks)
    half = tokens // ranks // 2
    return [[*range(r * half, (r + 1) * half), *range(tokens - (r + 1) * half, tokens - r * half)]
            for r in range(ranks)]


def in_floats(tokens, ranks):
    refuse_uneven(tokens, 2 * ranks)
    early, late = torch.linspace(0, tokens - 1, tokens).view(2, ranks, -1)
    return torch.cat([early, late.flip(0)], dim=1)


ALL = "torch.cat([head, tail.flip(0)], dim=1)"
PARTS = "Cut the sequence into 2R equal parts; rank r has parts r and 2R - 1 - r."
ZIGZAG = Proof(
    zigzag_shard,
    Stage("each token on one rank; parts r and 2R - 1 - r, so that all ranks compute the same "
          "number of scores; 1 to 5 ranks", _see, EVEN, oracle=by_parts, note=PARTS),
    Stage("a ValueError where 2R does not divide the tokens", _see_refusal, UNEVEN,
          note="refuse_uneven(tokens, parts) raises it."),
    mistakes=(
        Slip("Those are contiguous parts: rank 0 has only early tokens, which see few keys.",
             (ALL, "torch.arange(tokens).view(ranks, -1)")),
        Slip("That is every R-th token: the work is nearly even, but no block of keys is fully "
             "visible or fully hidden, so nothing can be skipped.",
             (ALL, "torch.arange(tokens).view(-1, ranks).T.contiguous()")),
        Slip("Tokens are dealt one by one, back and forth: the work is even, but no block of keys "
             "is fully visible or fully hidden, so nothing can be skipped.",
             (ALL, "torch.stack([(p := torch.arange(tokens).view(-1, 2, ranks))[:, 0], "
              "p[:, 1].flip(1)], dim=1).flatten(0, 1).T.contiguous()")),
        Slip("Those are parts r and R + r: the late one must be counted from the end.",
             ("tail.flip(0)", "tail")),
        Slip("The early part must come first: rows are ascending.",
             ("[head, tail.flip(0)]", "[tail.flip(0), head]")),
        Slip("The tokens of the late part are backwards: reverse the order of the parts, not the "
             "tokens within them.",
             ("tail.flip(0)", "tail.flip(1)"), ("tail.flip(0)", "tail.flip(0, 1)")),
        Slip("Both parts are early: the late part must come from the second half.",
             ("tail.flip(0)]", "head]"), ("tail.flip(0)]", "head.flip(0)]")),
        Slip("Each rank has one row: join its early and late parts along dim 1.",
             ("dim=1)", "dim=0)")),
        Slip("Rows are ranks, columns are their tokens: (R, T/R).", (ALL, f"{ALL}.T")),
        Slip("Join the two parts: a row is one list of tokens.",
             (ALL, "torch.stack([head, tail.flip(0)], dim=1)")),
        Slip("Return a torch.long tensor, like the one that torch.arange makes.", in_lists,
             in_floats,
             (ALL, f"{ALL}.int()")),
        Slip("2R must divide the number of tokens, not just R.", ("2 * ranks)\n", "ranks)\n")),
        Slip("Raise ValueError if 2R does not divide the tokens: refuse_uneven(tokens, 2 * ranks).",
             ("    refuse_uneven(tokens, 2 * ranks)\n", ""),
             ("    refuse_uneven(tokens, 2 * ranks)\n", "    tokens -= tokens % (2 * ranks)\n")),
    ), hints=(
        "Token i sees i + 1 keys. How can you pair parts of the sequence so that every pair sees "
        "the same number of keys?",
        "Of 2R parts, take the r-th from the front and the r-th from the end.",
        "head, tail = torch.arange(tokens).view(2, ranks, -1); torch.cat([head, tail.flip(0)], "
        "dim=1)",
    ))


# --- documents ------------------------------------------------------------------------------------

TOKENS, MOST = 8192, 1.1  # of the mean: pairs of the fullest rank
FULLEST, COPY = "the fullest rank computes", "Work on a copy: use sorted()."


def lengths_of(seed, tokens=TOKENS):
    """Draw lengths of documents, from 16 to 8,192 tokens, like a mix of web pages and books."""
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
        copy = list(lengths)
        if fault := fault_of(plan(copy, ranks), sum(lengths), ranks):
            raise Mistake(f"{where}: the plan is {fault[0]}", fault[1])
        expect(copy == lengths, f"{where}: `lengths` is changed", COPY)
        fullest, _ = plan_score(plan, lengths, ranks)
        expect(fullest <= MOST, f"{where}: {FULLEST} {fullest:.2f} times the mean, more than "
               f"{MOST}", "")
    yield (f"each token on one rank, the same number on each; the fullest rank at most {MOST} "
           "times the mean")
    refused("10 tokens on 4 ranks", partial(plan, [3, 7], 4))()
    yield "a ValueError where the ranks do not divide the tokens"
    for lengths, ranks in cases[:3]:
        (fullest, fetched), library, zigzag = (
            plan_score(each, lengths, ranks) for each in (
                plan, shard_documents, lambda lengths, R: zigzag_shard(sum(lengths), R)))
        yield (f"{ranks} ranks: the fullest computes {fullest:.3f} times the mean (library "
               f"{library[0]:.3f}, zigzag {zigzag[0]:.3f}); {fetched:,} tokens are fetched "
               f"(library {library[1]:,}, zigzag {zigzag[1]:,}, "
               f"ring {(ranks - 1) * sum(lengths):,})")


def zigzag_in_each(lengths, ranks):
    """Give each rank its zigzag part of every document, then the tokens left over in blocks.

    The tokens left over are the last ones of each document.
    """
    refuse_uneven(sum(lengths), ranks)
    rows, rest, where = [[] for _ in range(ranks)], [], 0
    for n in lengths:
        part = n // (2 * ranks)
        for r in range(ranks):
            for at in (r, 2 * ranks - 1 - r):
                rows[r] += range(where + at * part, where + (at + 1) * part)
        rest += range(where + 2 * ranks * part, where + n)
        where += n
    for row in rows:
        free = sum(lengths) // ranks - len(row)
        row += rest[:free]
        del rest[:free]
    return torch.tensor([sorted(row) for row in rows])


PAIRED, FOUND = "min(part, 2 * ranks - 1 - part)", "    return positions"
DOCUMENTS = Exercise(
    shard_documents, check_shard_documents, mistakes=(
        Slip(FULLEST, zigzag_in_each, ("n * (n + 1) / 2 <= max_pairs", "True"),
             (PAIRED, "part // 2"),
             lambda lengths, ranks: zigzag_shard(sum(lengths), ranks),
             lambda lengths, ranks: contiguous_shard(sum(lengths), ranks)),
        Slip(ROWS, (FOUND, f"{FOUND}[:, :sum(lengths) // ranks // 32 * 32]")),
        Slip(ONE_RANK, ("torch.arange(start, stop)", "torch.arange(start - begin, stop - begin)")),
        Slip(ORDER, (".sort().values", "")),
        Slip(COPY, (FOUND, f"    lengths.sort()\n{FOUND}")),
    ), hints=(
        "How much work is a document of n tokens? Which documents are more than a rank's share on "
        "their own?",
        "Cut the long ones into 2R parts, an early and a late one for each rank. Assign the others "
        "whole, longest first, to the rank with the least work that has room.",
        "For each rank, track the room left and the pairs so far. If no rank has room for a whole "
        "document, fill the rank with the most room, and continue with the rest. If you cut a "
        "document, deal out its first n % (2 * ranks) tokens one by one.",
    ))
