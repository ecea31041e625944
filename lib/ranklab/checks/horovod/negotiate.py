"""The check of negotiate: rounds in which ranks become ready in different orders."""

from functools import partial

import torch.distributed as dist

from ranklab.checks.beside import GROUP, expect, on_groups
from ranklab.meter import Traffic

LONG = "a.name.as.long.as.the.names.of.the.parameters.in.a.real.model.are." * 2
READY = (  # what becomes ready on each rank, in the rounds of a step; in some, some have nothing
    ("late a b c", "", "d e f i j", "g h"),
    ("b a", "c g h i", "", "f j e d late"),
    ("c b a h", "", "g j i", "f d e late"),
    ("h f", "a b c d", "", "e j i g late"))
ROUNDS = len(READY[0])
COORDINATOR = ("Rank 0 keeps its counts in `table`, from call to call: each rank that sends a name "
               "adds 1 to it, and at R the name is complete.")
TOGETHER = "All ranks call both collectives in every round, also with nothing to send."
LEAVES = "What was complete must leave the table: the same names come again in every step."
FIRST = (f"{GROUP} The first rank of the group does the counting, and that need not be rank 0 of "
         "the job: compare dist.get_rank(group) with 0.")


def ready_on(rank):
    """[the names that become ready on `rank`, in each round of two steps]"""
    step = [[LONG + name for name in names.split()] for names in READY[rank]]
    return step + [names[::-1] for names in step]


def complete_in(number, ranks):
    """The oracle: the names that the last of the ranks has in this round."""
    begin = number // ROUNDS * ROUNDS
    had, have = (set.intersection(*({*sum(ready_on(rank)[begin:end], [])} for rank in ranks))
                 for end in (number, number + 1))
    return have - had


def _trial(fn, ranks):
    table, told, received, is_idle, is_changed = {}, [], 0, False, False
    for names in ready_on(dist.get_rank()):
        given = list(names)
        with Traffic() as traffic:
            told.append(fn(names, table, **ranks.keywords))
        received += traffic.received_bytes
        is_idle |= not traffic.ops and ranks.size > 1
        is_changed |= given != names
    of_ranks, is_first = [None] * ranks.size, ranks.index == 0
    dist.all_gather_object(of_ranks, told, group=ranks.group)
    # The first has a name with one table, and all others have it with another one.
    fn([LONG] * is_first, {}, **ranks.keywords)
    of_new = fn([LONG] * (not is_first), {}, **ranks.keywords)

    yield partial(expect, not is_idle, f"{ranks} takes no part in a round", TOGETHER)
    yield partial(expect, not is_changed, f"{ranks}: the list `ready` is changed", "Leave it so.")
    for number, got in enumerate(told):
        yield partial(_told, ranks, number, got, of_ranks[0][number] or [])
    yield partial(expect, not of_new or ranks.size == 1, f"{ranks} is told a name that was counted "
                  "in another table", "All that is kept from call to call is in `table`.")
    if ranks.group is None:
        yield partial(_is_cheap, is_first, ranks, received)


def _told(ranks, number, got, firsts):
    where = f"{ranks}, round {number % ROUNDS + 1} of step {number // ROUNDS + 1}:"
    expect(isinstance(got, list), f"{where} {got} is returned, not a list", "Return the list.")
    right, is_second = complete_in(number, ranks.members), number >= ROUNDS
    early, lost = {*got} - right, right - {*got}
    for is_so, what, hint in (
        (got or not firsts, "it is told nothing, but the first rank is told something",
         "broadcast_object_list fills the list that it is given: return what is in that list "
         "afterwards."),
        (len(got) == len({*got}), "it is told a name twice", LEAVES),
        (not early, f"it is told {len(early)} names that not all ranks have yet",
         LEAVES if is_second else COORDINATOR),
        (not lost, f"it is not told {len(lost)} of {len(right)} names that all ranks have",
         LEAVES if is_second else f"Names of an earlier round are forgotten. {COORDINATOR}"),
        (got == firsts, "it gets the names in another order than the first rank", "One rank "
         "decides, and all take its list as it is: two orders are a deadlock."),
    ):
        expect(is_so, f"{where} {what}{', though step 1 was right' * is_second}", hint)


def _is_cheap(is_first, ranks, received):
    """The first gets the others' new names, padded to the longest list; they the answers alone."""
    lengths = [[sum(map(len, names)) for names in ready_on(rank)] for rank in ranks.members]
    what, least, hint = (
        ("others' new names", 1.3 * (ranks.size - 1) * sum(map(max, zip(*lengths))),
         "Send `ready` only: rank 0 has the rest.") if is_first else
        ("names that it is told", 2.5 * sum(lengths[0]),
         "Only rank 0 needs everybody's lists: gather_object, not all_gather_object."))
    expect(received <= least, f"{ranks} receives {received} bytes, much more than the {what}", hint)


def check_negotiate(fn):
    on_groups(_trial, fn, failures={"hang: .*": TOGETHER, "ValueError: .*not part of.*": FIRST},
              group_hint=FIRST)
    yield "on 4, 3, 2 and 1 ranks: a name is told when the last rank has it, once"
    yield "the same list on every rank, whatever the orders; names may come again in the next step"
    yield "ranks other than 0 receive the answer only; inside a group it talks to nobody outside"
