"""The check of health_check: a probe whose seconds are given, so that no clock decides."""

from functools import partial

import torch
import torch.distributed as dist

from ranklab.checks.beside import GROUP, expect, on_groups
from ranklab.checks.failures import LEFT, STUCK
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.resilience.health import Health

MEET = ("Both ranks of a link must call message at the same time: first on links from even ranks "
        "to the next, then on those from odd ranks. In an odd ring rank 0 has two even links.")
FAILURES = {"RuntimeError: .*invalid output tensor list.*": GROUP, STUCK: MEET,
            LEFT: f"{MEET} And all ranks must call the collectives.",
            "RuntimeError: .*Pair is not connected.*": "A single rank has no link: there is "
            "nobody to send to."}
LINK = ("A link is (rank, the next one), (R-1, 0) for the last rank. It is as slow as the slower "
        "of its two measurements.")
CARD = ("If both links of a rank are slow (rank 0 has the last link, too), the rank is slow, not "
        "the links. Name each rank once, in order.")


class Given:
    """A probe of a machine with these faults: it really sends, but its seconds are given."""

    def __init__(self, ranks, slow=None, products=(), memories=(), links=None):
        """{rank: product's factor}, wrong products and memories, {(rank, partner): factor}"""
        self.ranks, self.slow, self.links = ranks, slow or {}, links or {}
        self.products, self.memories = products, memories
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
    """(name, faults, what is not well, hint) of each case that is possible with R ranks."""
    last, others = R - 1, [*range(1, R)]
    for least, name, faults, right, hint in (
        (1, "all are well", {}, {}, "A little slower is not slow: `slow` times the fastest is."),
        (1, "a wrong product", {"products": [last]}, {"wrong": [last]}, "The first value "
         "of product() says whether it is right."),
        (1, "a wrong memory", {"memories": [0]}, {"wrong": [0]}, "memory() says whether memory "
         "is right: call it, too."),
        (2, "a slow product", {"slow": {last: 5.0}}, {"slow": [last]}, "A product is slow if it "
         "takes more than `slow` times as long as the fastest."),
        (2, "two faults on one rank", {"slow": {0: 9.0}, "products": [0]}, {"wrong": [0],
         "slow": [0]}, "This rank is wrong and slow."),
        (3, "all products slow but one", {"slow": dict.fromkeys(others, 5.0)}, {"slow": others},
         "Compare with the fastest: most of them may be slow."),
        (3, "a slow link to rank 0", {"links": {(last, 0): 4.0}}, {"links": [(last, 0)]}, LINK),
        (3, "a slow link from rank 0", {"links": {(0, last): 4.0}}, {"links": [(last, 0)]}, LINK),
        *((3, f"both links of rank {r} slow", {"links": {(r, (r + 1) % R): 8.0, (r, (r - 1) % R):
           9.0}, "slow": {0: 5.0}}, {"slow": sorted({0, r})}, CARD) for r in (1, 0)),
        (4, "two links slow, apart", {"links": {(1, 0): 9.0, (2, 3): 7.0}},
         {"links": [(0, 1), (2, 3)]}, "These links share no rank, so no rank is to blame."),
    ):
        if R >= least:
            yield name, faults, Health(**{"wrong": [], "slow": [], "links": []} | right), hint
    if R == 2:
        yield ("its one link 9 times as slow", {"links": {(0, 1): 9.0}}, Health([], [], []), "Two "
               "ranks have one link, so there is no faster one.")


def _trial(health_check, ranks):
    for case, faults, right, hint in _cases(ranks.size):
        yield _look_at(health_check, ranks, case, faults, right, hint)
    faults = {"slow": {0: 5.0}, "links": {(ranks.size - 1, 0): 8.0}}
    yield _look_at(health_check, ranks, "slow=10", faults, ([], [], []), "`slow` is an argument.",
                   slow=10.0)


def _look_at(health_check, ranks, case, faults, right, hint, **more):
    probe = Given(ranks, **faults)
    with Traffic() as traffic:
        found = health_check(probe, **more, **ranks.keywords)
    calls = probe.calls + [op.name for op in traffic.ops if op.name not in ("send", "recv")]
    return partial(_look, f"{ranks}, {case}", found, right, hint, probe, calls)


def _look(where, found, right, hint, probe, calls):
    rank, R = probe.ranks.index, probe.ranks.size
    neighbours = {(rank + 1) % R, (rank - 1) % R} - {rank}
    expect(probe.is_in_group, f"{where}: message gets another group", GROUP)
    expect(len(probe.partners) == len(neighbours) and {*probe.partners} == neighbours,
           f"{where}: it has messages with {probe.partners}, not with {sorted(neighbours)}", "One "
           "message for each link of the ring; two ranks have one link, one has none.")
    expect(probe.depth <= 3, f"{where}: {probe.depth} messages come one after the other; 3 are "
           "enough", f"Measure links without a common rank at the same time. {MEET}")
    twice = sorted({name for name in calls if calls.count(name) > 1})
    expect(not twice, f"{where}: {', '.join(twice)} more than once", "Call product and memory "
           "once on each rank, then send all four numbers in one all-gather.")
    expect(isinstance(found, tuple) and len(found) == 3, f"{where}: it returns {found!r}",
           "Return Health(wrong, slow, links), three lists.")
    for name, got, due in zip(Health._fields, found, right):
        expect(got == due, f"{where}: {name} is {got}, not {due}", hint)


def check_health_check(health_check):
    # Two ranks are looked at in a group only: what is wrong there need not be the group.
    on_groups(_trial, health_check, failures=FAILURES, group_hint="")
    yield "wrong products and memories, slow products, the slow link: named on every rank"
    yield "a rank with two slow links is slow itself; a link measured slow on one side is slow"
    yield "one message a link, at most 3 in a row; on 4, 3, 2 and 1 ranks"
