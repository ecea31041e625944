"""The exercises and predictions of lab 11, in the order of the lab.

    route.py    top_k_route, capacity, load_balance_loss: in this process
    ties.py     sorts that are not stable, on every machine
    inputs.py   what several of them use
"""

from ranklab import expert_parallel as ep
from ranklab.checks.exercise import Exercise
from ranklab.checks.expert_parallel.costs import (
    check_chunked_scan, check_moe_traffic, check_place_experts,
)
from ranklab.checks.expert_parallel.dispatch import check_combine_tokens, check_dispatch_tokens
from ranklab.checks.expert_parallel.gradients import check_expert_gradients
from ranklab.checks.expert_parallel.predictions import PREDICTIONS
from ranklab.checks.expert_parallel.route import CAPACITY, LOAD_BALANCE, ROUTE

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    ROUTE, CAPACITY,
    Exercise(ep.dispatch_tokens, check_dispatch_tokens, hints=(
        "In which order must rows lie, so that one all-to-all can send them? And in which order "
        "do they come?",
        "Sort all choices by expert: experts of one rank are neighbours. Send the counts for each "
        "expert first, by an all-to-all of their own. Then each rank knows what comes.",
        "received = empty_like(counts); dist.all_to_all_single(received, counts, group=group); "
        "to, came = (c.view(R, -1).sum(1).tolist() for c in (counts, received)); expert = "
        "arange(E // R).repeat(R).repeat_interleave(received); by_expert = its stable argsort",
    )),
    Exercise(ep.combine_tokens, check_combine_tokens, hints=(
        "Undo everything that dispatch_tokens did, the last step first.",
        "Undo the sorting by expert. Then an all-to-all with `to` and `came` exchanged. Row i that "
        "comes home belongs to place sent.order[i] of the choices.",
        "rows[sent.by_expert.argsort()]; AllToAll.apply(arrivals, sent.came, sent.to, group); zeros"
        ".index_add(0, sent.order // k, outputs * weights.flatten()[sent.order, None])",
    )),
    LOAD_BALANCE,
    Exercise(ep.expert_gradients, check_expert_gradients, hints=(
        "Whose tokens has an expert of this rank met in its backward?",
        "Those of all ranks that can send to it. So only the tokens that other ranks with the same "
        "expert have met are missing. The loss is a mean over the tokens of all ranks.",
        "for p in shared: all_reduce over group; for p in experts: all_reduce over own; both after "
        "p.grad /= dist.get_world_size(group)",
    )),
    Exercise(ep.moe_traffic, check_moe_traffic, hints=(
        "Which rank has expert e, and which way does a row take in backward?",
        "rows[r, s]: counts[r] added up over the experts of rank s, with zeros where r is s.",
        "rows = counts.unflatten(1, (R, -1)).sum(-1), without its diagonal; 2 * row_bytes * "
        "(rows + rows.T)",
    )),
    Exercise(ep.place_experts, check_place_experts, hints=(
        "What can be done with an expert whose load alone is more than a rank's share?",
        "First the copies: each free slot goes to the expert whose copies have the highest load. "
        "Then nodes, then the ranks of a node; always the heaviest first.",
        "Of the nodes that are nearly as empty, take the one whose experts are chosen together "
        "with this one most often: one_hot(chosen).sum(1), and its transpose times itself, counts "
        "that.",
    )),
    Exercise(ep.chunked_scan, check_chunked_scan, hints=(
        "How much of the state before the part is left at its first, second, t-th token?",
        "a[0] a[1] ... a[t] of it. So the rank can scan its own part at once, and add that share "
        "when the state comes.",
        "h, decay = scan(a, b), a.cumprod(1); recv from rank - 1; h + decay * before[:, None]; "
        "send h[:, -1] to rank + 1",
    )),
)
