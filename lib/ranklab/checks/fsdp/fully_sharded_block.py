"""The check of FullyShardedBlock: each method by hand, then training beside one process."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.beside import IN_GROUPS, TURNS, beside, expect, on_groups
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.checks.fsdp.shard_parameter import chunk_of
from ranklab.checks.handles import Waits
from ranklab.checks.zero.toys import ADAMW, SGD, Block, Toy, loss_of, seeded
from ranklab.checks.zero.training import OneProcess
from ranklab.fsdp import Precision
from ranklab.meter import Traffic
from ranklab.meter.storage import tensors_in

MODULES = {  # what each case is about: the module, its precision
    "float64, half of it frozen": (lambda: Block(1).double(), Precision()),
    "bfloat16, reduced in float32": (lambda: Block(0), Precision(torch.bfloat16, torch.float32)),
    "all frozen": (lambda: Block(0).requires_grad_(False), Precision()),
    "without parameters": (nn.Tanh, Precision()),
}
# The optimizer, of each backward before a step whether it communicates, the kind of checkpoint.
RUNS = ((ADAMW, (True,), None), (SGD, (False, True, True), None),
        (ADAMW, (True,), "reentrant"), (ADAMW, (True,), "non-reentrant"))
FULL = ("unshard() waits, and fills every parameter. All that rank 0 has sent comes first: view "
        "the message as (R, numbers of all), and split its columns.")
ROWS = ("Row r of the message is for rank r: torch.cat(..., dim=1) of each padded_gradient(). "
        "Divide the message: p.whole.grad may have 16 bits.")
MESSAGES = ("One all-gather of all padded_shard(), in their type; none where all is whole "
            "(self.is_whole) or on its way (self.work). One reduce-scatter of what is trained, in "
            "the type of padded_gradient(); an all-reduce sends twice as much.")
ALIKE = "All ranks send the same lengths, padded_shard() and padded_gradient(), in the same calls."
FAILURES = {
    "(Runtime|Value)Error: .*expected a non-empty list.*":
        "A block may have no parameters, or no trained ones: nothing to do then.",
    "RuntimeError: .*([Ii]nvalid (scalar|tensor) type|same d?type|Float and BFloat16).*":
        "Messages have the type of what is sent: new_empty(), not torch.empty().",
    "RuntimeError: .*(size mismatch|cannot be multiplied|of size 0|for input of size).*"
    "|IndexError: index out of range in self|was killed by SIGSEGV": FULL,
    "AttributeError: .* has no attribute '(view|split|wait)'":
        "async_op=True gives a handle. unshard() may be called when all is whole already, or when "
        "there is nothing to gather: then it does nothing. After it has waited, it sets self.work "
        "to None.",
    "RuntimeError: split_with_sizes .*":
        "begin_unshard() must send as many as unshard() splits off: p.numbers of self.parameters.",
    "RuntimeError: Sizes of tensors must match.*": ROWS, LEFT: ALIKE, MISMATCH: ALIKE,
    ".*never waited for": "unshard() waits for self.work before it reads the message.",
    ".*the gradient of .* is (None|zeros)":
        "p.whole.grad = None once it is in the message, not before.",
}
OF_GROUP = "All messages and sizes are those of self.group: group=self.group, self.ranks."
EARLY = ("Its message must travel while others compute: async_op=True, and keep the handle: "
         "self.work = ..., and self.reduction = (where it arrives, the handle).")
FAULTS = {
    "begin_unshard() waits": EARLY, "reduce_gradients() waits": EARLY,
    "after unshard() self.is_whole is not set":
        "It begins the gather if nothing has begun it, fills every parameter, and sets "
        "self.is_whole.",
    "after unshard() the message is still there":
        "It takes as much memory as the parameters: self.work, self.gathered = None, None.",
    "after reduce_gradients() there are whole gradients":
        "They would be added to in the next backward: parameter.whole.grad = None for each.",
    "in the end self holds a message, or what was whole": "Free both when they are used.",
}


def check_FullyShardedBlock(block_class):
    on_groups(_trial, block_class, RUNS, ranks=3, failures=FAILURES, at_once=True)
    yield "begin_unshard() does not wait, unshard() makes all parameters whole, after a step too"
    yield "gradients become means, each row on its owner; none is left whole"
    yield "one all-gather, one reduce-scatter; frozen, float64, bfloat16, or nothing in the block"
    yield "trains as one process: AdamW, SGD, several backwards, no_sync, activation checkpointing"
    yield "tied, uneven, a block that is used twice, also in a row"
    on_groups(_trial, block_class, RUNS[:1], groupings=IN_GROUPS, at_once=True, group_hint=OF_GROUP,
              failures={r"(hang|\w+Error): .*|was killed .*": OF_GROUP})
    yield "in groups of 1 and 3 it talks to nobody outside"


def _trial(block_class, ranks, runs):
    for case, given in MODULES.items():
        yield from _by_hand(f"{ranks}, a block: {case}", block_class, ranks, *given)
    for run in runs:
        yield from _trained(block_class, ranks, *run)


def _by_hand(where, block_class, ranks, new_module, precision):
    """Two rounds of all methods, with a step between; in the second one rank 0 lacks a gradient."""
    module, R, faults = seeded(new_module, 0), ranks.size, []
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trained = {name: before[name] for name, p in module.named_parameters() if p.requires_grad}
    block = block_class(module, ranks.group, precision=precision)

    def right(turn):
        found = {f"`{name}` after unshard()": [(x + turn).to(precision.compute or x.dtype)] * R
                 for name, x in before.items()}
        for number, (name, x) in enumerate(trained.items()):
            given = [_gradient(x, r) for r in ranks.members if r or turn <= number]
            found[f"the gradient of `{name}`"] = _rows(sum(given) / R if given else None, R)
        return found

    owns = {f"the gradient of `{name}`": _rows(_gradient(x, dist.get_rank()), R)[ranks.index]
            for name, x in trained.items()}
    with Traffic() as traffic:
        values = list(beside(
            where, ranks, lambda turn: _round(module, block, turn, faults), right,
            own=lambda turn: owns, slips=lambda name, turn: {} if name not in owns else {
                f"this rank's own, divided by {R}": (owns[name] / R, "Reduce-scatter into it.")},
            advice=lambda name: FULL if "unshard" in name else ROWS))
    for fault in faults:  # the first in time
        yield partial(expect, False, f"{where}: {fault}", FAULTS[fault])
    seen = sorted((op.name, int(op.sent_bytes)) for op in traffic.ops)
    its = {"all_gather": [p.numbers * p.whole.itemsize for p in block.parameters],
           "reduce_scatter": [p.numbers * p.reduce_in.itemsize for p in block.trained]}
    due = [(name, (R - 1) * sum(nbytes)) for name, nbytes in its.items() for _ in TURNS if nbytes]
    yield partial(expect, seen == due, f"{where}: bytes of two rounds {seen}, not {due}", MESSAGES)
    yield from values


def _round(module, block, turn, faults):
    """What was whole, and the gradients of this rank's rows."""
    def note(fault, is_seen):
        faults.extend([fault] * bool(is_seen))

    with Waits() as waits:
        if turn == 0:  # else unshard() begins it
            block.begin_unshard()
            block.begin_unshard()
            note("begin_unshard() waits",
                 block.parameters and (block.work is None or waits.is_over(block.work)))
        block.unshard()
        block.unshard()
        found = {f"`{name}` after unshard()": p.detach().clone()
                 for name, p in module.named_parameters()}
        note("after unshard() self.is_whole is not set", block.parameters and not block.is_whole)
        note("after unshard() the message is still there", block.gathered is not None or block.work)
        for number, p in enumerate(block.trained):
            if dist.get_rank() or turn <= number:
                p.whole.grad = _gradient(p.whole.detach(), dist.get_rank())
        block.reduce_gradients()
        note("after reduce_gradients() there are whole gradients",
             any(p.whole.grad is not None for p in block.trained))
        note("reduce_gradients() waits",
             block.trained and (not block.reduction or waits.is_over(block.reduction[1])))
        block.end_reduction()
        block.reshard()
        note("in the end self holds a message, or what was whole", tensors_in(vars(block)))
    for name, p in module.named_parameters():
        if p.requires_grad:
            found[f"the gradient of `{name}`"] = p.grad
        p.data += 1  # as an optimizer would
        p.grad = None
    return found


def _gradient(tensor, rank):
    return torch.arange(1.0, tensor.numel() + 1).view(tensor.shape).to(tensor) * 2**rank


def _rows(gradient, ranks):
    """Those of each rank; None where no rank has a gradient."""
    return [None if gradient is None else chunk_of(gradient, ranks, rank) for rank in range(ranks)]


def _trained(block_class, ranks, new_optimizer, pieces, recompute):
    """Two steps. The model is tied, half frozen, uneven; blocks are used twice, one in a row."""
    model, one = (seeded(lambda: Toy(order=(0, 1, 2, 2, 3, 0)).float(), 0) for _ in range(2))
    model.recompute, one = recompute, OneProcess(one, new_optimizer)
    for module in (*model.blocks[:3], model):
        root = block_class(module, ranks.group)
    optimizer = new_optimizer(model.parameters())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def seeds(turn, rank):
        return [100 * turn + 10 * piece + rank for piece in range(len(pieces))]

    def call(turn):
        for seed, root.unit.hooks.sync in zip(seeds(turn, dist.get_rank()), pieces):
            loss_of(model, seed).backward()
        found = {f"the gradient of `{name}`": p.grad for name, p in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
        return found

    def right(turn):
        mean = one.gradients(sum((seeds(turn, rank) for rank in ranks.members), []), ranks.size)
        one.step(mean)
        return {f"the gradient of `{name}`": _rows(gradient, ranks.size)
                for name, gradient in zip(trained, mean)}

    yield from beside(f"{ranks}, {len(pieces)} backwards, recompute={recompute}", ranks, call,
                      right, advice=lambda name: ROWS)
