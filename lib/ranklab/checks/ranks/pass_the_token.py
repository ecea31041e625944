"""pass_the_token: the right value on every rank, and one message each."""

import torch
import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.handles import all_awaited
from ranklab.checks.ranks.ring_shift import MEMBERS, OF, THE_GROUP, in_group, on_ring
from ranklab.checks.ranks.shard_range import SIZES, as_text

POINT_TO_POINT = {"send", "recv"}


def _token_trial(pass_the_token, members=None):
    """(value, value of a second call, Traffic of the first, its calls that were not waited for)."""
    seen = in_group(pass_the_token, members=members)
    dist.barrier()  # a hang in the first call must not look like one in the second
    again = in_group(pass_the_token, members=members)  # the token starts at 0 in each call
    return seen and (seen[0], again[0], *seen[1:])


def check_pass_the_token(pass_the_token):
    for size in SIZES:
        seen = on_ring(_token_trial, pass_the_token, ranks=size)
        _compare_token(seen, as_text(size))
    yield "1, 2, 3, 4, 8 ranks: rank r sees r, and rank 0 gets back the number of ranks"
    for rank, (_, _, traffic, _) in enumerate(seen):
        if others := sorted(set(traffic.calls) - POINT_TO_POINT):
            raise Mistake(f"rank {rank} called {', '.join(others)}",
                          "A collective would do it, but here a rank talks to its neighbours "
                          "only: dist.send and dist.recv.")
        if traffic.sent_messages != 1:
            raise Mistake(f"rank {rank} of 8 sent {traffic.sent_messages} messages; one is enough",
                          "Every rank hands the token on exactly once.")
        if traffic.sent_bytes != 8:
            raise Mistake(f"rank {rank} of 8 sent {traffic.sent_bytes} bytes; the token has 8",
                          "The token is one int64, as it is given. (float32 can't count beyond "
                          "2^24, and section 7 counts your bytes.)")
    yield "each rank sends one message of 8 bytes; a single rank sends none"
    seen = on_ring(_token_trial, pass_the_token, MEMBERS, ranks=OF)
    _compare_token([of_rank for of_rank in seen if of_rank], THE_GROUP)
    yield "right in a group that is not all ranks"


def _compare_token(seen, where):
    size = len(seen)
    for rank in (*range(1, size), 0):  # in the order of the ring: the first mistake counts
        value, again, _, missing = seen[rank]
        right = rank or size
        if value is None or isinstance(value, torch.Tensor):
            raise Mistake(f"{where}: rank {rank} returned {type(value).__name__}",
                          "Return the number: token.item().")
        all_awaited(missing, f"{where}, rank {rank}")
        if value != right:
            raise Mistake(f"{where}: rank {rank} returned {value}; right is {right}",
                          _why_wrong(seen, rank, value, right))
        if again != right:
            raise Mistake(f"{where}: a second call returned {again} on rank {rank}; right is "
                          f"{right}", "Something is kept from the first call. Make the token "
                          "inside the function: it starts at 0 in each call.")


def _why_wrong(seen, rank, value, right):
    size, values, traffic = len(seen), [of_rank[0] for of_rank in seen], seen[rank][2]
    first_op = [next((op.name for op in of_rank[2].ops if op.peer is not None), "")
                for of_rank in seen]
    early = next((r for r in range(1, size) if first_op[r] == "send"), None)
    hints = (  # the first that fits
        (early is not None, f"Rank {early} sends before it has received: the token can't be there "
                            "yet. Only rank 0 begins; each other rank receives first."),
        (value == right + size and traffic.sent_messages == 2,
         "The token went round twice. Each rank sends it once, and receives it once."),
        (size > 2 and values == list(range(size, 0, -1)),
         "The token goes the other way round: send to `after`, (rank + 1) % size, and receive from "
         "`before`."),
        (size > 1 and values == [size + 1, *range(2, size + 1)],
         "All see 1 too many. Rank 0 starts the token at 0, and a rank returns the value as it "
         "came, before it adds its own 1."),
        (rank == 0 and value == 0, "Rank 0 returns the token as it comes back from the last rank. "
                                   "Does it receive after it sent?"),
        (rank and value == rank + 1,
         "Return the value as it reached the rank, before the rank adds its own 1."),
        (True, "Each rank adds 1 to what it received, and sends that on: token + 1."))
    return next(hint for fits, hint in hints if fits)
