"""The checks of ring_attention and ring_attention_backward: all keys, one block at a time."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.context_parallel.attention import (
    FAILURES, Shards, block_by_block, first_call, in_one_process, inputs,
)
from ranklab.checks.context_parallel.merge import FINITE
from ranklab.context_parallel import block_gradients

EARLY = ("Start the hop of the block, then compute with the block, and only then wait: the next "
         "block travels meanwhile.")
OWNER = "In step i a rank has the block of rank (rank - i) % R: take the `visible` of that rank."
ADDED = "dq adds up over the blocks; a block's dk and dv over the ranks that it meets."
FORWARD = "k and v go in one message, R - 1 times: the last block goes nowhere."
BACKWARD = ("k and v go R - 1 times. Their gradients go R times: with the block, and home at the "
            "end; they are float32.")


def _forward(ring_attention, ranks):
    shards, types, nans = Shards(ranks), [], []

    def first(traffic, waits, dtype=torch.float32):
        found = ring_attention(*shards.mine(inputs(0, dtype)[:3]), shards.watched(traffic, waits),
                               ranks.group)
        types.extend(x.dtype for x in found)

    def call(turn):
        q, k, v = shards.mine(inputs(turn)[:3])
        out, lse = ring_attention(q, k, v, shards.visible, ranks.group)
        nans.append(bool(out.isnan().any()))
        return {"out": out, "lse": lse, "q": q, "k": k, "v": v}

    def right(turn):
        found = in_one_process(turn) | dict(zip("qkv", inputs(turn)))
        return {name: shards.of_all(found[name]) for name in ("out", "lse", "q", "k", "v")}

    hops = ranks.size - 1
    yield from first_call(str(ranks), first, hops, hops * shards.block_bytes, FORWARD)
    yield partial(_overlaps, ranks, shards.looks)
    yield from first_call(f"{ranks}, bfloat16", partial(first, dtype=torch.bfloat16), hops,
                          hops * shards.block_bytes // 2, FORWARD)
    yield partial(expect, set(types) == {torch.float32}, f"{ranks}, bfloat16: out and lse are "
                  f"{types[-2:]}", "Whatever the type of q: float32.")
    looks = list(beside(str(ranks), ranks, call, right, slips=partial(_forward_slips, shards),
                        advice=lambda name: OWNER))
    yield partial(expect, nans != [False, True], f"{ranks}: scores reach 290, and out is nan "
                  "somewhere", FINITE)
    yield from looks


def _forward_slips(shards, name, turn):
    if name not in ("out", "lse"):
        return {}
    blocks, item = block_by_block(shards, turn), ("out", "lse").index(name)
    outs, logs = zip(*blocks)
    mean = torch.stack(outs).mean(0) if name == "out" else torch.stack(logs).mean(0)
    total = sum(outs) if name == "out" else sum(logs)
    return {
        "that of its own keys alone": (blocks[shards.rank][item], "Other ranks' keys count, too: "
                                       "merge each block's result with what is there."),
        "the sum of the blocks' results": (total, "Each block has its own softmax: "
                                           "online_softmax_merge weighs them."),
        "the mean of the blocks' results": (mean, "Each block has its own softmax: "
                                            "online_softmax_merge weighs them."),
    }


def _overlaps(ranks, looks):
    late = [step for step, (sent, _) in enumerate(looks[: ranks.size - 1]) if sent < step + 1]
    early = [step for step, (_, under_way) in enumerate(looks[: ranks.size - 1]) if not under_way]
    expect(not late, f"{ranks}: block {late and late[0]} is computed before the next one is on its "
           "way", EARLY)
    # On a GPU a wait returns at once: only the stream waits.
    expect(not early or dist.get_backend() != "gloo", f"{ranks}: the next block is waited for "
           f"before block {early and early[0]} is computed", EARLY)


def check_ring_attention(ring_attention):
    on_groups(_forward, ring_attention, failures=FAILURES, at_once=True)
    yield "the attention of one process, and lse, on 4, 3, 2 and 1 ranks in zigzag; large scores"
    yield "2 key heads for 4 query heads; nothing is changed"
    yield "R - 1 messages of k's and v's bytes, each on its way while a block is computed"


def _backward(ring_attention_backward, ranks):
    shards, hops = Shards(ranks), 2 * ranks.size - 1 if ranks.size > 1 else 0

    def given(turn):
        *qkv, grad_out = inputs(turn)
        found = in_one_process(turn)
        return dict(zip(("grad_out", "q", "k", "v", "out", "lse"), shards.mine(
            [grad_out, *qkv, found["out"], found["lse"]])))

    def first(traffic, waits, dtype=torch.float32):
        mine = {name: x.to(dtype) if name in "qkv" else x for name, x in given(0).items()}
        ring_attention_backward(*mine.values(), shards.watched(traffic, waits), ranks.group)

    def call(turn):
        mine = given(turn)
        gradients = ring_attention_backward(*mine.values(), shards.visible, ranks.group)
        return dict(zip(("dq", "dk", "dv"), gradients)) | mine

    def right(turn):
        found = in_one_process(turn) | dict(zip(("q", "k", "v", "grad_out"), inputs(turn)))
        return {name: shards.of_all(whole) for name, whole in found.items()}

    yield from first_call(str(ranks), first, hops, hops * shards.block_bytes, BACKWARD)
    yield from first_call(f"{ranks}, bfloat16", partial(first, dtype=torch.bfloat16), hops,
                          (hops + ranks.size) * shards.block_bytes // 2 if hops else 0, BACKWARD)
    yield from beside(str(ranks), ranks, call, right, slips=partial(_backward_slips, shards),
                      advice=lambda name: f"{OWNER} {ADDED}")


def _backward_slips(shards, name, turn):
    if name not in ("dq", "dk", "dv"):
        return {}
    *qkv, grad_out = inputs(turn)
    found = in_one_process(turn)
    q, grad_out, out, lse = shards.mine([qkv[0], grad_out, found["out"], found["lse"]])
    at = ("dq", "dk", "dv").index(name)
    here = [block_gradients(grad_out, q, *(x[:, :, places] for x in qkv[1:]), out, lse, seen)[at]
            for places, seen in zip(shards.positions, shards.visible)]
    named = {"what its own queries and its own keys give": (
        here[shards.rank], "Add up: dq over all blocks, dk and dv over all ranks that the block "
        "meets.")}
    if name != "dq":
        R = len(shards.positions)
        named |= {f"that of rank {owner}'s keys": (found[name][:, :, shards.positions[owner]],
                  "One hop too few, or too many: after R steps a block's gradients are on the rank "
                  "before its owner.") for owner in range(R) if owner != shards.rank}
    return named


def check_ring_attention_backward(ring_attention_backward):
    on_groups(_backward, ring_attention_backward, failures=FAILURES, at_once=True)
    yield "dq, dk and dv of one process, on 4, 3, 2 and 1 ranks in zigzag; large scores"
    yield "2 key heads for 4 query heads; nothing is changed"
    yield "R - 1 messages of k and v, and R of their gradients: the last one brings them home"
