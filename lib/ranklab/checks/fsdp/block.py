"""The check of FullyShardedBlock: each method by hand, then training beside one process."""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.fsdp.training import explain_rows, train
from ranklab.checks.handles import Waits
from ranklab.checks.trial import explain, group_of_mine, hinted, members_of, on_ranks
from ranklab.checks.zero.toys import Block, seeded
from ranklab.fsdp import Precision
from ranklab.meter import Traffic

HALF = Precision(torch.bfloat16, torch.float32)
MODULES = {  # what each case is about: the module, and its precision
    "half of it frozen": (lambda: Block(1), Precision()),
    "float64": (lambda: Block(0).double(), Precision()),
    "bfloat16, reduced in float32": (lambda: Block(0), HALF),
    "all frozen": (lambda: Block(0).requires_grad_(False), Precision()),
    "without parameters": (nn.Tanh, Precision()),
}
FULL = ("unshard() waits, and fills every parameter from the message: parameter.fill(part), with "
        "(R, numbers) for each.")
ALIKE = "All ranks send alike, padded_shard() and padded_gradient(), in the same calls."
FAILURES = {
    "expected a non-empty list": "A block may have no parameters, or no trained ones: nothing to "
    "do then.",
    "type": "Messages have the type of what is sent: new_empty(), not torch.empty().",
    "size mismatch": FULL, "shapes cannot be multiplied": FULL, "storage of size 0": FULL,
    "SIGSEGV": FULL, "invalid for input": FULL, "split_with_sizes": "From each rank come "
    "p.numbers numbers of each of self.parameters, of frozen ones, too.",
    "invalid tensor size": "self.gathered is flat: R times as long as what this rank sends.",
    "'NoneType' object has no attribute 'flatten'": "A rank may have no gradient of a parameter: "
    "padded_gradient() has zeros then.",
    "Sizes of tensors must match": "Beside each other: torch.cat(..., dim=1), (R, numbers of all).",
    "has no attribute 'wait'": "async_op=True gives the handle that is waited for later; there is "
    "none where the parameters are whole already, or where there are none. self.reduction is "
    "(where it arrives, the handle).",
    "index out of range": FULL, "killed": ALIKE, "does not end": ALIKE,
}


def _cycles(block_class, in_group=False):
    group = group_of_mine() if in_group else None
    return {case: _cycle(block_class, *given, group) for case, given in MODULES.items()}, []


def _trained(block_class, in_group=False):
    return {}, train(block_class, in_group)


def _cycle(block_class, new_module, precision, group):
    """Two rounds of all methods, with a step between; in the second rank 0 lacks a gradient."""
    module, found = seeded(new_module, 0), {"whole": [], "early": []}
    found["before"] = {name: p.detach().clone() for name, p in module.named_parameters()}
    block = block_class(module, group, precision=precision)
    with Waits() as waits, Traffic() as traffic:
        for number in range(2):
            block.begin_unshard()
            block.begin_unshard()
            found["early"].append("begin_unshard" * _is_early(block.work, waits))
            block.unshard()
            block.unshard()
            found["whole"].append({name: p.detach().clone()
                                   for name, p in module.named_parameters()})
            found["left"] = block.gathered is not None or bool(block.work)
            for place, p in enumerate(block.trained):
                if number == 0 or place or dist.get_rank():
                    p.whole.grad = _gradient(p.whole.detach(), (dist.get_rank(),), False) / 2
            block.reduce_gradients()
            found["kept"] = any(p.whole.grad is not None for p in block.trained)
            found["early"].append("reduce_gradients" * _is_early(
                block.reduction and block.reduction[1], waits))
            block.end_reduction()
            block.reshard()
            for p in block.parameters:
                p.shard.data += 1  # as an optimizer would
        found["missing"] = waits.missing(len(traffic.ops))
    found["trained"] = [name for name, p in module.named_parameters() if p.requires_grad]
    found["gradients"] = {name: p.grad for name, p in module.named_parameters()}
    found["sent"] = {name: [op.sent_bytes for op in traffic.ops if op.name == name]
                     for name in traffic.calls}
    found["numbers"] = {"all_gather": sum(p.numbers for p in block.parameters),
                        "reduce_scatter": sum(p.numbers for p in block.trained)}
    return found


def _is_early(work, waits):
    """True where the work is done before somebody asked for it."""
    return work is None or waits.is_over(work)


def _gradient(tensor, members, is_lacking):
    """The mean over members in the first round, plus that of the second."""
    one = torch.arange(1.0, tensor.numel() + 1).view(tensor.shape).to(tensor)
    scale = sum(r + 1 for r in members), sum(r + 1 for r in members if r or not is_lacking)
    return one * sum(scale) / len(members)


def _recomputed(block_class):
    return [({}, train(block_class, recompute=how)) for how in ("reentrant", "non-reentrant")]


def check_FullyShardedBlock(block_class):
    for trial in (_cycles, _trained):
        with hinted(FAILURES):
            seen = on_ranks(trial, block_class, ranks=3)
        _compare("on 3 ranks", [range(3)] * 3, seen)
    yield "begin_unshard() does not wait, unshard() makes all parameters whole, after a step too"
    yield "gradients become means, each row on its owner; none is left whole"
    yield "one all-gather, one reduce-scatter; frozen, float64, bfloat16, or nothing in the block"
    yield "trains as one process on 3 ranks: AdamW, SGD, several backwards, no_sync"
    yield "tied, uneven, a block that is used twice, also in a row"
    with hinted(FAILURES):
        seen = on_ranks(_recomputed, block_class, ranks=2)
    for how in range(2):
        _compare("with checkpoints", [range(2)] * 2, [both[how] for both in seen])
    yield "activation checkpointing, of both kinds, changes nothing"
    for trial in (_cycles, _trained):
        with hinted({"": "All messages and sizes are those of self.group: group=self.group."}):
            seen = on_ranks(trial, block_class, True, ranks=4)
        _compare("in groups", [members_of(rank) for rank in range(4)], seen)
    yield "in groups of 1 and 3 it meets nobody else"


def _compare(where, members, seen):
    for rank, (cases, gradients) in enumerate(seen):
        here = f"{where}, rank {rank} of {tuple(members[rank])}"
        for case, found in cases.items():
            _compare_cycle(f"{here}, a block: {case}", members[rank], rank, case, found)
        for what, *tensors in gradients:
            explain_rows(f"{here}, {what}", *tensors, rank, members[rank])


def _compare_cycle(where, members, rank, case, found):
    numbers = found["numbers"]
    early = [name for name in found["early"] if name and numbers[
        "all_gather" if name == "begin_unshard" else "reduce_scatter"]]
    if early:
        raise Mistake(f"{where}: {early[0]}() waits", "Its message must travel while others "
                      "compute: async_op=True, and keep the handle: self.work = ..., and "
                      "self.reduction = (where it arrives, the handle).")
    for number, whole in enumerate(found["whole"]):
        right = {name: value + number for name, value in found["before"].items()}
        mixed = _cut_by_parameters(right, len(members)) if right else {}
        for name, value in right.items():
            old = found["before"][name].to(whole[name].dtype)
            explain(f"{where}: `{name}` after unshard() {number + 1}", whole[name], value.to(old), {
                "as before the step": (old, "Gather again what reshard() has freed: the shards "
                                       "have new numbers."),
                "of several parameters": (mixed[name].to(old), "All that rank 0 has sent comes "
                                          "first: view the message as (R, numbers of all), and "
                                          "split its columns.")}, FULL)
    _compare_sent(where, len(members), case, found)
    if found["kept"]:
        raise Mistake(f"{where}: after reduce_gradients() there are whole gradients", "They are in "
                      "the message, and would be added to in the next backward: "
                      "parameter.whole.grad = None for each.")
    for place, name in enumerate(found["trained"]):
        explain_rows(f"{where}: `{name}`", found["gradients"][name], *(
            _gradient(found["before"][name], r, is_lacking=not place) for r in (members, (rank,))),
            rank, members)
    if found["missing"]:
        raise Mistake(f"{where}: {found['missing']} messages were never waited for",
                      "unshard() waits for self.work before it reads the message.")
    if found["left"]:
        raise Mistake(f"{where}: after unshard() the message is still there", "It takes as much "
                      "memory as the parameters: self.work, self.gathered = None, None.")


def _cut_by_parameters(wholes, R):
    """{name: what comes of cutting the message by parameters first, and not by ranks}."""
    parts = []
    for value in wholes.values():
        numbers = -(-len(value) // R) * value[0].numel()
        parts.append(nn.functional.pad(value.flatten(), (0, R * numbers - value.numel())))
    message = torch.cat([part.view(R, -1) for part in parts], dim=1).flatten()
    cuts = message.split([len(part) for part in parts])
    return {name: cut[: value.numel()].view(value.shape)
            for (name, value), cut in zip(wholes.items(), cuts)}


def _compare_sent(where, R, case, found):
    """One message for each of two rounds, of each kind."""
    others = found["sent"].keys() - {"all_gather", "reduce_scatter"}
    if others:
        raise Mistake(f"{where}: it calls {', '.join(others)}", "An all-gather brings the "
                      "parameters, a reduce-scatter the gradients, which sends half as much.")
    nbytes = {"float64": (8, 8), "bfloat16, reduced in float32": (2, 4)}.get(case, (4, 4))
    for name, itemsize in zip(("all_gather", "reduce_scatter"), nbytes):
        each = found["numbers"][name] * itemsize * (R - 1)
        got, right = found["sent"].get(name, []), [each] * 2 if found["numbers"][name] else []
        if len(got) != len(right):
            raise Mistake(f"{where}: {len(got)} messages {name} in two rounds, not {len(right)}",
                          "One for the whole block: torch.cat what travels. And none where the "
                          "parameters are whole (self.is_whole), or on their way (self.work), or "
                          "where nothing is trained.")
        if got != right:
            raise Mistake(f"{where}: {name} sends {got} bytes, not {right}", "padded_shard() and "
                          "padded_gradient() give what travels, in the right type.")
