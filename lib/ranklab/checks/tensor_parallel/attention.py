"""The check of parallel_attention: the heads of each rank, beside all heads in one process."""

import copy
from functools import partial

import torch
from torch import nn

from ranklab.checks.tensor_parallel.beside import GROUP, Whole, beside, on_four, refused, seeded
from ranklab.engine import device
from ranklab.models.gpt import Attention, GPTConfig
from ranklab.tensor_parallel.regions import gather_tokens, scatter_tokens

B, T, D, H = 2, 12, 2, 12
# Heads of k and v, which 4, 3, 2 and 1 ranks divide, or not; and whether there are biases.
CASES = {"12 key heads": (12, True), "6 key heads": (6, False), "2 key heads": (2, True),
         "4 key heads, k frozen": (4, False), "each rank its tokens": (4, False)}
FIT = ("Each rank has H/R query heads in rank order, and for each of them `needed` names one head "
       "of k and v. out has this rank's inputs: RowParallelLinear.")
FAILURES = {"must divide the": f"Where ranks share a key head, use KeyValueHeads. {GROUP}",
            "'NoneType' object is not callable": "Return the attention.",
            "must match": FIT, "cannot be multiplied": FIT, "out of range": FIT}
SHARED = ("A key head that several ranks hold has the sum of their gradients: KeyValueHeads with "
          "`needed`, a head for each query head of this rank.")
HINTS = {"value": "Query head h reads key head h // (H // KV): neighbours share one. This rank has "
         "the query heads shard_range(H, rank, R). The output leaves by `leave`.",
         "x": "x enters once, for q, k and v together: enter_before(attention, enter, group), and "
         "as_it_is in q.", **{f"{name}.{kind}": SHARED for name in "kv"
                              for kind in ("weight", "bias")}}


def _attention(KV, has_bias=False, H=H):
    made = Attention(GPTConfig(n_ctx=T, n_head=H, n_embd=H * D))
    for name, size in (("q", H), ("k", KV), ("v", KV), ("out", H)):
        setattr(made, name, nn.Linear(H * D, size * D, has_bias))
    for place, p in enumerate(made.parameters()):
        p.data = seeded(place, *p.shape) / 3
    return made.to(device())


def _wholes(attention, KV, ranks):
    queries = ranks.at(H * D)
    keys = torch.cat([head * D + torch.arange(D, device=device())
                      for head in (ranks.at(H) // (H // KV)).unique()])
    parts = {"q": (0, queries), "k": (0, keys), "v": (0, keys), "out": (1, queries)}
    return {name: Whole(p) if name == "out.bias" else Whole(p, *parts[name.partition(".")[0]])
            for name, p in attention.named_parameters()}


def _trial(parallel_attention, ranks):
    for case, (KV, has_bias) in CASES.items():
        one, x = _attention(KV, has_bias), seeded(8, B, T, H * D).requires_grad_()
        one.k.requires_grad_("frozen" not in case)
        tokens, options = Whole(x), ()
        if "tokens" in case:
            tokens, options = Whole(x, 1, ranks.at(T)), (gather_tokens, scatter_tokens)
        given, mine = copy.deepcopy(one), tokens.leaf()
        attention = parallel_attention(given, ranks.group, *options)
        shared = [p.nbytes for name, p in one.named_parameters()
                  if name[:2] in ("k.", "v.") and p.requires_grad and KV % ranks.size]
        tokens_too = (x.nbytes,) * len(options[:1])  # each rank's: gathered, then scattered
        yield from beside(
            case, ranks, lambda: attention(mine), {"x": mine, **dict(given.named_parameters())},
            lambda: one(x), {"x": tokens, **_wholes(one, KV, ranks)}, tokens, HINTS,
            (x.nbytes, *tokens_too), (x.nbytes, *shared, *tokens_too))
    if ranks.size == 4:
        for KV, heads in ((6, 6), (5, 12)):
            yield refused(f"tp=4, {heads} query heads, {KV} key heads", partial(
                parallel_attention, _attention(KV, H=heads), ranks.group))


def check_parallel_attention(parallel_attention):
    on_four(_trial, parallel_attention, FAILURES)
    yield "12 query heads; 12, 6, 4 or 2 key heads: as one process, on 4, 3, 2 and 1 ranks"
    yield "all gradients, also of key heads that ranks share; biases; k frozen; enter and leave"
    yield "x enters once for q, k and v; only the needed heads are in memory"
    yield "heads that do not divide are a ValueError"
