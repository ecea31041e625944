"""What travels round a ring: bytes, messages, and to whom."""

from ranklab.checks.collectives.trials import no_backend, sends
from ranklab.checks.exercise import Mistake


def hint_all_reduce(per_rank):
    if max(per_rank) > min(per_rank):
        return "One rank does more than the others. In a ring no rank is special."
    if per_rank[0] == 3 * 192:
        return ("You pass the whole tensor R-1 times. Pass one chunk at a time: after R-1 steps "
                "each rank owns one finished chunk.")
    if per_rank[0] > 3 * 192:
        return "More than the whole tensor per neighbour: is it gathered or summed twice?"
    return "It is R-1 chunks in reduce-scatter and R-1 in all-gather: is there a step too many?"


def one_pass(seen, whole_bytes):
    """x unchanged has been seen; R-1 messages of one chunk each, and no backend."""
    no_backend(seen)
    sends(seen, whole_bytes, whole_bytes * 3 // 4, lambda sent: _hint_pass(sent, whole_bytes))
    round_the_ring(seen, messages=3)
    yield "x unchanged; each rank sends exactly (R-1)/R of the bytes, to one neighbour"


def round_the_ring(seen, messages):
    """Each rank of 4 sends to one neighbour, and one message in each step."""
    for rank, one in enumerate(seen):
        if len(one.bytes_to) != 1:
            raise Mistake(f"rank {rank} of 4 sends to ranks {sorted(one.bytes_to)}",
                          "In a ring a rank talks to its neighbours only: send to rank+1.")
        if one.messages != messages:
            raise Mistake(f"rank {rank} of 4 sends {one.messages} messages; {messages} are enough",
                          "One message a step: a chunk goes in one piece, as each message costs "
                          "its latency.")


def _hint_pass(per_rank, whole_bytes):
    if max(per_rank) > min(per_rank):
        return "One rank does more than the others. In a ring no rank is special."
    if per_rank[0] == 3 * whole_bytes:
        return "You pass the whole tensor each time. One chunk a step is enough."
    if per_rank[0] == whole_bytes:
        return "One step too many: R-1 steps, not R. Nobody needs to send a chunk to its owner."
    if per_rank[0] == whole_bytes * 6 // 4:
        return "Each step sends all that came so far. Only what arrived last is new to the next."
    return "R-1 steps of one chunk each: 3/4 of the bytes on 4 ranks."
