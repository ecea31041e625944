"""parallel_attention."""

import copy
from typing import NamedTuple

import torch
from torch import nn

from ranklab.checks.library_guard import LibrarysAnswer
from ranklab.checks.prover import Proof, Slip
from ranklab.checks.prover.compare import Raised
from ranklab.checks.tensor_parallel.inputs import (
    COST, GROUP, Whole, filled, in_one_process, normal, refusal_of, seen_of, seen_of_parameters,
    stages,
)
from ranklab.engine import device
from ranklab.models.gpt import Attention, GPTConfig
from ranklab.tensor_parallel.attention import parallel_attention
from ranklab.tensor_parallel.regions import gather_tokens, scatter_tokens

B, T, D, H = 2, 12, 2, 12
C = H * D
SHARED = "k.weight", "k.bias", "v.weight", "v.bias"


class Case(NamedTuple):
    """An attention of H query heads and KV key heads.

    has_tokens  outside the region each rank has its own tokens
    """

    KV: int
    H: int = H
    has_bias: bool = False
    is_frozen: bool = False
    has_tokens: bool = False

    def __str__(self):
        heads = f"{self.H} query heads, {self.KV} key head{'s' * (self.KV > 1)}"
        return (heads + ", with biases" * self.has_bias + ", k frozen" * self.is_frozen
                + ", each rank its tokens" * self.has_tokens)

    def attention(self):
        attention = Attention(GPTConfig(n_ctx=T, n_head=self.H, n_embd=self.H * D))
        for name, heads in (("q", self.H), ("k", self.KV), ("v", self.KV), ("out", self.H)):
            setattr(attention, name, nn.Linear(self.H * D, heads * D, self.has_bias))
        return filled(attention, "k." if self.is_frozen else "", normal)

    def cuts(self, ranks):
        """Return {name: (dim, indices)} of this rank's parts."""
        queries = ranks.at(C)
        keys = torch.cat([head * D + torch.arange(D, device=device())
                          for head in (ranks.at(H) // (H // self.KV)).unique()])
        return {"q.weight": (0, queries), "q.bias": (0, queries), "out.weight": (1, queries),
                **{name: (0, keys) for name in SHARED}}


CASES = (Case(12, has_bias=True), Case(6), Case(2, has_bias=True), Case(1),
         Case(4, is_frozen=True), Case(4, has_tokens=True))
REFUSED = Case(6, 6), Case(5)


def _see(fn, case, ranks):
    attention = case.attention()
    if case in REFUSED:
        yield refusal_of(fn, lambda: fn(attention, **ranks.keywords))
        return
    x, options, tokens = Whole(normal(8, B, T, C).requires_grad_()), {}, ()
    nbytes = x.tensor.nbytes
    if case.has_tokens:
        x, tokens = Whole(x.tensor, 1, ranks.at(T)), (nbytes,)
        options = {"enter": gather_tokens, "leave": scatter_tokens}
    cuts, local, changed = case.cuts(ranks), x.leaf(), copy.deepcopy(attention)
    wholes = {name: Whole(p, *cuts.get(name, ())) for name, p in attention.named_parameters()}
    shared = [p.nbytes for name, p in attention.named_parameters()
              if name in SHARED and p.requires_grad and case.KV % ranks.size]
    result = attention
    if fn is not in_one_process:
        result = _made(fn, changed, ranks.keywords | options)
    yield {"what it returns": result if isinstance(result, Raised) else
           "None" if result is None else "the attention",
           **seen_of_parameters(fn, changed, wholes)}
    if isinstance(result, Raised):
        return
    yield from seen_of(
        fn, ranks, lambda: result(local), {"x": local, **dict(changed.named_parameters())},
        lambda: attention(x.tensor), {"x": x, **wholes},
        Whole(normal(9, B, T, C), *x[1:]), (nbytes, *tokens), (nbytes, *shared, *tokens))


def _made(fn, attention, keywords):
    """Return the attention, or each rank's error, which may name its own heads."""
    try:
        return fn(attention, **keywords)
    except LibrarysAnswer:
        raise
    except Exception as error:
        return Raised.from_error(error)


NEEDED = "[head // (H // KV) for head in shard_range(H, rank, R)]"
ENTER = "    enter_before(attention, enter, group)\n"
KEYS = "attention.k = KeyValueHeads(attention.k, needed, D, group)"
VALUES = KEYS.replace(".k", ".v")
QUERIES = "ColumnParallelLinear(attention.q, group, identity)"
OUT = "RowParallelLinear(attention.out, group, leave)"
REFUSE = "if H % R or H % KV:"
ATTENTION = Proof(
    parallel_attention,
    *stages({"12 query heads; 12, 6, 4, 2 or 1 key heads: as in one process, on 4 ranks":
             (),
             "all gradients, also of key heads that ranks share; biases; k frozen; enter and leave":
             (), "x enters once for q, k and v; only the needed heads are in memory": COST,
             "heads that do not divide are a ValueError": ("what it raises",)},
            _see, CASES, also=REFUSED),
    mistakes=(
        Slip("x enters three times, and its gradient is summed each time. It must enter once, for "
             "q, k and v together: enter_before(attention, enter, group).",
             (ENTER, "    for name in 'qkv':\n"
              "        enter_before(getattr(attention, name), enter, group)\n")),
        Slip("x must enter the region: enter_before(attention, enter, group).", (ENTER, "")),
        Slip("x has already entered before q, k and v, so q needs identity.",
             (QUERIES, "ColumnParallelLinear(attention.q, group)"),
             (QUERIES, "ColumnParallelLinear(attention.q, group, enter)")),
        Slip("Use the `enter` that was passed in: x may arrive split by tokens.",
             (ENTER, ENTER.replace(", enter,", ", copy_to_region,"))),
        Slip("If the number of ranks does not divide the key heads, several ranks share one, and "
             "its gradient is summed over them. KeyValueHeads does that.",
             (KEYS, "attention.k = ColumnParallelLinear(attention.k, group, identity)",
              VALUES, "attention.v = ColumnParallelLinear(attention.v, group, identity)")),
        Slip("Neighbouring query heads share a key head: query head h reads key head h // (H // "
             "KV).",
             (NEEDED, "[head % KV for head in shard_range(H, rank, R)]")),
        Slip("`needed` must follow the order of this rank's query heads.",
             (NEEDED, f"{NEEDED}[::-1]")),
        Slip("`needed` must list a key head for each query head of this rank, repeated where query "
             "heads share it.",
             (NEEDED, "list(shard_range(KV, rank, R))"), (NEEDED, f"sorted(set({NEEDED}))")),
        Slip("A rank needs only the key heads of its own query heads: shard_range(H, rank, R).",
             (NEEDED, NEEDED.replace("shard_range(H, rank, R)", "range(H)"))),
        Slip("v needs the same heads as k: use `needed` for both.",
             (VALUES, VALUES.replace("needed", "[0] * len(needed)"))),
        Slip("v has its own matrix: split attention.v.",
             (VALUES, "attention.v = attention.k")),
        Slip("Pass `leave` to out: the output must leave through it.",
             (OUT, "RowParallelLinear(attention.out, group)")),
        Slip("The inputs of out are this rank's heads, so out is a row layer.",
             (OUT, "ColumnParallelLinear(attention.out, group)")),
        Slip("A rank holds whole heads: refuse an H that R does not divide. (The layers only check "
             "rows, and each head has D rows.)", (REFUSE, "if H % KV:")),
        Slip("Each key head is read by the same number of query heads: refuse a KV that does not "
             "divide H.",
             (REFUSE, "if H % R:")),
        Slip("Return `attention`, after changing it in place.", ("    return attention\n", "")),
        Slip("Change `attention` in place: the caller keeps it.",
             ("    D, rank, R", "    attention = copy.deepcopy(attention)\n    D, rank, R"),
             copy=copy),
        Slip(GROUP, ("dist.get_rank(group), dist.get_world_size(group)",
                     "dist.get_rank(), dist.get_world_size()"),
             (ENTER, ENTER.replace(", group)", ")")), (OUT, OUT.replace("group", "None")),
             (QUERIES, QUERIES.replace("group", "None"))),
    ), hints=(
        "Which query heads does this rank have, and which key head does each of them read?",
        "q is a column layer whose x has already entered (identity); k and v are KeyValueHeads; "
        "out is a row layer. x enters once, before q, k and v.",
        "needed = [head // (H // KV) for head in shard_range(H, rank, R)]; attention.k = "
        "KeyValueHeads(attention.k, needed, D, group); enter_before(attention, enter, group)",
    ))
