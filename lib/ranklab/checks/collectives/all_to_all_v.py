"""all_to_all_v: right for any lengths, with few messages; the score is printed at the end."""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.collectives.inputs import BACKENDS, BUILD, KEPT, watched
from ranklab.checks.handles import DROPPED
from ranklab.checks.prover import GROUPS, AtMost, Must, Proof, Ranks, Slip, Stage, Told
from ranklab.checks.trial import gathered, on_ranks
from ranklab.collectives import all_to_all_v, all_to_all_v_time, ring_all_gather, sendrecv
from ranklab.engine import device

# The fabric of the lab, told of pieces of 1 MB, counted on pieces of 10 kB.
ALPHA, BETA, SMALLER = 10e-6, 1 / 100e9, 100
TELLING = 1000  # bytes that a rank may send to tell lengths
LENGTHS = {  # from rank i to rank j of R
    # First: only rank 0 or 1 gets more than it may expect, so that it is no chance who fails.
    "most to rank 0": lambda i, j, R: 601 if j == 0 else 20 + 4 * (i + j > 1),
    "lengths 0 to 6": lambda i, j, R: (3 * i + 5 * j + 2) % 7,
    "longer for higher ranks": lambda i, j, R: 300 * j + i,
    "different lengths on rank 1 only": lambda i, j, R: (3 * i + 5 * j + 2 + 4 * (i == 1)) % 7,
    "all to the last rank": lambda i, j, R: 9 + i if j == R - 1 else 0,
    "nothing at all": lambda i, j, R: 0,
    "each to itself": lambda i, j, R: 4 if i == j else 0,
    "even": lambda i, j, R: 2_500,
    "skewed": lambda i, j, R: 2_500 if j == 0 else 25,
    "sparse": lambda i, j, R: 5_000 if j == i + 1 else 0,
}
SCORED = "even", "skewed", "sparse"


class Case(NamedTuple):
    lengths: str
    dtype: str = "float32"

    def __str__(self):
        return f"{self.lengths}, {self.dtype}"

    def pieces(self, i, R, turn=0):
        """Make what rank i has for each rank, with steps; see sender_and_receiver()."""
        n = LENGTHS[self.lengths]
        return [(torch.arange(2 * n(i, j, R), device=device()) // 2 % 4 + 4 * (8 * i + j + turn + 1)
                 ).to(getattr(torch, self.dtype))[::2] for j in range(R)]


def sender_and_receiver(turn, got, due):
    """Return whose piece this is: its values encode i and j, even in bfloat16."""
    if not isinstance(got, torch.Tensor) or not got.numel():
        return ""
    codes = {int(value) // 4 - turn - 1 for value in got.flatten().tolist() if 4 <= value < 256}
    if len(codes) != 1 or got.dtype != due.dtype:
        return ""
    sender, receiver = divmod(codes.pop(), 8)
    return f"what rank {sender} has for rank {receiver}, {got.numel()} elements"


def _see(fn, case, ranks):
    yield from [_seen(fn, case, ranks, turn) for turn in (0, 1)]


def _seen(fn, case, ranks, turn):
    R, pieces = ranks.size, case.pieces(ranks.index, ranks.size, turn)
    away = [x.nbytes for to, x in enumerate(pieces) if to != ranks.index and x.numel()]
    handed = list(pieces)
    results, traffic, dropped = watched(lambda: fn(handed, **ranks.keywords))
    results = results if isinstance(results, list | tuple) else []
    memory = [{x.untyped_storage().data_ptr() for x in each
               if isinstance(x, torch.Tensor) and x.numel()} for each in (pieces, results)]
    return {
        "how many tensors it returns": len(results),
        **{f"what came from rank {i}": Told(without_steps(x), partial(sender_and_receiver, turn))
           for i, x in enumerate(results)},
        **{f"pieces[{j}] afterwards": without_steps(x) for j, x in enumerate(handed)},
        "memory that results share with `pieces`": Must(bool(memory[0] & memory[1]), False),
        "handles that nobody waited for": AtMost(dropped, 0),
        "what it uses of the backend's collectives": Must(sorted(BACKENDS & {*traffic.calls}), []),
        "bytes sent": AtMost(traffic.sent_bytes, sum(away) + TELLING,
                             f"sends {{:,.0f}} bytes; its pieces for others have {sum(away):,}, "
                             f"and {TELLING} more are allowed for lengths: {{:,.0f}}"),
        "messages sent": AtMost(traffic.sent_messages, len(away) + R - 1, "sends {} messages; "
                                f"{len(away)} for its pieces and {R - 1} for lengths are enough: "
                                "{}")}


def without_steps(x):
    """Return a view of one element without its stride, with which a rank could not send it."""
    return x.as_strided((1,), (1,)) if isinstance(x, torch.Tensor) and x.shape == (1,) else x


def _score(fn):
    """Return for each case (messages of this rank that tell lengths, us that it sends or receives).
    """
    ranks, scores = Ranks(tuple(range(dist.get_world_size())), None), []
    for case in CASES:
        pieces = case.pieces(ranks.index, ranks.size)
        _, traffic, _ = watched(lambda: fn(pieces))
        sizes = [op.received_bytes for op in traffic.ops if op.name == "recv"]
        both = (traffic.sent_messages, traffic.sent_bytes), (len(sizes), sum(sizes))
        away = sum(to != ranks.index and x.numel() > 0 for to, x in enumerate(pieces))
        scores.append((traffic.sent_messages - away, 1e6 * max(
            ALPHA * count + SMALLER * BETA * nbytes for count, nbytes in both)))
    return scores


class Scored(Proof):
    """A Proof that, when all stages hold, prints the modelled cost of the function's messages."""

    def prove(self, fn):
        yield from super().prove(fn)
        scores = on_ranks(_score, fn, ranks=4)
        most = max(count for of_rank in scores for count, _ in of_rank)
        yield f"messages that tell lengths, sent by one of 4 ranks: {most} (at most 3)"
        for name in SCORED:
            at = CASES.index(Case(name))
            busiest = max(of_rank[at][1] for of_rank in scores)
            nbytes = [[4 * SMALLER * LENGTHS[name](i, j, 4) for j in range(4)] for i in range(4)]
            yield (f"{name}: the busiest of 4 ranks takes {busiest:.1f} us by the model; the "
                   f"library's {1e6 * all_to_all_v_time(nbytes, ALPHA, BETA):.1f}, "
                   f"bound {1e6 * all_to_all_v_time(nbytes, 0, BETA):.1f}")


def by_objects(pieces, group=None):
    """Send everything to everyone."""
    rank = dist.get_rank(group)
    return [of_rank[rank].to(pieces[0]) for of_rank in gathered(list(pieces), group)]


def padded_to_the_longest(pieces, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lengths = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device)
    of_all = ring_all_gather(lengths, group).view(R, R)
    longest, results = int(of_all.max()), [pieces[rank].clone()] * R
    for step in range(1, R):
        to, source = (rank + step) % R, (rank - step) % R
        n = int(of_all[source, rank])
        padded = pieces[0].new_zeros(longest if len(pieces[to]) else 0)
        padded[: len(pieces[to])] = pieces[to]
        place = pieces[0].new_empty(longest if n else 0)
        results[source] = sendrecv(padded, to, place, source, group)[:n]
    return results


def all_send_first(pieces, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lengths = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device)
    counts = ring_all_gather(lengths, group).view(R, R)[:, rank].tolist()
    results = [pieces[0].new_empty(n) for n in counts]
    results[rank].copy_(pieces[rank])
    for to in range(R):
        if to != rank and len(pieces[to]):
            dist.send(pieces[to].contiguous(), group=group, group_dst=to)
    for source in range(R):
        if source != rank and len(results[source]):
            dist.recv(results[source], group=group, group_src=source)
    return results


def a_message_for_nothing(pieces, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    results = [pieces[rank].clone()] * R
    for step in range(1, R):
        to, source = (rank + step) % R, (rank - step) % R
        n = torch.tensor([len(pieces[to])], device=pieces[to].device)
        size = torch.empty_like(n)
        sendrecv(n, to, size, source, group)
        results[source] = pieces[0].new_empty(int(size))
        works = [dist.irecv(results[source], group=group, group_src=source),
                 dist.isend(pieces[to].contiguous(), group=group, group_dst=to)]
        for work in works:
            work.wait()
    return results


def everything_round_a_ring(pieces, group=None):
    """Pass all pieces of all ranks through every rank."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lengths = torch.tensor([len(piece) for piece in pieces], device=pieces[0].device)
    of_all = ring_all_gather(lengths, group).view(R, R)
    message, results = torch.cat(list(pieces)), [pieces[rank].clone()] * R
    for step in range(1, R):
        source = (rank - step) % R
        place = message.new_empty(int(of_all[source].sum()))
        message = sendrecv(message, (rank + 1) % R, place, (rank - 1) % R, group)
        results[source] = message.split(of_all[source].tolist())[rank].clone()
    return results


CASES = tuple(Case(*each) for each in (
    ("most to rank 0",), ("lengths 0 to 6", "int64"), ("lengths 0 to 6", "bfloat16"),
    ("longer for higher ranks", "bfloat16"), ("lengths 0 to 6",), ("longer for higher ranks",),
    ("different lengths on rank 1 only",), ("all to the last rank",), ("nothing at all",),
    ("each to itself",), ("even",), ("skewed",), ("sparse",)))
NEW = "[pieces[0].new_empty(n) for n in source_lengths]"
TELL = "verbs.all_to_all(lengths, group).flatten().tolist()"
SWAP = "sendrecv(pieces[to].contiguous(), to, received[source], source, group)"
OWN, RETURN, ROUNDS = "received[rank].copy_(pieces[rank])", "    return received\n", "range(1, R)"
ORDER = ("Item i of the list must be what rank i sent to this rank, its pieces[my rank], even if "
         "that is empty.")
UNEVEN = Scored(
    all_to_all_v,
    Stage({"right on 3 and 4 ranks, three types, any lengths, strided views; pieces unchanged":
           (), "a piece goes once, straight to its rank, if it is not empty; R-1 messages tell "
           "lengths": ("bytes sent", "messages sent")},
          _see, CASES, (3, 4), oracle=by_objects),
    Stage("in groups of one, two and three it talks only to ranks of the group, and ranks are "
          "numbered within it",
          _see, CASES[:6], (4,), GROUPS, oracle=by_objects),
    mistakes=(
        Slip("A buffer does not fit what arrives. Exchange the lengths first, as int64, "
             "because other dtypes can round them. pieces[to] is for rank `to`, and the buffer of "
             "`source` for what comes from there.",
             (TELL, "[len(piece) for piece in pieces]"),
             (SWAP, "sendrecv(pieces[to].contiguous(), source, received[source], to, group)"),
             (".tolist()", ".to(torch.bfloat16).long().tolist()"),
             ("device=pieces[0].device", "device=pieces[0].device, dtype=pieces[0].dtype",
              ".tolist()", ".long().tolist()")),
        Slip("Make the buffer for each piece in the sender's dtype, with new_empty.",
             (NEW, NEW.replace("(n)", "(n, dtype=torch.float32)"))),
        Slip("Here the pieces are strided views, and a message must be contiguous: "
             "pieces[to].contiguous().", ("pieces[to].contiguous()", "pieces[to]")),
        Slip("Copy this rank's own piece as well.", (OWN, "received[rank].zero_()")),
        Slip("A result shares memory with a piece, so writing into the result would change the "
             "piece. Copy this rank's own piece.", (OWN, "received[rank] = pieces[rank]")),
        Slip(ORDER, (RETURN, "    return received[rank:] + received[:rank]\n"),
             (RETURN, "    return [received[rank - n] for n in range(R)]\n"),
             (RETURN, "    return [x for x in received if x.numel()]\n")),
        Slip("Return a list of R tensors, one from each rank.",
             (RETURN, "    return torch.cat(received)\n"),
             (RETURN, "    received.pop(rank)\n    return received\n")),
        Slip("One step is missing: every other rank has a piece for this one, so use range(1, R).",
             (ROUNDS, "range(1, R - 1)", "new_empty(n)", "new_zeros(n)")),
        Slip("`pieces` has changed: receive into new tensors, and leave the list as it is.",
             (RETURN, "    pieces.clear()\n    return received\n"),
             (RETURN, "    pieces[:] = received\n    return received\n")),
        Slip("Send each piece once, straight to its rank, without padding.",
             padded_to_the_longest),
        Slip("Send each piece straight to its rank. Round a ring, it is sent up to R-1 times.",
             everything_round_a_ring),
        Slip("A send waits until its receiver receives, and here no rank receives. `sendrecv` does "
             "both at the same time; without it, only one rank of a pair may send first.",
             all_send_first),
        Slip("Send no message for an empty piece: both sides already know its length.",
             a_message_for_nothing),
        Slip("One message to every other rank tells it the length of its piece: R-1 messages are "
             "enough.",
             ("    source_lengths =",
              "    verbs.all_to_all(lengths, group)\n    source_lengths =")),
        Slip("Send each piece in one message: every message costs latency.",
             (SWAP, "for a, b in zip(pieces[to].tensor_split(2), received[source].tensor_split(2)):"
              "\n            sendrecv(a.contiguous(), to, b, source, group)")),
        Slip(DROPPED, (SWAP, "handles = [dist.irecv(received[source], group=group, "
                       "group_src=source)] if received[source].numel() else []\n        if "
                       "pieces[to].numel():\n            dist.isend(pieces[to].contiguous(), "
                       "group=group, group_dst=to)\n        for handle in handles:\n            "
                       "handle.wait()")),
        Slip(KEPT, ("group=None):", "group=None, kept={}):", NEW,
                    f"kept.setdefault((R, pieces[0].dtype, *source_lengths), {NEW})")),
        Slip("Pass `group` to every call: get_rank(group), get_world_size(group), sendrecv(..., "
             "group).", (SWAP, SWAP.replace(", group)", ")")),
             (TELL, TELL.replace(", group", ""))),
        Slip("sendrecv numbers ranks within the group, as get_rank(group) does.",
             (SWAP, SWAP.replace("to,", "dist.get_global_rank(group or dist.group.WORLD, to),"))),
        Slip(BUILD, by_objects),
    ), hints=(
        "A rank must receive a piece into a tensor of the right length. Which rank knows that "
        "length?",
        "Use two rounds of messages. First each rank tells every other rank how much to expect, "
        "then it sends the pieces. In step s of each round, send to rank + s and receive from rank "
        "- s.",
        "For the lengths, call verbs.all_to_all on an int64 tensor of shape (R, 1). Then for shift "
        "in range(1, R): sendrecv(pieces[to].contiguous(), to, received[source], source, group), "
        "with to = (rank + shift) % R and source = (rank - shift) % R. sendrecv skips empty "
        "tensors. Copy your own piece.",
    ))
