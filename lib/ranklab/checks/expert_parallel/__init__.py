"""The exercises and predictions of lab 11, in the order of the lab.

    inputs.py     tokens of all ranks, the way of each row, and what a call may cost
    ties.py       sorts that are not stable, on every machine
    route.py      top_k_route, capacity, load_balance_loss
    dispatch.py   dispatch_tokens, combine_tokens
    gradients.py  expert_gradients
    costs.py      moe_traffic; place_experts, which is open and has a score
    scan.py       chunked_scan
"""

from ranklab import expert_parallel as ep
from ranklab.checks.exercise import Exercise
from ranklab.checks.expert_parallel.costs import TRAFFIC, check_place_experts
from ranklab.checks.expert_parallel.dispatch import COMBINE, DISPATCH
from ranklab.checks.expert_parallel.gradients import GRADIENTS
from ranklab.checks.expert_parallel.predictions import PREDICTIONS
from ranklab.checks.expert_parallel.route import CAPACITY, LOAD_BALANCE, ROUTE
from ranklab.checks.expert_parallel.scan import SCAN

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    ROUTE, CAPACITY, DISPATCH, COMBINE, LOAD_BALANCE, GRADIENTS, TRAFFIC,
    Exercise(ep.place_experts, check_place_experts, hints=(
        "What can be done with an expert whose load alone is more than a rank's share?",
        "First the copies: each free slot goes to the expert whose copies have the highest load. "
        "Then nodes, then the ranks of a node; always the heaviest first.",
        "Of the nodes that are nearly as empty, take the one whose experts are chosen together "
        "with this one most often: one_hot(chosen).sum(1), and its transpose times itself, counts "
        "that.",
    )),
    SCAN,
)
