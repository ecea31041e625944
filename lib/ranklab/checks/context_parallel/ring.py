"""The checks of ring_attention and ring_attention_backward: all keys, one block at a time."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.context_parallel.attention import (
    FAILURES, OF_SCORES, Shards, block_by_block, confused, first_call, in_one_process, inputs,
)
from ranklab.checks.context_parallel.merge import FINITE
from ranklab.context_parallel import block_gradients, causal_blocks, online_softmax_merge
from ranklab.context_parallel.shard import contiguous_shard

NO_HOP = {"AttributeError: 'NoneType' object has no attribute 'wait'": "No hop has begun there."}
# What is compared, after zigzag in float32: sums in 16 bits, and blocks that nobody here sees.
MORE = (("bfloat16", torch.bfloat16, {}),
        ("consecutive parts", torch.float32, {"shard": contiguous_shard}))
EARLY = ("Start the hop of the block, then compute with the block, and only then wait: the next "
         "block travels meanwhile.")
OWNER = "In step i a rank has the block of rank (rank - i) % R."
ADDED = "dq adds up over the blocks; a block's dk and dv over the ranks that it meets."
FORWARD = "k and v go in one message, R - 1 times: the last block goes nowhere."
BACKWARD = ("k and v go R - 1 times. Their gradients go R times: with the block, and home at the "
            "end; they are float32.")


def _forward(ring_attention, ranks):
    shards, hops = Shards(ranks), ranks.size - 1

    def first(traffic, waits, dtype=torch.float32):
        ring_attention(*shards.mine(inputs(0, dtype)[:3]), shards.watched(traffic, waits),
                       ranks.group)

    yield from first_call(str(ranks), first, hops, hops * shards.block_bytes, FORWARD)
    yield partial(_overlaps, ranks, shards.looks)
    yield from first_call(f"{ranks}, bfloat16", partial(first, dtype=torch.bfloat16), hops,
                          hops * shards.block_bytes // 2, FORWARD)
    yield from _forward_beside(ring_attention, ranks, str(ranks), shards)
    for what, dtype, plan in MORE:
        yield from _forward_beside(ring_attention, ranks, f"{ranks}, {what}",
                                   Shards(ranks, **plan), dtype)


def _forward_beside(ring_attention, ranks, where, shards, dtype=torch.float32):
    nans = []

    def call(turn):
        q, k, v = shards.mine(inputs(turn, dtype)[:3])
        out, lse = ring_attention(q, k, v, shards.visible, ranks.group)
        nans.append(bool(out.isnan().any()))
        return {"out": out, "lse": lse, "q": q, "k": k, "v": v}

    def right(turn):
        found = in_one_process(turn, dtype) | dict(zip("qkv", inputs(turn, dtype)))
        return {name: shards.of_all(found[name]) for name in ("out", "lse", "q", "k", "v")}

    looks = list(beside(where, ranks, call, right, slips=partial(_forward_slips, shards, dtype),
                        roundings=OF_SCORES))
    yield partial(expect, nans != [False, True], f"{where}: scores reach 290, and out is nan "
                  "somewhere", FINITE)
    yield from looks


def _forward_slips(shards, dtype, name, turn):
    if name not in ("out", "lse"):
        return {}
    blocks, item = block_by_block(shards, turn, dtype), ("out", "lse").index(name)
    outs, logs = zip(*blocks)
    mean = torch.stack(outs).mean(0) if name == "out" else torch.stack(logs).mean(0)
    total = sum(outs) if name == "out" else sum(logs)
    R = len(shards.positions)
    return {
        "that of its own keys alone": (blocks[shards.rank][item], "Other ranks' keys count, too: "
                                       "merge each block's result with what is there."),
        "the sum of the blocks' results": (total, "Each block has its own softmax: "
                                           "online_softmax_merge weighs them."),
        "the mean of the blocks' results": (mean, "Each block has its own softmax: "
                                            "online_softmax_merge weighs them."),
        **{f"what {index} gives": (_merged(block_by_block(shards, turn, dtype, seen_of))[item],
                                   OWNER)
           for index, seen_of in confused(R).items()},
    }


def _merged(blocks):
    found = blocks[0]
    for block in blocks[1:]:
        found = online_softmax_merge(*found, *block)
    return found


def _overlaps(ranks, looks):
    late = [step for step, (sent, _) in enumerate(looks[: ranks.size - 1]) if sent < step + 1]
    early = [step for step, (_, under_way) in enumerate(looks[: ranks.size - 1]) if not under_way]
    expect(not late, f"{ranks}: block {late and late[0]} is computed before the next one is on its "
           "way", EARLY)
    # On a GPU a wait returns at once: only the stream waits.
    expect(not early or dist.get_backend() != "gloo", f"{ranks}: the next block is waited for "
           f"before block {early and early[0]} is computed", EARLY)


def check_ring_attention(ring_attention):
    on_groups(_forward, ring_attention, failures=FAILURES | NO_HOP, at_once=True)
    yield "the attention of one process, and lse, on 4, 3, 2 and 1 ranks; large scores"
    yield "tokens in zigzag and in consecutive parts; bfloat16, added up in float32"
    yield "2 key heads for 4 query heads; nothing is changed"
    yield "R - 1 messages of k's and v's bytes, each on its way while a block is computed"


def _backward(ring_attention_backward, ranks):
    shards, hops = Shards(ranks), 2 * ranks.size - 1 if ranks.size > 1 else 0

    def first(traffic, waits, dtype=torch.float32):
        given = _given(shards, 0, dtype)
        ring_attention_backward(*given.values(), shards.watched(traffic, waits), ranks.group)

    yield from first_call(str(ranks), first, hops, hops * shards.block_bytes, BACKWARD)
    yield from first_call(f"{ranks}, bfloat16", partial(first, dtype=torch.bfloat16), hops,
                          (hops + ranks.size) * shards.block_bytes // 2 if hops else 0, BACKWARD)
    yield from _backward_beside(ring_attention_backward, ranks, str(ranks), shards)
    for what, dtype, plan in MORE:
        yield from _backward_beside(ring_attention_backward, ranks, f"{ranks}, {what}",
                                    Shards(ranks, **plan), dtype)


def _given(shards, turn, dtype):
    """The arguments of a rank: out and lse are float32, as ring_attention gives them."""
    *qkv, grad_out = inputs(turn, dtype)
    found = in_one_process(turn, dtype)
    return dict(zip(("grad_out", "q", "k", "v", "out", "lse"), shards.mine(
        [grad_out, *qkv, found["out"], found["lse"]])))


def _backward_beside(ring_attention_backward, ranks, where, shards, dtype=torch.float32):
    def call(turn):
        given = _given(shards, turn, dtype)
        gradients = ring_attention_backward(*given.values(), shards.visible, ranks.group)
        return dict(zip(("dq", "dk", "dv"), gradients)) | given

    def right(turn):
        found = in_one_process(turn, dtype) | dict(zip(("q", "k", "v", "grad_out"),
                                                       inputs(turn, dtype)))
        return {name: shards.of_all(whole) for name, whole in found.items()}

    yield from beside(where, ranks, call, right, slips=partial(_backward_slips, shards, dtype),
                      advice=lambda name: ADDED if name in ("dq", "dk", "dv") else
                      "It is an argument: work on a copy.", roundings=OF_SCORES)


def _backward_slips(shards, dtype, name, turn):
    if name not in ("dq", "dk", "dv"):
        return {}
    *qkv, grad_out = inputs(turn, dtype)
    found, R = in_one_process(turn, dtype), len(shards.positions)
    visible = [causal_blocks(shards.positions, rank) for rank in range(R)]

    def part(rank, owner, seen_of=lambda rank, owner: owner):
        """What `rank`'s queries and `owner`'s keys give of dq, dk or dv."""
        q, dout, out, lse = shards.of_rank(rank, [qkv[0], grad_out, found["out"], found["lse"]])
        k, v = shards.of_rank(owner, qkv[1:])
        seen = visible[rank][seen_of(rank, owner)]
        return block_gradients(dout, q, k, v, out, lse, seen)[("dq", "dk", "dv").index(name)]

    def whole(seen_of):
        return sum(part(*((shards.rank, other) if name == "dq" else (other, shards.rank)), seen_of)
                   for other in range(R))

    named = {"what its own queries and its own keys give": (
        part(shards.rank, shards.rank), "Add up: dq over all blocks, dk and dv over all ranks that "
        "the block meets."), **{f"what {index} gives": (whole(seen_of), OWNER)
                                for index, seen_of in confused(R).items()}}
    if name != "dq":
        named |= {f"that of rank {owner}'s keys": (found[name][:, :, shards.positions[owner]],
                  "One hop too few, or too many: after R steps a block's gradients are on the rank "
                  "before its owner.") for owner in range(R) if owner != shards.rank}
        other = {"dk": "dv", "dv": "dk"}[name]
        named[other] = found[other][:, :, shards.positions[shards.rank]], "Return dq, dk, dv."
    return named


def check_ring_attention_backward(ring_attention_backward):
    on_groups(_backward, ring_attention_backward, failures=FAILURES | NO_HOP, at_once=True)
    yield "dq, dk and dv of one process, on 4, 3, 2 and 1 ranks; large scores"
    yield "tokens in zigzag and in consecutive parts; bfloat16, added up in float32"
    yield "2 key heads for 4 query heads; nothing is changed"
    yield "R - 1 messages of k and v, and R of their gradients: the last one brings them home"
