"""What Muon changes in a plan that was found with AdamW: memory, and two more parts of the step."""

from typing import NamedTuple

from ranklab.formulas.muon import muon_cost
from ranklab.planner.compute import product_rate
from ranklab.planner.constants import CONSTANTS
from ranklab.planner.links import exchange_seconds
from ranklab.planner.placement import place
from ranklab.planner.traffic import Exchange, Message


class MuonChange(NamedTuple):
    """What Muon saves and adds, compared with AdamW's plan.

    saved_bytes: of optimizer state, on a GPU of the stage with the most layers.
    computing: seconds of Newton-Schulz on the busiest owner.
    sending: seconds to send rows to the owners, and back. Neither of the two is hidden.
    """

    saved_bytes: float
    computing: float
    sending: float


def muon_change(model, plan, machine, constants=CONSTANTS):
    """Compute the MuonChange of a plan whose blocks' matrices are updated by Muon.

    Muon has one moment of 4 bytes instead of two. Embedding, head and norms stay with AdamW. Each
    matrix of a stage has an owner among the ranks that hold a part of it (muon_owners): with ZeRO
    those of the data, context and tensor axes, else the tensor ranks of each copy. All rows count
    as if they took the links of the data axis.
    Not modelled: experts, low-rank attention, an optimizer on the host; Newton-Schulz at more than
    the rate of other large products (half of a symmetric product is enough).
    Raises: ValueError for a plan that is not modelled.
    """
    for is_so, feature in ((model.experts, "experts"), (plan.offload, "an offloaded optimizer"),
                           (model.attention_numbers, "low-rank attention"),
                           (plan.frozen, "adapters"),
                           (plan.tool == "ours", "the course's trainer")):
        if is_so:
            raise ValueError(f"the planner does not know Muon with {feature}")
    layers, sharded = max(plan.stages(model.layers)), plan.zero > 0
    owners = (plan.copies if sharded else 1) * plan.tp
    cost = muon_cost(matrices(model) * layers, owners)
    span = place(plan, machine).weights
    nbytes = cost.sent_bytes / 2 * owners / max(1, owners - 1)  # the larger side of an all-to-all
    rows = Exchange((Message("all_to_all", nbytes, span),), 2)
    numbers = layers * model.block / plan.tp
    return MuonChange(4 * numbers / (plan.sharders if sharded else 1),
                      cost.flops / product_rate(machine, constants),
                      exchange_seconds((rows,), machine, constants))


def matrices(model):
    """List the shapes of a dense block's matrices: queries, keys and values are separate."""
    h, kv = model.hidden, model.kv_heads * model.head_size
    return [(model.width, h), (kv, h), (kv, h), (h, model.width),
            *[(model.ffn, h)] * (model.matrices - 1), (h, model.ffn)]
