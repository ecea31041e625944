"""The check of negotiate: rounds in which ranks become ready in different orders."""

import random

import torch.distributed as dist

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.trial import GROUPS, group_of_mine, on_ranks
from ranklab.meter import Traffic

ROUNDS, STEPS = 4, 2
LONG = "a.name.as.long.as.the.names.of.the.parameters.in.a.real.model.are" * 2
COORDINATOR = ("Rank 0's table lives in `table`, from call to call: a name counts one more on each "
               "rank that sends it, and is complete when it counts R.")
TOGETHER = ("All ranks call both collectives in every round: also one that has nothing to send, "
            "and one that is only told. Or the others wait for it, or hear of the wrong round.")


def ready_on(rank, step):
    """[the names that become ready on `rank`, in each round]: another order on each rank."""
    names = [f"{LONG}.{i}" for i in range(12)] + ["late"]
    draw = random.Random(f"{rank} {step}")
    rounds = [[] for _ in range(ROUNDS)]
    # In one round only the even ranks have something to say, and in the next one only the others.
    loud = [k for k in range(ROUNDS) if k != 1 + rank % 2]
    for name in draw.sample(names, len(names)):
        if name == "late":  # on rank 0 at once, on all others in the last round
            rounds[0 if rank == 0 else -1].append(name)
        else:
            rounds[draw.choice(loud)].append(name)
    return rounds


def complete_in(ranks):
    """The oracle: [of each round of each step, the names that the last rank has then]."""
    right = []
    for step in range(STEPS):
        rounds = [ready_on(rank, step) for rank in ranks]
        when = {name: max(next(k for k, one in enumerate(of_rank) if name in one)
                          for of_rank in rounds) for name in sum(rounds[0], [])}
        right += [{name for name in when if when[name] == k} for k in range(ROUNDS)]
    return right


def trial(fn, grouped=False):
    """Runs on every rank: what it was told in each round, bytes received, what else was seen."""
    group = group_of_mine() if grouped else None
    table, seen = {}, {"told": [], "received": 0, "changed": False, "idle": False}
    for step in range(STEPS):
        for names in ready_on(dist.get_rank(), step):
            given = list(names)
            with Traffic() as traffic:
                seen["told"].append(fn(given, table, group=group))
            seen["received"] += sum(op.received_bytes for op in traffic.ops)
            seen["changed"] |= given != names
            seen["idle"] |= not traffic.ops
    # Rank 0 has a name with one table, and all others have it with another one.
    is_first = dist.get_rank(group) == 0
    fn([LONG] if is_first else [], {}, group=group)
    seen["of new tables"] = fn([] if is_first else [LONG], {}, group=group)
    return seen


def check_negotiate(fn):
    for ranks in (3, 1, 4):
        with hinted({"hang: .*": TOGETHER}):
            seen = on_ranks(trial, fn, ranks=ranks)
        _judge(seen, range(ranks), f"on {ranks} ranks")
    yield "on 1, 3, 4 ranks: a name is told in the round in which the last rank has it, once"
    yield "the same list on every rank, whatever the orders; names may come again in the next step"
    _cheap(seen)
    yield "ranks other than 0 receive the answer only, not everybody's lists"
    try:
        seen = on_ranks(trial, fn, True, ranks=4)
        for members in GROUPS:
            _judge([seen[r] for r in members], members, f"in the group of ranks {members}")
    except Mistake as mistake:
        hint = ("Hand `group` on: get_rank(group), get_world_size(group), gather_object(..., "
                "group=group, group_dst=0), and so for the answer: group_src=0 is the first rank "
                "of the group.")
        if f"in the group of ranks {GROUPS[1]}" in mistake.what and "is not told" in mistake.what:
            hint = ("The first of a group counts, and that need not be rank 0 of the job: in this "
                    "group it is rank 1. Ask `rank == 0` of dist.get_rank(group), or go through "
                    "`lists or ()`.")
        mistake.hint = hint
        raise
    yield "inside a group it meets nobody else"


def _judge(seen, ranks, where):
    first = seen[0]
    for rank, one in zip(ranks, seen):
        if one["idle"] and len(ranks) > 1:
            raise Mistake(f"{where} rank {rank} takes no part in a round", TOGETHER)
    for k, right in enumerate(complete_in(ranks)):
        place = f"{where}, round {k % ROUNDS + 1} of step {k // ROUNDS + 1}"
        for rank, one in zip(ranks, seen):
            told = one["told"][k]
            if right and one is not first and told in ([], None):
                raise Mistake(f"{place}: rank {rank} is told nothing, but rank {ranks[0]} is told "
                              f"{len(right)} names", "broadcast_object_list fills the list that "
                              "it is given, on every rank: return what is in it then.")
            _one_answer(told, right, f"{place}, rank {rank}", is_second=k >= ROUNDS)
            if told != first["told"][k]:
                raise Mistake(f"{place}: rank {rank} gets the names in another order than rank "
                              f"{ranks[0]}", "One rank decides, and all take its list as it is: "
                              "two orders are two ranks in different all-reduces, a deadlock.")
    for rank, one in zip(ranks, seen):
        if one["of new tables"] and len(ranks) > 1:
            raise Mistake(f"{where} rank {rank} is told a name that was counted in another table",
                          "All that is kept from call to call is in `table`: with a new one "
                          "nothing is known. (Each set of ranks has its own.)")
        if one["changed"]:
            raise Mistake(f"{where} the list `ready` of rank {rank} is changed",
                          "Send it, and leave it as it is.")


def _one_answer(got, right, where, is_second):
    if not isinstance(got, list):
        raise Mistake(f"{where} is told {type(got).__name__}, not a list", "Return the list.")
    if len(got) > len(set(got)):
        raise Mistake(f"{where} is told a name twice", "A name that is complete leaves the table.")
    missing, early = right - set(got), set(got) - right
    if not missing and not early:
        return
    if early:
        what = f"{where} is told {len(early)} names that not all ranks have yet"
        hint = ("A rank that waits in an all-reduce for a rank that is not ready can do nothing "
                f"else. {COORDINATOR}")
        again = "or its old count makes it complete too early in the next step."
    else:
        what = f"{where} is not told {len(missing)} of {len(right)} names that all ranks have"
        hint = f"Names that came in an earlier round are forgotten. {COORDINATOR}"
        again = "for the same names come again in every step."
    if is_second:
        what += ", though in the first step all was well"
        hint = f"What was complete must leave the table, {again}"
    raise Mistake(what, hint)


def _cheap(seen):
    """The lists of a rank are about as long as the answers: so it should receive about that."""
    rounds = [[sum(map(len, names)) for step in range(STEPS) for names in ready_on(rank, step)]
              for rank in range(len(seen))]
    everything = sum(rounds[1])
    for rank, one in enumerate(seen[1:], 1):
        if one["received"] > 2.5 * everything:
            raise Mistake(f"rank {rank} receives {one['received']} bytes in all; the names that it "
                          f"is told are {everything} bytes",
                          "Only rank 0 needs everybody's lists: gather_object, not "
                          "all_gather_object. With 64 ranks that is 64 times as much.")
    # gather_object pads every list to the longest one of the round.
    new = (len(seen) - 1) * sum(max(lengths) for lengths in zip(*rounds))
    if seen[0]["received"] > 1.3 * new:
        raise Mistake(f"rank 0 receives {seen[0]['received']} bytes in all; the new names of the "
                      f"others are {new} bytes", "Send `ready` only, what became ready since the "
                      "last call. What came before is in rank 0's table.")
