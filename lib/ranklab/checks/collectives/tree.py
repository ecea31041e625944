"""Few steps: tree_broadcast and recursive_doubling, by their values, rounds and messages."""

import math
from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.collectives.inputs import (
    BUILD, CHANGED, COST, EMPTY, KEPT, MARK, MARKS, MEAN, OWN_TYPE, ROOTS, STRIDED, TYPES, UNEVEN,
    Case, all_reduce_by_torch, two_calls, two_sums,
)
from ranklab.checks.handles import DROPPED
from ranklab.checks.prover import GROUPS, AtMost, InAll, Must, Proof, Slip, Stage
from ranklab.collectives import recursive_doubling, ring_all_reduce, sendrecv, tree_broadcast
from ranklab.engine import device

CLONE = "x.clone(memory_format=torch.contiguous_format)"


# --- tree_broadcast -------------------------------------------------------------------------------

def _see_broadcast(fn, case, ranks):
    """Look at a broadcast, then send each rank's log of receivers by it, to count the rounds."""
    R, src, logs = ranks.size, case.root_of(ranks.size), []
    rounds = math.ceil(math.log2(R))

    def messages(traffic):
        logs.append([op.peer for op in traffic.ops if op.name == "send"])
        return {"messages that all ranks send": InAll(len(logs[-1]), (R - 1) / R * (case.n > 0))}

    cost = (rounds, rounds, rounds) if case.n else (0, 0, 0)  # a rank sends once in a round
    yield from two_calls(partial(fn, src=src), ranks, case, cost, tell=whose_x, cuts=False,
                         in_all=(R - 1) / R, more=messages)
    if case.kind == "marks":
        own = [ranks.members.index(peer) for peer in logs[0] if peer in ranks.members][:R]
        own = torch.tensor(own + [-1] * (R - len(own)), device=device())
        receivers = [fn(own, src=rank, **ranks.keywords).tolist() for rank in range(R)]
        yield {"rounds until all have it": AtMost(_last_round(receivers, {src: 0}, src), rounds)}


def _last_round(receivers, rounds, rank):
    """Return the round in which the last rank gets it: a rank sends to one receiver per round.

    rounds  in which each rank gets it, as far as known
    """
    for n, peer in enumerate(receivers[rank], 1):
        if peer >= 0 and peer not in rounds:
            rounds[peer] = rounds[rank] + n
            _last_round(receivers, rounds, peer)
    return max(rounds.values())


def whose_x(got, due):
    """Return whose marks these are."""
    rank_of = {float(MARK**rank): rank for rank in range(8)}
    values = {*got.flatten().tolist()} if isinstance(got, torch.Tensor) else {}
    if len(values) != 1 or not values <= {*rank_of}:
        return ""
    return f"the x of rank {rank_of[values.pop()]}, not of rank {rank_of[due.flatten()[0].item()]}"


def broadcast_by_torch(x, src=0, group=None):
    out = x.contiguous().clone()
    dist.broadcast(out, group=group, group_src=src)
    return out


def nearest_first(x, src=0, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    out, place = x.clone(memory_format=torch.contiguous_format), (rank - src) % R
    step, last = 1, place & -place or R
    if place and x.numel():
        dist.recv(out, group=group, group_src=(rank - last) % R)
    while step < last and x.numel():
        if place + step < R:
            dist.send(out, group=group, group_dst=(rank + step) % R)
        step *= 2
    return out


SENDS, RECEIVES = "place < have and place + have < R", "have <= place < 2 * have"
TO, FROM, DOUBLES = "(rank + have) % R", "(rank - have) % R", "have *= 2"
START = "    rank, R ="
BROADCAST = Proof(
    tree_broadcast,
    Stage({"every rank has rank src's x, for several src, on 1, 2, 5, 8 ranks; four types": (),
           "x unchanged; R-1 messages in all, in ceil(log2 R) rounds":
           (*COST, "messages that all ranks send", "rounds until all have it")},
          _see_broadcast, (*ROOTS, *TYPES), (5, 8, 2, 1), oracle=broadcast_by_torch),
    Stage("on 3 too, for lengths 0, 1, 2, 7, 1001, when x is not contiguous", _see_broadcast,
          UNEVEN, (3,), oracle=broadcast_by_torch),
    Stage("inside a group it talks only to that group's ranks, and `src` is a rank of the group",
          _see_broadcast,
          (ROOTS[1],), (4,), GROUPS, oracle=broadcast_by_torch),
    mistakes=(
        Slip("src itself sends to every rank. Any rank that has the value can pass it on.",
             (SENDS, "place == 0", RECEIVES, "place == have", DOUBLES, "have += 1")),
        Slip("The value is handed on one rank at a time. In each round every rank that has it can "
             "send, so the number of ranks that have it doubles.",
             (SENDS, "place + 1 == have", TO, "(rank + 1) % R", RECEIVES, "place == have",
              FROM, "(rank - 1) % R", DOUBLES, "have += 1")),
        Slip("Send to the farthest place first: it has to serve the most others.", nearest_first),
        Slip("Count places from src: place = (rank - src) % R.", ("(rank - src) % R", "rank")),
        Slip("Turn a place back into a rank with (place + src) % R before you send to it or "
             "receive from it.", (TO, "place + have", FROM, "place - have")),
        Slip("R is not a power of two here, so not every place has a partner: a place sends only "
             "if place + have < R.", (SENDS, "place < have")),
        Slip("There are too few rounds: `have` doubles until it is R or more, which takes log2 R "
             "rounds, rounded up.",
             ("while have < R", "while 2 * have <= R"), ("while have < R", "while 2 * have < R")),
        Slip("Each round doubles the number of ranks that have the value: have *= 2.",
             (DOUBLES, "have += 1")),
        Slip("A rank sends what it does not have yet: only places 0 .. have-1 have the value.",
             (SENDS, "place % (2 * have) == 0 and place + have < R",
              RECEIVES, "place % (2 * have) == have")),
        Slip("A send waits until its receiver receives, and here no rank receives. Of each pair, "
             "only the rank that has the value sends.",
             (f"if {SENDS}", "if R > 1", f"elif {RECEIVES}", "if R > 1")),
        Slip("Send x as it is, in its own dtype.",
             *(("dist.send(out,", f"dist.send(out.{wide}(),",
                "dist.recv(out,", f"wide = out.{wide}()\n            dist.recv(wide,",
                f"{FROM})", f"{FROM})\n            out.copy_(wide)")
               for wide in ("double", "float"))),
        Slip(f"{CHANGED}Receive into a copy. (x.contiguous() makes no copy if x is already "
             "contiguous.)",
             (CLONE, "x"), (CLONE, "x.contiguous()")),
        Slip("Return a copy on src as well; otherwise, writing into the result would change x.",
             ("    return out", "    return x if place == 0 else out")),
        Slip(STRIDED, (CLONE, "x.clone()")),
        Slip(EMPTY, (" and out.numel()", "")),
        Slip(KEPT, ("group=None):", "group=None, kept={}):", CLONE,
                    f"kept.setdefault((R, x.shape, x.dtype), {CLONE})")),
        Slip(DROPPED, ("dist.send(out,", "dist.isend(out,")),
        Slip("Pass `group` to every call that takes it: get_rank(group), dist.send(..., "
             "group=group, group_dst=...).", (START, f"    group = None\n{START}"),
             ("dist.send(out, group=group", "dist.send(out")),
        Slip("Ranks here, `src` included, are numbered within the group: convert nothing, and use "
             "group_dst= and group_src=. dst= and src= are ranks in the whole world.",
             ("(rank - src)", "(rank - (dist.get_group_rank(group, src) if group else src))"),
             ("group_dst=", "dst=", "group_src=", "src=")),
        Slip(BUILD, broadcast_by_torch),
    ), hints=(
        "Count places from src: place = (rank - src) % R. Place 0 has the value at the start.",
        "Keep a number `have`, 1 at first: places 0 .. have-1 have the value. In each round, each "
        "of them sends to the place `have` further on, if there is one. Then `have` doubles.",
        "while have < R: if place < have and place + have < R: dist.send(out, group=group, "
        "group_dst=(rank + have) % R); elif have <= place < 2 * have: dist.recv(out, group=group, "
        "group_src=(rank - have) % R); then have *= 2. (Send nothing when `out` is empty.)",
    ))


# --- recursive_doubling ---------------------------------------------------------------------------

def _see_doubling(fn, case, ranks):
    """Look at calls, then sum the ranks' numbers of messages by the function itself."""
    R, counts = ranks.size, []
    rounds = R.bit_length() - 1
    power = 2**rounds
    extra = R - power  # they hand over, to as many that take over and hand back
    due = sorted([1] * extra + [rounds + 1] * extra + [rounds] * (power - extra))

    def messages(traffic):
        counts.append(traffic.sent_messages)
        return {}

    yield from two_sums(fn, ranks, case, (due[-1], due[-1], due[-1]), cuts=False,
                        in_all=sum(due) / R, more=messages)
    if case.kind == "marks":
        own = torch.zeros(R, dtype=torch.int64, device=device())
        own[ranks.index] = counts[0]
        yield {"messages of each rank, in order": Must(
            sorted(fn(own, **ranks.keywords).tolist()), due)}


def by_distance(x, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    total, step = x.contiguous().clone(), 1
    while step < R:
        to, source = (rank + step) % R, (rank - step) % R
        total = total + sendrecv(total, to, torch.empty_like(total), source, group)
        step *= 2
    return total


def round_a_ring(x, group=None):
    """Add up around a ring: each rank passes on the last message that came, R-1 times."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    message, total = x.contiguous(), x.contiguous().clone()
    for _ in range(R - 1):
        buffer = torch.empty_like(message)
        message = sendrecv(message, (rank + 1) % R, buffer, (rank - 1) % R, group)
        total += message
    return total


POWER, SUM = "2 ** (R.bit_length() - 1)", "    return total\n"
SWAP = "sendrecv(total, rank ^ step, buffer, rank ^ step, group)"
ADD = f"total += {SWAP}"
TAKE_OVER = "total += sendrecv(empty, rank + power, buffer, rank + power, group)"
GIVE_BACK = "sendrecv(total, rank + power, empty, rank + power, group)"
TAKE_BACK = "return sendrecv(empty, rank - power, total, rank - power, group)"
DOUBLING = Proof(
    recursive_doubling,
    Stage({"right on 1, 2, 7, 8 ranks, in the same bits; four types": (),
           "x unchanged; each rank sends log2 R messages, each with all bytes; of 7 ranks, three "
           "hand over their x and get the sum back, and four work like four ranks alone":
           (*COST, "messages of each rank, in order")},
          _see_doubling, (MARKS, *TYPES, Case(24, kind="normal")), (7, 8, 2, 1),
          oracle=all_reduce_by_torch),
    Stage("on 4 too, for lengths 0, 1, 2, 7, 1001, when x is not contiguous", _see_doubling,
          (*UNEVEN, Case(1001, kind="normal")), (4,), oracle=all_reduce_by_torch),
    Stage("inside a group it talks only to that group's ranks", _see_doubling, (MARKS,), (4,),
          GROUPS,
          oracle=all_reduce_by_torch),
    mistakes=(
        Slip("The step doubles each time: 1, 2, 4 (step *= 2).", ("step *= 2", "step += 1")),
        Slip("There are log2 R rounds: continue while step < power.",
             ("step < power", "2 * step < power")),
        Slip("Swap with a single partner, rank ^ step: then both add the same two numbers and get "
             "the same bits.",
             (SWAP, SWAP.replace("rank ^ step", "(rank + step) % power", 1).replace(
                 "rank ^ step", "(rank - step) % power"))),
        Slip("No rank ends. Does the loop end (step *= 2)? Do swaps meet? Your partner's partner "
             "must be you: rank ^ step, not rank + step.",
             (SWAP, SWAP.replace("rank ^ step", "(rank + step) % power"))),
        Slip("Swap everything you have added up so far, not just x.",
             (SWAP, SWAP.replace("total", "x"))),
        Slip("Add what arrives to what you have.",
             (ADD, f"total = {SWAP.replace('buffer', 'torch.empty_like(total)')}")),
        Slip("What arrives needs a buffer of its own: are you receiving into the tensor that you "
             "add to?", (SWAP, "sendrecv(total.clone(), rank ^ step, total, rank ^ step, group)")),
        Slip(MEAN, (SUM, "    return (total / R).to(x.dtype)\n")),
        Slip(OWN_TYPE, (CLONE, "x.float()"),
             (CLONE, "x.float()", SUM, "    return total.to(x.dtype)\n",
              TAKE_BACK, f"{TAKE_BACK}.to(x.dtype)")),
        Slip("No ring, no chunks: log2 R swaps of the whole tensor. On 7 ranks, three send their x "
             "once; the other four swap twice, and three of these send the sum back.",
             ring_all_reduce,
             ("    power =", "    if R & R - 1:\n        return ring_all_reduce(x, group)\n"
              "    power ="), ring_all_reduce=ring_all_reduce),
        Slip("You pass x around a ring in R-1 steps. Instead, swap the sum so far with rank ^ "
             "step: log2 R steps.", round_a_ring),
        Slip("Send one message per step: every message pays its own latency.",
             (ADD, "for a, b in zip(total.view(-1).tensor_split(2), "
              "buffer.view(-1).tensor_split(2)):\n            sendrecv(a, rank ^ step, b, rank ^ "
              "step, group)\n        total += buffer")),
        Slip("R is not a power of two here: does every rank have a partner? Only ranks below the "
             "largest power of two swap.", (POWER, "R"), ("step < power", "step < R")),
        Slip("7 is not a power of two. The ranks beyond the largest power of two first send their "
             "x to a lower partner, wait, and get the finished sum back.",
             by_distance),
        Slip("Add what the extra ranks hand over.",
             (TAKE_OVER, TAKE_OVER.removeprefix("total += "))),
        Slip("Add what the extra ranks send before the swaps start; otherwise the other ranks "
             "never get it.",
             (TAKE_OVER, f"late = {TAKE_OVER.removeprefix('total += ')}.clone()", GIVE_BACK,
              f"total += late\n        {GIVE_BACK}")),
        Slip("The extra ranks get the finished sum back at the end.",
             (TAKE_BACK, "return total", GIVE_BACK, "pass")),
        Slip(f"{CHANGED}Add into a copy. (x.contiguous() makes no copy if x is already "
             "contiguous.)",
             (CLONE, "x"), (CLONE, "x.contiguous()")),
        Slip("Return a copy on a single rank as well: a caller who writes into the result would "
             "write into x.",
             (SUM, "    return total if R > 1 else x\n")),
        Slip(STRIDED, (CLONE, "x.clone()"), ("torch.empty_like(total)", "torch.empty_like(x)")),
        Slip(KEPT, ("group=None):", "group=None, kept={}):", CLONE,
                    f"kept.setdefault((R, x.shape, x.dtype), {CLONE})")),
        Slip("Pass `group` to every call that takes it: get_rank(group), sendrecv(..., group).",
             (START, f"    group = None\n{START}"), (SWAP, SWAP.replace(", group", "")),
             ("dist.get_rank(group), dist.get_world_size(group)",
              "dist.get_rank(), dist.get_world_size()")),
        Slip(BUILD, all_reduce_by_torch),
    ), hints=(
        "In round k, swap everything you have with the rank whose number differs from yours in bit "
        "k: rank ^ 2**k.",
        "When R is not a power of two, the ranks from `power` on first send their x to rank - "
        "power, wait, and receive the sum at the end. sendrecv with an empty tensor is a one-way "
        "message.",
        "step = 1; while step < power: total += sendrecv(total, rank ^ step, buffer, rank ^ step, "
        "group); step *= 2 - with the extra ranks handled before and after.",
    ))
