"""The check of negotiate: rounds in which ranks become ready in different orders."""

import random
from functools import partial

import torch.distributed as dist

from ranklab.checks.beside import GROUP, expect, on_groups
from ranklab.meter import Traffic

ROUNDS, STEPS = 4, 2
LONG = "a.name.as.long.as.the.names.of.the.parameters.in.a.real.model.are" * 2
NAMES = [f"{LONG}.{i}" for i in range(12)]
COORDINATOR = ("Rank 0's table lives in `table`, from call to call: a name counts one more on each "
               "rank that sends it, and is complete when it counts R.")
TOGETHER = ("All ranks call both collectives in every round: also one that has nothing to send, "
            "and one that is only told.")
LATE = f"Names that came in an earlier round are forgotten. {COORDINATOR}"
LEAVES = ("What was complete must leave the table: the same names come again in every step, and "
          "an old count makes them complete too early, or never.")
FIRST = (f"{GROUP} The first of a group counts, and that need not be rank 0 of the job: ask "
         "`rank == 0` of dist.get_rank(group).")


def ready_on(rank):
    """[the names that become ready on `rank`, in each round of all steps]: each in its order."""
    rounds = []
    # In one round only the even ranks have something to say, and in the next one only the others.
    loud = [k for k in range(ROUNDS) if k != 1 + rank % 2]
    for step in range(STEPS):
        draw, of_step = random.Random(f"{rank} {step}"), [[] for _ in range(ROUNDS)]
        for name in draw.sample(NAMES, len(NAMES)):
            of_step[draw.choice(loud)].append(name)
        of_step[0 if rank == 0 else -1].append("late")  # on rank 0 at once, on all others last
        rounds += of_step
    return rounds


def complete_in(ranks):
    """The oracle: [of each round, the names that the last of the ranks has then]."""
    right, of_ranks = [], [ready_on(rank) for rank in ranks]
    for begin in range(0, STEPS * ROUNDS, ROUNDS):
        had = set()
        for end in range(begin + 1, begin + ROUNDS + 1):
            have = set.intersection(*({*sum(rounds[begin:end], [])} for rounds in of_ranks))
            right.append(have - had)
            had = have
    return right


def _trial(fn, ranks):
    table, told, received, is_idle, is_changed = {}, [], 0, False, False
    for names in ready_on(dist.get_rank()):
        given = list(names)
        with Traffic() as traffic:
            told.append(fn(given, table, **ranks.keywords))
        received += traffic.received_bytes
        is_idle |= not traffic.ops and ranks.size > 1
        is_changed |= given != names
    of_ranks = [None] * ranks.size
    dist.all_gather_object(of_ranks, told, group=ranks.group)
    # The first has a name with one table, and all others have it with another one.
    first, new = ranks.index == 0, [LONG]
    fn(new if first else [], {}, **ranks.keywords)
    of_new = fn([] if first else new, {}, **ranks.keywords)

    yield partial(expect, not is_idle, f"{ranks} takes no part in a round", TOGETHER)
    for number, right in enumerate(complete_in(ranks.members)):
        where = f"{ranks}, round {number % ROUNDS + 1} of step {number // ROUNDS + 1}:"
        yield partial(_told, where, told[number], of_ranks[0][number] or [], right,
                      number >= ROUNDS)
    yield partial(expect, not of_new or ranks.size == 1, f"{ranks} is told a name that was counted "
                  "in another table", "All that is kept from call to call is in `table`.")
    yield partial(expect, not is_changed, f"{ranks}: the list `ready` is changed", "Leave it so.")
    if ranks.group is None:
        yield partial(_is_cheap, ranks, received)


def _told(where, got, firsts, right, is_second):
    expect(isinstance(got, list), f"{where} {got} is returned, not a list", "Return the list.")
    early, lost = {*got} - right, right - {*got}
    then = ", though in the first step all was well" * is_second
    for is_so, what, hint in (
        (got or not firsts, f"it is told nothing, and the first rank {len(firsts)} names",
         "broadcast_object_list fills the list that it is given: return what is in it then."),
        (len(got) == len({*got}), "it is told a name twice", LEAVES),
        (not early, f"it is told {len(early)} names that not all ranks have yet{then}",
         LEAVES if is_second else COORDINATOR),
        (not lost, f"it is not told {len(lost)} of {len(right)} names that all ranks have{then}",
         LEAVES if is_second else LATE),
        (got == firsts, "it gets the names in another order than the first rank", "One rank "
         "decides, and all take its list as it is: two orders are a deadlock."),
    ):
        expect(is_so, f"{where} {what}", hint)


def _is_cheap(ranks, received):
    """Rank 0 receives the others' new names, padded to the longest list; they the answers alone."""
    lengths = [[sum(map(len, names)) for names in ready_on(rank)] for rank in ranks.members]
    names, new = sum(lengths[0]), (ranks.size - 1) * sum(map(max, zip(*lengths)))
    expect(ranks.index == 0 or received <= 2.5 * names, f"{ranks} receives {received} bytes in all;"
           f" the names that it is told are {names} bytes", "Only rank 0 needs everybody's lists: "
           "gather_object, not all_gather_object.")
    expect(ranks.index or received <= 1.3 * new, f"{ranks} receives {received} bytes in all; the "
           f"new names of the others are {new} bytes", "Send `ready` only: rank 0 has the rest.")


def check_negotiate(fn):
    on_groups(_trial, fn, failures={"hang: .*": TOGETHER, "ValueError: .*not part of.*": FIRST},
              group_hint=FIRST)
    yield "on 4, 3, 2 and 1 ranks: a name is told when the last rank has it, once"
    yield "the same list on every rank, whatever the orders; names may come again in the next step"
    yield "ranks other than 0 receive the answer only; inside a group it meets nobody else"
