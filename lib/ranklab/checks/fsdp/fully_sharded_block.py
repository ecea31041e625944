"""FullyShardedBlock: each method by hand, and training, compared with one process."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.fsdp.shard_parameter import chunk_of
from ranklab.checks.handles import HeldWork, Waits
from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.checks.zero.toys import ADAMW, SGD, Block, Toy, loss_of, seeded
from ranklab.fsdp import FullyShardedBlock, Precision
from ranklab.meter import Traffic
from ranklab.meter.storage import tensors_in

TURNS = 0, 1
VERBS = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
         "reduce_scatter_tensor")

# --- messages -------------------------------------------------------------------------------------

class Held:
    """A context in which a message's result is NaN until somebody has waited for it.

    rehearsed  nothing is sent: ranks that send different lengths would crash, or wait
    """

    def __init__(self, rehearsed=False):
        self.rehearsed, self.sent, self.ranks, self.changed = rehearsed, [], set(), 0
        self.patch = mock.patch.multiple(dist, **{
            verb: partial(self._call, getattr(dist, verb)) for verb in VERBS})

    def __enter__(self):
        self.patch.__enter__()
        return self

    def __exit__(self, *error):
        self.patch.__exit__(*error)

    def _call(self, collective, out, tensor, *args, **kwargs):
        arguments = inspect.signature(collective).bind(out, tensor, *args, **kwargs).arguments
        verb = "all_gather" if "gather" in collective.__name__ else "reduce_scatter"
        self.sent.append((verb, _length(tensor.numel(), tensor.dtype)))
        self.ranks |= {*dist.get_process_group_ranks(arguments.get("group"))}
        result, copy = torch.full_like(out, torch.nan), tensor.detach().clone()
        work = Rehearsed() if self.rehearsed else collective(result, copy, *args, **kwargs)
        shares = tensor.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        if not arguments.get("async_op"):
            out.detach().copy_(result)
            return None

        def arrives():
            self.changed += not (shares or torch.equal(tensor, copy))

        out.detach().fill_(torch.nan)
        return HeldWork(work, out, result, arrives)


class Rehearsed:
    """The handle of a message that is never sent."""

    def wait(self, *_):
        return True


def _length(numbers, dtype):
    return f"{numbers} numbers in {dtype}"


def _travels(handle, waits):
    if isinstance(handle, HeldWork):
        return not handle.is_here
    return bool(handle) and not waits.is_over(handle)


# --- what is seen ---------------------------------------------------------------------------------

LENGTHS = "messages of another length or type than padded_shard() and padded_gradient()"
OUTSIDE = "ranks outside the group that it sends to"
GATHERS, REDUCES = "begin_unshard() is under way", "reduce_gradients() is under way"
WHOLE, LEFT = "self.is_whole after unshard()", "does self hold a message after unshard()?"
SENDS = "does it send without a gradient here?"
GRADIENTS, HELD = "whole gradients after reduce_gradients()", "tensors that self holds in the end"
CHANGED, UNENDED = "messages changed under way", "handles that nobody waited for"
MESSAGES = "calls and their bytes"
LAYERS = [f"{layer}.{kind}" for layer in ("up", "down") for kind in ("weight", "bias")]
OF_LAYERS = tuple(f"the gradient of `{name}`" for name in LAYERS)
IN_TRAINING = tuple(f"in training, the gradient of `{name}`" for name in (
    "embedding.weight", "norm.weight", "norm.bias",
    *(f"blocks.{n}.{name}" for n in range(4) for name in LAYERS)))


class Rounds(NamedTuple):
    """Two rounds of all methods, with a step between.

    lacking  number of parameters without a gradient on rank 0 in the second round
    """

    name: str
    new_module: Callable
    precision: Precision = Precision()
    lacking: int = 1

    def __str__(self):
        return f"a block: {self.name}"

    def see(self, block_class, ranks):
        module, block = self._sharded(block_class, ranks)
        sends = Must(True, True)
        with Held(rehearsed=True) as recorder, Waits() as waits, suppress(Exception):
            # What it raises, it raises again.
            sends = self._round(module, block, 1, waits)[SENDS]
        due = {"all_gather": [_length(sum(q.numbers for q in block.parameters), p.whole.dtype)
                              for p in block.parameters[:1]],
               "reduce_scatter": [_length(ranks.size * sum(q.numbers for q in block.trained),
                                          p.reduce_in) for p in block.trained[:1]]}
        yield {LENGTHS: Must([f"{verb} of {sent}, not {due[verb]}" for verb, sent in recorder.sent
                              if sent not in due[verb]], []),
               OUTSIDE: Must(sorted(recorder.ranks - {*ranks.members}), []), SENDS: sends}
        module, block = self._sharded(block_class, ranks)
        for turn in TURNS:
            with Held() as recorder, Traffic() as traffic, Waits() as waits:
                values = self._round(module, block, turn, waits)
            nbytes = {"all_gather": sum(p.numbers * p.whole.itemsize for p in block.parameters),
                      "reduce_scatter": sum(p.numbers * p.reduce_in.itemsize
                                            for p in block.trained)}
            yield values | {
                CHANGED: AtMost(recorder.changed, 0),
                MESSAGES: Must(sorted([op.name, int(op.sent_bytes)] for op in traffic.ops), [
                    [name, (ranks.size - 1) * each] for name, each in nbytes.items() if each]),
                UNENDED: AtMost(waits.missing(traffic.calls.total()), 0)}

    def _sharded(self, block_class, ranks):
        module = seeded(self.new_module, 0)
        return module, block_class(module, ranks.group, precision=self.precision)

    def _round(self, module, block, turn, waits):
        has_gradient = [dist.get_rank() or self._has(number, turn)
                        for number in range(len(block.trained))]
        return _round(module, block, turn, waits, has_gradient)

    def _has(self, number, turn):
        """Return whether rank 0 has a gradient of this parameter."""
        return number >= turn * self.lacking

    def right(self, ranks):
        before = dict(seeded(self.new_module, 0).named_parameters())
        trained = {name: x for name, x in before.items() if x.requires_grad}
        yield {LENGTHS: Must([], []), OUTSIDE: Must([], []), SENDS: Must(0, 0)}
        for turn in TURNS:
            values = {GATHERS: Must(0, 0)} if turn == 0 else {}
            values |= {f"`{name}` after unshard()": (x + turn).to(self.precision.compute or x.dtype)
                       for name, x in before.items()}
            values |= dict.fromkeys((WHOLE, LEFT, SENDS, REDUCES), Must(0, 0))
            values |= dict.fromkeys((GRADIENTS, HELD), AtMost(0, 0))
            for number, (name, x) in enumerate(trained.items()):
                of_ranks = [_gradient(x, r) for r in ranks.members
                            if r or self._has(number, turn)]
                values[f"the gradient of `{name}`"] = chunk_of(
                    sum(of_ranks) / ranks.size, ranks.size, ranks.index) if of_ranks else None
            yield values | {CHANGED: AtMost(0, 0), MESSAGES: Must(0, 0), UNENDED: AtMost(0, 0)}


def _round(module, block, turn, waits, has_gradient):
    values = {}
    if turn == 0:  # else unshard() begins it
        block.begin_unshard()
        block.begin_unshard()
        values[GATHERS] = Must(_travels(block.work, waits), bool(block.parameters))
    block.unshard()
    block.unshard()
    values |= {f"`{name}` after unshard()": p.detach().clone()
               for name, p in module.named_parameters()}
    values |= {WHOLE: Must(bool(block.is_whole) or not block.parameters, True),
               LEFT: Must(block.gathered is not None or bool(block.work), False)}
    for p, has in zip(block.trained, has_gradient):
        if has:
            p.whole.grad = _gradient(p.whole.detach(), dist.get_rank())
    block.reduce_gradients()
    values |= {GRADIENTS: AtMost(sum(p.whole.grad is not None for p in block.trained), 0),
               SENDS: Must(block.reduction is not None, bool(block.trained)),
               REDUCES: Must(bool(block.reduction) and _travels(block.reduction[1], waits),
                             bool(block.trained))}
    block.end_reduction()
    block.reshard()
    values[HELD] = AtMost(len(tensors_in(vars(block))), 0)
    for name, p in module.named_parameters():
        if p.requires_grad:
            values[f"the gradient of `{name}`"] = p.grad
        p.data += 1  # as an optimizer would
        p.grad = None
    return values


def _gradient(tensor, rank):
    return torch.arange(1.0, tensor.numel() + 1).view(tensor.shape).to(tensor) * 2**rank


class Training(NamedTuple):
    """Two steps. The model is tied, half frozen, uneven; blocks are used twice, one twice in a row.

    pieces  of each backward before a step: does it communicate?
    """

    new_optimizer: Callable
    pieces: tuple = (True,)
    recompute: str | None = None

    def __str__(self):
        return f"training, {len(self.pieces)} backwards, recompute={self.recompute}"

    def see(self, block_class, ranks):
        model = self._model()
        for module in (*model.blocks[:3], model):
            root = block_class(module, ranks.group)
        optimizer = self.new_optimizer(model.parameters())
        for turn in TURNS:
            for piece, root.unit.hooks.sync in enumerate(self.pieces):
                loss_of(model, _seed(turn, piece, dist.get_rank())).backward()
            yield {name: p.grad for name, p in _trained(model)}
            optimizer.step()
            optimizer.zero_grad()

    def right(self, ranks):
        model, R = self._model(), ranks.size
        optimizer = self.new_optimizer(model.parameters())
        for turn in TURNS:
            for piece in range(len(self.pieces)):
                for rank in ranks.members:
                    (loss_of(model, _seed(turn, piece, rank)) / R).backward()
            yield {name: chunk_of(p.grad, R, ranks.index) for name, p in _trained(model)}
            optimizer.step()
            optimizer.zero_grad()

    def _model(self):
        model = seeded(lambda: Toy(order=(0, 1, 2, 2, 3, 0)).float(), 0)
        model.recompute = self.recompute
        return model


def _seed(turn, piece, rank):
    return 100 * turn + 10 * piece + rank


def _trained(model):
    return [(f"in training, the gradient of `{name}`", p) for name, p in model.named_parameters()
            if p.requires_grad]


def in_one_process(module, group=None):
    """Replace a block: each case knows the right result without blocks."""


def _see(fn, case, ranks):
    return case.right(ranks) if fn is in_one_process else case.see(fn, ranks)


# --- mistakes -------------------------------------------------------------------------------------

ROUNDS = (
    Rounds("float64, half of it frozen", lambda: Block(1).double()),
    Rounds("bfloat16, reduced in float32; rank 0 has no gradient in the second round",
           lambda: Block(0), Precision(torch.bfloat16, torch.float32), lacking=4),
    Rounds("all frozen", lambda: Block(0).requires_grad_(False)),
    Rounds("without parameters", nn.Tanh))
TRAININGS = (Training(SGD, (False, True, True)), Training(ADAMW, recompute="reentrant"),
             Training(ADAMW, recompute="non-reentrant"))

GUARD = "if not self.parameters or self.is_whole or self.work:"
SHARDS = "p.padded_shard() for p in self.parameters"
ROOM = "message.new_empty(self.ranks * len(message))"
GATHER = ("self.work = dist.all_gather_single(self.gathered, message, group=self.group, "
          "async_op=True)")
BEGIN, WAIT = "        self.begin_unshard()\n", "        self.work.wait()\n"
VIEW = "parts = self.gathered.view(self.ranks, -1).split([p.numbers for p in self.parameters], 1)"
FILL = "parameter.fill(part)"
END = "self.work, self.gathered, self.is_whole = None, None, True"
UNTRAINED = "        if not self.trained:\n            return\n"
OWNED = "p.padded_gradient() for p in self.trained"
CAT, DIVIDE = f"grads = torch.cat([{OWNED}], dim=1)", "        grads /= self.ranks\n"
REDUCE = ("work = dist.reduce_scatter_single(shard, grads.flatten(), group=self.group, "
          "async_op=True)")
KEEP = "        self.reduction = shard, work"
FREE = "            parameter.whole.grad = None\n"
BLOCK = Proof(
    FullyShardedBlock,
    Stage({"begin_unshard() does not wait, unshard() makes all parameters whole, also after a step":
           (),
           "gradients become means, each row on its owner; none is left whole":
           (GRADIENTS, SENDS, REDUCES, *OF_LAYERS, CHANGED, HELD),
           "one all-gather, one reduce-scatter; frozen, float64, bfloat16, or nothing in the block":
           (MESSAGES, UNENDED),
           "trains like one process, on 4 ranks and in groups of 1 and 3": IN_TRAINING},
          _see, (*ROUNDS, Training(ADAMW)), (4,), (ALL, *GROUPS[:1]), oracle=in_one_process),
    Stage("also with SGD, several backwards, no_sync, activation checkpointing; tied, uneven, a "
          "block that is used twice, even in a row", _see, TRAININGS, (3,),
          oracle=in_one_process),
    mistakes=(
        Slip("A block may have no parameters; then there is nothing to gather.",
             (GUARD, "if self.is_whole or self.work:")),
        Slip("This gathers again what is already on its way: if self.work is set, there is nothing "
             "to do.",
             (GUARD, "if not self.parameters or self.is_whole:")),
        Slip("This gathers again what is already whole: if self.is_whole is set, there is nothing "
             "to do.",
             (GUARD, "if not self.parameters or self.work:")),
        Slip("begin_unshard() must start the gather without waiting for it, so that other blocks "
             "compute meanwhile: use async_op=True, and keep the handle, self.work = ...",
             (GATHER, f"{GATHER}\n{WAIT}"),
             (GATHER, GATHER.replace(", async_op=True", "")),
             (GATHER, f"{GATHER.replace('self.work', 'work')}\n        work.wait()\n"
                      "        self.work = None"),
             (GATHER, "pass", WAIT, f"        {GATHER}\n{WAIT}")),
        Slip("begin_unshard() must send as many numbers as unshard() splits off: p.numbers for "
             "each p in self.parameters.", (SHARDS, SHARDS.replace("parameters", "trained"))),
        Slip("The receive buffer needs the message's dtype and device: use new_empty().",
             (ROOM, ROOM.replace("message.new_", "torch.")),
             (ROOM, "torch.zeros(self.ranks * len(message))"), torch=torch),
        Slip("All ranks must send messages of the same length: padded_shard() adds zeros at the "
             "end.",
             (SHARDS, SHARDS.replace("padded_shard()", "shard.detach().flatten()"))),
        Slip("Gather in the compute dtype, which padded_shard() already uses.",
             (SHARDS, SHARDS.replace("padded_shard()", "padded_shard(p.shard.dtype)"))),
        Slip("The message goes through float32: send it in the dtype of padded_shard().",
             (f"torch.cat([{SHARDS}])", f"torch.cat([{SHARDS}]).float()")),
        Slip("Once all parameters are filled, free the gathered message, self.gathered = None: it "
             "takes as much memory as they do.", (END, "self.work, self.is_whole = None, True")),
        Slip("Keep no other reference to the gathered message: it takes as much memory as the "
             "parameters.",
             (WAIT, f"{WAIT}        self.message = self.gathered\n"),
             (f"self.gathered = {ROOM}", f"self.gathered = self.message = {ROOM}")),
        Slip("unshard() reads self.gathered, which is None: begin_unshard() keeps the receive "
             "buffer there. unshard() first reads it, and then sets both self.work and "
             "self.gathered to None.",
             (END, "self.gathered, self.is_whole = None, True")),
        Slip("unshard() must start the gather if it has not been started yet.", (BEGIN, "")),
        Slip("unshard() waits for self.work before it reads the message.",
             (WAIT, ""), (WAIT, "", END, f"self.work.wait()\n        {END}")),
        Slip("Everything from rank 0 comes first: view the message as (R, numbers of all "
             "parameters), and split its columns.",
             (VIEW, "parts = self.gathered.split([self.ranks * p.numbers for p in self.parameters])"
              ), (VIEW, "parts = [part.view(self.ranks, -1) for part in self.gathered.split([self."
                        "ranks * p.numbers for p in self.parameters])]"),
             (VIEW, VIEW.replace("view(self.ranks, -1)", "view(-1, self.ranks).T"))),
        Slip("unshard() fills every parameter.", (FILL, f"{FILL}\n            break"),
             (FILL, f"{FILL} if parameter in self.trained else None")),
        Slip("unshard() sets self.is_whole.", (END, "self.work, self.gathered = None, None")),
        Slip("Don't keep the message of whole gradients after it has been sent.",
             (KEEP, f"{KEEP}\n        self.whole_gradients = grads")),
        Slip("This is the sum over ranks: divide the message by self.ranks before it is sent.",
             (DIVIDE, ""), (DIVIDE, "", KEEP, f"        shard /= self.ranks\n{KEEP}")),
        Slip("Reduce-scatter into the tensor that self.reduction keeps: this one holds only the "
             "rank's own gradient.",
             (KEEP, "        self.reduction = grads[self.rank].clone(), work"),
             (DIVIDE, "", KEEP, "        self.reduction = grads[self.rank].clone(), work")),
        Slip("Divide by self.ranks, the number of ranks in the group, not by the number of all "
             "ranks.",
             ("grads /= self.ranks", "grads /= dist.get_world_size()")),
        Slip("The gradient is divided twice.", (DIVIDE, DIVIDE + DIVIDE)),
        Slip("Row r of the message is for rank r: torch.cat each padded_gradient() along dim=1.",
             (CAT, "grads = torch.cat([p.padded_gradient().flatten() for p in self.trained])",
              "grads.new_empty(grads.shape[1])", "grads.new_empty(len(grads) // self.ranks)"),
             (CAT, f"{CAT}.T.contiguous()", "grads.new_empty(grads.shape[1])",
              "grads.new_empty(len(grads))")),
        Slip("The parameters' parts of the message must be in the order of self.trained.",
             (OWNED, "p.padded_gradient() for p in self.trained[::-1]")),
        Slip("Reduce in the dtype of padded_gradient(): in 16 bits, a sum over many ranks is "
             "rounded.",
             ("grads /= self.ranks",
              "grads = grads.to(self.trained[0].whole.dtype) / self.ranks")),
        Slip("The gradients go through float32: send them in the dtype of padded_gradient().",
             (CAT, f"{CAT}.float()")),
        Slip("Set p.whole.grad = None only once the gradient is in the message.",
             (CAT, f"for p in self.trained:\n            p.whole.grad = None\n        {CAT}")),
        Slip("A block may have no trained parameters; then there is nothing to reduce.",
             (UNTRAINED, "")),
        Slip("Backward must continue while the message travels: divide, send with async_op=True, "
             "and don't wait here, but keep the handle: self.reduction = (the receive buffer, the "
             "handle).",
             (REDUCE, f"{REDUCE}\n        work.wait()"),
             (REDUCE, f"{REDUCE}\n        work.wait()\n        work = None"),
             (REDUCE, REDUCE.replace(", async_op=True", ""))),
        Slip("The ranks that share the rows are in self.group: pass group=self.group to the gather "
             "and the reduce-scatter.", (GATHER, GATHER.replace("group=self.group, ", "")),
             (REDUCE, REDUCE.replace("group=self.group, ", ""))),
        Slip("The next backward would add to the whole gradients: set parameter.whole.grad = None "
             "for each.", (FREE, "            pass\n"),
             (FREE, f"{FREE}            break\n")),
        Slip("One reduce-scatter is enough: an all-reduce sends twice as much.",
             (REDUCE, "work = dist.all_reduce(grads, group=self.group, async_op=True)\n"
                      "        shard = grads[self.rank]")),
        Slip("Only trained parameters have gradients to send: use self.trained.",
             (OWNED, OWNED.replace("trained", "parameters"))),
        Slip("Divide the message, not p.whole.grad, which may be in 16 bits.",
             (DIVIDE, "", CAT, "for p in self.trained:\n            if p.whole.grad is not None:\n"
                               f"                p.whole.grad /= self.ranks\n        {CAT}")),
        Slip("The message is already on its way when it is divided: divide it before sending.",
             (DIVIDE, "", "grads.flatten()", "grads.view(-1)", KEEP, f"{DIVIDE}{KEEP}")),
        Slip("All ranks must send the same length: padded_gradient() of every trained parameter, "
             "with zeros where this rank has no gradient.",
             (OWNED, f"{OWNED} if p.whole.grad is not None")),
        Slip("The other ranks wait for this one's message even if it has no gradients: "
             "padded_gradient() is zeros then. Return early only if nothing is trained.",
             (UNTRAINED, UNTRAINED.replace(":\n", " or not self.has_gradients():\n"))),
        Slip("Send one all-gather, one reduce-scatter, and nothing else: every message adds "
             "latency.",
             (GATHER, f"{GATHER}\n        dist.barrier(group=self.group)"),
             (REDUCE, f"{REDUCE}\n        dist.barrier(group=self.group)")),
    ), hints=(
        "What does one message hold for the rank that sends it, and for the rank that receives R "
        "of them?",
        "A rank sends padded_shard() of all parameters, one after another; so what arrives is (R, "
        "numbers), and each parameter is some of its columns. Gradients go back the same way: "
        "padded_gradient() is (R, numbers), row r for rank r.",
        "begin_unshard(): message = torch.cat([p.padded_shard() for p in self.parameters]); "
        "self.work = dist.all_gather_single(self.gathered, message, group=self.group, "
        "async_op=True). unshard(): self.begin_unshard(); wait; "
        "self.gathered.view(self.ranks, -1).split([p.numbers ...], 1), and "
        "parameter.fill(part). reduce_gradients(): torch.cat([p.padded_gradient() "
        "...], dim=1) / self.ranks; dist.reduce_scatter_single(shard, grads.flatten(), ...); "
        "self.reduction = shard, work; p.whole.grad = None",
    ))
