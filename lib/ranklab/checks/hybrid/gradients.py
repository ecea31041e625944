"""The check of tied_embedding_sync: gradients of one step, on real ranks."""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.beside import beside, expect, on_groups
from ranklab.checks.failures import MISMATCH
from ranklab.checks.handles import Waits, all_awaited
from ranklab.engine import device
from ranklab.meter import Traffic

PAIR = ("Only the two ranks that hold a copy send and receive, one message each way. Start both "
        "(dist.batch_isend_irecv), and wait for both: if both send first, both wait.")
GROUP = "`other` counts in the group: group_dst=other, group_src=other, or group_peer=other."
OWN = ("Send the gradient that backward has left, and receive into another tensor. Add when both "
       "are here, and put the sum into parameter.grad.")
TIED_FAILURES = {
    ".*never waited for": PAIR, "ValueError: .* part of group .*": GROUP,
    "RuntimeError: input tensor has to be contiguous":
        "A gradient may have any strides: send grad.contiguous().",
    "RuntimeError: .*grad_dtype.*": "The sum has the type of the gradients.",
    "hang: .*": f"{PAIR} {GROUP}", MISMATCH: f"{PAIR} {GROUP}",
    "(Type|Attribute)Error: .*'NoneType'.*":
        "On a rank without copies `other` is None: nothing is sent there.",
}


def _numbers(*seed):
    """(3, 4), not contiguous."""
    generator = torch.Generator().manual_seed(sum(n * 100**i for i, n in enumerate(seed)))
    return torch.randn(4, 3, generator=generator).T


def _at_end(rank, turn):
    """{name: gradient of a copy}; the second is bf16."""
    found = {f"gradient {i} of the copies": _numbers(rank, i, turn) for i in range(3)}
    return found | {"gradient 1 of the copies": _numbers(rank, 1, turn).bfloat16()}


def _tied(sync, ranks):
    rank, ends, seen = dist.get_rank(), ranks.members[:: max(1, ranks.size - 1)], []
    has_copies = rank in ends and len(ends) == 2
    other = ends[rank == ends[0]] if has_copies else None

    def own(turn):
        return _at_end(rank, turn) if has_copies else {}

    def call(turn):
        copies = {}
        for name, gradient in own(turn).items():
            copies[name] = nn.Parameter(torch.zeros_like(gradient, device=device()))
            copies[name].grad = gradient.to(device())
        with Traffic() as traffic, Waits() as waits:
            sync([*copies.values()], ranks.members.index(other) if has_copies else None,
                 ranks.group)
        all_awaited(waits.missing(len(traffic.ops)), "the sum")  # else what follows may hang
        seen.append(traffic)
        return {name: parameter.grad for name, parameter in copies.items()}

    def right(turn):
        """The sums, which both ends have; a rank without copies has none."""
        return {name: [mine + _at_end(other, turn)[name]] * ranks.size
                for name, mine in own(turn).items()}

    def slips(name, turn):
        return {"the mean": (right(turn)[name][0] / 2,
                             "Each end has a part of one gradient: add, no mean."),
                "its own as it was": (own(turn)[name], OWN),
                "that of the other end": (_at_end(other, turn)[name], OWN)}

    yield from beside(f"{ranks}", ranks, call, right, slips=slips, advice=lambda name: OWN)
    calls, sent, mine = seen[0].calls, seen[0].sent_bytes, own(0).values()
    nbytes = sum(gradient.nbytes for gradient in mine)
    yield partial(expect, sent <= nbytes and calls <= Counter(send=len(mine), recv=len(mine)),
                  f"{ranks} sends {calls['send']} messages of {sent} bytes in all, not {len(mine)} "
                  f"of {nbytes}; it calls {', '.join(calls)}", f"No other rank has to wait. {PAIR}")


def check_tied_embedding_sync(sync):
    on_groups(_tied, sync, failures=TIED_FAILURES, group_hint=GROUP)
    yield "both ends have the sum of both gradients, in any type and with any strides"
    yield "each end sends its own gradients once, and waits; the other ranks send nothing"
    yield "also in a group of some ranks, where `other` counts in the group"
