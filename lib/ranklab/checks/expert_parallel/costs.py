"""The checks of moe_traffic, place_experts and chunked_scan."""

from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ranklab.checks.beside import beside, expect, on_groups, refused
from ranklab.checks.handles import Waits
from ranklab.checks.trial import explain
from ranklab.engine import device
from ranklab.engine.report import count_ranks
from ranklab.expert_parallel import place_experts, placement_score, scan
from ranklab.expert_parallel.place import score_of


def check_moe_traffic(moe_traffic):
    for R, E, row in ((4, 8, 16), (3, 3, 100), (1, 4, 8), (2, 12, 2)):
        counts = torch.randint(50, (R, E), generator=torch.Generator().manual_seed(R))
        counts = counts.T.contiguous().T  # perhaps a view: nothing is said of how it lies
        given, there = counts.T.clone().T, torch.zeros(R, R, dtype=torch.long)
        for r in range(R):
            for e in range(E):
                there[r, e * R // E] += int(counts[r, e]) * row
        away = there - torch.diag(there.diag())
        right = 2 * (away + away.T)
        where = f"{count_ranks(R)}, {E} experts, {row} bytes a row"
        explain(where, moe_traffic(given, row), right, {
            "with what stays": (2 * (there + there.T), "A row for an expert of its own rank is not "
                                "sent."),
            "forward alone": (right // 2, "In backward the gradient of each row takes the way "
                              "back."),
            "the way there alone": (away, "A row comes back, and in backward its gradient goes "
                                    "both ways, too."),
            "four times the way there": (4 * away, "What went from r to s comes back from s to r: "
                                         "the matrix turned round."),
            "rows, not bytes": (right // row, "Times row_bytes."),
            "what ranks get": (2 * away.T, "Row r is what rank r sends, there and back."),
        }, "Add up each rank's counts over the experts of each rank, then there and back, twice.")
        expect(torch.equal(given, counts), f"{where}: `counts` is changed", "Work on a copy.")
    yield "bytes from each rank to each other one, there and back, forward and backward"
    refused("6 experts on 4 ranks", partial(moe_traffic, torch.ones(4, 6).long(), 8))()
    yield "ranks that do not divide the experts are a ValueError"


# --- place_experts --------------------------------------------------------------------------------

MOST, CROSSED = 1.1, 0.95  # times the mean load; times what experts in order of load must reach


def trace(seed, n_experts=32, k=4, tokens=4096):
    """(N, k): each token has a topic, whose experts it chooses, and one expert is good for all."""
    random = torch.Generator().manual_seed(seed)
    topic = torch.multinomial(1 / torch.arange(1, 9).float(), tokens, True, generator=random)
    wants = 0.25 * torch.rand(8, n_experts, generator=random) ** 4 + 0.002
    favourites = torch.randperm(n_experts, generator=random).view(8, -1)
    wants.scatter_add_(1, favourites, 0.3 + torch.rand(favourites.shape, generator=random))
    wants[:, favourites[0, 0]] += 1
    return torch.multinomial(wants[topic], k, generator=random)


def by_load(chosen, n_experts, ranks, slots, per_node):
    """Experts dealt to the ranks in the order of their loads; the heaviest ones twice."""
    order = chosen.flatten().bincount(minlength=n_experts).argsort(descending=True).tolist()
    order = order + order[: ranks * slots - n_experts]
    return [order[rank::ranks] for rank in range(ranks)]


def check_place_experts(place):
    cases = [(seed, 32, 8, 5, 4) for seed in range(3)] + [(3, 32, 8, 4, 4), (4, 16, 4, 6, 2),
                                                          (5, 8, 1, 8, 1)]
    seen = []
    for seed, E, R, slots, per_node in cases:
        chosen = trace(seed, E, k=min(4, E // 4))
        given = chosen.clone()
        where = f"trace {seed}: {E} experts, {R} ranks with {slots} slots, {per_node} to a node"
        plan = place(given, E, R, slots, per_node)
        _is_plan(where, plan, E, R, slots)
        expect(torch.equal(given, chosen), f"{where}: `chosen` is changed", "Work on a copy.")
        score = placement_score(plan, chosen, E, per_node)
        library, dealt = (score_of(each, chosen, E, R, slots, per_node)
                          for each in (place_experts, by_load))
        most = MOST if R * slots > E else MOST * library[0]
        expect(score[0] <= most, f"{where}: the fullest rank has {score[0]:.2f} times the mean "
               f"load, more than {most:.2f}", "An expert with more than a rank's share needs "
               "copies: give each free slot to the expert whose copies have the highest load. Then "
               "place the heaviest first, each on the emptiest rank.")
        is_free = R not in (per_node, E // slots)  # several nodes, and slots for copies
        expect(score[1] <= CROSSED * dealt[1] or not is_free, f"{where}: a token must reach "
               f"{score[1]:.2f} other nodes, more than {CROSSED} times the {dealt[1]:.2f} of "
               "experts that are dealt by load", "Experts that are often chosen together belong on "
               "one node. Choose the node first, by how often its experts are chosen with this "
               "one.")
        seen.append((score, library, dealt))
    yield f"each expert stands somewhere; the fullest rank has at most {MOST} times the mean load"
    yield f"other nodes that a token must reach: at most {CROSSED} times as many as dealt by load"
    refused("8 experts in 6 slots", partial(place, trace(1, 8, 2), 8, 2, 3, 1))()
    yield "fewer slots than experts are a ValueError"
    for (score, library, dealt), (seed, *_) in list(zip(seen, cases))[:3]:
        yield (f"trace {seed}: fullest {score[0]:.3f} times the mean (library {library[0]:.3f}, "
               f"dealt by load {dealt[0]:.3f}); other nodes {score[1]:.2f} (library "
               f"{library[1]:.2f}, dealt {dealt[1]:.2f})")


def _is_plan(where, plan, E, R, slots):
    expect(isinstance(plan, list) and [len(each) for each in plan] == [slots] * R,
           f"{where}: not {R} lists of {slots}", "A list of experts for each rank; all slots are "
           "filled.")
    placed = [e for each in plan for e in each]
    expect(set(placed) <= set(range(E)), f"{where}: {sorted(set(placed) - set(range(E)))[:3]} are "
           "no experts", f"Whole numbers from 0 to {E - 1}.")
    missing = sorted(set(range(E)) - set(placed))
    expect(not missing, f"{where}: experts {missing[:6]} stand nowhere", "Each expert at least "
           "once, whatever its load.")


# --- chunked_scan ---------------------------------------------------------------------------------

B, T, C = 2, 96, 3
CAME = ("h is the scan of this part, and a[0] ... a[t] times the state that came. Send the last h "
        "with that share in it. a may be 0 or less: it has no logarithm.")
AFTER = 20  # operations that may follow when the state has come: a scan of 24 tokens takes more
TYPES = torch.float32, torch.float64  # of a and b


class Over(Waits):
    """Inside, counts the handles that were waited for."""

    @property
    def count(self):
        return len(self._over)


class AfterReceive(TorchDispatchMode):
    """Inside, counts the operations since the last receive was over; `over` is an Over."""

    def __init__(self, over):
        super().__init__()
        self.over, self.before, self.count = over, None, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "recv" in str(func):
            self.before, self.count = self.over.count, 0
        elif self.before is not None and self.over.count > self.before:
            self.count += 1
        return func(*args, **(kwargs or {}))


def _scan(chunked_scan, ranks):
    at, seen = ranks.at(T).cpu(), []

    def given(turn):
        random = torch.Generator().manual_seed(turn)
        a, b = (2 * torch.rand(B, T, C, generator=random, dtype=TYPES[turn]) - 1 for _ in range(2))
        a = a.sign() * (1 - 0.2 * a.abs())  # so that the state counts at the end of a part, too
        a[0, 3] = 0  # nothing is left of what was before
        return a, b

    def call(turn):
        a, b = (x[:, at].to(device()) for x in given(turn))
        with Over() as over, AfterReceive(over) as after:
            h = chunked_scan(a, b, **ranks.keywords)
        seen.append(after.count if ranks.index else 0)
        return {"h": h, "a": a, "b": b}

    def right(turn):
        a, b = given(turn)
        parts = torch.arange(T).tensor_split(ranks.size)
        return {name: [x[:, part] for part in parts]
                for name, x in (("h", scan(a, b)), ("a", a), ("b", b))}

    def slips(name, turn):
        if name != "h":
            return {}
        a, b = given(turn)
        whole, alone = scan(a, b), scan(a[:, at], b[:, at])
        before = whole[:, at[0] - 1][:, None] if at[0] else 0 * alone
        last = a[:, at].cumprod(1)
        return {"a scan of this part alone": (alone, "What came before counts, too: add the "
                                              "previous rank's state."),
                "the state before, without its decay": (alone + before, "Each step multiplies by "
                                                        "a: the share shrinks with a's product."),
                "as if it decayed once": (alone + before * a[:, at], "After t steps the product "
                                          "of all a up to t: cumprod."),
                "one step of decay too few": (alone + before * last / a[:, at], "The first token "
                                              "of a part multiplies by its a, too.")}

    messages = (ranks.index > 0) + (ranks.index < ranks.size - 1)  # a recv and a send
    yield from beside(str(ranks), ranks, call, right, slips=slips, advice=lambda name:
                      "It is an argument: work on a copy." if name != "h" else CAME, sends=(
                          messages, 4 * B * C * messages))
    yield partial(expect, seen[0] <= AFTER, f"{ranks}: {seen[0]} operations run after the state "
                  f"has come, more than {AFTER}", "Scan your own part first; the state only adds "
                  "its share: h + decay * before.")


def check_chunked_scan(chunked_scan):
    on_groups(_scan, chunked_scan)
    yield "the states of one process, on 1, 2, 3 and 4 ranks, in the type of b"
    yield ("one message of a state from each rank but the last; each rank scans its own part "
           "before that")
