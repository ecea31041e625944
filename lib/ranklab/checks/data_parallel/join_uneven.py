"""The check of join_uneven, on the library's OverlappedDataParallel, compared with one process."""

from operator import length_hint
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.data_parallel.toys import loss_of, rows, toy
from ranklab.checks.prover import ALL, GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.checks.trial import gathered
from ranklab.data_parallel import OverlappedDataParallel, join_uneven
from ranklab.engine import device
from ranklab.meter import Traffic

LIMIT = 6  # seconds; the usual mistake waits for ever


class Case(NamedTuple):
    """counts: number of batches of each rank of a group."""

    counts: tuple = ()

    def __str__(self):
        return f"with {self.counts} batches" if self.counts else "a loop that is left by a break"


CASES = Case(), Case((0, 3, 1, 2)), Case((2, 0, 1, 1))
BATCHES, AHEAD = "the numbers of its batches", "batches that it takes before they are asked for"
JOINING = "model.joining in the loop"
AFTER = "model.joining and model.buffers_from afterwards"
ASKS, ASKED = "whether ranks communicate before a batch", "bytes in collectives before a batch"
SENT, BROADCASTS = "bytes in collectives", "broadcasts after a break"


def _see(fn, case, ranks):
    model = OverlappedDataParallel(toy(0), bucket_cap_bytes=200, group=ranks.group)
    if not case.counts:
        nbytes = 0
        with Traffic() as traffic:
            for _ in fn(iter([torch.zeros(2)]), model):  # a batch may be a tensor
                nbytes = sum(op.payload_bytes for op in traffic.ops)
                break  # on all ranks: what a training loop does after its last step
        yield {ASKS: Must(nbytes > 0, True), ASKED: AtMost(nbytes, 8),
               BROADCASTS: AtMost(traffic.calls["broadcast"], 0), AFTER: _after(model)}
        return
    counts = case.counts[:ranks.size]
    steps, count = max(counts), counts[ranks.index]
    optimizer, numbers, ahead, states = torch.optim.SGD(model.parameters(), 0.1), [], [], []
    # like a loader it has no length, and what is taken is gone
    batches = iter([(k, rows(10 * dist.get_rank() + k)) for k in range(count)])
    with Traffic() as traffic:
        for k, x in fn(batches, model):
            numbers.append(k)
            ahead.append(count - length_hint(batches) - len(numbers))
            states.append(model.joining)
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    whole = sum(p.nbytes for p in model.parameters()) + buffers
    yield {BATCHES: numbers, AHEAD: AtMost(max(ahead, default=0), 1),
           JOINING: Must(states, [True] * len(states)), AFTER: _after(model),
           SENT: AtMost(sum(op.payload_bytes for op in traffic.ops),
                        steps * (gradients + buffers + 8) + 8 + whole),
           } | {f"`{name}` at the end": tensor for name, tensor in model.state_dict().items()}


def _after(model):
    return Must([model.joining, model.buffers_from], [False, 0])


def in_one_process(batches, model):
    """Yield this rank's batches, then train on the batches of all ranks from the start."""
    own = list(batches)
    of_ranks = gathered(own, model.group)
    model.sync = model.buffers_stale = False  # steps inside the loop send nothing
    yield from own
    copy = toy(0)
    optimizer = torch.optim.SGD(copy.parameters(), 0.1)
    for step in range(max(map(len, of_ranks))):
        before = copy.steps.clone()
        optimizer.zero_grad()
        for _, x in (of_rank[step] for of_rank in of_ranks if step < len(of_rank)):
            (loss_of(copy, x.to(device())) / len(of_ranks)).backward()
        optimizer.step()
        copy.steps = before + 1  # a buffer: it counts forwards
    model.load_state_dict(copy.state_dict())


def each_for_itself(batches, model):
    yield from batches


def repeats(batches, model):
    batches = list(batches)
    count = torch.tensor(len(batches))
    dist.all_reduce(count, dist.ReduceOp.MAX, group=model.group)
    for k in range(count):
        yield batches[k % len(batches)] if batches else (9, torch.zeros(4, 6))


LAST = "model.buffers_from = last = going_on.item()"
HAND_OVER = "broadcast_parameters(model.module, last, model.group)"
RESET = "model.joining, model.buffers_from = False, 0"
AT_THE_END = ("At the end, broadcast_parameters(model.module, src, model.group) must give every "
              "rank the whole state of a rank that had a batch in the last step.")
ON_AND_ON = "A rank without a batch must keep taking part, through shadow(), until no rank has one."
GO_ON = "going_on, dist.ReduceOp.MAX, group=model.group"
RANK = "-1 if batch is None else rank"
SHADOW = "                model.shadow()\n"
NEXT, YIELDS = "batch = next(batches, None)", "            else:\n                yield batch\n"
JOIN = Proof(
    join_uneven,
    Stage({"every rank gets all its own batches, in order: 1, 2, 3, 4 ranks, some with none":
           (BATCHES,),
           "at the end all ranks have the weights and buffers that one process has after all steps":
           (),
           "each step sends one extra number, and at the end the model is sent once; batches are "
           "taken one by one": (ASKED, SENT, AHEAD),
           "inside, model.joining is True; afterwards all is as before, even after a break":
           (JOINING, AFTER, BROADCASTS)},
          _see, CASES, (4,), (ALL, *GROUPS), oracle=in_one_process, through=torch.float32,
          launch={"timeout": LIMIT}),
    mistakes=(
        Slip("Don't throw away any rank's batches: all ranks continue until none has one left. "
             "Take the MAX.",
             ("ReduceOp.MAX", "ReduceOp.MIN"), ("ReduceOp.MAX", "ReduceOp.MIN", "going_on < 0",
                                               "going_on < 0 or batch is None")),
        Slip("A loader may have no length: one small all-reduce in each step tells all ranks "
             "whether any rank has a batch.", ("iter(batches)", "iter(batches[:len(batches)])")),
        Slip("An epoch may not fit into memory: call next(batches, None) once in each step.",
             ("iter(batches)", "iter(list(batches))")),
        Slip("next(batches, None) returns None at the end; next(batches) raises StopIteration.",
             ("next(batches, None)", "next(batches)")),
        Slip("A batch may be a tensor, or empty, and still counts as a batch: test `batch is "
             "None`, not `if batch`.", ("-1 if batch is None else rank", "rank if batch else -1"),
             ("if batch is None:", "if not batch:")),
        Slip("Ask the other ranks before each step, including the first, and only then yield: a "
             "rank without a batch must know in time whether they continue.", each_for_itself,
             (YIELDS, "", NEXT, f"{NEXT}\n            if batch is not None:\n"
              "                yield batch")),
        Slip("A rank with a batch only yields it: its own forward and backward already send what "
             "shadow() sends.", (f"            if batch is None:\n{SHADOW}{YIELDS}",
                        "            model.shadow()\n            if batch is not None:\n"
                        "                yield batch\n")),
        Slip(ON_AND_ON, ("                break\n            model",
                                          "                break\n            if batch is None:\n"
                                          "                break\n            model"),
             (SHADOW, "                pass\n")),
        Slip("Stop only if the MAX is below 0: 0 is rank 0, which still has a batch. A rank "
             "without a batch sends -1.",
             ("-1 if", "0 if", "going_on < 0", "going_on == 0 and batch is None"),
             ("going_on < 0", "going_on <= 0")),
        Slip("A rank without a batch shadows the step and yields nothing.",
             ("    else:\n                yield batch", "    yield batch"),
             (SHADOW, "                yield None\n")),
        Slip("A rank that has no batch left must not repeat one: it shadows the step.", repeats),
        Slip("The loop gets the parts of a batch one by one: use `yield batch`, not `return "
             "batch` or `yield from batch`.",
             ("yield batch", "return batch")),
        Slip("All ranks use the buffers of rank `model.buffers_from`: it must be a rank that still "
             "has a batch.",
             (LAST, "last = going_on.item()")),
        Slip(AT_THE_END, ("model.module, last", "model.module, 0"), (HAND_OVER, "pass")),
        Slip("At the end, rank `last` must send its buffers as well, not only its parameters.",
             (HAND_OVER, "for p in model.parameters():\n            "
              "dist.broadcast(p.detach(), group=model.group, group_src=last)")),
        Slip("-1 means that no rank has a batch left. Keep the last result before it, which is a "
             "rank.",
             ("model.module, last", "model.module, going_on.item()")),
        Slip("Send only the gradients, the buffers and one number in each step; send the model's "
             "weights once, at the end.", (LAST, f"{LAST}\n            {HAND_OVER}")),
        Slip("One number says who still has a batch, the largest over all ranks: an all-reduce of "
             "8 bytes.",
             (RANK, f"[{RANK}] * 2", "going_on < 0", "going_on[0] < 0", "going_on.item()",
              "going_on[0].item()"),
             (f"dist.all_reduce({GO_ON})", "of_ranks = [None] * dist.get_world_size(model.group)\n"
              "            dist.all_gather_object(of_ranks, going_on, group=model.group)\n"
              "            going_on = max(of_ranks)")),
        Slip("Use the rank within the group: dist.get_rank(model.group).",
             ("get_rank(model.group)", "get_rank()")),
        Slip("Pass model.group to every collective.", ("last, model.group)", "last)"),
             (GO_ON, "going_on, dist.ReduceOp.MAX")),
        Slip("Set model.joining before the first step, so that no_sync inside the loop is an "
             "error, not a hang.", ("model.joining = True", "pass")),
        Slip("Reset model.joining and model.buffers_from in a `finally`: the loop may be left "
             "early.", ("try:", "if True:", "finally:", "if True:")),
        Slip("Reset model.buffers_from to 0 as well: without join_uneven, rank 0's buffers count.",
             (RESET, "model.joining = False")),
        Slip("Reset model.joining to False.", (RESET, "model.buffers_from = 0")),
        Slip("Broadcast before the `finally`, not in it: after an error on one rank, the broadcast "
             "would hang.",
             (HAND_OVER, "pass", RESET, f"{RESET}\n        {HAND_OVER}")),
    ), hints=(
        "Before each step, all ranks must find out whether any rank has a batch left. And what "
        "does a rank without a batch do?",
        "Use one all-reduce with MAX: a rank with a batch contributes its rank, one without "
        "contributes -1. Below 0, all are done. Otherwise the result is a rank that still has a "
        "batch: its buffers count, and at the end its weights.",
        "batch = next(batches, None); dist.all_reduce(going_on, dist.ReduceOp.MAX, "
        "group=model.group); if going_on < 0: break; model.buffers_from = last = going_on.item(); "
        "then model.shadow() or yield batch. At the end broadcast_parameters(model.module, last, "
        "model.group)",
    ))
