"""Lab 00's checks: shards, neighbours, deadlocks, common decisions."""

import numpy as np
import torch
import torch.distributed as dist

from ranklab import ranks
from ranklab.course.exercise import Exercise, Mistake, Prediction, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic

SIZES = (1, 2, 3, 4, 8)
POINT_TO_POINT = {"send", "recv"}


def check_shard_range(shard_range):
    for n in (5, 7, 8, 10, 24, 1001, 1, 0):
        for size in reversed(SIZES):
            parts = [list(shard_range(n, rank, size)) for rank in range(size)]
            _compare_parts(parts, n, size)
    yield "range(n) for n = 0, 1, 5, 7, ... on 1, 2, 3, 4, 8 ranks: nothing lost, nothing twice"
    yield "lengths differ by at most one, the longer parts first, each part contiguous"


def _compare_parts(parts, n, size):
    right = [part.tolist() for part in np.array_split(np.arange(n), size)]
    if parts == right:
        return
    case = f"n={n} on {size} ranks"
    given = [i for part in parts for i in part]
    lengths = [len(part) for part in parts]
    if twice := sorted({i for i in given if given.count(i) > 1}):
        raise Mistake(f"{case}: {_some(twice)} is handed out twice",
                      "Each part must start where the part of the rank before it ends.")
    if lost := sorted(set(range(n)) - set(given)):
        raise Mistake(f"{case}: nobody has {_some(lost)}",
                      "n // size rounds down, and the left-over n % size items get lost. "
                      "The first n % size ranks take one more each.")
    if beyond := sorted(set(given) - set(range(n))):
        raise Mistake(f"{case}: {_some(beyond)} is handed out, but range({n}) ends before",
                      "Cut the last part at n, or better: count the left-over items exactly.")
    if any(part and part != list(range(part[0], part[-1] + 1)) for part in parts):
        raise Mistake(f"{case}: rank 0 has {_some(parts[0])}, which is not contiguous",
                      "A stride (rank, rank + size, ...) is a fair split, too, but files and "
                      "tensors are read in blocks: make each part one block.")
    if max(lengths) - min(lengths) > 1:
        raise Mistake(f"{case}: the parts have lengths {lengths}",
                      "Lengths may differ by one at most; the rank with most work sets the pace. "
                      "Neither rounding up nor giving all the rest to one rank is fair.")
    raise Mistake(f"{case}: the parts have lengths {lengths}; wanted {list(map(len, right))}",
                  "The longer parts belong to the first ranks, in rank order.")


def _some(items):
    return ", ".join(map(str, items[:4])) + (", ..." if len(items) > 4 else "")


def _token_trial(pass_the_token, members=None):
    group = dist.new_group(members) if members else None
    if members and dist.get_rank() not in members:
        return None
    with Traffic() as traffic:
        value = pass_the_token() if group is None else pass_the_token(group)
    return value, traffic.sent_messages, dict(traffic.calls)


def check_pass_the_token(pass_the_token):
    for size in SIZES:
        seen = on_token_ring(pass_the_token, ranks=size)
        _compare_token(seen, f"{size} ranks" if size > 1 else "1 rank")
    yield "1, 2, 3, 4, 8 ranks: rank r sees r, and rank 0 gets back the number of ranks"
    for rank, (_, messages, calls) in enumerate(seen):
        if set(calls) - POINT_TO_POINT:
            raise Mistake(f"rank {rank} called {', '.join(sorted(set(calls) - POINT_TO_POINT))}",
                          "A collective would do it, but here a rank talks to its neighbours "
                          "only: dist.send and dist.recv.")
        if messages != 1:
            raise Mistake(f"rank {rank} of 8 sent {messages} messages; one is enough",
                          "Every rank hands the token on exactly once.")
    yield "each rank sends one message; a single rank sends none"
    seen = [s for s in on_token_ring(pass_the_token, [1, 3], ranks=4) if s]
    _compare_token(seen, "the group of ranks 1 and 3")
    yield "right in a group that is not all ranks"


def on_token_ring(pass_the_token, members=None, *, ranks):
    """Launches the ring; a hang in which all receive gets its own hint."""
    try:
        return on_ranks(_token_trial, pass_the_token, members, ranks=ranks, timeout=5)
    except Mistake as mistake:
        if members:
            hint = ("In a group, dist.send(x, dst) still means a rank of the whole world. Say "
                    "group_dst= and group_src= (or dist.get_global_rank) with group=group.")
        elif mistake.what.count("waits in recv") == ranks:
            hint = "All ranks wait in recv, and nobody sends. One has to begin: rank 0 sends first."
        elif mistake.what.count("waits in send") == ranks:
            hint = "All ranks send first. Only rank 0 may; the others receive before they send."
        elif "SIGSEGV" in mistake.what or "nvalid" in mistake.what:
            hint = "There is no such rank to send to. The ring closes: after the last rank comes rank 0, so (rank + 1) % size."
        elif "does not end" in mistake.what:
            hint = ("A rank waits for a message that nobody sends. The ring closes: the last rank "
                    "sends to rank 0, (rank + 1) % size, and rank 0 receives it.")
        else:
            hint = mistake.hint
        raise Mistake(mistake.what, hint) from None


def _compare_token(seen, where):
    size = len(seen)
    for rank, (value, _, _) in enumerate(seen):
        right = rank or size
        if isinstance(value, torch.Tensor):
            raise Mistake(f"{where}: rank {rank} returned a tensor", "Return token.item().")
        if value != right:
            if rank == 0:
                hint = ("Rank 0 returns the token as it comes back from the last rank. Does "
                        "it receive after it sent?")
            elif value == rank + 1:
                hint = "Return the value as it reached the rank, before the rank adds its own 1."
            else:
                hint = "Each rank adds 1 to what it received, and sends that on."
            raise Mistake(f"{where}: rank {rank} returned {value}; right is {right}", hint)


def _shift_trial(fix_the_deadlock):
    rank, found = dist.get_rank(), []
    for length, dtype in ((3, torch.float32), (0, torch.int64), (500_001, torch.float32)):
        x = torch.full((length,), rank + 1, dtype=dtype, device=device())
        before = x.clone()
        with Traffic() as traffic:
            got = fix_the_deadlock(x)
        if not isinstance(got, torch.Tensor):
            return [(type(got).__name__, length, True, 0, 0)]
        values = got.detach().clone().unique().tolist()
        found.append((values, length, torch.equal(x, before), traffic.sent_bytes, x.nbytes))
    return found


def check_fix_the_deadlock(fix_the_deadlock):
    for size in SIZES:
        seen = on_shift_ring(fix_the_deadlock, ranks=size)
        for rank, cases in enumerate(seen):
            for case in cases:
                _compare_shift(case, rank, size)
    yield "no deadlock on 1, 2, 3, 4, 8 ranks, with 12 bytes, 0 bytes and 2 MB"
    yield "every rank returns the x of the rank before it; its own x is unchanged"
    for rank, cases in enumerate(seen):  # of the last size, 8
        for _, _, _, sent, x_bytes in cases:
            if sent != x_bytes:
                raise Mistake(f"rank {rank} of 8 sent {sent} bytes for an x of {x_bytes} bytes",
                              "One message to one neighbour is enough; a gather or broadcast "
                              "sends x to everybody.")
    yield "each rank sends x exactly once"


def on_shift_ring(fix_the_deadlock, *, ranks):
    """Launches the shift; the hang in which all send first gets its own hint."""
    try:
        return on_ranks(_shift_trial, fix_the_deadlock, ranks=ranks, timeout=5)
    except Mistake as mistake:
        hint = mistake.hint
        if mistake.what.count("waits in send") == ranks:
            hint = ("All ranks send first. gloo's send returns when the other side receives, and "
                    "nobody does: start the send, receive, then wait for the send (dist.isend, or "
                    "dist.batch_isend_irecv).")
        elif mistake.what.count("waits in recv") == ranks:
            hint = "All ranks receive first, and nobody sends. Start the send before the receive."
        raise Mistake(mistake.what, hint) from None


def _compare_shift(case, rank, size):
    values, length, unchanged, _, _ = case
    if isinstance(values, str):
        raise Mistake(f"rank {rank} of {size} returned a {values}", "Return the received tensor.")
    if not unchanged:
        raise Mistake(f"rank {rank} of {size}: x was overwritten",
                      "The caller still needs its own x. Receive into torch.empty_like(x).")
    right = [(rank - 1) % size + 1] if length else []
    if values == right:
        return
    if values == [(rank + 1) % size + 1]:
        hint = "That is the x of the rank after it. Send to rank + 1, receive from rank - 1."
    elif values == [rank + 1]:
        hint = "That is its own x: the received tensor must be returned."
    else:
        hint = "The buffer was read before the message was in it. Wait for the receive."
    raise Mistake(f"rank {rank} of {size} (length {length}) returned {_some(values)}; right is "
                  f"{_some(right)}", hint)


FINITE, NAN, INF, HUGE = 1.5, float("nan"), float("inf"), 3e38


def _finite_trial(all_ranks_finite):
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for of_first, of_last in ((FINITE, FINITE), (NAN, FINITE), (FINITE, INF), (HUGE, HUGE)):
        value = of_first if rank == 0 else of_last if rank == size - 1 else FINITE
        loss = torch.tensor(value, device=device())
        with Traffic() as traffic:
            answer = all_ranks_finite(loss)
        same = torch.equal(loss.nan_to_num(), torch.tensor(value, device=device()).nan_to_num())
        found.append((answer, same, traffic.sent_messages, dict(traffic.calls)))
    return found


def check_all_ranks_finite(all_ranks_finite):
    for size in (1, 2, 3, 4):
        seen = on_ranks(_finite_trial, all_ranks_finite, ranks=size, timeout=5)
        for case, right in enumerate((True, False, size == 1, True)):
            answers = [of_rank[case][0] for of_rank in seen]
            _compare_finite(answers, right, case, size)
        for rank, of_rank in enumerate(seen):
            if not all(same for _, same, _, _ in of_rank):
                raise Mistake(f"rank {rank} of {size}: the loss was changed",
                              "all_reduce works in place. Reduce a flag of your own, not the loss.")
    yield "the same answer on all of 1, 2, 3, 4 ranks: NaN and infinity on one rank are seen by all"
    yield "the loss is unchanged"
    for rank, of_rank in enumerate(seen):
        calls = of_rank[0][3]
        if sum(calls.values()) != 1:
            raise Mistake(f"rank {rank} made {sum(calls.values())} calls: {calls}",
                          "One all_reduce of one number is enough.")
    yield "one collective"


def _compare_finite(answers, right, case, size):
    case_name = ("all losses finite", "rank 0 has NaN", "the last rank has infinity",
                 "two ranks have 3e38, which is finite")[case]
    if any(not isinstance(answer, bool) for answer in answers):
        raise Mistake(f"it returned a {type(answers[0]).__name__}", "Return a bool.")
    if all(answer == right for answer in answers):
        return
    if len(set(answers)) > 1:
        hint = ("The ranks disagree: each looks at its own loss only. That is the bug you came to "
                "mend. Reduce the flag over all ranks.")
    elif case == 3:
        hint = "The sum of finite losses may overflow. Reduce a flag (0 or 1), not the losses."
    else:
        hint = "One rank that is not finite decides for all: the MIN over ranks of a 0/1 flag."
    raise Mistake(f"{case_name} ({size} ranks): the ranks answer {answers}; right is {right} on "
                  "all", hint)


EXERCISES = (
    Exercise(ranks.shard_range, check_shard_range, hints=(
        "How many items has each rank at least? How many are left over then?",
        "divmod(n, size) gives both. The first `left over` ranks take one more each.",
        "start = rank * each + min(rank, left_over); the length is each + (rank < left_over).")),
    Exercise(ranks.pass_the_token, check_pass_the_token, hints=(
        "Who may send before it has received? Exactly one rank.",
        "Rank 0: send, then receive. All others: receive, then send. Neighbours modulo size.",
        "dist.send(token + 1, group=group, group_dst=(rank + 1) % size); then return "
        "token.item().")),
    Exercise(ranks.fix_the_deadlock, check_fix_the_deadlock, hints=(
        "A send may return only when its receiver is there. Who is there, if all send?",
        "Start the send without waiting for it, receive, then wait: dist.isend returns a handle.",
        "dist.batch_isend_irecv([dist.P2POp(dist.isend, ...), dist.P2POp(dist.irecv, ...)]), then "
        "wait() for each. A single rank has no neighbour: return a copy.")),
    Exercise(ranks.all_ranks_finite, check_all_ranks_finite, hints=(
        "Turn the loss into a flag first: 1 for finite, 0 for not.",
        "Which reduction of the flags is 1 only if all are 1? Look through dist.ReduceOp.",
        "dist.all_reduce(flag, dist.ReduceOp.MIN, group=group), then bool(flag).")),
)

PREDICTIONS = (
    Prediction("longest_shard", working="1_000_003 // 8 + 1", unit="documents",
               answer=lambda: len(ranks.shard_range(1_000_003, 0, 8)), tolerance=0,
               slips={125_000: "three documents are left over, and rank 0 takes one of them",
                      125_003: "that rank would take all that is left over; share it out"},
               why="Rank 7 has 125000: one document less, and one step less in some loops."),
    Prediction("token_round_ms", working="1024 * 20 / 1000", unit="ms",
               answer=lambda: 1024 * 20e-6 * 1e3,
               slips={20_480: "microseconds, not milliseconds",
                      0.02: "one hop only; the token visits every rank"},
               why="Eight bytes, 20 ms: at scale, latency counts before bandwidth does."),
    Prediction("guilty_rank", working="11 // 5", tolerance=0,
               answer=lambda: next(r for r in range(4) if 11 in ranks.shard_range(20, r, 4)),
               slips={0: "rank 0 waits like the others; who does not wait?",
                      1: "rank 1 waits like the others; who does not wait?",
                      3: "rank 3 waits like the others; who does not wait?"},
               why="It finished: it skipped a call that the others still wait for."),
    Prediction("calls_it_made", working="5 - 1", unit="calls", answer=lambda: 4, tolerance=0,
               slips={5: "all others wait in their fifth call; the guilty rank made one less",
                      1: "it skipped one call, and made all the rest"},
               why="Its second call met the others' second, but for another document: silently "
                   "wrong sums, long before the hang."),
    Prediction("hang_dollars", working="1024 * 2 * 10 / 60", unit="dollars",
               answer=lambda: 1024 * 2 * 600 / 3600,
               slips={20_480: "ten minutes, not ten hours", 2048: "that is a whole hour",
                      204.8: "two dollars an hour: multiply by 10/60, not by 10/100"},
               why="For one skipped line on one rank, and nobody has looked at it yet."),
)
