"""The check of negotiate: rounds in which ranks become ready in different orders."""

from typing import NamedTuple

import torch.distributed as dist

from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.horovod import negotiate
from ranklab.meter import Traffic

LONG = "a.name.as.long.as.the.names.of.the.parameters.in.a.real.model.are." * 2


class Case(NamedTuple):
    """The tensors that become ready in each round on each of four ranks; LONG makes the names.

    new_tables  each round begins with an empty table
    """

    name: str
    words: tuple
    new_tables: bool = False

    def __str__(self):
        return self.name

    def names(self, rank):
        return [[LONG + word for word in words.split()] for words in self.words[rank]]


STEP = (  # in some rounds some ranks have nothing
    ("late a b c", "", "d e f i j", "g h"),
    ("b a", "c g h i", "", "f j e d late"),
    ("c b a h", "", "g j i", "f d e late"),
    ("h f", "a b c d", "", "e j i g late"))
AGAIN = tuple(tuple(" ".join(words.split()[::-1]) for words in of_rank) for of_rank in STEP)
NOTHING = Case("nothing is ready anywhere", (("",),) * 4)
ONCE = Case("one round, in which all ranks have the same names", (("a b",), ("b a",)) * 2)
STEPS = Case("four rounds, and once more the same names", tuple(map(tuple.__add__, STEP, AGAIN)))
TABLES = Case("a new table in each round", (("x", ""), *(("", "x"),) * 3), new_tables=True)
RECEIVED = "bytes that it receives"
LEFT = "what `table` still holds, when all names are complete,"
TAKES_PART = "whether it takes part in the round"


def _see(fn, case, ranks):
    table, answers, rounds, of_ranks = {}, [], [], [None] * ranks.size
    for names in case.names(dist.get_rank()):
        if case.new_tables:
            table = {}
        ready = [*names]
        with Traffic() as traffic:
            answers.append(_words(fn(ready, table, **ranks.keywords)))
        rounds.append((names, ready, traffic))
    dist.all_gather_object(of_ranks, answers, group=ranks.group)
    for i, (names, ready, traffic) in enumerate(rounds):
        words, name = answers[i], f"what it returns in round {i + 1}"
        yield {TAKES_PART: Must(bool(traffic.ops) or ranks.size == 1, True),
               f"{name}, sorted,": sorted(words) if isinstance(words, list) else words,
               name: Must(words, of_ranks[0][i]),
               "`ready` afterwards": Must(_words(ready), _words(names))}
    if case == STEPS:
        nbytes = sum(traffic.received_bytes for *_, traffic in rounds)
        yield {LEFT: Must([str(name).removeprefix(LONG) for name in table
                           if str(name).startswith(LONG)], []),
               RECEIVED: AtMost(nbytes, _enough(ranks), "receives {:,.0f} bytes; {:,.0f} are "
                                "enough")}


def _words(names):
    if not isinstance(names, list):
        return f"a {type(names).__name__}"
    return [str(name).removeprefix(LONG) for name in names]


def _enough(ranks):
    """Return the bytes that suffice: rank 0 of the group gets the others' new names, padded to the
    longest list of the round; they get only the answers.
    """
    lengths = [[sum(map(len, names)) for names in STEPS.names(rank)] for rank in ranks.members]
    if ranks.index == 0:
        return 1.3 * (ranks.size - 1) * sum(map(max, zip(*lengths)))
    return 1.5 * sum(lengths[0])


# --- right for another reason ---------------------------------------------------------------------

def by_sets(ready, table, group=None):
    """Gather the names of all ranks on every rank; return the names that are ready on all."""
    lists = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, ready, group=group)
    for rank, names in enumerate(lists):
        table.setdefault(rank, set()).update(names)
    complete = sorted(set.intersection(*table.values()))
    for names in table.values():
        names.difference_update(complete)
    return complete


# --- mistakes -------------------------------------------------------------------------------------

def says_it_again_and_again(ready, table, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    queue = table.get("waiting", []) + ready
    lists = [None] * R if rank == 0 else None
    dist.gather_object(queue, lists, group=group, group_dst=0)
    answers = [[name for name in queue if all(name in one for one in lists or ())]]
    dist.broadcast_object_list(answers, group=group, group_src=0)
    table["waiting"] = [name for name in queue if name not in answers[0]]
    return answers[0]


START = "rank, R ="
FORGET = "                del table[name]\n"
COUNTS = "table[name] = table.get(name, 0) + 1"
LISTS = "for names in lists or ():"
GATHER = "dist.gather_object(ready, lists, group=group, group_dst=0)"
ANSWER = "return answer[0]"
NEGOTIATE = Proof(
    negotiate,
    Stage({"on 4, 3, 2 and 1 ranks: a name is announced once, when the last rank has it": (),
           "the same list on every rank, whatever the orders; names may come again in the next "
           "step": (*(f"what it returns in round {number}" for number in range(1, 9)), LEFT),
           "ranks other than 0 receive only the answer; inside a group it talks only to that "
           "group's ranks":
           (RECEIVED,)},
          _see, (NOTHING, ONCE, STEPS, TABLES), (4,), (ALL, *GROUPS), oracle=by_sets),
    mistakes=(
        Slip("Names from earlier rounds are forgotten. Rank 0 must keep its counts in `table` from "
             "call to call.", ("complete = []", "complete, table = [], {}"),
             (GATHER, f"table.clear()\n    {GATHER}")),
        Slip("A name is returned before all ranks have it: it is complete when its count is R.",
             ("table[name] == R:", "name not in complete:"),
             ("table[name] == R:", "table[name] == max(1, R - 1):")),
        Slip("A name waits for more ranks than there are: it is complete when its count is R.",
             ("table[name] == R:", "table[name] > R:")),
        Slip("Complete names must leave the table: the same names come again in every step.",
             (FORGET, ""), ("table[name] == R:", "table[name] >= R:", FORGET, ""),
             (FORGET, "                table[name] = -1\n")),
        Slip("Remove a complete name with del table[name]: with a count of 0, it stays in the "
             "table.",
             (FORGET, "                table[name] = 0\n")),
        Slip("Only rank 0 needs the lists of all ranks: use gather_object, not all_gather_object.",
             ("[None] * R if rank == 0 else None", "[None] * R", GATHER,
              "dist.all_gather_object(lists, ready, group=group)")),
        Slip("Send only `ready`: rank 0 already has the earlier names.", says_it_again_and_again),
        Slip("Broadcast only the complete names: no other rank needs the counts.",
             ("answer = [complete]", "answer = [complete, lists, table]")),
        Slip("One rank decides, and all ranks return its list as it is: different orders cause a "
             "deadlock.",
             (ANSWER, "return [name for name in ready if name in answer[0]] + "
              "[name for name in answer[0] if name not in ready]"),
             (ANSWER, "return answer[0] if rank == 0 else sorted(answer[0], reverse=True)")),
        Slip("broadcast_object_list fills the list that you pass to it: return what is in that "
             "list afterwards.", (ANSWER, "return complete")),
        Slip("You broadcast a list of one item, which is the list of names: return that item, [0].",
             (ANSWER, "return answer")),
        Slip("Return a list: its order is the order that all ranks follow.",
             (ANSWER, "return set(answer[0])"), (ANSWER, "return tuple(answer[0])"),
             (ANSWER, "return dict.fromkeys(answer[0])")),
        Slip("`ready` is the caller's list: leave it as it is.",
             (GATHER, f"{GATHER}\n    ready.clear()"), (GATHER, f"ready.sort()\n    {GATHER}")),
        Slip("Pass `group` on to both collectives, to get_rank and to get_world_size.",
             (START, f"group = None\n    {START}"),
             (GATHER, GATHER.replace("group=group, ", ""))),
        Slip("R is the number of ranks in the group: dist.get_world_size(group).",
             ("dist.get_world_size(group)", "dist.get_world_size()")),
        Slip("Give ranks as numbers within the group: group_dst=0, group_src=0.",
             ("group_src=0", "src=0"), ("group_dst=0", "dst=0")),
        Slip("The first rank of the group counts, and it need not be rank 0 of the job: compare "
             "dist.get_rank(group) with 0.",
             ("lists or ()", "lists if dist.get_rank() == 0 else ()"),
             ("dist.get_rank(group)", "dist.get_rank()")),
        Slip("Keep what must last from call to call only in `table`.",
             ("group=None):", "group=None, counts={}):",
              GATHER, f"table = counts.setdefault(group, counts)\n    {GATHER}")),
        Slip("All ranks must call both collectives in every round, even with nothing to send.",
             (START, f"if not ready:\n        return []\n    {START}")),
    ), hints=(
        "Send new names to rank 0; rank 0 counts them and sends the complete ones to all ranks.",
        "dist.gather_object(ready, lists, group=group, group_dst=0), where `lists` is [None] * R "
        "on rank 0 and None elsewhere. A name whose count is R is complete, and leaves the table.",
        "answer = [complete]; dist.broadcast_object_list(answer, group=group, group_src=0); "
        "return answer[0]. All ranks call both, even with nothing to send.",
    ))
