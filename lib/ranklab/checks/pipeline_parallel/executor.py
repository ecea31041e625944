"""The check of PipelineExecutor: real ranks run schedules of all kinds, beside one process."""

import functools
import weakref

import torch
import torch.distributed as dist
from torch import nn

from ranklab.checks.exercise import Mistake
from ranklab.checks.handles import Waits
from ranklab.checks.trial import explain, group_of_mine, hinted, members_of, on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.pipeline_parallel import (
    Message, gpipe_schedule, in_flight_activations, interleaved_schedule, one_f_one_b_schedule,
    places, with_messages, zb_v_schedule, zero_bubble_schedule,
)
from ranklab.pipeline_parallel.deferred import WeightQueue, defer_weights

WIDTH, PIECES, WEIGHT, SCALE = 4, 6, 0.25, 3.0
SCHEDULES = {"GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule, "ZB-H1": zero_bubble_schedule,
             "ZB-V": zb_v_schedule, "interleaved": functools.partial(interleaved_schedule,
                                                                     virtual=2)}
LEAF = ("What a stage hands on has no graph, y.detach(), and what it takes is a leaf: "
        "requires_grad_(), so that backward gives x.grad for the stage before.")
START = ("The last stage begins backward with self.weight * self.scale, each other one with what "
         "the stage after it sends, take(\"B\", ...). Each sends that of its input, x.grad.")
FAILURES = {
    "never waited": "take() waits for what arrives, run() for what is in self.leaving.",
    "() waits": "dist.isend and dist.irecv only start a message. Keep (handle, tensor) in "
                "self.leaving, or in self.arriving[way, stage, m]; take() and run() wait.",
    "self.leaving": "dist.isend gives a handle. run() waits for all in self.leaving, and the tensor "
                    "must live until then: append (handle, tensor).",
    "sends a graph": LEAF, "second time": LEAF, "'NoneType'": LEAF, "not require grad": LEAF,
    "scalar outputs": f"{START} {LEAF}", "Mismatch in shape": START,
    "contiguous": "A stage may give any strides: send tensor.contiguous().",
    "broadcast shape": "Only the output of the last stage of all, self.last, is a loss.",
    "KeyError": "send() takes there[\"F\", stage + 1, m] after SF, and there[\"B\", stage - 1, m] "
                "after SB; receive() puts into arriving[kind[1], stage, m].",
    "does not end": "send() and receive() start one message each, with the peer that it names.",
}


def new_stage(number, last, kept):
    """A stage: (x, targets) -> output, the last one's the sum of a loss; and its module. `kept`
    gets how many outputs live, with their graphs, after each forward.
    """
    torch.manual_seed(number)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(device())
    outputs = []

    def stage(x, targets):
        y = module(x)
        if number == last:
            y = ((y - targets).square() * (targets > 0)).sum()
        elif number == 1:
            y = y.T.contiguous().T  # other strides
        outputs.append(weakref.ref(y))
        kept.append(sum(output() is not None for output in outputs))
        return y

    return stage, module


def pieces_of(batch):
    """Unequal micro-batches with unequal numbers of targets."""
    generator = torch.Generator().manual_seed(100 + batch)
    rows = [2 + batch] * (PIECES - 1) + [1]
    return [tuple(torch.randn(count, WIDTH, generator=generator).to(device()) for _ in range(2))
            for count in rows]


def _trial(executor_class, in_group=False):
    """{name of a schedule: what is seen when this rank runs it}"""
    group = group_of_mine() if in_group else None
    return {name: _run(executor_class, make(dist.get_world_size(group), PIECES), group)
            for name, make in SCHEDULES.items()}


def _run(executor_class, schedule, group):
    """Two batches, whose gradients are added up, then one without gradients."""
    rank, last, queue, kept = dist.get_rank(group), max(places(schedule)), WeightQueue(), []
    mine = {s: new_stage(s, last, kept) for s, of in places(schedule).items() if of == rank}
    for _, module in mine.values():
        defer_weights(module, queue)
    executor = executor_class({stage: call for stage, (call, _) in mine.items()}, last,
                              torch.empty_like, group, weight_queue=queue)
    with Waits() as waits, Traffic() as traffic:
        _watch(executor, waits)
        losses = [executor.run(schedule, pieces_of(0), WEIGHT, SCALE)]
    if missing := waits.missing(len(traffic.ops)):
        raise RuntimeError(f"{missing} messages were never waited for")
    losses.append(executor.run(schedule, pieces_of(1), WEIGHT, SCALE))
    most = max(kept)
    forwards = tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule)
    with torch.no_grad():
        losses.append(executor.run(forwards, pieces_of(2)))
    return {"losses": losses, "kept": most, "left": len(executor.kept),
            "sent": (traffic.calls["send"], traffic.calls["recv"], traffic.sent_bytes),
            "gradients": {stage: [p.grad for p in module.parameters()]
                          for stage, (_, module) in mine.items()}}


def _watch(executor, waits):
    """A call of send or receive that waits, or loses its handle, is an error at once: later it
    might hang.
    """
    send, receive = executor.send, executor.receive

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

    executor.send, executor.receive = sending, receiving


@functools.cache
def one_process(stages):
    """The losses of three batches, and the gradients of each stage after two."""
    made, losses, gradients = [new_stage(s, stages - 1, []) for s in range(stages)], [], []
    for batch, weight in enumerate((WEIGHT, WEIGHT, 1)):
        losses.append(0)
        for x, targets in pieces_of(batch):
            for stage, _ in made:
                x = stage(x, targets)
            (x * weight * SCALE * (batch < 2)).backward()
            losses[-1] += weight * x.item()
    return losses, [[p.grad.cpu() for p in module.parameters()] for _, module in made]


def check_PipelineExecutor(executor_class):
    with hinted(FAILURES):
        seen = on_ranks(_trial, executor_class, ranks=2)
    _compare("on 2 ranks", [range(2)] * 2, seen)
    yield "losses and all gradients of one process: GPipe, 1F1B, ZB-H1, ZB-V, interleaved; 2 ranks"
    yield "gradients of two batches are added up; unequal micro-batches; without gradients, too"
    yield "one message for each micro-batch and neighbour, each way; nobody waits early"
    yield "each activation is kept from its F to its backward, and not longer"
    with hinted({"": "Hand self.group on, and name peers by their rank in it: "
                     "dist.isend(tensor, group=self.group, group_dst=peer), group_src=peer."}):
        seen = on_ranks(_trial, executor_class, True, ranks=4)
    _compare("in its group", [members_of(rank) for rank in range(4)], seen)
    yield "in groups of 1 and 3 ranks it meets nobody else"


def _compare(where, members, seen):
    for rank, found in enumerate(seen):
        place = list(members[rank]).index(rank)
        for name, make in SCHEDULES.items():
            here, schedule = f"{where}, {name}, rank {rank}", make(len(members[rank]), PIECES)
            _compare_values(here, schedule, place, found[name])
            _compare_costs(here, schedule, place, found[name])


def _compare_values(where, schedule, place, found):
    place_of = places(schedule)
    losses, gradients = one_process(len(place_of))
    for batch, (got, right) in enumerate(zip(found["losses"], losses)):
        right = torch.tensor(right if place_of[len(place_of) - 1] == place else 0.0)
        explain(f"{where}: the loss of batch {batch + 1}", got.cpu(), right, {
            "not weighted": (right / WEIGHT, "self.loss += y.detach() * self.weight"),
            "a mean": (right / WEIGHT / PIECES, "Micro-batches have unequal numbers of targets: "
                       "self.weight is one over those of the whole batch."),
        }, "Only the last stage of all, self.last, has a loss; others hand their output on.")
    for stage, ours in found["gradients"].items():
        for got, right in zip(ours, gradients[stage]):
            explain(f"{where}: a gradient of stage {stage}", got, right, {
                "not weighted": (right / WEIGHT, START), "not scaled": (right / SCALE, START),
                "neither weighted nor scaled": (right / WEIGHT / SCALE, START)}, START)


def _compare_costs(where, schedule, place, found):
    messages = [m for m in with_messages(schedule)[place] if isinstance(m, Message)]
    sizes = [4 * pieces_of(0)[m.micro_batch][0].numel() for m in messages if m.kind[0] == "S"]
    right = len(sizes), len(messages) - len(sizes), sum(sizes)
    if found["sent"] != right:
        raise Mistake(f"{where}: (sends, receives, bytes sent) are {found['sent']}, not {right}",
                      "One message for each call of send() and receive(): a stage on the same rank "
                      "takes what is in self.there.")
    most = in_flight_activations(schedule)[place]
    if found["kept"] > most:
        raise Mistake(f"{where}: {found['kept']} outputs are kept at once, where the schedule says "
                      f"{most}", "Backward is the last use of a micro-batch: self.kept.pop().")
    if found["left"]:
        raise Mistake(f"{where}: without gradients, {found['left']} activations are kept", "Keep "
                      "something for backward only where one follows: torch.is_grad_enabled().")
