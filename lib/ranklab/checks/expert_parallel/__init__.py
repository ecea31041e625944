"""The exercises and predictions of lab 11, in the order of the lab.

    inputs.py     tokens of all ranks, the path of each row, and the cost that a call may have
    ties.py       unstable sorts, on every machine
    route.py      top_k_route, capacity, load_balance_loss
    dispatch.py   dispatch_tokens, combine_tokens
    gradients.py  expert_gradients
    costs.py      moe_traffic; place_experts, which is open and has a score
    once.py       dispatch_once
    mx.py         mxfp8_all_to_all
    scan.py       chunked_scan
"""

from ranklab.checks.expert_parallel.costs import PLACE, TRAFFIC
from ranklab.checks.expert_parallel.dispatch import COMBINE, DISPATCH
from ranklab.checks.expert_parallel.gradients import GRADIENTS
from ranklab.checks.expert_parallel.mx import MXFP8
from ranklab.checks.expert_parallel.once import ONCE
from ranklab.checks.expert_parallel.predictions import PREDICTIONS
from ranklab.checks.expert_parallel.route import CAPACITY, LOAD_BALANCE, ROUTE
from ranklab.checks.expert_parallel.scan import SCAN

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    ROUTE, CAPACITY, DISPATCH, COMBINE, LOAD_BALANCE, GRADIENTS, TRAFFIC, PLACE, ONCE,
    MXFP8, SCAN,
)
