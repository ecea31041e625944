"""Which layers a stage has, a GPT cut down to them, and a matrix that is on two stages.

FLOPs are counted by baseline.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

from ranklab.baseline import transformer_flops
from ranklab.models.initialise import normal_by_name


def split_stages(costs, stages):
    """[range of layers] for each stage, in order, so that the largest sum of costs is smallest.

    Every stage has at least one layer. The slowest stage sets the pace of all.
    costs  one for each layer, in any unit; embedding and head are layers, too
    error  ValueError for fewer layers than stages, or no stage
    lab    09
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"stages={stages} must be between 1 and the {len(costs)} layers")
    # best[n] = (the largest sum, where stages begin) for the first n layers, one stage more a round
    best = {n: (sum(costs[:n]), [0]) for n in range(1, len(costs) + 1)}
    for stage in range(1, stages):
        best = {n: min((max(best[k][0], sum(costs[k:n])), best[k][1] + [k])
                       for k in range(stage, n)) for n in range(stage + 1, len(costs) + 1)}
    begins = best[len(costs)][1]
    return [range(a, b) for a, b in zip(begins, begins[1:] + [len(costs)])]


def gpt_costs(config):
    """FLOPs of a token's forward in each layer of a GPT: embedding, blocks, head (with its norm).

    An embedding is looked up, and costs nothing; the head is one product of C x V.
    """
    head = 2 * config.n_embd * config.vocab_size
    all_layers = transformer_flops(config, 1, config.n_ctx, backward=False) // config.n_ctx
    more = 4 * config.n_embd * (config.mlp_width - 4 * config.n_embd)  # than an MLP has
    return [0, *[(all_layers - head) // config.n_layer + more] * config.n_layer, head]


def keep_layers(model, *ranges):
    """`model`, a GPT, has only these layers left, counted as in gpt_costs; names stay. In place."""
    layers = {layer for layers in ranges for layer in layers}
    n_layer = model.config.n_layer
    if 0 not in layers:
        model.token = None
    if n_layer + 1 not in layers:
        model.norm = model.head = None
    model.blocks = nn.ModuleDict({name: block for name, block in model.blocks.items()
                                  if int(name) + 1 in layers})
    return model


def materialize(model, device, draw=normal_by_name):
    """A part of a GPT that was made on "meta" is on `device`, with fresh weights. In place.
    draw  see GPT.reset_parameters
    """
    known = {name: dict(vars(p)) for name, p in model.named_parameters()}
    model.to_empty(device=device)
    if None not in (model.token, model.head):
        model.head.weight = model.token.weight  # to_empty has made two of the one
    for name, parameter in model.named_parameters():
        vars(parameter).update(known[name])  # what part it is, if it is one (labs 08 and 11)
    with torch.device(device):
        for module in model.modules():
            if hasattr(module, "reset_buffers"):
                module.reset_buffers()
    model.reset_parameters(draw=draw)
    return model


def stage_of(model, layers):
    """A GPT with these layers of `model`, which shares them.

    It keeps the hooks: in a stage, too, lab 07's full shard gathers and frees what is in no block.
    """
    stage = copy.copy(model)
    stage._modules = dict(model._modules)  # of its own, so that keep_layers leaves the model alone
    return keep_layers(stage, layers)


def tied_embedding_sync(copies, other, group=None):
    """Each of `copies` has in .grad the sum of its gradients here and on the rank `other`.

    Both ranks call it after all backwards of a step. They have the same weights and get the same
    bits, so they also have the same weights after the step.
    copies  parameters that the rank `other` of the group holds, too, in the same order; empty on a
            rank that has neither the embedding nor the head, whatever `other` is there
    cost    each of the two ranks sends one message for each copy: its own gradient
    paper   Narayanan et al. 2021, Megatron-LM, has a group of the two and an all-reduce
    lab     12
    """
    for parameter in copies:
        mine = parameter.grad.contiguous()
        theirs = torch.empty_like(mine)
        both = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, mine, group=group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=other)])
        for work in both:
            work.wait()
        parameter.grad = mine + theirs
