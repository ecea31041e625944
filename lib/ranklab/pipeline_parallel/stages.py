"""Which layers a stage has, a GPT cut down to these layers, and a matrix on two stages.

baseline counts the FLOPs.
"""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.baseline import transformer_flops
from ranklab.models.gpt import GPT
from ranklab.models.initialise import normal_by_name


def split_stages(costs, stages):
    """Split the layers into stages, in order, so that the largest sum of costs is smallest.

    Every stage has at least one layer. The slowest stage sets the pace of all.
    costs: one for each layer, in any unit; the embedding and the head are layers as well.
    Returns: a list with a range of layers for each stage.
    Raises: ValueError if there are fewer layers than stages, or no stages.
    Lab: 09
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"stages={stages} must be between 1 and the {len(costs)} layers")
    # best[n] = (largest sum, starts of stages) for the first n layers; each round adds a stage
    best = {n: (sum(costs[:n]), [0]) for n in range(1, len(costs) + 1)}
    for stage in range(1, stages):
        best = {n: min((max(best[k][0], sum(costs[k:n])), best[k][1] + [k])
                       for k in range(stage, n)) for n in range(stage + 1, len(costs) + 1)}
    begins = best[len(costs)][1]
    return [range(a, b) for a, b in zip(begins, begins[1:] + [len(costs)])]


def gpt_costs(config):
    """Count the forward FLOPs a token in each layer of a GPT: embedding, blocks, norm and head.

    An embedding is a lookup, and costs nothing; the head is one product of C x V.
    """
    head = 2 * config.n_embd * config.vocab_size
    all_layers = transformer_flops(config, 1, config.n_ctx, backward=False) // config.n_ctx
    extra = 4 * config.n_embd * (config.mlp_width - 4 * config.n_embd)  # beyond an MLP of width 4 C
    return [0, *[(all_layers - head) // config.n_layer + extra] * config.n_layer, head]


class GPTStage(GPT):
    """Compute some layers of `model`, a GPT; the stage shares them, under the same names.

    layers: a range or set of layers, counted as in gpt_costs.
    """

    def __init__(self, model, layers):
        nn.Module.__init__(self)  # GPT's would make new layers
        n_layer = model.config.n_layer
        self.config, self.loss = model.config, model.loss
        self.token = model.token if 0 in layers else None
        self.blocks = nn.ModuleDict({name: block for name, block in model.blocks.items()
                                     if int(name) + 1 in layers})
        self.norm = model.norm if n_layer + 1 in layers else None
        self.head = model.head if n_layer + 1 in layers else None


def keep_layers(model, *ranges):
    """Drop all layers of `model` except these, counted as in gpt_costs; names stay. In place."""
    part = GPTStage(model, {layer for layers in ranges for layer in layers})
    model.token, model.blocks = part.token, part.blocks
    model.norm, model.head = part.norm, part.head
    return model


def materialize(model, device, draw=normal_by_name):
    """Move a part of a GPT that was made on "meta" to `device`, with new weights. In place.

    draw: see GPT.reset_parameters.
    """
    attributes = {name: dict(vars(p)) for name, p in model.named_parameters()}
    model.to_empty(device=device)
    if None not in (model.token, model.head):
        model.head.weight = model.token.weight  # to_empty has made two copies of it
    for name, parameter in model.named_parameters():
        vars(parameter).update(attributes[name])  # what part it is, if it is one (labs 08 and 11)
    with torch.device(device):
        for module in model.modules():
            if hasattr(module, "reset_buffers"):
                module.reset_buffers()
    model.reset_parameters(draw=draw)
    return model


def tied_embedding_sync(copies, other, group=None):
    """Replace each copy's gradient with its sum over this rank and the rank `other`.

    Both ranks call it after all backwards of a step. They have the same weights and get the same
    bits, so they also have the same weights after the step.
    copies: parameters that the rank `other` of the group holds as well, in the same order; empty on
        a rank that has neither the embedding nor the head, where `other` is ignored.
    Cost: each of the two ranks sends one message for each copy, its own gradient.
    Paper: Narayanan et al. 2021, Megatron-LM, has a group of the two and an all-reduce
    Lab: 12
    """
    for parameter in copies:
        local = parameter.grad.contiguous()
        remote = torch.empty_like(local)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, local, group=group, group_peer=other),
            dist.P2POp(dist.irecv, remote, group=group, group_peer=other)])
        for work in works:
            work.wait()
        parameter.grad = local + remote
