"""The check of full_state_dict: beside the state dict of the model before it was sharded."""

from functools import partial

import torch
from torch import nn

from ranklab.checks.beside import IN_GROUPS, expect, on_groups
from ranklab.checks.failures import LEFT
from ranklab.checks.fsdp.shard_parameter import chunk_of
from ranklab.checks.trial import explain
from ranklab.checks.zero.toys import Toy, is_there, seeded
from ranklab.fsdp import FullyShardedBlock, Precision
from ranklab.meter import Traffic

FAILURES = {LEFT: "All ranks send their rows, also those that return {} in the end.",
            "KeyError: .*": "Buffers have no shard: they are copied as they are.",
            "AttributeError: 'NoneType' object has no attribute 'items'":
            "The other ranks return {}, not None.",
            "AttributeError: 'NoneType' object has no attribute 'detach'": "The other ranks return "
            "{}, and not names without a tensor.",
            "ValueError: .*group.*": "Hand block.group on to every collective: sizes and ranks are "
            "its."}


def _model(dtype):
    """Tied, frozen and uneven; with buffers, one of which is not in the state."""
    model = Toy()
    model.counted = nn.BatchNorm1d(3)
    model.register_buffer("left_out", torch.ones(2), persistent=False)
    return model.to(dtype)


def _trial(full_state_dict, ranks):
    """In groups some parameters are in no block."""
    in_group = ranks.group is not None
    model = seeded(lambda: _model(torch.float64 if in_group else torch.float32), 0)
    before = {name: x.cpu().clone() for name, x in model.state_dict().items()}
    blocks = [FullyShardedBlock(module, ranks.group, precision=Precision(torch.bfloat16))
              for module in (*model.blocks, *[model] * (not in_group))]
    parameters = [p for block in blocks for p in block.parameters]
    for number in range(2):
        where = f"{ranks}, call {number + 1}"
        with Traffic() as traffic:
            state = full_state_dict(model)
        given = {name: x.detach().cpu().clone() for name, x in state.items()}
        whole = sum(is_there(p.whole) for p in parameters)
        yield partial(_compare, where, given, before, number, ranks.index == 0)
        yield partial(expect, not whole, f"{where}: {whole} parameters are whole afterwards",
                      "They do not all fit at the same time: gather the rows of one at a time.")
        yield partial(expect, len(traffic.ops) == len(parameters),
                      f"{where}: {len(traffic.ops)} messages for {len(parameters)} parameters",
                      "Gather each one once, also where it has two names, in a message of its own: "
                      "all parameters of each block, then the names.")
        most = sum(p.numbers * p.shard.itemsize for p in parameters)
        sent = traffic.sent_bytes
        yield partial(expect, sent <= most, f"{where}: sends {sent} bytes, its rows are {most}",
                      "Only the group's rank 0 needs them: dist.gather(). An all-gather sends the "
                      "rows to every rank.")
        for tensor in (*(p.data for p in model.parameters()), *model.buffers()):
            tensor += 1
        yield partial(_compare_copies, where, state, given)


def check_full_state_dict(full_state_dict):
    on_groups(_trial, full_state_dict, ranks=3, failures=FAILURES)
    on_groups(_trial, full_state_dict, groupings=IN_GROUPS, failures=FAILURES)
    yield "the whole state on the group's rank 0, {} on the others; in groups of 1 and 3, too"
    yield "tied, frozen, uneven, in no block; and buffers; in the shards' type; twice in a row"
    yield "a copy on the CPU; the model stays in shards"


def _compare_copies(where, state, given):
    """The model has changed, and the state must not."""
    for name, x in state.items():
        is_kept = x.device.type == "cpu" and torch.equal(x, given[name])
        expect(is_kept and not x.requires_grad, f"{where}: `{name}` is not a copy on the CPU",
               "tensor.detach().cpu().clone(), buffers as well: .cpu() alone may be no copy.")


def _compare(where, state, before, more, is_first):
    plain = {name: x + more for name, x in before.items()}
    if not is_first:
        expect(not state, f"{where} returns {len(state)} tensors, not {{}}", "Only the group's "
               "rank 0 has the state: there may be no room elsewhere.")
        return
    expect(state.keys() == plain.keys(),
           f"{where}: these names differ: {sorted(state.keys() ^ plain.keys())}",
           "Take those of model.state_dict(keep_vars=True): a tied parameter has two, and buffers "
           "are there. The first rank is dist.get_rank(block.group) == 0.")
    for name, right in plain.items():
        expect(state[name].dtype == right.dtype,
               f"{where}: `{name}` is {state[name].dtype}, not {right.dtype}", "The state has the "
               "shards' type: padded_shard(parameter.shard.dtype).")
        rows = chunk_of(right, 3, 0) if right.dim() else right
        explain(f"{where}: `{name}`", state[name], right, {
            "this rank's rows": (rows, "In model.state_dict(keep_vars=True) its `.shard` stands: "
                                 "gather the rows of all parameters of all blocks, and put the "
                                 "whole in its place."),
            "rounded to 16 bits": (right.bfloat16().to(right), "Gather the shards in their own "
                                   "type, padded_shard(parameter.shard.dtype), not what was "
                                   "gathered to compute."),
        }, "Rows of rank 0, then of rank 1, ...; without the zeros at the end, in parameter.shape.")
