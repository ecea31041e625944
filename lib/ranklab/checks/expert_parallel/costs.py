"""moe_traffic, and the open exercise place_experts, which has a score."""

from functools import partial
from typing import NamedTuple

import torch

from ranklab.checks.exercise import Exercise
from ranklab.checks.expert_parallel.inputs import error_of
from ranklab.checks.looks import expect, refused
from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.engine.report import count_ranks
from ranklab.expert_parallel import moe_traffic, place_experts, placement_score
from ranklab.expert_parallel.place import score_of

# --- moe_traffic ----------------------------------------------------------------------------------

class Rows(NamedTuple):
    ranks: int
    n_experts: int
    row_bytes: int
    dtype: str = "int64"

    def __str__(self):
        return (f"{count_ranks(self.ranks)}, {self.n_experts} experts, {self.row_bytes} bytes a "
                f"row, counts in {self.dtype}")

    def counts(self):
        """Return a view: the memory layout is not specified."""
        random = torch.Generator().manual_seed(self.ranks)
        counts = torch.randint(50, (self.n_experts, self.ranks), generator=random)
        return counts.to(getattr(torch, self.dtype)).T


def _see_traffic(fn, case):
    counts = case.counts()
    yield {"the result": fn(counts, case.row_bytes), "`counts` afterwards": counts}


def _see_refusal(fn, case):
    yield {"the error": error_of(lambda: fn(case.counts(), case.row_bytes))}


def row_by_row(counts, row_bytes):
    R, E = counts.shape
    if E % R:
        raise ValueError(f"{R} ranks, {E} experts")
    sent = torch.zeros(R, R, dtype=torch.long)
    for r in range(R):
        for e in range(E):
            s = e * R // E
            if s != r:
                for source, target in ((r, s), (s, r), (r, s), (s, r)):  # back: the gradients
                    sent[source, target] += int(counts[r, e]) * row_bytes
    return sent


ROWS = "counts.unflatten(1, (R, -1)).sum(-1)"
OFF, BYTES = "rows = rows - torch.diag(rows.diag())", "2 * row_bytes * (rows + rows.T)"
TRAFFIC = Proof(
    moe_traffic,
    Stage("bytes from each rank to every other rank, there and back, forward and backward",
          _see_traffic, tuple(Rows(*each) for each in (
              (4, 8, 16), (3, 3, 100), (1, 4, 8), (2, 12, 2),
              (4, 8, 2**26 + 1, "int32"))), oracle=row_by_row),
    Stage("ranks that do not divide the experts are a ValueError", _see_refusal, (Rows(4, 6, 8),),
          oracle=row_by_row),
    mistakes=(
        Slip("A row whose expert is on its own rank is not sent.", (OFF, "pass")),
        Slip("In backward, the gradient of each row travels the reverse way, which doubles the "
             "bytes.",
             (BYTES, BYTES.replace("2 * ", ""))),
        Slip("This counts only the way there. Each row also comes back, and in backward its "
             "gradient goes both ways.", (BYTES, "row_bytes * rows")),
        Slip("This counts only the way there, in forward and backward. Each row also comes back.",
             (BYTES, "2 * row_bytes * rows")),
        Slip("What went from r to s comes back from s to r: that is the transposed matrix, rows.T.",
             (BYTES, "4 * row_bytes * rows")),
        Slip("These are rows, not bytes: multiply by row_bytes.", (BYTES, "2 * (rows + rows.T)")),
        Slip("Row r is what rank r sends, there and back. This is what it receives on the way "
             "there.",
             (BYTES, "2 * row_bytes * rows.T"), (BYTES, "row_bytes * rows.T"),
             (BYTES, "4 * row_bytes * rows.T")),
        Slip("Rank 0 has the first E/R experts, and rank 1 the next E/R: they are not dealt out in "
             "turn.",
             (ROWS, "counts.unflatten(1, (-1, R)).sum(1)")),
        Slip("`counts` may be a non-contiguous view, and view() fails on those: use unflatten or "
             "reshape.", (ROWS, "counts.view(R * R, -1).sum(-1).view(R, R)")),
        Slip("Sum over the experts of each rank, not over the ranks.",
             (ROWS, "counts.unflatten(1, (R, -1)).sum(0).sum(-1).repeat(R, 1)")),
        Slip("Bytes are whole numbers: use int64.", (BYTES, "2.0 * row_bytes * (rows + rows.T)")),
        Slip("int32 ends at 2**31, and bytes soon get there: sum in int64.",
             (ROWS, ROWS.replace("sum(-1)", "sum(-1, dtype=counts.dtype)"))),
        Slip("float32 has only 24 bits of precision, and byte counts need more: use whole numbers, "
             "in int64.",
             (ROWS, ROWS.replace("counts", "counts.float()"), f"return {BYTES}",
              f"return ({BYTES}).long()")),
        Slip("This is a sum. Return what each rank sends to each rank, (R, R).",
             (BYTES, f"({BYTES}).sum()"), (BYTES, f"({BYTES}).sum(1)")),
        Slip("`counts` is an argument: work on a copy.",
             (OFF, f"{OFF}\n    counts *= 0"), (OFF, f"{OFF}\n    counts.fill_diagonal_(0)")),
        Slip("Raise ValueError if the number of ranks does not divide the experts.",
             ("    if E % R:", "    if False:"),
             ("    if E % R:", "    if E < R:"), ("raise ValueError(", "raise RuntimeError(")),
    ), hints=(
        "Which rank has expert e, and which way does a row's gradient travel in backward?",
        "rows[r, s] is counts[r] summed over the experts of rank s, with zeros where r equals s.",
        "rows = counts.unflatten(1, (R, -1)).sum(-1), without its diagonal; 2 * row_bytes * "
        "(rows + rows.T)",
    ))


# --- place_experts --------------------------------------------------------------------------------

MOST, CROSSED = 1.1, 0.95  # times the mean load; times what experts in order of load must reach
COPIES = ("An expert with more than a rank's share needs copies: give each free slot to the expert "
          "whose copies have the highest load. Then place experts heaviest first, each on the "
          "emptiest rank.")
TOGETHER = ("Experts that are often chosen together belong on one node. Choose the node first, by "
            "how often its experts are chosen with this one.")
LISTS = "Return a list of experts for each rank, with all slots filled."
AT_LEAST = "Place each expert at least once, whatever its load."


def trace(seed, n_experts=32, k=4, tokens=4096):
    """Draw the experts that each token chooses, (N, k).

    Each token has a topic, whose experts it chooses; one expert suits all topics.
    """
    random = torch.Generator().manual_seed(seed)
    topic = torch.multinomial(1 / torch.arange(1, 9).float(), tokens, True, generator=random)
    wants = 0.25 * torch.rand(8, n_experts, generator=random) ** 4 + 0.002
    favourites = torch.randperm(n_experts, generator=random).view(8, -1)
    wants.scatter_add_(1, favourites, 0.3 + torch.rand(favourites.shape, generator=random))
    wants[:, favourites[0, 0]] += 1
    return torch.multinomial(wants[topic], k, generator=random)


def by_load(chosen, n_experts, ranks, slots, per_node):
    """Deal the experts to the ranks in order of load, the most loaded ones twice."""
    order = chosen.flatten().bincount(minlength=n_experts).argsort(descending=True).tolist()
    order = order + order[: ranks * slots - n_experts]
    return [order[rank::ranks] for rank in range(ranks)]


def check_place_experts(place):
    cases = [(seed, 32, 8, 5, 4) for seed in range(3)] + [(3, 32, 8, 4, 4), (4, 16, 4, 6, 2),
                                                          (5, 8, 1, 8, 1)]
    scores = []
    for seed, E, R, slots, per_node in cases:
        chosen = trace(seed, E, k=min(4, E // 4))
        clone = chosen.clone()
        where = f"trace {seed}: {E} experts, {R} ranks with {slots} slots, {per_node} to a node"
        plan = place(clone, E, R, slots, per_node)
        _is_plan(where, plan, E, R, slots)
        expect(torch.equal(clone, chosen), f"{where}: `chosen` is changed", "Work on a copy.")
        score = placement_score(plan, chosen, E, per_node)
        library, dealt = (score_of(each, chosen, E, R, slots, per_node)
                          for each in (place_experts, by_load))
        most = MOST if R * slots > E else MOST * library[0]
        expect(score[0] <= most, f"{where}: the fullest rank has {score[0]:.2f} times the mean "
               f"load, more than {most:.2f}", COPIES)
        is_free = R not in (per_node, E // slots)  # several nodes, and slots for copies
        expect(score[1] <= CROSSED * dealt[1] or not is_free, f"{where}: a token must reach "
               f"{score[1]:.2f} other nodes, more than {CROSSED} times the {dealt[1]:.2f} of "
               "experts that are dealt by load", TOGETHER)
        scores.append((score, library, dealt))
    yield (f"each expert is placed somewhere; the fullest rank has at most {MOST} times the mean "
           "load")
    yield (f"other nodes that a token must reach: at most {CROSSED} times as many as when dealt "
           "by load")
    refused("8 experts in 6 slots", partial(place, trace(1, 8, 2), 8, 2, 3, 1))()
    yield "fewer slots than experts are a ValueError"
    for (score, library, dealt), (seed, *_) in list(zip(scores, cases))[:3]:
        yield (f"trace {seed}: fullest {score[0]:.3f} times the mean (library {library[0]:.3f}, "
               f"dealt by load {dealt[0]:.3f}); other nodes {score[1]:.2f} (library "
               f"{library[1]:.2f}, dealt {dealt[1]:.2f})")


def _is_plan(where, plan, E, R, slots):
    expect(isinstance(plan, list) and len(plan) == R and all(
        hasattr(each, "__len__") and len(each) == slots for each in plan),
           f"{where}: not {R} lists of {slots}", LISTS)
    placed = [e for each in plan for e in each]
    expect(set(placed) <= set(range(E)), f"{where}: {sorted(set(placed) - set(range(E)))[:3]} are "
                                         "not experts",
           f"An expert is a whole number from 0 to {E - 1}.")
    missing = sorted(set(range(E)) - set(placed))
    expect(not missing, f"{where}: experts {missing[:6]} are not placed anywhere", AT_LEAST)


NEEDY, SLACK = "(loads / copies).argmax()", "slack=0.08 *"
PLAN = "[rank for node in nodes for rank in pack(node, per_node, slots, slack=0)]"
PLACE = Exercise(
    place_experts, check_place_experts, mistakes=(
        Slip(COPIES, (NEEDY, "0"), (NEEDY, "loads.argmax()"), ("-share[e])", "share[e])"),
             (SLACK, "slack=9.0 *")),
        Slip(TOGETHER, (SLACK, "slack=1e-9 *",  # copies of one expert stand on one node
                        "e not in placed[b]", "(e in placed[b]) == bool(slack)")),
        Slip(AT_LEAST, ("[e for e in", "[e or 1 for e in")),
        Slip(LISTS, (PLAN, f"torch.tensor({PLAN})")),
    ), hints=(
        "What can be done with an expert whose load alone is more than a rank's share?",
        "First make copies: each free slot goes to the expert whose copies have the highest load. "
        "Then fill nodes, then each node's ranks, always heaviest expert first.",
        "Among the nearly emptiest nodes, take the one whose experts are chosen together with this "
        "one most often. With m = one_hot(chosen).sum(1), m.T @ m counts that.",
    ))
