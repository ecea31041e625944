"""What the checks of lab 10 share: attention in one process, and what of it a rank must have."""

from functools import partial

import torch
import torch.nn.functional as F

from ranklab.checks.beside import expect
from ranklab.checks.handles import Waits, all_awaited
from ranklab.checks.failures import MISMATCH, STUCK
from ranklab.context_parallel import block_attention, causal_blocks, zigzag_shard
from ranklab.context_parallel.block import Visible
from ranklab.engine import device
from ranklab.meter import Traffic

B, H, KV, T, D = 2, 4, 2, 24, 4
# Roundings of exp(score - lse): an error of half an eps in a score of 290, in the products that it
# is the sum of, in lse or in the difference is 290 such errors in the result.
OF_SCORES = 4 * 290
ALIKE = "In each step all ranks of the group send, and all receive."
FAILURES = {STUCK: ALIKE, MISMATCH: ALIKE}


def inputs(turn, dtype=torch.float32, heads=(H, KV)):
    """q, k, v and a gradient of the result, of the whole sequence. In turn 1 scores reach 290, and
    exp(89) is infinite.
    """
    generator = torch.Generator().manual_seed(turn)
    made = [torch.randn(B, n, T, D, generator=generator).to(device(), dtype)
            for n in (heads[0], heads[1], heads[1], heads[0])]
    return [made[0] * (1 + 39 * turn), *made[1:]]


def as_in_a_model(x):
    """A copy of x (B, H, T, D) that lies in memory as (B, T, H, D): a model transposes its q."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def in_one_process(turn, dtype=torch.float32, heads=(H, KV)):
    """{"out", "lse", "dq", "dk", "dv"} of the whole sequence, by torch, in float32."""
    *qkv, grad_out = (x.float() for x in inputs(turn, dtype, heads))
    q, k, v = (x.requires_grad_() for x in qkv)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out.backward(grad_out)
    scores = q @ k.repeat_interleave(heads[0] // heads[1], 1).mT * D**-0.5
    hidden = torch.ones(T, T, dtype=torch.bool, device=device()).triu(1)
    lse = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    return {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


class Shards:
    """How the ranks of a group have the sequence."""

    def __init__(self, ranks, shard=zigzag_shard):
        self.positions = shard(T, ranks.size)
        self.rank, self.looks = ranks.index, []
        self.block_bytes = 2 * B * KV * T * D * 4 // ranks.size
        self.visible = causal_blocks(self.positions, self.rank)

    def mine(self, tensors):
        return self.of_rank(self.rank, tensors)

    def of_rank(self, rank, tensors):
        parts = [x[:, :, self.positions[rank]] for x in tensors]
        return [as_in_a_model(x) if x.ndim == 4 else x for x in parts]

    def of_all(self, whole):
        """[what each rank must have of a tensor (B, H, T, ...)]"""
        return [whole[:, :, at] for at in self.positions]

    def watched(self, traffic, waits):
        """`visible`, which notes as each block is computed how many messages had been sent, and how
        many calls are not waited for yet.
        """
        self.looks = []
        return [Watched(*each).noting(self.looks, traffic, waits) for each in self.visible]


class Watched(Visible):
    """A Visible; who asks for its mask computes its scores."""

    def noting(self, looks, traffic, waits):
        self.looks, self.traffic, self.waits = looks, traffic, waits
        return self

    @property
    def mask(self):
        calls = self.traffic.calls
        self.looks.append((calls["send"], self.waits.missing(sum(calls.values()))))
        return self[2]


def block_by_block(shards, turn, dtype, seen_of=lambda rank, owner: owner):
    """[(out, lse) of this rank's queries over each rank's keys alone], under visible[seen_of(this
    rank, the keys' owner)].
    """
    q, k, v, _ = inputs(turn, dtype)
    mine = shards.mine([q])[0]
    return [block_attention(mine, k[:, :, at], v[:, :, at],
                            shards.visible[seen_of(shards.rank, owner)])
            for owner, at in enumerate(shards.positions)]


def confused(R):
    """{an index of `visible` that is not the owner of step's block: (rank, owner) -> its value}"""
    return {"visible[rank]": lambda rank, owner: rank,
            "visible[step]": lambda rank, owner: (rank - owner) % R,
            "visible[(rank + step) % R]": lambda rank, owner: (2 * rank - owner) % R}


def first_call(where, call, messages, nbytes, hint):
    """A look at what a call of its own has sent; a Mistake where a message was not awaited."""
    with Traffic() as traffic, Waits() as waits:
        call(traffic, waits)
    all_awaited(waits.missing(sum(traffic.calls.values())), where)  # now: more would never end
    sent = traffic.calls["send"], traffic.sent_bytes
    yield partial(expect, sent == (messages, nbytes), f"{where}: a rank sends {sent[1]:,} bytes in"
                  f" {sent[0]} messages, not {nbytes:,} in {messages}", hint)
