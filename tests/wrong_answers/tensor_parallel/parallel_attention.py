"""Lab 08: what goes wrong when attention is cut by its heads."""

from mutants import mutant

from ranklab.tensor_parallel import parallel_attention
from ranklab.tensor_parallel.regions import copy_to_region

NEEDED = "[head // (H // KV) for head in shard_range(H, rank, R)]"
ENTER = "    enter_before(attention, enter, group)\n"
KEYS = "attention.k = KeyValueHeads(attention.k, needed, D, group)"
VALUES = KEYS.replace(".k", ".v")
QUERIES = "ColumnParallelLinear(attention.q, group, identity)"
OUT = "RowParallelLinear(attention.out, group, leave)"


def _wrong(*edits, says, **named):
    return mutant(parallel_attention, *edits, says=says, copy_to_region=copy_to_region, **named)


WRONG = [
    _wrong(ENTER, "    for name in 'qkv':\n        enter_before(getattr(attention, name), enter, "
           "group)\n", says="backward sends 3 messages.*x enters a region once"),
    _wrong(ENTER, "", says="enter_before"),
    _wrong(QUERIES, "ColumnParallelLinear(attention.q, group)", says="identity in q"),
    _wrong(KEYS, "attention.k = ColumnParallelLinear(attention.k, group, identity)", VALUES,
           "attention.v = ColumnParallelLinear(attention.v, group, identity)",
           says="for each of them `needed` names one"),
    _wrong(NEEDED, "[head % KV for head in shard_range(H, rank, R)]", says="`needed` "
           "names one head", called="by_the_remainder"),
    _wrong(NEEDED, NEEDED[:-1] + "][::-1]", says="need the key heads.*`needed` names one head",
           called="from_the_last_head"),
    _wrong(NEEDED, "list(shard_range(KV, rank, R))", says="for each of them|for each query head|"
           "index out of range|zero|division"),
    _wrong(OUT, "RowParallelLinear(attention.out, group)", says="leaves by `leave`"),
    _wrong("(attention, enter, group)", "(attention, copy_to_region, group)",
           says="tokens", called="always_copies"),
    _wrong(NEEDED, "[head // (H // KV) for head in range(H)]", says="need the key heads|"
           "in memory|range", called="all_heads"),
    _wrong(OUT, "ColumnParallelLinear(attention.out, group)", says="out has this rank's inputs"),
    _wrong("if H % R or H % KV:", "if H % KV:", says="6 query heads, 6 key heads: no ValueError|"
           "must divide", called="ranks_that_do_not_divide"),
    _wrong("if H % R or H % KV:", "if H % R:", says="5 key heads: no ValueError",
           called="key_heads_that_do_not_divide"),
    _wrong("    return attention\n", "", says="Return the attention"),
    _wrong("dist.get_rank(group), dist.get_world_size(group)", "dist.get_rank(), "
           "dist.get_world_size()", says="Pass `group` on"),
    _wrong(VALUES, VALUES.replace("needed", "[0] * len(needed)"), says="`needed` names one head",
           called="one_value_head"),
]
