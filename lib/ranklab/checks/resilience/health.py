"""health_check: on a probe whose seconds are given, so that no clock decides."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.resilience import health_check
from ranklab.resilience.health import Health

FASTEST = 0.01, 0.002  # seconds of a product, of a message


class Faults(NamedTuple):
    """The faults of a machine, and the right answer; ranks are numbered in the group.

    ranks      the smallest number of ranks
    slow       {rank: factor of its product}
    products   ranks whose product is wrong; memories: ranks whose memory is
    links      {(rank, partner): factor of its measurement}
    """

    name: str
    ranks: int
    right: Health
    slow: dict = {}
    products: tuple = ()
    memories: tuple = ()
    links: dict = {}
    options: dict = {}


class Probe:
    """A probe of a machine with these Faults: it really sends, but its seconds are given."""

    def __init__(self, ranks, faults):
        self.ranks, self.faults = ranks, faults
        self.depth, self.partners, self.is_in_group, self.calls = 0, [], True, []

    def product(self):
        self.calls.append("product")
        is_right = self.ranks.index not in self.faults.products
        return is_right, FASTEST[0] * self.faults.slow.get(self.ranks.index, 1)

    def memory(self):
        self.calls.append("memory")
        return self.ranks.index not in self.faults.memories

    def message(self, partner, group=None):
        """Exchange a message with `partner`, and return its seconds.

        `depth`: how many messages came one after another, up to this one
        """
        self.partners.append(partner)
        self.is_in_group &= group is self.ranks.group
        out = torch.tensor([self.depth], device=device())
        into = torch.empty_like(out)
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, out, group=self.ranks.group, group_peer=partner),
                dist.P2POp(dist.irecv, into, group=self.ranks.group, group_peer=partner)]):
            work.wait()
        self.depth = 1 + max(self.depth, int(into))
        # a few percent of difference between links
        return FASTEST[1] * self.faults.links.get((self.ranks.index, partner),
                                                  1 + 0.05 * self.ranks.index)


class Case(NamedTuple):
    """A machine of R ranks."""

    name: str

    def __str__(self):
        return self.name

    def faults(self, R):
        return next((each for each in _machines(R) if each.name == self.name and R >= each.ranks),
                    None)


def _machines(R):
    """Return the Faults of each case for a machine of R ranks."""
    last, rest, ring = R - 1, [*range(1, R)], Health([], [], [(R - 1, 0)])
    return (
        Faults("all are well", 1, Health([], [], [])),
        Faults("a wrong product", 1, Health([last], [], []), products=(last,)),
        Faults("a wrong memory", 1, Health([0], [], []), memories=(0,)),
        Faults("a slow product", 2, Health([], [last], []), slow={last: 5.0}),
        Faults("two faults on one rank", 2, Health([0], [0], []), slow={0: 9.0}, products=(0,)),
        Faults("all products slow but one", 3, Health([], rest, []),
               slow=dict.fromkeys(rest, 5.0)),
        Faults("three links of four slow", 4, Health([], [1, 2], []), links={
            link: 9.0 for a in range(3) for link in ((a, a + 1), (a + 1, a))}),
        Faults("a slow link, measured on the last rank", 3, ring, links={(last, 0): 4.0}),
        Faults("a slow link, measured on rank 0", 3, ring, links={(0, last): 4.0}),
        *(Faults(f"both links of rank {r} slow", 3, Health([], sorted({0, r}), []), slow={0: 5.0},
                 links={(r, (r + 1) % R): 8.0, (r, (r - 1) % R): 9.0}) for r in (1, 0)),
        Faults("two links slow, apart", 4, Health([], [], [(0, 1), (2, 3)]),
               links={(1, 0): 9.0, (2, 3): 7.0}),
        Faults("slow=10", 1, Health([], [], []), slow={0: 5.0}, links={(last, 0): 8.0},
               options={"slow": 10.0}),
        *([Faults("its one link 9 times as slow", 2, Health([], [], []), links={(0, 1): 9.0})]
          if R == 2 else ()),
    )


def _see(fn, case, ranks):
    """Look at a case; nothing is seen if it needs more ranks than there are."""
    faults = case.faults(ranks.size)
    if faults is None:
        yield {}
        return
    probe = Probe(ranks, faults)
    with Traffic() as traffic:
        health = fn(probe, **faults.options, **ranks.keywords)
    calls = probe.calls + [op.name for op in traffic.ops if op.name not in ("send", "recv")]
    neighbours = sorted({(ranks.index + 1) % ranks.size, (ranks.index - 1) % ranks.size}
                        - {ranks.index})
    is_health = isinstance(health, tuple) and len(health) == 3
    yield {
        "what it returns": Must("Health" if is_health else health, "Health"),
        **{f"the list `{name}`": Must(got, due) for name, got, due in zip(
            Health._fields, health if is_health else (), faults.right)},
        "the group of its messages is its own": Must(probe.is_in_group, True),
        "the list of partners of its messages": Must(sorted(probe.partners), neighbours),
        "messages, one after the other": AtMost(probe.depth, 3),
        "the list of what it calls twice": Must(
            sorted({name for name in calls if calls.count(name) > 1}), []),
    }


CASES = tuple(map(Case, (
    "all are well", "a wrong product", "a wrong memory", "a slow product",
    "two faults on one rank", "all products slow but one",
    "three links of four slow", "a slow link, measured on the last rank",
    "a slow link, measured on rank 0",
    "both links of rank 1 slow", "both links of rank 0 slow", "two links slow, apart", "slow=10",
    "its one link 9 times as slow")))
TURN = "key=lambda link: link % 2"
LINKS = "n_links = R if R > 2 else R - 1"
RIGHT = "is_right and probe.memory()"
SIDES = "max(to_next[r], from_before[(r + 1) % R])"
CARDS = "slow_cards = {r for r in range(R) if R > 2 and {r, (r - 1) % R} <= slow_links}"
SLOW = "r in slow_cards or products[r] > slow * min(products)"
BY_PRODUCT = "{r for r in range(R) if products[r] > slow * min(products)}"
FAR = "duration > slow * min(durations)"
NAMED = "(r, (r + 1) % R) for r in sorted(slow_links)"
SEND = "probe.message(partner, group)"
GATHER = "dist.all_gather(rows, row, group=group)"
TWO_SIDES = ("Both ranks of a link measure it, and the slower time counts: rank r's to the next "
             "rank, and the next rank's back to rank r.")
HEALTH = Proof(
    health_check,
    Stage({"wrong products and memories, slow products, slow links, ranks whose two links are "
           "slow: named on every rank, of 4, 3, 2 and 1": (),
           "one message a link, at most 3 in a row; product and memory once, one all-gather": (
               "the group of its messages is its own", "the list of partners of its messages",
               "messages, one after the other", "the list of what it calls twice")},
          _see, CASES, (4,), (ALL, *GROUPS)),
    mistakes=(
        Slip("If the ranks wait in message: both ranks of a link must call it at the same time, "
             "first for links from an even rank to the next, then for those from an odd rank.",
             (TURN, "key=lambda link: link != rank"), (TURN, "key=lambda link: link == rank")),
        Slip("Measure links that share no rank at the same time: even links first, then odd ones.",
             (TURN, "key=lambda link: link")),
        Slip("Pass `group` on to probe.message.", (SEND, "probe.message(partner)")),
        Slip("Pass `group` on to the all-gather.", (GATHER, "dist.all_gather(rows, row)")),
        Slip("A single rank has no link: there is no other rank to send to.",
             (LINKS, "n_links = R")),
        Slip("Two ranks have one link, not two.", (LINKS, "n_links = R if R > 1 else 0")),
        Slip("Two ranks have one link: measure it.", (LINKS, "n_links = R if R > 2 else 0")),
        Slip("The ring is closed: the last rank has a link to rank 0.", (LINKS, "n_links = R - 1")),
        Slip("Call memory() as well: it says whether memory is right.", (RIGHT, "is_right")),
        Slip("The first value of product() says whether the product is right: use it.",
             (RIGHT, "probe.memory()")),
        Slip("A rank is right only if both its product and its memory are right: use `and`, not "
             "`or`.",
             (RIGHT, "is_right or probe.memory()")),
        Slip(TWO_SIDES, *((SIDES, side, CARDS, cards)
                          for cards in (CARDS, f"{CARDS} | {BY_PRODUCT}")
                          for side in ("to_next[r]", "from_before[(r + 1) % R]",
                                       "max(to_next[r], from_before[r])",
                                       SIDES.replace("max", "min"),
                                       "(to_next[r] + from_before[(r + 1) % R]) / 2"))),
        Slip("If both links of a rank are slow, the rank is slow, not the links. (Rank 0 also has "
             "the last link.)", (CARDS, "slow_cards = set()"),
             (CARDS, f"slow_cards = {BY_PRODUCT}"),
             (CARDS, CARDS.replace("range(R)", "range(1, R)"))),
        Slip("One slow link does not make a rank slow: both of its links must be slow.",
             (CARDS, CARDS.replace("<= slow_links", "& slow_links"))),
        Slip("The links of a slow card are good: name the rank, not its links.",
             (" for r in sorted(slow_links)\n"
              "                   if not slow_cards & {r, (r + 1) % R}",
              " for r in sorted(slow_links)")),
        Slip("A rank is also slow if its product takes more than `slow` times as long as the "
             "fastest.",
             (SLOW, "r in slow_cards")),
        Slip("Most ranks can be slow: compare each product with the fastest one.",
             (SLOW, SLOW.replace("min(products)", "sorted(products)[(R - 1) // 2]")),
             (SLOW, SLOW.replace("min(products)", "sum(products) / R"))),
        Slip("Most links can be slow: compare each link with the fastest one.",
             (FAR, "duration > slow * sum(durations) / R"),
             (FAR, "duration > slow * sorted(durations)[n_links // 2]")),
        Slip("Name each rank once, in ascending order.",
             (f"[r for r in range(R) if {SLOW}]", "[*slow_cards] + [r for r in range(R) if "
              "products[r] > slow * min(products)]"),
             (f"[r for r in range(R) if {SLOW}]", f"[r for r in reversed(range(R)) if {SLOW}]")),
        Slip("Call product once: it returns both values.",
             ("is_right, product = probe.product()",
              "is_right, product = probe.product()[0], probe.product()[1]")),
        Slip("Send all four numbers in one all-gather.", (GATHER, f"{GATHER}\n    {GATHER}")),
        Slip("Use the argument `slow` for both products and links.",
             (FAR, "duration > 3.0 * min(durations)"),
             (SLOW, SLOW.replace("slow * min", "3.0 * min"))),
        Slip("A link is (rank, next rank): for the last rank it is (R-1, 0).",
             (NAMED, NAMED.replace("(r + 1) % R)", "r + 1)")),
             (NAMED, NAMED.replace("(r, (r + 1) % R)", "((r + 1) % R, r)"))),
        Slip("All ranks must evaluate the whole table: here each one names only what it measured "
             "itself.",
             ("return Health([r for r in range(R) if not right[r]]",
              "return Health([r for r in [rank] if not right[r]]")),
        Slip("Return Health(wrong, slow, links): `wrong` lists the ranks that are not right.",
             ("if not right[r]]", "if right[r]]")),
    ), hints=(
        "The ring has R links, and each rank talks to one other rank at a time. Which links can be "
        "measured at the same time?",
        "Measure even links, then odd ones; in an odd ring, rank 0 has two even ones. Then "
        "all-gather four numbers at once: right?, and the seconds of the product, the link to the "
        "next rank, and the link to the previous rank. All ranks evaluate the same table.",
        "for link in sorted((rank, before), key=lambda link: link % 2): probe.message(partner, "
        "group), but two ranks have only link 0. A link is bad above slow * min(links); a rank "
        "between two bad links is itself slow",
    ))
