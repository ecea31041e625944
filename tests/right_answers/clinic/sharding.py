"""Other mends of clinic/sharding.py that are right."""

from ranklab.checks.prover.slips import edited
from ranklab.clinic.sharding import (
    BLOCKS, CLIP, GATHER, LOAD, NEW_ENDS, OPTIMIZER, OWN, ROOT, SEEDS, STEP, SUM_ENDS, flat_model,
    gathered_model, moved_gpt, staged_gpt, wide_layer,
)

OWN_STREAM = """        shared = torch.get_rng_state()
        torch.set_rng_state(mine)
        h = F.dropout(F.relu(model["up"](x)), p)
        mine = torch.get_rng_state()
        torch.set_rng_state(shared)
"""
WIDE = OWN[0] + "F.dropout(F.relu(model[\"up\"](x)), p)\n"
WITH_ZEROS = """        end = model.token if first else model.head
        gradient = end.weight.grad if end else torch.zeros(256, 32, device=device())
        if R > 1:
            dist.all_reduce(gradient, group=group)
"""
GIVEN = "    optimizer.param_groups[0][\"params\"] = list(model.parameters())\n"
ALL_NORMS = """        norms_of = torch.empty(R, device=device())
        dist.all_gather_single(norms_of, shard.grad.norm().view(1), group=group)
        norm = norms_of.float().norm()
        if norm > max_norm:
            shard.grad *= max_norm / norm
"""

RIGHT = {
    "two_streams": edited(wide_layer, (
        SEEDS, "    torch.manual_seed(1000 * seed + 100 + rank)\n"
        "    mine = torch.get_rng_state()\n    torch.manual_seed(1000 * seed + row)\n",
        WIDE, OWN_STREAM)),
    "all_stages_sum": edited(staged_gpt, (NEW_ENDS, "", SUM_ENDS, WITH_ZEROS)),
    "at_once": edited(gathered_model, (
        STEP + GATHER, STEP,
        LOAD, "        dist.all_gather_single(flat, shard.detach(), group=group)\n")),
    "parameters_given_later": edited(moved_gpt, (
        BLOCKS + ROOT + OPTIMIZER, OPTIMIZER + BLOCKS + ROOT + GIVEN)),
    "all_norms_in_float32": edited(flat_model, (CLIP, ALL_NORMS)),
}
