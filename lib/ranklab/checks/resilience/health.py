"""The check of health_check: a probe whose seconds are given, so that no clock decides."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import GROUP, expect, on_groups
from ranklab.checks.failures import LEFT, STUCK
from ranklab.engine import device
from ranklab.meter import Traffic

MEET = ("Both ranks of a link must call message for it at the same time: first the links from even "
        "ranks to the next, then those from odd ranks. In an odd ring rank 0 has two even ones.")
FAILURES = {"RuntimeError: .*invalid output tensor list.*": GROUP, STUCK: MEET,
            LEFT: f"{MEET} And all ranks call the collectives.",
            "RuntimeError: .*Pair is not connected.*": "One rank has no link: there is nobody to "
            "send to."}
# name: ({rank: product's factor}, wrong products, wrong memories, {(rank, partner): factor})
WELL = {}, (), (), {}


class Given:
    """A probe of a machine with these faults: it sends, and says what the seconds were."""

    def __init__(self, ranks, faults):
        self.ranks, (self.slow, self.products, self.memories, self.links) = ranks, faults
        self.depth, self.partners, self.is_in_group, self.calls = 0, [], True, []

    def product(self):
        self.calls.append("product")
        return self.ranks.index not in self.products, 0.01 * self.slow.get(self.ranks.index, 1)

    def memory(self):
        self.calls.append("memory")
        return self.ranks.index not in self.memories

    def message(self, partner, group=None):
        """`depth`: how many messages came one after the other, up to this one."""
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
        factor = self.links.get((self.ranks.index, partner), 1 + 0.05 * self.ranks.index)
        return 0.002 * factor


def _cases(R):
    """{name: (faults, (wrong, slow, links), hint)}"""
    last = R - 1
    cases = {
        "all are well": (WELL, ([], [], []), "A little slower is not slow: `slow` times."),
        "a wrong product": (({}, (last,), (), {}), ([last], [], []), "product() says first whether "
                            "it is right."),
        "a wrong memory": (({}, (), (0,), {}), ([0], [], []), "memory() says whether it is right: "
                           "ask it, too."),
    }
    if R > 1:
        cases["a slow product"] = (({last: 5.0}, (), (), {}), ([], [last], []), "Its seconds, more "
                                   "than `slow` times the fastest.")
        cases["two faults on one rank"] = (({0: 9.0}, (0,), (), {}), ([0], [0], []), "It is wrong "
                                           "and slow.")
    if R == 2:
        one = {(0, 1): 9.0}, ([], [], []), "Two ranks have one link: no other is faster."
        return cases | {"its one link 9 times as slow": (({}, (), (), one[0]), *one[1:])}
    if R > 2:
        one_side, other_side = {(last, 0): 4.0}, {(0, last): 4.0}
        for name, slow in (("to", one_side), ("from", other_side)):
            cases[f"a slow link {name} rank 0"] = (
                ({}, (), (), slow), ([], [], [(last, 0)]), "A link is (rank, the next one), of the "
                "last rank (R-1, 0); as slow as the slower of its two measurements.")
        for card in (1, 0):
            links = {(card, (card + 1) % R): 8.0, (card, (card - 1) % R): 9.0}
            cases[f"both links of rank {card} slow"] = (
                ({}, (), (), links), ([], [card], []), "Both links of one rank are slow: it is the "
                "rank, not the links. Rank 0 has the last one, too.")
        slow = {r: 5.0 for r in range(1, R)}
        cases["all products slow but one"] = ((slow, (), (), {}), ([], [*slow], []), "Compare with "
                                              "the fastest: most of them may be slow.")
    if R > 3:
        cases["two links slow, apart"] = (({}, (), (), {(1, 0): 9.0, (2, 3): 7.0}),
                                          ([], [], [(0, 1), (2, 3)]), "They share no rank.")
    return cases


def _trial(health_check, ranks):
    neighbours = {(ranks.index + 1) % ranks.size, (ranks.index - 1) % ranks.size} - {ranks.index}
    for case, (faults, right, hint) in _cases(ranks.size).items():
        probe = Given(ranks, faults)
        with Traffic() as traffic:
            found = health_check(probe, **ranks.keywords)
        calls = probe.calls + [op.name for op in traffic.ops if op.name not in ("send", "recv")]
        yield partial(_once, f"{ranks}, {case}", calls)
        yield partial(_look, f"{ranks}, {case}", found, right, hint, probe, neighbours)
    probe = Given(ranks, ({0: 5.0}, (), (), {(ranks.size - 1, 0): 8.0}))
    found = health_check(probe, slow=10.0, **ranks.keywords)
    yield partial(_look, f"{ranks}, slow=10", found, ([], [], []), "`slow` is an argument.", probe,
                  neighbours)


def _once(where, calls):
    twice = sorted({name for name in calls if calls.count(name) > 1})
    expect(not twice, f"{where}: {', '.join(twice)} more than once", "product and memory once a "
           "rank; then all four numbers in one all-gather.")


def _look(where, found, right, hint, probe, neighbours):
    expect(probe.is_in_group, f"{where}: message gets another group", GROUP)
    expect(len(probe.partners) == len(neighbours) and {*probe.partners} == neighbours,
           f"{where}: it has messages with {probe.partners}, not with {sorted(neighbours)}", "One "
           "message for each link of the ring; two ranks have one link, one has none.")
    expect(probe.depth <= 3, f"{where}: {probe.depth} messages come one after the other; 3 are "
           "enough", f"Links without a common rank are measured at the same time. {MEET}")
    expect(isinstance(found, tuple) and len(found) == 3, f"{where}: it returns {found!r}",
           "Return Health(wrong, slow, links), of lists.")
    for name, got, due in zip(("wrong", "slow", "links"), found, right):
        expect(got == due, f"{where}: {name} is {got}, not {due}", hint)


def check_health_check(health_check):
    on_groups(_trial, health_check, failures=FAILURES)
    yield "wrong products and memories, slow products, the slow link: named on every rank"
    yield "a rank with two slow links is slow itself; a link measured slow on one side is slow"
    yield "one message a link, at most 3 after one another; on 4, 3, 2 and 1 ranks"
