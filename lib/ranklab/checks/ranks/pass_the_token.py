"""The check of pass_the_token: the value on every rank, in the order of the ring; one message each.
"""

import functools
import numbers

import torch
import torch.distributed as dist

from ranklab.checks.failures import RECEIVE_FIRST
from ranklab.checks.prover import Must, Proof, Slip, Stage
from ranklab.checks.ranks.messages import (
    CLOSES, DROPPED, GROUPINGS, IN_GROUP, LIMIT, MESSAGES, NEXT, NUMBERS, PREVIOUS, WAIT, sent_by,
)
from ranklab.ranks import pass_the_token

OTHERS, BYTES = "what it calls besides send and recv", "the number of bytes sent"


def _see(fn, case, ranks):
    value, traffic, messages = sent_by(functools.partial(fn, **ranks.keywords))
    if isinstance(value, numbers.Integral):  # numpy's, too
        value = int(value)
    first = next((op.name for op in traffic.ops), "")
    of_first = {"what the first rank of the ring returns": value}
    of_others = {"whether it sends before it has received": Must(first == "send", False),
                 "what it returns": value}
    yield of_others if ranks.index else {}  # in the order of the ring: the first mistake counts
    yield {**({} if ranks.index else of_first),
           OTHERS: Must(sorted({*traffic.calls} - {"send", "recv"}), []), **messages,
           BYTES: Must(traffic.sent_bytes, 8 * (ranks.size > 1))}


def by_numbers(group=None):
    return dist.get_rank(group) or dist.get_world_size(group)


def by_a_collective(group=None):
    ones = torch.ones(1, dtype=torch.int64)
    dist.all_reduce(ones, group=group)
    return dist.get_rank(group) or ones.item()


MAKES = "torch.zeros(1, dtype=torch.int64, device=device())"
BEGINS, COMES = "if rank == 0:\n        ", "else:\n        dist.recv"
SENDS = "previous_rank)\n        dist.send(token + 1"  # the other ranks, after receiving
LATER = "    else:\n        dist.recv(token, group=group, group_src=previous_rank)\n"
HOMES = f"        dist.recv(token, group=group, group_src=previous_rank)\n{LATER}"
CALLS = (f"{BEGINS}dist.send(token + 1, group=group, group_dst",
         "next_rank)\n        dist.recv(token, group=group, group_src",
         f"{COMES}(token, group=group, group_src", f"{SENDS}, group=group, group_dst")


def _all_calls(old, new):
    return tuple(text for call in CALLS for text in (call, call.replace(old, new)))


TOKEN = Proof(
    pass_the_token,
    Stage("the token comes home on 3 ranks", _see, ("first call",), (3,), oracle=by_numbers,
          launch={"timeout": LIMIT}),
    Stage({"1, 2, 3, 4 ranks, also in groups: rank r sees r, and rank 0 gets back the number of "
           "ranks": (),
           "each rank sends one message of 8 bytes; a single rank sends none":
           (OTHERS, DROPPED, MESSAGES, BYTES)},
          _see, ("first call", "second call"), (4,), GROUPINGS, oracle=by_numbers,
          launch={"timeout": LIMIT}),
    mistakes=(
        Slip(RECEIVE_FIRST, ("if rank == 0", "if rank < 0")),
        Slip("A rank sends before the token can have reached it. Only rank 0 begins; every other "
             "rank receives first.", ("if rank == 0", "if rank % 2 == 0"),
             (BEGINS, "if rank in (0, size - 1):\n        ")),
        Slip(CLOSES, (SENDS, SENDS.replace("dist", "if rank < size - 1: dist"))),
        Slip(NEXT, ("(rank + 1) % size", "rank + 1")),
        Slip(PREVIOUS, ("(rank - 1) % size", "rank - 1")),
        Slip("The last rank sends to rank 0, so rank 0 must receive after it has sent.",
             (HOMES, LATER)),
        Slip("The token goes round the wrong way: send to (rank + 1) % size, and receive from "
             "(rank - 1) % size.", ("next_rank, previous_rank =", "previous_rank, next_rank =")),
        Slip("The token went round twice. Each rank must send it once and receive it once.",
             ("if rank == 0", "for _ in range(2 if rank == 0 else 0)",
              "else:", "for _ in range(2 if rank else 0):")),
        Slip("Return the value that reached this rank, before the rank adds 1.",
             (SENDS, "previous_rank)\n        token += 1\n        dist.send(token"),
             ("return token.item()", "return token.item() + (rank > 0)")),
        Slip("Every rank sees a value that is 1 too large. Rank 0 starts the token at 0 and adds 1 "
             "when it sends.",
             (BEGINS, f"{BEGINS}token += 1\n        "), (MAKES, MAKES.replace("zeros", "ones"))),
        Slip("Each rank adds 1 to what it received and sends the sum on: token + 1.",
             (SENDS, SENDS.replace(" + 1", ""))),
        Slip("Rank 0 starts the token at 0 and, like every other rank, adds 1 before sending.",
             (f"{BEGINS}dist.send(token + 1", f"{BEGINS}dist.send(token")),
        Slip("The first argument of dist.send and dist.recv is a tensor. recv fills it and "
             "returns the sender's rank: do not assign its result to the tensor.",
             (COMES, COMES.replace("dist", "token = dist"))),
        Slip(WAIT, (SENDS, SENDS.replace("send", "isend"))),
        Slip("The token must stay one int64, as given. (float32 can't count beyond 2^24, and "
             "section 7 counts your bytes.)", ("torch.int64", "torch.int32"),
             ("torch.int64", "torch.float32")),
        Slip("A value is kept from an earlier call. The token must start at 0 in every call.",
             ("group=None", "group=None, kept=torch.zeros(1, dtype=torch.int64)", MAKES, "kept")),
        Slip(IN_GROUP, ("dist.get_rank(group), dist.get_world_size(group)",
                        "dist.get_rank(), dist.get_world_size()"),
             _all_calls("group=group, ", "")),
        Slip(NUMBERS, _all_calls("group_", "")),
        Slip("Return the number: token.item().", ("token.item()", "token")),
        Slip("The function returns None. Return the number: token.item().",
             ("return token.item()", "")),
        Slip("Here a rank talks only to its neighbours, with dist.send and dist.recv.",
             by_a_collective),
        Slip("No token went round: each rank must send one message.", by_numbers),
    ), hints=(
        "Which rank may send before it has received? Exactly one may.",
        "Rank 0: send, then receive. All others: receive, then send. Neighbours modulo size.",
        "dist.send(token + 1, group=group, group_dst=(rank + 1) % size); then return "
        "token.item()."))
