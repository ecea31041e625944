"""The same layer in other libraries: transformers' experts spread over ranks, and DeepSpeed's MoE,
which is imported as in lab 06 (zero).
"""

import contextlib
import io

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ranklab.expert_parallel.dispatch import combine_tokens, dispatch_tokens
from ranklab.peers.deepspeed_zero import quiet_deepspeed


class SpreadExperts(nn.Module):
    """Replace transformers' experts (Mixtral's, Qwen2-MoE's) by this rank's experts.

    transformers' router, shared expert and everything else stay unchanged.
    """

    def __init__(self, experts, group=None, dispatch=dispatch_tokens, combine=combine_tokens):
        super().__init__()
        R, rank = dist.get_world_size(group), dist.get_rank(group)
        self.n_expert, self.act, self.group = experts.num_experts, experts.act_fn, group
        self.dispatch, self.combine = dispatch, combine
        each = self.n_expert // R
        for name in ("gate_up_proj", "down_proj"):
            local_experts = getattr(experts, name).detach()[rank * each : (rank + 1) * each]
            setattr(self, name, nn.Parameter(local_experts.clone()))

    def forward(self, hidden, chosen, weights):  # (N, C), (N, k), (N, k) -> (N, C)
        rows, sent = self.dispatch(hidden, chosen, self.n_expert, self.group)
        outputs = []
        for x, enter, leave in zip(rows.split(sent.counts.tolist()), self.gate_up_proj,
                                   self.down_proj):
            gate, up = F.linear(x, enter).chunk(2, dim=-1)
            outputs.append(F.linear(self.act(gate) * up, leave))
        return self.combine(torch.cat(outputs), sent, weights, self.group).to(hidden.dtype)


def spread_transformers(model, group=None, **parts):
    """Keep only this rank's experts in each layer of a transformers model, in place."""
    for layer in [module for module in model.modules() if hasattr(module, "experts")]:
        layer.experts = SpreadExperts(layer.experts, group, **parts)
    return model


def deepspeed_moe(layer, k):
    """Build DeepSpeed's MoE over all ranks, from the router and the experts of our whole MoE.

    forward returns (output, DeepSpeed's auxiliary loss, counts). No token is dropped.
    """
    quiet_deepspeed().init_distributed(dist_init_required=False, verbose=False)
    from deepspeed.moe.layer import MoE  # here: takes two seconds

    C, E, width = layer.router.in_features, layer.router.out_features, layer.up.weight.shape[1]
    expert = nn.Sequential(nn.Linear(C, width, bias=False), nn.GELU(),
                           nn.Linear(width, C, bias=False))
    R, rank = dist.get_world_size(), dist.get_rank()
    moe = MoE(C, expert, E, R, k, drop_tokens=False, use_rts=False, min_capacity=0,
              top2_2nd_expert_sampling=False).to(layer.router.weight.device)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the name of its group
        moe.set_deepspeed_parallelism()
    with torch.no_grad():
        moe.deepspeed_moe.gate.wg.weight.copy_(layer.router.weight)
        for i, local_expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            local_expert[0].weight.copy_(layer.up.weight[rank * E // R + i])
            local_expert[2].weight.copy_(layer.down.weight[rank * E // R + i])
    return moe
