"""The check of PipelineExecutor: real ranks run schedules of all kinds, beside one process."""

import functools
import gc
import weakref

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.failures import hinted
from ranklab.checks.handles import Waits
from ranklab.checks.memory import held_bytes
from ranklab.checks.trial import explain, group_of_mine, members_of, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.pipeline_parallel import (
    Message, gpipe_schedule, in_flight_activations, interleaved_schedule, one_f_one_b_schedule,
    places, with_messages, zb_v_schedule, zero_bubble_schedule,
)
from ranklab.pipeline_parallel.deferred import WeightQueue, defer_weights

WIDTH, PIECES, WEIGHT, SCALE = 4, 6, 0.25, 3.0
SCHEDULES = {"GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule, "ZB-H1": zero_bubble_schedule,
             "ZB-V": zb_v_schedule, "interleaved": lambda P, M: interleaved_schedule(P, M, 2)}
HANDLE = ("isend and irecv only start a message. Keep (handle, tensor) in self.leaving, or in "
          "self.arriving[way, stage, m]: the tensor must live until take() or run() has waited.")
LEAF = ("What a stage hands on has no graph, y.detach(), and what it takes is a leaf: "
        "requires_grad_(), so that backward gives x.grad for the stage before.")
START = ("The last stage of all, self.last, begins backward with self.weight * self.scale, each "
         "other one with what the stage after it sends, take(\"B\", ...), and each sends x.grad.")
WEIGHTED = ("The loss counts times self.weight, one over the targets of the whole batch, because "
            "micro-batches have unequal numbers. Backward begins with self.weight * self.scale.")
COSTS = {
    "messages": "One for each send() and receive(): inside a rank self.there is enough.",
    "bytes sent": "What travels has the shape of an output.",
    "activations at once": "Backward is the last use of a micro-batch: self.kept.pop().",
    "bytes kept after training": "After a run nobody needs inputs, outputs or gradients of "
    "micro-batches: pop() what is used or sent out of self.there, self.kept and self.arriving.",
    "tensors left in self.there": "What is used or sent is popped out of self.there.",
    "activations kept without gradients": "No backward follows: torch.is_grad_enabled() tells.",
}
FAILURES = {
    r"KeyError: \(.*\)":
        "send() takes there[\"F\", stage + 1, m] after SF, and there[\"B\", stage - 1, m] "
                "after SB; receive() puts into arriving[kind[1], stage, m]. Nobody sends stage 0 "
                "its input: it is self.pieces[m][0].",
    "RuntimeError: .*has to be contiguous":
        "A stage may give any strides: send tensor.contiguous().",
    r".*(waited|\(\) waits|self\.leaving).*": HANDLE,
    ".*for its W.*": "with self.later(action): y.backward(gradient)",
    ".*loss has.*": "self.loss += y.detach() * self.weight: a graph keeps all that it comes from.",
    ".*sends a graph.*": LEAF, "RuntimeError: .*(second time|not require grad).*": LEAF,
    "(Type|Attribute)Error: 'NoneType' .*": LEAF,
    "RuntimeError: grad can be implicitly created only for scalar outputs": f"{START} {LEAF}",
    "RuntimeError: Mismatch in shape.*": "A gradient has the shape of the output that it is for: "
    "both are of one stage and one micro-batch.",
    ".*broadcast shape.*": "Only the output of the last stage of all, self.last, is a loss.",
    "RuntimeError: .*floating point.*":
        "Stage 0 takes its inputs as they are: tokens get no gradient.",
}


def new_stage(number, last, kept):
    """A stage: (x, targets) -> output, the last one's the sum of a loss; and its module. `kept`
    gets how many outputs live, with their graphs, after each forward.
    """
    torch.manual_seed(number)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device())
    outputs = []

    def stage(x, targets):
        y = module(x.float())
        if number == last:
            y = ((y - targets).square() * (targets > 0)).sum()
        elif number == 1:
            y = y.T.contiguous().T  # other strides
        outputs.append(weakref.ref(y))
        living = [output for output in outputs if output() is not None]
        if len(living) > max(kept, default=0):
            gc.collect()  # some may live in a circle only
        kept.append(sum(output() is not None for output in living))
        return y

    return stage, module


def pieces_of(batch):
    """Unequal micro-batches with unequal numbers of targets; inputs are integers, as tokens are."""
    generator = torch.Generator().manual_seed(100 + batch)
    rows = [2 + batch] * (PIECES - 1) + [1]
    return [(torch.randint(-2, 3, (count, WIDTH), generator=generator).int().to(device()),
             torch.randn(count, WIDTH, generator=generator).to(device())) for count in rows]


def _trial(executor_class, names, in_group=False):
    """{name of a schedule: what is seen when this rank runs it}"""
    group = group_of_mine() if in_group else None
    return {name: _run(executor_class, SCHEDULES[name](dist.get_world_size(group), PIECES), group)
            for name in names}


def _run(executor_class, schedule, group):
    """Two batches, whose gradients are added up, then one without gradients: [(what, a value, the
    right one)], and {what: (a cost, the most that it may be)}.
    """
    rank, place, kept, queue = dist.get_rank(group), places(schedule), [], WeightQueue()
    last = max(place)
    mine = {s: new_stage(s, last, kept) for s, of in place.items() if of == rank}
    for _, module in mine.values():
        defer_weights(module, queue)
    executor = executor_class({stage: call for stage, (call, _) in mine.items()}, last,
                              lambda x: torch.empty_like(x, dtype=torch.float32), group,
                              weight_queue=queue)
    held = held_bytes()
    with Waits() as waits, Traffic() as traffic:
        _watch(executor, waits)
        losses = [executor.run(schedule, pieces_of(0), WEIGHT, SCALE)]
    if losses[0].requires_grad:
        raise RuntimeError("self.loss has a graph")
    if missing := waits.missing(len(traffic.ops)):
        raise RuntimeError(f"{missing} messages were never waited for")
    losses.append(executor.run(schedule, pieces_of(1), WEIGHT, SCALE))
    waits.forget()
    left = held_bytes([*_known(executor, mine), *losses]) - held
    at_once = max(kept), in_flight_activations(schedule)[rank]
    forwards = tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule)
    with torch.no_grad():
        losses.append(executor.run(forwards, pieces_of(2)))
    right, modules = one_process(last + 1)
    values = [(f"the loss of batch {batch + 1}", loss, right[batch] * (last in mine))
              for batch, loss in enumerate(losses)]
    values += [(f"a gradient of stage {stage}", p.grad, q.grad) for stage, (_, module)
               in mine.items() for p, q in zip(module.parameters(), modules[stage].parameters())]
    messages = [m for m in with_messages(schedule)[rank] if isinstance(m, Message)]
    nbytes = sum(pieces_of(0)[m.micro_batch][0].nbytes for m in messages if m.kind[0] == "S")
    return values, {"messages": (len(traffic.ops), len(messages)),
                    "bytes sent": (traffic.sent_bytes, nbytes), "activations at once": at_once,
                    "tensors left in self.there": (len(executor.there), 0),
                    "activations kept without gradients": (len(executor.kept), 0),
                    "bytes kept after training": (left, 0)}


def _known(executor, mine):
    """The tensors that may be there after a run."""
    yield executor.loss
    yield from (x for piece in executor.pieces for x in piece)
    yield from (x for _, x in executor.leaving)
    yield from (p.grad for _, module in mine.values() for p in module.parameters())


def _watch(executor, waits):
    """What would hang later, or could not be seen, is an error at once."""
    send, receive, weights = executor.send, executor.receive, executor.weights

    def sending(message):
        send(message)
        handle, tensor = executor.leaving[-1] if executor.leaving else (None, None)
        if not isinstance(tensor, torch.Tensor):
            raise RuntimeError("send() leaves no (handle, tensor) in self.leaving")
        if waits.is_over(handle) or tensor.requires_grad:
            raise RuntimeError("send() waits" if waits.is_over(handle) else "send() sends a graph")

    def receiving(message):
        receive(message)
        handle, _ = executor.arriving.get((message.kind[1], *message[1:3]), (None, None))
        if handle is None or waits.is_over(handle):
            raise RuntimeError("receive() waits, or leaves nothing in self.arriving")

    def weighing(action):
        if not executor.weight_queue.waiting.get(action[1:]):
            raise RuntimeError("an I leaves nothing for its W")
        weights(action)

    executor.send, executor.receive, executor.weights = sending, receiving, weighing


@functools.cache
def one_process(stages):
    """The losses of three batches, and the modules with their gradients of the first two."""
    made, losses = [new_stage(number, stages - 1, []) for number in range(stages)], []
    for batch, weight in enumerate((WEIGHT, WEIGHT, 1)):
        losses.append(torch.zeros((), device=device()))
        for x, targets in pieces_of(batch):
            for stage, _ in made:
                x = stage(x, targets)
            (x * weight * SCALE * (batch < 2)).backward()
            losses[-1] += weight * x.detach()
    return losses, [module for _, module in made]


def check_PipelineExecutor(executor_class):
    with hinted(FAILURES):
        seen = on_ranks(_trial, executor_class, list(SCHEDULES), ranks=2)
    _compare("on 2 ranks", seen)
    yield "losses and all gradients of one process: GPipe, 1F1B, ZB-H1, ZB-V, interleaved; 2 ranks"
    yield "two batches in a row, unequal micro-batches, evaluation without gradients"
    yield "one message for each need, no early wait; what is kept is free after its backward"
    with hinted({".*": "Hand self.group on, and name peers by their rank in it: "
                     "dist.isend(tensor, group=self.group, group_dst=peer), group_src=peer."}):
        seen = on_ranks(_trial, executor_class, ["1F1B", "ZB-V"], True, ranks=4)
    _compare("in its group", seen)
    yield "in groups of 1 and 3 ranks it meets nobody else"


def _compare(where, seen):
    for name in seen[0]:
        for rank, found in enumerate(seen):
            here, (values, costs) = f"{where}, {name}, rank {rank}", found[name]
            for what, got, right in values:
                explain(f"{here}: {what}", got, right, {
                    "not weighted": (right / WEIGHT, WEIGHTED),
                    "not scaled": (right / SCALE, WEIGHTED),
                    "neither weighted nor scaled": (right / WEIGHT / SCALE, WEIGHTED),
                    "a mean over micro-batches": (right / WEIGHT / PIECES, WEIGHTED)}, START)
            for what, (got, most) in costs.items():
                if got > most:
                    raise Mistake(f"{here}: {got} {what}, not {most}", COSTS[what])
