"""Expert parallelism: experts are spread over ranks, and tokens go to the experts they chose.

    route.py      top_k_route, capacity, load_balance_loss: which token goes to which expert
    dispatch.py   dispatch_tokens, combine_tokens: there and back, two all-to-alls
    layer.py      MoE: a router and experts instead of an MLP; moe_gpt: a GPT with them

Those three are the idea. Then:
    gradients.py  expert_gradients: which gradient is averaged over which ranks
    training.py   ExpertParallel: the training loop's view
    traffic.py    moe_traffic, moe_parameters: formulas
    place.py      place_experts: which rank gets which experts, by a trace of loads
    once.py       dispatch_once: over the slow link once to a node
    mx.py         mxfp8_all_to_all: rows travel in 8 bits
    scan.py       chunked_scan: a state-space model's scan over ranks

Ranks with different experts take different rows: for all other weights they are data-parallel ranks
(data_parallel). An expert's matrices are cut from the whole as in tensor parallelism
(tensor_parallel.split).
"""

from ranklab.expert_parallel.dispatch import AllToAll, Sent, combine_tokens, dispatch_tokens
from ranklab.expert_parallel.gradients import expert_gradients
from ranklab.expert_parallel.layer import MoE, MoEConfig, layers_of, moe_gpt
from ranklab.expert_parallel.mx import mxfp8_all_to_all, mxfp8_bytes
from ranklab.expert_parallel.once import crossings, dispatch_once, even_crossings, once_bytes
from ranklab.expert_parallel.place import chosen_together, place_experts, placement_score
from ranklab.expert_parallel.route import (
    balance_bias, capacity, expert_slots, load_balance_loss, router_z_loss, top_k_route,
)
from ranklab.expert_parallel.scan import chunked_scan, scan
from ranklab.expert_parallel.traffic import moe_parameters, moe_traffic
from ranklab.expert_parallel.training import ExpertParallel, spread_experts

__all__ = [
    "AllToAll", "ExpertParallel", "MoE", "MoEConfig", "Sent", "balance_bias", "capacity",
    "chosen_together", "chunked_scan", "combine_tokens", "crossings", "dispatch_once",
    "dispatch_tokens", "even_crossings", "expert_gradients", "expert_slots", "layers_of",
    "load_balance_loss", "moe_gpt", "moe_parameters", "moe_traffic", "mxfp8_all_to_all",
    "mxfp8_bytes", "once_bytes", "place_experts", "placement_score", "router_z_loss", "scan",
    "spread_experts", "top_k_route",
]
