"""A GPT with experts in a mesh: spread over expert ranks, each split over tensor ranks (lab 11)."""

import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab.expert_parallel import MoEConfig, spread_experts
from ranklab.tensor_parallel.plan import GPT_PLAN, entering, inner_column
from ranklab.tensor_parallel.regions import copy_to_region, identity
from ranklab.tensor_parallel.split import split_parameter


def experts(layer, how):
    """Split a MoE over tensor ranks, as one region: each rank has a part of the width F of every
    expert.

    Inside the region each rank has all tokens, and all ranks route them in the same way. But a rank
    computes only a part of their outputs, so it has only a part of the gradients of the router and
    of the inputs.
    """
    for linear, dim in ((layer.up, 1), (layer.down, 2)):  # (E/ep, F/tp, C), (E/ep, C, F/tp)
        linear.weight = split_parameter(linear.weight, dim, how.group)
    if layer.shared is not None:
        layer.shared.up = inner_column(layer.shared.up, how)
        layer.shared.down = how.row(layer.shared.down, how.group, identity)
    layer.router = CopiedLinear(layer.router, how.group)
    layer.aux_gradient.part = 1 / dist.get_world_size(how.group)
    layer.register_forward_hook(lambda layer, args, out: how.leave(out, how.group))
    return entering(layer, how)


class CopiedLinear(nn.Module):
    """`linear` inside a region: equal on all ranks; its gradient is summed over the ranks."""

    def __init__(self, linear, group=None):
        super().__init__()
        self.weight, self.group = linear.weight, group

    def forward(self, x):
        return F.linear(x, copy_to_region(self.weight, self.group))


MOE_PLAN = {
    **{pattern: style for pattern, style in GPT_PLAN.items() if ".mlp." not in pattern},
    "blocks.*.mlp": experts,
}


def prepare_experts(model, group):
    """Leave in `model` only the experts of this rank, and give it a plan for tensor ranks.

    Call it before parallelize, which need not know about experts.
    group  the ranks that share a layer's experts
    """
    spread_experts(model, group)
    model.plan = MOE_PLAN


def refuse_experts(layout, config):
    """Raise ValueError if the layout does not fit the experts of this GPT, or if it has none."""
    if not isinstance(config, MoEConfig):
        if layout.ep > 1:
            raise ValueError(f"ep={layout.ep} shares out experts, and this GPT has none")
        return
    if config.n_expert % layout.ep:
        raise ValueError(f"ep={layout.ep} must divide n_expert={config.n_expert}")
    for name in ("expert_width", "shared_width"):
        if getattr(config, name) % layout.tp:
            raise ValueError(f"tp={layout.tp} must divide {name}={getattr(config, name)}")
    if layout.cp > 1 and (config.factor or config.balance == "loss"):
        raise ValueError(f"cp={layout.cp}: a rank has 1/{layout.cp} of each sequence, but factor="
                         f"{config.factor:g} and balance={config.balance!r} count in whole ones: "
                         "take factor=0, and balance by bias")
