"""The check of tied_embedding_sync: gradients of one step, on real ranks."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.hybrid.late import Late
from ranklab.checks.prover import GROUPS, Agree, AtMost, Must, Proof, Slip, Stage
from ranklab.checks.trial import gathered
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.pipeline_parallel import tied_embedding_sync


class Case(NamedTuple):
    """Copies whose gradients have these types."""

    dtypes: tuple
    strided: bool = False

    def __str__(self):
        return f"gradients in {', '.join(self.dtypes)}" + ", not contiguous" * self.strided

    def copies(self, rank, turn):
        """Return the copies of a rank, with their gradients."""
        generator = torch.Generator().manual_seed(rank + 9 * turn)
        parameters = []
        for dtype in self.dtypes:
            gradient = torch.randn(3, 4, dtype=torch.float64, generator=generator)
            gradient = gradient.to(device(), getattr(torch, dtype))
            parameters.append(nn.Parameter(torch.full_like(gradient, 3)))
            parameters[-1].grad = gradient.T.contiguous().T if self.strided else gradient
        return parameters


CASES = (Case(("float32",)), Case(("float32", "bfloat16", "float32"), True), Case(("float64",)))
DROPPED, CHANGED = "handles that nobody waited for", "tensors that change while they are sent"
OTHERS, SENT, BYTES = "what it calls of collectives", "messages sent", "bytes sent"
COST = CHANGED, OTHERS, SENT, BYTES


def _see(fn, case, ranks):
    """Look at two calls. The first and the last rank of the group have copies, if it has two."""
    is_end = ranks.size > 1 and ranks.index in (0, ranks.size - 1)
    peer = ranks.size - 1 - ranks.index if is_end else None
    for turn in (0, 1):
        copies = case.copies(dist.get_rank(), turn) if is_end else []
        peer_copies = case.copies(ranks.members[peer], turn) if is_end else []
        parts = {f"this end's gradient {i} before the call": copy.grad.clone()
                 for i, copy in enumerate(copies)} | {
                 f"the other end's gradient {i}": copy.grad for i, copy in enumerate(peer_copies)}
        nbytes = sum(copy.nbytes for copy in copies)
        with Traffic() as traffic, Late() as late:
            fn([*copies], peer, **ranks.keywords)
        calls = traffic.calls
        yield {DROPPED: AtMost(late.drop(), 0)} | {
            f"gradient {i}": copy.grad for i, copy in enumerate(copies)} | {
            f"weight {i} afterwards": copy for i, copy in enumerate(copies)} | {
            f"the bits of gradient {i}": Agree(copy.grad) for i, copy in enumerate(copies)
            if ranks.size == 2} | parts | {  # parts: so that one of them is told by its name
            CHANGED: AtMost(late.changed, 0), OTHERS: Must(sorted({*calls} - {"send", "recv"}), []),
            SENT: AtMost(calls["send"], len(copies), "sends {:.0f} messages; {:.0f} are enough"),
            BYTES: AtMost(traffic.sent_bytes, nbytes, "sends {:.0f} bytes; {:.0f} are enough")}


def by_gathering(copies, other, group=None):
    of_all = gathered([copy.grad for copy in copies], group)
    for copy, gradient in zip(copies, of_all[other] if copies else ()):
        copy.grad = copy.grad + gradient.to(device())


SUM, OWN = "parameter.grad = local + remote", "parameter.grad.contiguous()"
WAIT = "        for work in works:\n            work.wait()\n"
BUFFER, COPIES = "torch.empty_like(local)", "    for parameter in copies:\n"
BATCH = """dist.batch_isend_irecv([
            dist.P2POp(dist.isend, local, group=group, group_peer=other),
            dist.P2POp(dist.irecv, remote, group=group, group_peer=other)])"""
SEND = "dist.isend(local, group=group, group_dst=other)"
RECEIVE = "dist.irecv(remote, group=group, group_src=other)"
EACH = f"[{SEND}, {RECEIVE}]"


def all_reduce(copies, other, group=None):
    for parameter in copies:
        total = parameter.grad.contiguous()
        dist.all_reduce(total, group=group)
        parameter.grad = total


def all_gather(copies, other, group=None):
    for parameter in copies:
        local = parameter.grad.contiguous()
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local, group=group)
        parameter.grad = local + parts[other]


def the_sum_is_sent(copies, other, group=None):
    for parameter in copies:
        local = parameter.grad.contiguous()
        remote = torch.empty_like(local)
        if dist.get_rank(group) < other:
            dist.send(local, group=group, group_dst=other)
            dist.recv(remote, group=group, group_src=other)
            parameter.grad = local + remote
        else:
            dist.recv(remote, group=group, group_src=other)
            parameter.grad = local + remote
            dist.send(parameter.grad, group=group, group_dst=other)


def in_rows(copies, other, group=None):
    for parameter in copies:
        local = parameter.grad.contiguous()
        remote = torch.empty_like(local)
        for row, buffer in zip(local, remote):
            for work in (dist.isend(row, group=group, group_dst=other),
                         dist.irecv(buffer, group=group, group_src=other)):
                work.wait()
        parameter.grad = local + remote


TIED = Proof(
    tied_embedding_sync,
    Stage({"both ends have the sum of both gradients, in any type and with any strides": (),
           "each end sends its own gradients once, and waits; the other ranks send nothing": COST},
          _see, CASES, (2, 3), oracle=by_gathering,
          note=("On both ends, in the order of `copies`, parameter.grad becomes this end's "
                "gradient plus the other end's, in their own dtype. A rank without copies does "
                "nothing.")),
    Stage("also in a group of some ranks, where `other` is a rank of the group", _see, CASES, (4,),
          GROUPS[:1], oracle=by_gathering,
          note="It was right on all ranks. Here there are groups, whose ranks are not 0 .. n-1."),
    mistakes=(
        Slip("Each end has a part of one gradient: add the parts, don't average them.",
             (SUM, "parameter.grad = (local + remote) / 2")),
        Slip("Both ends need the sum: each adds what it receives to its own.",
             (SUM, f"if dist.get_rank(group) < other:\n            {SUM}"),
             (SUM, f"if dist.get_rank(group) > other:\n            {SUM}")),
        Slip("This is only the other end's part: add your own.", (SUM, "parameter.grad = remote")),
        Slip("parameter.grad still holds this end's part alone: assign the sum to it. (What you "
             "add to grad.contiguous() may go into a copy.)",
             (SUM, "local += remote"), (SUM, "local = local + remote")),
        Slip("This end's own part must count only once.",
             (SUM, "parameter.grad += local + remote")),
        Slip("The other end's part must count only once.",
             (SUM, "parameter.grad = local + 2 * remote")),
        Slip("What the other end sends already includes this end's part: each end must send the "
             "gradient that backward left.", the_sum_is_sent),
        Slip("The sum is a gradient: put it into parameter.grad, and leave the weight as it is.",
             (SUM, "parameter.data += local + remote"), (SUM, f"{SUM}\n        parameter.data -= "
                                                              "parameter.grad"),
             (SUM, f"{SUM}\n        parameter.data /= 2")),
        Slip("Send the gradient, not the weight: parameter.grad.",
             (OWN, "parameter.detach().contiguous()",
              SUM, "parameter.grad = parameter.grad + remote")),
        Slip("Every parameter in `copies` must get its sum.",
             (COPIES, COPIES.replace("copies", "copies[:1]")),
             (COPIES, COPIES.replace("copies", "copies[-1:]"))),
        Slip("The sum must have the dtype of the gradients.",
             (OWN, "parameter.grad.float().contiguous()"), (OWN, "parameter.grad.double()"
                                                                 ".contiguous()")),
        Slip("Send the gradient as it is: a wider dtype has more bytes.",
             (OWN, "parameter.grad.double().contiguous()",
              SUM, "parameter.grad = (local + remote).to(parameter.grad.dtype)")),
        Slip("Precision is lost on the way: keep the gradient in its own dtype.",
             (OWN, "parameter.grad.bfloat16().contiguous()",
              SUM, "parameter.grad = parameter.grad + remote.to(parameter.grad.dtype)"),
             (OWN, "parameter.grad.float().contiguous()",
              SUM, "parameter.grad = (local + remote).to(parameter.grad.dtype)"),
             (SUM, "parameter.grad = local + remote.bfloat16().to(local.dtype)")),
        Slip("A gradient may have any strides, but a message must be contiguous: send "
             "grad.contiguous(). (clone() keeps the strides.)", (OWN, "parameter.grad"),
             (OWN, "parameter.grad.clone()"),
             (BUFFER, "torch.empty_like(parameter.grad)")),
        # messages
        Slip("Wait for both messages: until then the other end's part has not arrived, and your "
             "own may be lost.", (WAIT, ""), (WAIT, "        works[-1].wait()\n"),
             (WAIT, "        works[0].wait()\n"), (WAIT, "", SUM, f"{SUM}\n{WAIT[:-1]}")),
        Slip("Until its wait() returns, a send may still be reading its tensor: wait for it as "
             "well before you write into that tensor.",
             (WAIT, "        works[1].wait()\n", SUM, "parameter.grad += remote\n        "
                                                      "works[0].wait()")),
        Slip("Receive into another tensor: the one being sent must not change.",
             (BUFFER, "local"),
             (BUFFER, "local", SUM, "parameter.grad = parameter.grad + remote")),
        Slip("Both ends must go through `copies` in the same order: the first message is for the "
             "first copy.",
             (COPIES, "    for parameter in copies[:: 1 if dist.get_rank(group) < (other or 0) "
                      "else -1]:\n")),
        Slip("The two ends wait for each other: a deadlock. Start both messages "
             "(dist.batch_isend_irecv), then wait for both.",
             (BATCH, f"{SEND}, {RECEIVE}".replace("dist.i", "dist."), WAIT, ""),
             (BATCH, f"{RECEIVE}, {SEND}".replace("dist.i", "dist."), WAIT, ""),
             (BATCH, f"[{SEND.replace('isend', 'send')}, {RECEIVE}]"),
             (BATCH, f"[{RECEIVE.replace('irecv', 'recv')}, {SEND}]")),
        Slip("Only the two ends communicate, and only with each other: no other rank of the group "
             "has to wait for them.", (COPIES, f"    dist.barrier(group=group)\n{COPIES}"),
             (SUM, f"{SUM}\n    dist.barrier(group=group)"), all_reduce, all_gather),
        Slip("Each end sends its gradient only once: the other end does its own adding.",
             (SUM, "local += remote\n        works = [dist.isend(local, group=group, "
              "group_dst=other), dist.irecv(remote, group=group, group_src=other)]\n        "
              "[work.wait() for work in works]\n        parameter.grad = local")),
        Slip("Send one message per gradient: every message costs its latency.", in_rows),
        Slip("A rank without copies does nothing, and its `other` is meaningless: use `other` only "
             "inside the loop.", (COPIES, f"    is_first = dist.get_rank(group) < other\n{COPIES}"),
             (COPIES, f"    peer = dist.get_global_rank(group or dist.group.WORLD, other)\n{COPIES}"
              ),
             (COPIES, "    other = other or 0\n    for parameter in copies or [torch.nn."
                      "Parameter(torch.zeros(1))]:\n")),
        # groups
        Slip("Pass `group` on, and name the other end by its rank in the group: group_dst=other, "
             "group_src=other, or group_peer=other.",
             (BATCH, BATCH.replace("group_peer", "peer")),
             (BATCH, EACH.replace("group_dst", "dst").replace("group_src", "src")),
             (BATCH, BATCH.replace("group=group, ", "")), (BATCH, EACH.replace("group=group, ", ""))
             ),
    ), hints=(
        "Each of the two ranks has a part of the gradient. What does the other rank need?",
        "Send your own gradient, receive the other one into an empty tensor, wait for both, and "
        "add the two gradients.",
        "dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, group=group, group_peer=other), "
        "dist.P2POp(dist.irecv, theirs, group=group, group_peer=other)]); wait; mine + theirs",
    ))
