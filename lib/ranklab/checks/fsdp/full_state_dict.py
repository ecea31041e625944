"""The check of full_state_dict: beside the state dict of the model before it was sharded."""

from functools import partial

import torch
from torch import nn

from ranklab.checks.beside import IN_GROUPS, beside, expect, on_groups
from ranklab.checks.failures import LEFT
from ranklab.checks.fsdp.shard_parameter import chunk_of
from ranklab.checks.zero.toys import Toy, is_there, seeded
from ranklab.fsdp import FullyShardedBlock, Precision
from ranklab.meter import Traffic

EMPTY = "Only dist.get_rank(block.group) == 0 has the state; all other ranks return {}."
FAILURES = {
    LEFT: "All ranks send their rows, also those that return {} in the end.",
    "KeyError: .*": "Buffers have no shard: they are copied as they are.",
    "AttributeError: 'NoneType' object has no attribute .*|.* is there": EMPTY,
    ".* is None": "Take the names of model.state_dict(keep_vars=True): a tied parameter has two, "
    f"and buffers are there. {EMPTY}",
    ".*that of the (first|second) call.*": "The model has changed since. tensor.detach().cpu()"
    ".clone(), buffers as well: .cpu() alone may be no copy.",
    "ValueError: .*group.*": "Pass block.group on to every collective, and take sizes and "
                             "ranks from it.",
}
ROWS = ("model.state_dict(keep_vars=True) has its `.shard`: gather the rows of all "
        "parameters of all blocks, and put the whole in its place.")
SHARDS_TYPE = "Gather the shards in their own type: padded_shard(parameter.shard.dtype)."
COSTS = {
    "parameters are whole afterwards": "They do not all fit: gather the rows of one at a time.",
    "tensors are not on the CPU, or have a graph": "tensor.detach().cpu().clone()",
    "names too many": "Take those of model.state_dict(keep_vars=True).",
    "messages too many (below 0: too few)":
        "Gather each parameter of each block once, also where it has two names.",
    "bytes more than its rows are sent":
        "Use dist.gather(): an all-gather sends the rows to every rank, and one needs them.",
}


def _model(dtype):
    """Tied, frozen and uneven; with buffers, one of which is not in the state."""
    model = Toy()
    model.counted = nn.BatchNorm1d(3)
    model.register_buffer("left_out", torch.ones(2), persistent=False)
    return model.to(dtype)


def _trial(full_state_dict, ranks):
    """In groups some parameters are in no block."""
    in_group, costs = ranks.group is not None, []
    model = seeded(lambda: _model(torch.float64 if in_group else torch.float32), 0)
    before = {name: x.cpu().clone() for name, x in model.state_dict().items()}
    blocks = [FullyShardedBlock(module, ranks.group, precision=Precision(torch.bfloat16))
              for module in (*model.blocks, *[model] * (not in_group))]
    parameters = [p for block in blocks for p in block.parameters]
    rows = sum(p.numbers * p.shard.itemsize for p in parameters)

    def call(turn):
        with Traffic() as traffic:
            state = full_state_dict(model)
        costs.append((sum(is_there(p.whole) for p in parameters),
                      sum(x.requires_grad or not x.is_cpu for x in state.values() if x is not None),
                      len(state.keys() - before), len(traffic.ops) - len(parameters),
                      max(0, traffic.sent_bytes - rows)))
        for tensor in (*(p.data for p in model.parameters()), *model.buffers()):
            tensor += 1 - turn  # between the two calls
        return state

    def slips(name, turn):
        x = before[name] + turn
        return {"this rank's rows": (chunk_of(x, ranks.size, ranks.index) if x.dim() else x, ROWS),
                "rounded to 16 bits": (x.bfloat16().to(x), SHARDS_TYPE)}

    values = list(beside(str(ranks), ranks, call, lambda turn: {
        name: [x + turn, *[None] * (ranks.size - 1)] for name, x in before.items()}, slips=slips,
        advice=lambda name: "Rows of rank 0, rank 1, ..., without the zeros at the end, in the "
                            "shape of the parameter and the type of its shard."))
    is_whole, *others = (partial(expect, not cost, f"{ranks}: {cost} {what}", hint)
                         for (what, hint), cost in zip(COSTS.items(), costs[0]))
    yield from (is_whole, *values, *others)


def check_full_state_dict(full_state_dict):
    on_groups(_trial, full_state_dict, ranks=3, failures=FAILURES)
    on_groups(_trial, full_state_dict, groupings=IN_GROUPS, failures=FAILURES)
    yield "the whole state on the group's rank 0, {} on the others; in groups of 1 and 3, too"
    yield "tied, frozen, uneven, in no block; and buffers; in the shards' type; twice in a row"
    yield "a copy on the CPU; the model stays in shards"
