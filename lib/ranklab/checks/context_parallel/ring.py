"""ring_attention and ring_attention_backward: all keys, one block at a time."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.context_parallel.attention import (
    IN_GROUPS, KEPT, KV, OF_SCORES, B, D, T, as_in_a_model, attention, gathered, gradients, inputs,
)
from ranklab.checks.context_parallel.calls import (
    COST, afterwards, changes_of, cost_of, messages, named,
)
from ranklab.checks.context_parallel.merge import FINITE
from ranklab.checks.prover import GROUPS, AtMost, Proof, Slip, Stage
from ranklab.context_parallel import (
    block_attention, block_gradients, causal_blocks, contiguous_shard, online_softmax_merge,
    ring_attention, ring_attention_backward, zigzag_shard,
)
from ranklab.context_parallel.block import Visible
from ranklab.context_parallel.ring import Hop

SCALES = 1, 40  # in the second call scores reach 290, and exp(89) is infinite
LATE = "blocks computed before the next one is on its way"
EARLY = "waits for the next block before a block is computed"


class Case(NamedTuple):
    """How the sequence is divided among a group's ranks."""

    name: str
    dtype: torch.dtype = torch.float32
    shard: Callable = zigzag_shard

    def __str__(self):
        return self.name


# Sums in 16 bits, and blocks that a rank does not see at all.
CASES = (Case("float32"), Case("bfloat16", torch.bfloat16),
         Case("consecutive parts", shard=contiguous_shard))


class Blocks(list):
    """What a rank's queries see of each rank's keys. Reading a mask counts as computing scores.

    positions  (R, T/R): which tokens each rank has
    looks      when each block is computed: how many messages had been sent, and how many calls were
               not yet waited for
    """

    def __init__(self, positions, rank, traffic, waits):
        self.positions, self.own, self.looks = positions, positions[rank], []
        super().__init__(Watched(*each).noting(self.looks, traffic, waits)
                         for each in causal_blocks(positions, rank))

    def whole(self, x, group):
        """Return all ranks' x (B, n, T/R, D), in the order of the sequence."""
        return gathered(x, group)[:, :, self.positions.flatten().argsort()]

    def overlap(self):
        """Return how often no message was in transit while a block was computed."""
        looks = self.looks[: len(self) - 1]
        late = sum(sent < step + 1 for step, (sent, _) in enumerate(looks))
        # On a GPU a wait returns at once: only the stream waits.
        early = sum(not under_way for _, under_way in looks) * (dist.get_backend() == "gloo")
        return {LATE: AtMost(late, 0, "computes {:.0f} of its blocks before the next one is on its "
                             "way"),
                EARLY: AtMost(early, 0, "waits for the next block before it computes the one that "
                              "it has, {:.0f} times")}


class Watched(Visible):
    """A Visible that records when its mask is read."""

    def noting(self, looks, traffic, waits):
        self.looks, self.traffic, self.waits = looks, traffic, waits
        return self

    @property
    def mask(self):
        calls = self.traffic.calls
        self.looks.append((calls["send"], self.waits.missing(calls.total())))
        return self[2]


def _stages(see, oracle, results, cost, arguments):
    return (
        Stage({f"{results} of one process; large scores, zigzag and consecutive parts; bfloat16, "
               "added up in float32": (),
               "2 key heads for 4 query heads; nothing is changed":
               tuple(map(afterwards, arguments)), **cost},
              see, CASES, (4,), oracle=oracle, roundings=OF_SCORES),
        Stage("inside groups of 1, 2 and 3 ranks it talks only to ranks of its group", see, CASES,
              (4,),
              GROUPS, oracle=oracle, roundings=OF_SCORES, note=IN_GROUPS))


def _cut(tensors, positions):
    return [as_in_a_model(x[:, :, positions]) for x in tensors]


def _block_bytes(ranks, element=4):
    return 2 * B * KV * T * D * element // ranks.size


# --- forward --------------------------------------------------------------------------------------

def _see_forward(fn, case, ranks):
    positions, hops = case.shard(T, ranks.size), ranks.size - 1
    for turn, scale in enumerate(SCALES):
        qkv = _cut(inputs(turn, case.dtype, scale=scale)[:3], positions[ranks.index])
        with messages() as (traffic, waits):
            visible = Blocks(positions, ranks.index, traffic, waits)
            results = named(fn(*qkv, visible, **ranks.keywords), "out", "lse")
        yield results | changes_of("qkv", qkv) | cost_of(
            traffic, waits, hops, hops * _block_bytes(ranks, case.dtype.itemsize)
        ) | visible.overlap()


def in_one_process(q, k, v, visible, group=None):
    return attention(q, *(visible.whole(x, group) for x in (k, v)), visible.own)


def all_blocks_at_once(q, k, v, visible, group=None):
    blocks = [torch.empty_like(torch.stack([k, v])) for _ in range(dist.get_world_size(group))]
    dist.all_gather(blocks, torch.stack([k, v]), group=group)
    out, lse = block_attention(q, *blocks[0], visible[0])
    for block, mask in zip(blocks[1:], visible[1:]):
        out, lse = online_softmax_merge(out, lse, *block_attention(q, *block, mask))
    return out, lse


def two_messages(q, k, v, visible, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out = torch.zeros(q.shape, device=q.device)
    lse = torch.full(q.shape[:-1], float("-inf"), device=q.device)
    for step in range(R):
        hops = [Hop(x, group) for x in (k, v)] if step < R - 1 else []
        part = block_attention(q, k, v, visible[(rank - step) % R])
        out, lse = online_softmax_merge(out, lse, *part)
        k, v = [hop.wait() for hop in hops] or (None, None)
    return out, lse


GROUP = "Pass `group` to every call that needs it: get_rank(group), Hop(x, group)."
OWNER = "In step i a rank has the block of rank (rank - i) % R."
OVERLAP = ("Start the block's hop, then compute with the block, and only then wait: the next block "
           "travels during the computation.")
VIEWS = ("The arguments may be transposed views, which are not contiguous: view() fails on them, "
         "and reshape() or torch.stack copies.")
PASSES = "All ranks make R - 1 hops, whatever anybody's queries see."
TYPE = "Send k and v in their own dtype: float32 has twice the bytes of bfloat16."
STACKED = "One message per hop is enough: k and v, stacked."
ALONE = "A single rank sends nothing: there is no other rank to send to."
GATHERED = ("This is not a ring: all_gather brings all blocks at once, and needs memory for the "
            "whole sequence.")
NOWHERE = "The last block is not passed on: R - 1 hops are enough for k and v."
VISIBLE = "visible[(rank - step) % R]"
HOP = "hop = Hop(block, group) if step < R - 1 else None"
WAIT = "block = hop and hop.wait()"
STACK = "torch.stack([k, v])"
PART = "part = block_attention(q, *block, visible[(rank - step) % R])"
PLACE = "dist.get_rank(group), dist.get_world_size(group)"
ROUNDED = "[x.to(q.dtype).float() for x in"
LOOP = "    for step in range(R):\n"
HIDDEN = tuple((LOOP, f"{LOOP}        if {condition}:\n            break\n")
               for condition in (f"not len({VISIBLE}.rows)", "step > rank"))
OTHERS = tuple((VISIBLE, f"visible[{index}]") for index in ("rank", "step", "(rank + step) % R"))
ADDED = "out, lse = online_softmax_merge(out, lse, *part)"
FORWARD = Proof(
    ring_attention,
    *_stages(_see_forward, in_one_process, "the attention and lse", {
        "R - 1 messages of k's and v's bytes, each on its way while a block is computed":
        (*COST, LATE, EARLY)}, "qkv"),
    mistakes=(
        Slip(OWNER, *OTHERS),
        Slip("One step is missing: there are R blocks to process, with R - 1 hops between them.",
             ("range(R)", "range(R - 1)"), ("range(R)", "range(1, R)")),
        Slip("Each block has its own softmax: online_softmax_merge weights the results.",
             (ADDED, "out, lse = out + part[0], part[1]"),
             (ADDED, "out, lse = out + part[0], torch.logaddexp(lse, part[1])"),
             (ADDED, "out, lse = out + part[0] / R, torch.logaddexp(lse, part[1])")),
        Slip("Only the last block counts here: merge each block's result into the result so far.",
             (ADDED, "out, lse = part")),
        Slip("Only the rank's own block counts here: use each block that wait() returns, and "
             "merge its result into the result so far.",
             (ADDED, "out, lse = part if step == 0 else (out, lse)"),
             (WAIT, "_ = hop and hop.wait()"), (WAIT, "")),
        Slip("Scores and sums are float32: accumulate in float32, whatever the dtype of q.",
             (PART, f"{PART}\n        part = {ROUNDED} part]"),
             (ADDED, f"{ADDED}\n        out, lse = {ROUNDED} (out, lse)]"),
             (PART, f"{PART}\n        part = {ROUNDED} part]",
              ADDED, f"{ADDED}\n        out, lse = {ROUNDED} (out, lse)]"),
             (PART, f"{PART}\n        part = [x.to(q.dtype) for x in part]",
              ADDED, f"{ADDED}\n        out, lse = out.to(q.dtype), lse.to(q.dtype)",
              "return out, lse", "return out.float(), lse.float()"),
             ("dtype=torch.float32, device=q.device", "dtype=q.dtype, device=q.device",
              ADDED, f"{ADDED}\n        out = out.to(q.dtype)",
              "return out", "return out.float()")),
        Slip("out is float32, whatever the dtype of q.", ("return out", "return out.to(q.dtype)")),
        Slip("Return both: (out, lse).", ("return out, lse", "return out")),
        Slip("Return out first, then lse.", ("return out, lse", "return lse, out")),
        Slip("k comes first in the block, then v.", (STACK, "torch.stack([v, k])")),
        Slip(FINITE, (ADDED, "a, b = lse.exp().unsqueeze(-1), part[1].exp().unsqueeze(-1)\n"
                      "        out = ((a * out + b * part[0]) / (a + b)).nan_to_num(0.0)\n"
                      "        lse = torch.log(lse.exp() + part[1].exp())")),
        Slip("An argument is changed: keep what arrives in a separate buffer.",
             (WAIT, f"{WAIT}\n        block = block is not None and [k.copy_(block[0]), "
              "v.copy_(block[1])]", "Hop(block,", "Hop(torch.stack([*block]),")),
        Slip(KEPT, ("group=None):", "group=None, kept={}):", f"block = {STACK}",
                       f"block = kept.setdefault((R, k.dtype, rank), {STACK})")),
        Slip(VIEWS,
             (STACK, "torch.cat([k.view(-1), v.view(-1)]).view(2, *k.shape)")),
        Slip(PASSES, *HIDDEN),
        Slip("hop is None here. Wait only where a hop was started: R - 1 times in R steps.",
             (WAIT, "block = hop.wait()")),
        Slip(GROUP, ("Hop(block, group)", "Hop(block)"),
             (PLACE, "dist.get_rank(group), dist.get_world_size()")),
        Slip(NOWHERE,
             ("if step < R - 1 else", "if R > 1 else")),
        Slip(TYPE,
             (STACK, f"{STACK}.float()")),
        Slip(ALONE, (HOP, HOP.replace("R - 1", "max(R - 1, 1)"))),
        Slip(STACKED, two_messages),
        Slip("There is no need to send the block's owner: it is rank (rank - step) % R.",
             (HOP, f"{HOP}\n        told = hop and Hop(torch.tensor([rank], device=q.device), "
              "group)", WAIT, f"{WAIT}\n        told and told.wait()")),
        Slip("Each block is sent twice. Start one hop, and use what its wait() returns.",
             (WAIT, "hop and hop.wait()\n        block = hop and Hop(block, group).wait()")),
        Slip(GATHERED, all_blocks_at_once),
        Slip(OVERLAP, (HOP, "", WAIT, f"{HOP}; {WAIT}"),
             (HOP, "hop = Hop(block, group).wait() if step < R - 1 else None",
              WAIT, "block = hop")),
    ), hints=(
        "Whose block does a rank have in step 0, in step 1, in step i?",
        "In each of R steps, start the block's hop, attend to the block, merge, and wait for the "
        "next block. The last step passes nothing on.",
        "hop = Hop(block, group) if step < R - 1 else None; out, lse = online_softmax_merge(out, "
        "lse, *block_attention(q, *block, visible[(rank - step) % R])); block = hop and hop.wait()",
    ))


# --- backward -------------------------------------------------------------------------------------

def _see_backward(fn, case, ranks):
    positions, R = case.shard(T, ranks.size), ranks.size
    own, element = positions[ranks.index], case.dtype.itemsize
    cost = (2 * R - 1, (R - 1) * _block_bytes(ranks, element) + R * _block_bytes(ranks))
    for turn, scale in enumerate(SCALES):
        q, k, v, grad_out = inputs(turn, case.dtype, scale=scale)
        out, lse = attention(q[:, :, own], k, v, own)
        arguments = [*_cut((grad_out, q, k, v), own), as_in_a_model(out), lse]
        with messages() as (traffic, waits):
            visible = Blocks(positions, ranks.index, traffic, waits)
            results = named(fn(*arguments, visible, **ranks.keywords), "dq", "dk", "dv")
        yield results | changes_of(ARGUMENTS, arguments) | cost_of(
            traffic, waits, *(cost if R > 1 else (0, 0)))


def gradients_in_one_process(grad_out, q, k, v, out, lse, visible, group=None):
    whole = (visible.whole(x, group) for x in (grad_out, q, k, v))
    return [x[:, :, visible.own] for x in gradients(*whole)]


def all_reduced(grad_out, q, k, v, out, lse, visible, group=None):
    blocks = [torch.empty_like(torch.stack([k, v])) for _ in range(dist.get_world_size(group))]
    dist.all_gather(blocks, torch.stack([k, v]), group=group)
    parts = [block_gradients(grad_out, q, *block, out, lse, mask)
             for block, mask in zip(blocks, visible)]
    dkv = torch.stack([torch.stack(part[1:]) for part in parts])
    dist.all_reduce(dkv, group=group)
    return sum(part[0] for part in parts), *dkv[dist.get_rank(group)]


ARGUMENTS = "grad_out", "q", "k", "v", "out", "lse"
GRADS = f"block_gradients(grad_out, q, *block, out, lse, {VISIBLE})"
SUM = "gradients += grad_hop.wait()"
HOME = "grad_hop.wait() if grad_hop else gradients"
BACKWARD = Proof(
    ring_attention_backward,
    *_stages(_see_backward, gradients_in_one_process, "dq, dk and dv", {
        "R - 1 messages of k and v, and R of their gradients: the last one brings them home":
        COST}, ARGUMENTS),
    mistakes=(
        Slip(OWNER, *OTHERS),
        Slip("One step is missing: there are R blocks to process, with R - 1 hops between them.",
             ("range(R)", "range(R - 1)")),
        Slip("dq comes from the last block only: sum it over all blocks.",
             ("dq + grads[0]", "grads[0]")),
        Slip("dq comes from the rank's own block only: sum it over all blocks.",
             ("dq + grads[0]", "dq if step else grads[0]")),
        Slip("dk and dv cover only one rank's queries: a block's gradients travel with it, and "
             "each rank adds its own to those it receives.", (SUM, "grad_hop.wait()")),
        Slip("dk and dv cover only this rank's own queries: a block's gradients add up over all "
             "the ranks that it visits.", (SUM, "gradients = grad_hop.wait()"),
             ("dq, block, grad_hop = 0,", "own, dq, block, grad_hop = None, 0,",
              "        if grad_hop:", "        own = gradients.clone() if own is None else own\n"
              "        if grad_hop:",
              f"dk, dv = {HOME}", "dk, dv = own\n    grad_hop and grad_hop.wait()")),
        Slip("dk and dv are sums over the queries of all ranks, not means: do not divide by R.",
             ("return dq, dk, dv", "return dq, dk / R, dv / R")),
        Slip("After R steps a block's gradients are on the rank before its owner. In each of the R "
             "steps add this rank's part first, then send.",
             ("Hop(gradients, group) if R > 1", "Hop(gradients, group) if step < R - 1")),
        Slip("Wait for the last hop: it brings the gradients home.", (HOME, "gradients")),
        Slip("Return dq, dk, dv, in this order.", ("return dq, dk, dv", "return dq, dv, dk"),
             ("return dq, dk, dv", "return dk, dv, dq")),
        Slip("Return all three: dq, dk and dv.", ("return dq, dk, dv", "return dq")),
        Slip("k comes first in the block, then v.", (STACK, "torch.stack([v, k])")),
        Slip("The probabilities are exp(score - lse), with lse over all keys: pass the given out "
             "and lse, not those of one block.",
             (GRADS, GRADS.replace("out, lse", f"*block_attention(q, *block, {VISIBLE})"))),
        Slip("All three gradients are accumulated, sent and returned in float32, whatever the "
             "dtype of q: each rank adds to them, and in 16 bits every sum is rounded.",
             ("dq, block, grad_hop = 0,", "dq, block, grad_hop = torch.zeros_like(q),",
              "dq + grads[0]", "dq.add_(grads[0])"),
             ("dq, block, grad_hop = 0,", "dq, block, grad_hop = torch.zeros_like(q),",
              "dq + grads[0]", "dq.add_(grads[0])", "return dq,", "return dq.float(),"),
             ("return dq, dk, dv", "return [x.to(q.dtype) for x in (dq, dk, dv)]"),
             ("return dq, dk, dv", "return dq, dk.to(k.dtype), dv.to(k.dtype)"),
             ("return dq, dk, dv", "return [x.to(q.dtype).float() for x in (dq, dk, dv)]"),
             ("torch.stack(grads[1:])", "torch.stack(grads[1:]).to(k.dtype)"),
             ("torch.stack(grads[1:])", "torch.stack(grads[1:]).to(k.dtype)",
              HOME, f"({HOME}).float()"),
             ("torch.stack(grads[1:])", "torch.stack(grads[1:]).bfloat16()")),
        Slip("An argument is changed: keep what arrives in a separate buffer.",
             (WAIT, "block = hop and [k.copy_((arrived := hop.wait())[0]), "
              "v.copy_(arrived[1])]", "Hop(block,", "Hop(torch.stack([*block]),")),
        Slip(KEPT, ("group=None):", "group=None, kept={}):", f"0, {STACK}",
                    f"0, kept.setdefault((R, k.dtype, rank), {STACK})")),
        Slip(VIEWS, (STACK, "torch.cat([k.view(-1), v.view(-1)]).view(2, *k.shape)")),
        Slip(PASSES, *HIDDEN),
        Slip("There is no hop to wait for: no gradients arrive in the first step, and no block "
             "arrives in the last.", ("        if grad_hop:", "        if R > 1:"),
             ("hop and hop.wait()", "hop.wait()")),
        Slip(GROUP, ("Hop(block, group)", "Hop(block)"),
             ("Hop(gradients, group)", "Hop(gradients)")),
        Slip(ALONE,
             ("Hop(gradients, group) if R > 1 else None", "Hop(gradients, group)")),
        Slip("R - 1 hops are enough for k and v, because the last block is not passed on, and R "
             "for their gradients.", (HOP, "hop = Hop(block, group) if R > 1 else None")),
        Slip(TYPE, (STACK, f"{STACK}.float()")),
        Slip(GATHERED, all_reduced),
    ), hints=(
        "dq stays on its rank. Which ranks compute a part of one block's dk and dv?",
        "Proceed as in forward, with block_gradients. A block's gradients travel with it: each "
        "rank adds its own to those it receives, and passes the sum on. Where are they after R "
        "steps?",
        "gradients = torch.stack([dk, dv]) of this block; if grad_hop: gradients += grad_hop.wait()"
        "; grad_hop = Hop(gradients, group); after the loop dk, dv = grad_hop.wait()",
    ))
