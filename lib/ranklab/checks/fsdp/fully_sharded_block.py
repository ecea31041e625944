"""The check of FullyShardedBlock: each method by hand, then training beside one process."""

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.beside import IN_GROUPS, beside, expect, on_groups
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.checks.fsdp.shard_parameter import chunk_of
from ranklab.checks.handles import Waits
from ranklab.checks.memory import held_bytes
from ranklab.checks.zero.toys import ADAMW, SGD, Block, Toy, loss_of, seeded
from ranklab.checks.zero.training import OneProcess
from ranklab.fsdp import Precision
from ranklab.meter import Traffic

HALF = Precision(torch.bfloat16, torch.float32)
MODULES = {  # what each case is about: the module, its precision, bytes of a number that travels
    "half of it frozen": (lambda: Block(1), Precision(), (4, 4)),
    "float64": (lambda: Block(0).double(), Precision(), (8, 8)),
    "bfloat16, reduced in float32": (lambda: Block(0), HALF, (2, 4)),
    "all frozen": (lambda: Block(0).requires_grad_(False), Precision(), (4, 4)),
    "without parameters": (nn.Tanh, Precision(), (4, 4)),
}
# The optimizer, of each backward before a step whether it communicates, the kind of checkpoint.
WAYS = ((ADAMW, (True,), None), (SGD, (False, True, True), None),
        (ADAMW, (True,), "reentrant"), (ADAMW, (True,), "non-reentrant"))
FULL = ("unshard() waits, and fills every parameter. All that rank 0 has sent comes first: view "
        "the message as (R, numbers of all), and split its columns.")
ROWS = ("Row r of the message is for rank r: torch.cat(..., dim=1) of each padded_gradient(). "
        "Divide the message: p.whole.grad may have 16 bits.")
SCATTER = "Nothing of the others is in self.reduction[0]: reduce-scatter into it."
ALIKE = "All ranks send alike, padded_shard() and padded_gradient(), in the same calls."
NOTHING = ("unshard() is called where all is whole, too, or nothing is there: it sets self.work to "
           "None when it has waited, and has nothing to do then.")
FAILURES = {
    "(Runtime|Value)Error: .*expected a non-empty list.*":
        "A block may have no parameters, or no trained ones: nothing to do then.",
    "RuntimeError: .*([Ii]nvalid (scalar|tensor) type|same type|same dtype|Float and BFloat16).*":
        "Messages have the type of what is sent: new_empty(), not torch.empty().",
    "RuntimeError: .*(size mismatch|cannot be multiplied|of size 0|for input of size).*": FULL,
    "IndexError: index out of range in self|was killed by SIGSEGV": FULL,
    "AttributeError: 'NoneType' object has no attribute '(view|split)'": NOTHING,
    "AttributeError: .* has no attribute 'wait'": f"async_op=True gives a handle. {NOTHING}",
    "AttributeError: 'NoneType' object has no attribute 'flatten'":
        "A rank may have no gradient of a parameter: padded_gradient() has zeros then.",
    "RuntimeError: split_with_sizes .*":
        "begin_unshard() must send as many as unshard() splits off: p.numbers of self.parameters.",
    r"\w+: .*invalid tensor size.*": "self.gathered is flat: R times what this rank sends.",
    "RuntimeError: Sizes of tensors must match.*": ROWS, LEFT: ALIKE, MISMATCH: ALIKE,
    ".*never waited for": "unshard() waits for self.work before it reads the message.",
    r".*after unshard\(\) is that of the first call": "Gather again what reshard() has freed.",
    ".*the gradient of .* is (None|zeros)":
        "p.whole.grad = None once it is in the message, not before.",
}
OF_GROUP = "All messages and sizes are those of self.group: group=self.group, self.ranks."
EARLY = ("Its message must travel while others compute: async_op=True, and keep the handle: "
         "self.work = ..., and self.reduction = (where it arrives, the handle).")
FAULTS = {
    "begin_unshard() waits": EARLY, "reduce_gradients() waits": EARLY,
    "after reduce_gradients() there are whole gradients":
        "They would be added to in the next backward: parameter.whole.grad = None for each.",
    "after unshard() the message is still there":
        "It takes as much memory as the parameters: self.work, self.gathered = None, None.",
}


def check_FullyShardedBlock(block_class):
    on_groups(_trial, block_class, WAYS, ranks=3, failures=FAILURES, at_once=True)
    yield "begin_unshard() does not wait, unshard() makes all parameters whole, after a step too"
    yield "gradients become means, each row on its owner; none is left whole"
    yield "one all-gather, one reduce-scatter; frozen, float64, bfloat16, or nothing in the block"
    yield "trains as one process: AdamW, SGD, several backwards, no_sync, activation checkpointing"
    yield "tied, uneven, a block that is used twice, also in a row"
    on_groups(_trial, block_class, WAYS[:1], groupings=IN_GROUPS, at_once=True, group_hint=OF_GROUP,
              failures={r"(hang|\w+Error): .*|was killed .*": OF_GROUP})
    yield "in groups of 1 and 3 it meets nobody else"


def _trial(block_class, ranks, ways):
    for case, given in MODULES.items():
        yield from _by_hand(f"{ranks}, a block: {case}", block_class, ranks, *given)
    for way in ways:
        yield from _trained(block_class, ranks, *way)


def _by_hand(where, block_class, ranks, new_module, precision, sizes):
    """Rounds of all methods, with a step between; in the second one rank 0 lacks a gradient."""
    def new():
        module = seeded(new_module, 0)
        return module, block_class(module, ranks.group, precision=precision)

    def right(turn):
        found = {f"`{name}` after unshard()": [
            (x + turn).to(precision.compute or x.dtype)] * ranks.size for name, x in before.items()}
        for number, name in enumerate(trained):
            given = [_gradient(before[name], r) for r in ranks.members if r or turn <= number]
            found |= _rows(name, sum(given) / ranks.size if given else None, ranks.size)
        return found

    module, block = new()
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    held, faults = held_bytes(), []
    kept = _kept(held, [x for x in _round(module, block, 0, []).values() if x is not None])
    module, block = new()
    before = {name: p.detach().clone() for name, p in seeded(new_module, 0).named_parameters()}
    own = {f"the gradient of `{name}`": chunk_of(_gradient(before[name], dist.get_rank()),
                                                 ranks.size, ranks.index) for name in trained}
    divided = {name: {f"this rank's own, divided by {ranks.size}": (x / ranks.size, SCATTER)}
               for name, x in own.items()}
    with Traffic() as traffic:
        values = list(beside(where, ranks, lambda turn: _round(module, block, turn, faults), right,
                             own=lambda turn: own, slips=lambda name, turn: divided.get(name, {}),
                             advice=lambda name: FULL if "unshard" in name else ROWS))
    for fault in faults:  # the first in time
        yield partial(expect, False, f"{where}: {fault}", FAULTS[fault])
    yield partial(_compare_messages, where, ranks.size, block, sizes, traffic.ops)
    yield partial(expect, kept <= 0, f"{where}: in the end {kept} bytes more are held",
                  "What holds a message, or what was whole? Free both when they are used.")
    yield from values


def _round(module, block, turn, faults):
    """What was whole, and the gradients of this rank's rows."""
    with Waits() as waits:
        block.begin_unshard()
        block.begin_unshard()
        if block.parameters and (block.work is None or waits.is_over(block.work)):
            faults.append("begin_unshard() waits")
        block.unshard()
        block.unshard()
        found = {f"`{name}` after unshard()": p.detach().clone()
                 for name, p in module.named_parameters()}
        if block.gathered is not None or block.work:
            faults.append("after unshard() the message is still there")
        for number, p in enumerate(block.trained):
            if dist.get_rank() or turn <= number:
                p.whole.grad = _gradient(p.whole.detach(), dist.get_rank())
        block.reduce_gradients()
        if any(p.whole.grad is not None for p in block.trained):
            faults.append("after reduce_gradients() there are whole gradients")
        if block.trained and (not block.reduction or waits.is_over(block.reduction[1])):
            faults.append("reduce_gradients() waits")
        block.end_reduction()
        block.reshard()
    for name, p in module.named_parameters():
        if p.requires_grad:
            found[f"the gradient of `{name}`"] = p.grad
        p.data += 1  # as an optimizer would
        p.grad = None
    return found


def _kept(held, besides):
    """Bytes that are held now, more than `held`. A thread of gloo's may hold a message for some
    milliseconds after it has arrived.
    """
    for _ in range(40):
        if (kept := held_bytes(besides) - held) <= 0:
            break
        time.sleep(0.05)
    return kept


def _gradient(tensor, rank):
    return torch.arange(1.0, tensor.numel() + 1).view(tensor.shape).to(tensor) * 2**rank


def _rows(name, gradient, ranks):
    """{what it is called: [the rows of each rank]}; None where no rank has a gradient."""
    return {f"the gradient of `{name}`": [
        None if gradient is None else chunk_of(gradient, ranks, rank) for rank in range(ranks)]}


def _compare_messages(where, R, block, sizes, ops):
    """Of each kind one for each of two rounds."""
    its = {"all_gather": block.parameters, "reduce_scatter": block.trained}
    for op in ops:
        expect(op.name in its, f"{where}: it calls {op.name}", "An all-gather brings the "
               "parameters, a reduce-scatter the gradients, which sends half as much.")
    for (name, parameters), size in zip(its.items(), sizes):
        sent = [op.sent_bytes for op in ops if op.name == name]
        nbytes, most = sum(p.numbers for p in parameters) * size * (R - 1), 2 * bool(parameters)
        expect(len(sent) == most, f"{where}: {len(sent)} messages {name} in two rounds, not {most}",
               "One for the whole block: torch.cat what travels. None where it is whole "
               "(self.is_whole) or on its way (self.work), or where nothing is trained.")
        expect(set(sent) <= {nbytes}, f"{where}: {name} sends {sent} bytes, not {nbytes} each",
               "padded_shard() and padded_gradient() give what travels, in the right type.")


def _trained(block_class, ranks, new_optimizer, pieces, recompute):
    """Two steps: the gradients, beside those of one process. The model is tied, half frozen and
    uneven; a block is used twice in a row, another one first and last.
    """
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
        return {key: rows for name, gradient in zip(trained, mean)
                for key, rows in _rows(name, gradient, ranks.size).items()}

    where = f"{ranks}, {len(pieces)} backwards, recompute={recompute}"
    yield from beside(where, ranks, call, right, advice=lambda name: ROWS)
