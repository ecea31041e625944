"""Lab 07: what goes wrong when a whole state is put together."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.fsdp import full_state_dict
from ranklab.fsdp.shards import sharded_modules
from ranklab.fsdp.state import gather_rows


def gather_padded(parameter, group):
    """Every rank gets the rows, and the zeros at the end."""
    mine = parameter.padded_shard(parameter.shard.dtype)
    parts = [torch.empty_like(mine) for _ in range(parameter.ranks)]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts).view(-1, *parameter.shape[1:]).cpu()


GATHER = "gather_rows(parameter, block.group)"
NAMES = "model.state_dict(keep_vars=True).items()"
REST = "tensor.detach().cpu().clone()"
FIRST = "state if sharded_modules(model)[0].rank == 0 else {}"


def _wrong(*edits, says, **named):
    return mutant(full_state_dict, *edits, says=says, **named)


WRONG = [
    _wrong(FIRST, "state", says=r"other ranks return \{\}"),
    _wrong(FIRST, "state if dist.get_rank() == 0 else {}", says="The first rank is|has the state"),
    _wrong(GATHER, "gather_padded(parameter, block.group)[: len(parameter.whole)]",
           says="sends the rows to every rank", gather_padded=gather_padded),
    _wrong(GATHER, "gather_padded(parameter, block.group)", says="without the zeros at the end",
           called="padding_left_in", gather_padded=gather_padded),
    _wrong(REST + "\n", "None if tensor.requires_grad else " + REST + "\n",
           says="in no block|is None|no attribute", called="no_parameters_outside"),
    _wrong(GATHER, "gather_rows(parameter, None)", says="block.group|does not end|roup"),
    _wrong(NAMES, "model.named_parameters()", says="a tied parameter has two"),
    _wrong(f"return {FIRST}", "for block in sharded_modules(model):\n        block.unshard()\n"
           f"    return {FIRST}", says="parameters are whole afterwards"),
    _wrong(FIRST, FIRST.replace("state if", "{name: x.float() if x.is_floating_point() else x for "
           "name, x in state.items()} if"), says=r"float32, not torch\.float64"),
    _wrong(REST, "tensor", says="buffers as well"),
    _wrong(REST, "tensor.detach().cpu()", says="may be no copy"),
]


def full_state_dict__what_computes(model):
    """in their own type|afterwards|not what was gathered"""
    for block in sharded_modules(model):
        block.unshard()
    state = {name: tensor.detach().cpu().float().clone() if tensor.is_floating_point()
             else tensor.clone() for name, tensor in model.state_dict().items()}
    for block in sharded_modules(model):
        block.reshard()
    return state if sharded_modules(model)[0].rank == 0 else {}


def full_state_dict__tied_twice(model):
    """once, also where it has two names"""
    of = {p.shard: (p, block.group) for block in sharded_modules(model) for p in block.parameters}
    state = {name: gather_rows(*of[tensor]) if tensor in of else tensor.detach().cpu().clone()
             for name, tensor in model.state_dict(keep_vars=True).items()}
    return state if sharded_modules(model)[0].rank == 0 else {}


def full_state_dict__of_this_rank(model):
    """is this rank's rows"""
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    return state if sharded_modules(model)[0].rank == 0 else {}
