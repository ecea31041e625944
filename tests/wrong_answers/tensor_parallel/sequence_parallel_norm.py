"""Lab 08: what goes wrong in a norm that sees some tokens only."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mutants import mutant

from ranklab.tensor_parallel import sequence_parallel_norm
from ranklab.tensor_parallel.regions import gather_tokens, scatter_tokens

CALL = "functional_call(norm, parameters, x)"
ALL = "for name, p in norm.named_parameters()"


def _wrong(*edits, says, **named):
    return mutant(sequence_parallel_norm, *edits, says=says, torch=torch, dist=dist, F=F, **named)


WRONG = [
    _wrong(CALL, "norm(x)", says="its weight would drift"),
    _wrong(CALL, "functional_call(norm, parameters, copy_to_region(x, group))",
           says="No other rank has these tokens"),
    _wrong(CALL, "norm(copy_to_region(x, group))", says="gradient of x|x needs no sum"),
    _wrong(ALL, f"{ALL} if name == 'weight'", says="gradient of bias"),
    _wrong("copy_to_region(p, group)", "copy_to_region(p)", says="Pass `group` on"),
    _wrong(CALL, "F.layer_norm(x, x.shape[-1:], parameters['weight'], parameters.get('bias'))",
           says="with all that the norm has"),
    _wrong("copy_to_region(p, group)", "copy_to_region(p, group) / dist.get_world_size(group)",
           says="1/4 of what is right|the value", called="a_mean"),
    _wrong(CALL, "scatter(functional_call(norm, parameters, gather(x, group)), group)",
           says="forward sends|the value", gather=gather_tokens, scatter=scatter_tokens,
           called="gathers_the_tokens"),
]


def _summed(gradient, group):
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=group)
    return gradient


def sequence_parallel_norm__hooks_that_stay(norm, x, group=None):
    """4 times what is right|a hook on its own parameter"""
    for p in norm.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: _summed(gradient, group))
    return norm(x)


def sequence_parallel_norm__one_hook_that_stays(norm, x, group=None):
    """by itself afterwards.*a hook on the norm's own parameter"""
    for p in norm.parameters():
        if p.requires_grad and not p._backward_hooks:
            p.register_hook(lambda gradient: _summed(gradient, group))
    return norm(x)


def sequence_parallel_norm__assigned(norm, x, group=None):
    """functional_call\\(norm, {name: tensor}, x\\) computes"""
    norm.weight = norm.weight * 1
    return norm(x)
