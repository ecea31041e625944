"""Lab 10: shards that are even in tokens, and not in work."""

import torch
from mutants import mutant

from ranklab.context_parallel import zigzag_shard

WRONG = [mutant(zigzag_shard, *edits, says=says, called=called) for *edits, says, called in (
    ("tail.flip(0)", "tail", "counted from the end", "not_mirrored"),
    ("return torch.cat([head, tail.flip(0)], dim=1)",
     "return torch.arange(tokens).view(ranks, -1)", "consecutive parts", "contiguous"),
    ("return torch.cat([head, tail.flip(0)], dim=1)",
     "return torch.arange(tokens).view(-1, ranks).T.contiguous()", "every R-th token", "striped"),
    ("[head, tail.flip(0)]", "[tail.flip(0), head]", "a row is not ascending", "late_first"),
    ("tail.flip(0)", "tail.flip(1)", "a row is not ascending", "tokens_backwards"),
    ("[head, tail.flip(0)], dim=1", "[head, tail.flip(0)], dim=0", "its shape is", "stacked"),
    ("    refuse_uneven(tokens, 2 * ranks)\n", "", "no ValueError|Error", "not_refused"),
    ("2 * ranks)\n", "ranks)\n", "no ValueError|Error", "half_refused"),
    ("tail.flip(0)], dim=1", "head], dim=1", "there twice|ascending", "early_twice"),
)]  # fmt: skip


def zigzag_shard__lists(tokens, ranks):
    """not a tensor"""
    half = tokens // ranks // 2
    return [[*range(r * half, (r + 1) * half), *range(tokens - (r + 1) * half, tokens - r * half)]
            for r in range(ranks)]


def zigzag_shard__floats(tokens, ranks):
    """not a tensor of whole numbers"""
    early, late = torch.linspace(0, tokens - 1, tokens).view(2, ranks, -1)
    return torch.cat([early, late.flip(0)], dim=1)
