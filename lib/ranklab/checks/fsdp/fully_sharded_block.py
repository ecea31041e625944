"""The check of FullyShardedBlock: each method by hand, then training beside one process."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.beside import IN_GROUPS, expect, on_groups
from ranklab.checks.failures import LEFT, MISMATCH
from ranklab.checks.fsdp.shard_parameter import chunk_of
from ranklab.checks.handles import Waits
from ranklab.checks.memory import held_bytes
from ranklab.checks.trial import explain
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
WAYS = (ADAMW, (True,), None), (SGD, (False, True, True), None)
CHECKPOINTED = (ADAMW, (True,), "reentrant"), (ADAMW, (True,), "non-reentrant")
FULL = ("unshard() waits, and fills every parameter from the message: parameter.fill(part), with "
        "(R, numbers) for each. All that rank 0 has sent comes first: view the message as (R, "
        "numbers of all), and split its columns.")
ALIKE = "All ranks send alike, padded_shard() and padded_gradient(), in the same calls."
FAILURES = {
    "(Runtime|Value)Error: .*expected a non-empty list.*":
        "A block may have no parameters, or no trained ones: nothing to "
    "do then.",
    "RuntimeError: .*([Ii]nvalid (scalar|tensor) type|same type|same dtype|Float and BFloat16).*":
        "Messages have the type of what is sent: new_empty(), not torch.empty().",
    "RuntimeError: .*(size mismatch|shapes cannot be multiplied|storage of size 0).*": FULL,
    "IndexError: index out of range in self": FULL,
    "AttributeError: 'NoneType' object has no attribute '(view|split)'":
        "self.gathered is None where all is whole. unshard() is called there, too: it sets "
        "self.work to None when it has waited, and has nothing to do then.",
    "was killed by SIGSEGV": FULL, "RuntimeError: shape .* is invalid for input of size .*": FULL,
    "RuntimeError: split_with_sizes .*": "unshard() splits off "
    "p.numbers columns for each of self.parameters: begin_unshard() must send as many.",
    r"\w+: .*invalid tensor size.*":
        "self.gathered is flat: R times as long as what this rank sends.",
    "AttributeError: 'NoneType' object has no attribute 'flatten'":
        "A rank may have no gradient of a parameter: "
    "padded_gradient() has zeros then.",
    "RuntimeError: Sizes of tensors must match.*":
        "Beside each other: torch.cat(..., dim=1), (R, numbers of all).",
    "AttributeError: .* has no attribute 'wait'":
        "async_op=True gives the handle that is waited for later; there is "
    "none where the parameters are whole already, or where there are none. self.reduction is "
    "(where it arrives, the handle).",
    LEFT: ALIKE, MISMATCH: ALIKE,
}
OF_GROUPS = {".*is divided by all 4 ranks": "Divide by self.ranks: those of the group.",
             r"(hang|\w+Error): .*|was killed .*":
             "All messages and sizes are those of self.group: group=self.group."}
EARLY = ("Its message must travel while others compute: async_op=True, and keep the handle: "
         "self.work = ..., and self.reduction = (where it arrives, the handle).")
FAULTS = {
    "begin_unshard() waits": EARLY, "reduce_gradients() waits": EARLY,
    "after reduce_gradients() there are whole gradients": "They are in the message, and would be "
    "added to in the next backward: parameter.whole.grad = None for each.",
    "after unshard() the message is still there": "It takes as much memory as the parameters: "
    "self.work, self.gathered = None, None.",
}


def check_FullyShardedBlock(block_class):
    on_groups(_by_hand, block_class, ranks=3, failures=FAILURES)
    on_groups(_trained, block_class, WAYS, ranks=3, failures=FAILURES)
    yield "begin_unshard() does not wait, unshard() makes all parameters whole, after a step too"
    yield "gradients become means, each row on its owner; none is left whole"
    yield "one all-gather, one reduce-scatter; frozen, float64, bfloat16, or nothing in the block"
    yield "trains as one process on 3 ranks: AdamW, SGD, several backwards, no_sync"
    yield "tied, uneven, a block that is used twice, also in a row"
    on_groups(_trained, block_class, CHECKPOINTED, ranks=2, failures=FAILURES)
    yield "activation checkpointing, of both kinds, changes nothing"
    for trial, *ways in (_by_hand,), (_trained, WAYS[:1]):
        on_groups(trial, block_class, *ways, groupings=IN_GROUPS, failures=OF_GROUPS)
    yield "in groups of 1 and 3 it meets nobody else"


def _by_hand(block_class, ranks):
    for case, given in MODULES.items():
        yield from _cycle(f"{ranks}, a block: {case}", block_class, ranks, *given)


def _cycle(where, block_class, ranks, new_module, precision, sizes):
    """Two rounds of all methods, with a step between; in the second rank 0 lacks a gradient."""
    module, rank, members = seeded(new_module, 0), dist.get_rank(), ranks.members
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    block, wholes, faults = block_class(module, ranks.group, precision=precision), [], []
    held = held_bytes()
    with Waits() as waits, Traffic() as traffic:
        for number in range(2):
            block.begin_unshard()
            block.begin_unshard()
            if block.parameters and (block.work is None or waits.is_over(block.work)):
                faults.append("begin_unshard() waits")
            block.unshard()
            block.unshard()
            wholes.append({name: p.detach().clone() for name, p in module.named_parameters()})
            if block.gathered is not None or block.work:
                faults.append("after unshard() the message is still there")
            for place, p in enumerate(block.trained):
                if number == 0 or place or rank:
                    p.whole.grad = _gradient(p.whole.detach(), (rank,), False) / 2
            block.reduce_gradients()
            if any(p.whole.grad is not None for p in block.trained):
                faults.append("after reduce_gradients() there are whole gradients")
            if block.trained and (not block.reduction or waits.is_over(block.reduction[1])):
                faults.append("reduce_gradients() waits")
            block.end_reduction()
            block.reshard()
            for p in block.parameters:
                p.shard.data += 1  # as an optimizer would
        missing = waits.missing(len(traffic.ops))
    waits.forget()
    kept = held_bytes([tensor for whole in wholes for tensor in whole.values()]) - held
    yield partial(_compare_messages, where, len(members), block, sizes, traffic, faults, missing)
    shards = sum(p.numbers * p.shard.itemsize for p in block.parameters)
    yield partial(_compare_kept, where, kept, shards)
    for number, whole in enumerate(wholes):
        yield partial(_compare_whole, where, before, whole, number)
    trained = [(name, p.grad) for name, p in module.named_parameters() if p.requires_grad]
    for place, (name, gradient) in enumerate(trained):
        both = (_gradient(before[name], r, not place) for r in (members, (rank,)))
        yield partial(_compare_gradient, f"{where}: `{name}`", gradient, *both, members)


def _gradient(tensor, members, is_lacking):
    """The mean over members in the first round, plus that of the second."""
    one = torch.arange(1.0, tensor.numel() + 1).view(tensor.shape).to(tensor)
    scale = sum(r + 1 for r in members), sum(r + 1 for r in members if r or not is_lacking)
    return one * sum(scale) / len(members)


def _compare_messages(where, R, block, sizes, traffic, faults, missing):
    """Of each kind one for each of two rounds; it travels meanwhile, and is waited for."""
    for fault in faults:  # the first in time
        expect(False, f"{where}: {fault}", FAULTS[fault])
    sent = {"all_gather": [], "reduce_scatter": []}
    for op in traffic.ops:
        expect(op.name in sent, f"{where}: it calls {op.name}", "An all-gather brings the "
               "parameters, a reduce-scatter the gradients, which sends half as much.")
        sent[op.name].append(op.sent_bytes)
    its = block.parameters, block.trained
    for (name, got), parameters, size in zip(sent.items(), its, sizes):
        right = [sum(p.numbers for p in parameters) * size * (R - 1)] * (2 if parameters else 0)
        expect(len(got) == len(right),
               f"{where}: {len(got)} messages {name} in two rounds, not {len(right)}",
               "One for the whole block: torch.cat what travels. And none where the parameters are "
               "whole (self.is_whole), or on their way (self.work), or where nothing is trained.")
        expect(got == right, f"{where}: {name} sends {got} bytes, not {right}",
               "padded_shard() and padded_gradient() give what travels, in the right type.")
    expect(not missing, f"{where}: {missing} messages were never waited for",
           "unshard() waits for self.work before it reads the message.")


def _compare_kept(where, kept, shards):
    expect(kept <= 2 * shards, f"{where}: in the end {kept} bytes more are held, beside shards of "
           f"{shards}", "The message and what is whole are freed when they are used; all that "
           "stays is the gradients of this rank's rows. What holds another tensor?")


def _compare_whole(where, before, whole, number):
    for name, value in before.items():
        old = value.to(whole[name].dtype)
        explain(f"{where}: `{name}` after unshard() {number + 1}", whole[name],
                (value + number).to(old), {"as before the step": (
                    old, "Gather again what reshard() has freed: the shards have new numbers.")},
                FULL)


def _toy():
    """Tied, half frozen, uneven; a block is used twice in a row, another one first and last."""
    return Toy(order=(0, 1, 2, 2, 3, 0)).float()


def _trained(block_class, ranks, ways):
    """Two steps in each of the ways: the gradients, beside those of one process."""
    for new_optimizer, pieces, recompute in ways:
        model, one = seeded(_toy, 0), OneProcess(seeded(_toy, 0), new_optimizer)
        model.recompute = recompute
        for module in (*model.blocks[:3], model):
            root = block_class(module, ranks.group)
        optimizer = new_optimizer(model.parameters())
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for step in range(2):
            optimizer.zero_grad()
            seeds = {rank: [100 * step + 10 * piece + rank for piece in range(len(pieces))]
                     for rank in ranks.members}
            for seed, root.hooks.sync in zip(seeds[dist.get_rank()], pieces):
                loss_of(model, seed).backward()
            mean = one.gradients(sum(seeds.values(), []), ranks.size)
            own = one.gradients(seeds[dist.get_rank()], 1)
            for name, *right in zip(trained, mean, own):
                here = f"{ranks}, {len(pieces)} backwards, recompute={recompute}: `{name}`"
                yield partial(_compare_gradient, here, trained[name].grad, *right, ranks.members)
            optimizer.step()
            one.step(mean)


def _compare_gradient(where, got, right, own, members):
    """This rank has its rows of the mean, `right`; `own` is its own gradient, whole."""
    R, place = len(members), members.index(dist.get_rank())
    expect(got is not None, f"{where}: the gradient is None, as where no rank has one",
           "p.whole.grad = None once it is in the message, not before.")
    right, own = (chunk_of(x, R, place) for x in (right, own))
    explain(f"{where}: the gradient", got, right, {
        f"the sum, {R} times the mean": (R * right, "Divide by self.ranks, once."),
        "divided twice": (right / R, "Divide by self.ranks, once."),
        "divided by all 4 ranks": (R * right / 4, "Divide by self.ranks: those of the group."),
        "this rank's own": (own, "Reduce-scatter the gradients of all ranks."),
        f"this rank's own, divided by {R}": (own / R, "Reduce-scatter those of all ranks."),
        "zeros": (0 * right, "p.whole.grad = None once it is in the message, not before."),
    }, "Row r of the message is for rank r: padded_gradient() has a row for each rank, so lay the "
       "parameters beside each other, torch.cat(..., dim=1). Zeros where there is no gradient. "
       "Divide the message: p.whole.grad may have 16 bits.")
