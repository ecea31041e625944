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
ARRIVED = ("What arrives is a leaf without history: requires_grad_(), so that backward gives x.grad "
           "for the stage before.")
LEFT = ("What is on its way to another stage, also on the same rank, is y.detach(): the graph ends "
        "at the stage, and x.requires_grad_() begins the next one.")
FAILURES = {
    "second time": LEFT, "'NoneType' object": ARRIVED, "does not require grad": ARRIVED,
    "expected Tensor": ARRIVED, "contiguous": "A stage may give any strides: send "
    "tensor.contiguous().", "KeyError": "send() takes there[\"F\", stage + 1, m] after SF, and "
    "there[\"B\", stage - 1, m] after SB; receive() puts into arriving[kind[1], stage, m].",
    "scalar outputs": "y.backward(gradient): that of the output, which the next stage has sent.",
    "Mismatch in shape": "y.backward(gradient): that of this stage's output.",
    "does not end": "Each message needs both ends, in the order of the list: send() and receive() "
    "are called once for each. Its peer is the one in the message.",
}


def stage_of(number, last, kept=None):
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
        if kept is not None:
            outputs.append(weakref.ref(y))
            kept.append(sum(output() is not None for output in outputs))
        return y

    return stage, module


def pieces_of(batch):
    """Unequal micro-batches with unequal numbers of targets."""
    generator = torch.Generator().manual_seed(100 + batch)
    rows = [(2 + batch, WIDTH)] * (PIECES - 1) + [(1, WIDTH)]
    return [tuple(torch.randn(shape, generator=generator).to(device()) for _ in range(2))
            for shape in rows]


def _trial(executor_class, in_group=False):
    """{name of a schedule: what is seen when this rank runs it}"""
    group = group_of_mine() if in_group else None
    return {name: _run(executor_class, make(dist.get_world_size(group), PIECES), group)
            for name, make in SCHEDULES.items()}


def _run(executor_class, schedule, group):
    """Two batches, whose gradients are added up, then one without gradients."""
    rank, last, queue, kept = dist.get_rank(group), max(places(schedule)), WeightQueue(), []
    mine = {stage: stage_of(stage, last, kept) for stage, of in places(schedule).items()
            if of == rank}
    for _, module in mine.values():
        defer_weights(module, queue)
    executor = executor_class({stage: call for stage, (call, _) in mine.items()}, last,
                              torch.empty_like, group, weight_queue=queue)
    found = {"early": []}
    with Waits() as waits, Traffic() as traffic:
        _watch(executor, waits, found["early"])
        found["losses"] = [executor.run(schedule, pieces_of(batch), WEIGHT, SCALE)
                           for batch in (0, 1)]
    found["missing"] = waits.missing(len(traffic.ops))
    found["sent"] = traffic.calls["send"], traffic.calls["recv"], traffic.sent_bytes
    found["others"] = sorted(traffic.calls.keys() - {"send", "recv"})
    found["gradients"] = {stage: [p.grad for p in module.parameters()]
                          for stage, (_, module) in mine.items()}
    found["kept"] = max(kept)
    forwards = tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule)
    kept.clear()
    with torch.no_grad():
        found["losses"].append(executor.run(forwards, pieces_of(2)))
    found["left"] = len(executor.kept)
    return found


def _watch(executor, waits, early):
    """Notes what is wrong after a call of send or receive."""
    send, receive = executor.send, executor.receive

    def sending(message):
        before = list(executor.leaving)
        send(message)
        new = [entry for entry in executor.leaving if not any(entry is old for old in before)]
        if not new or not isinstance(new[-1][1], torch.Tensor):
            early.append("send() leaves no (handle, tensor) in self.leaving")
        elif waits.is_over(new[-1][0]):
            early.append("send() waits")
        elif new[-1][1].requires_grad:
            early.append("send() sends a tensor with its graph")

    def receiving(message):
        receive(message)
        handle, _ = executor.arriving.get((message.kind[1], *message[1:3]), (None, None))
        if handle is None or waits.is_over(handle):
            early.append("receive() waits")

    executor.send, executor.receive = sending, receiving


@functools.cache
def one_process(stages):
    """The losses of three batches, and the gradients of each stage after the first two."""
    made, losses = [stage_of(number, stages - 1) for number in range(stages)], []
    for batch, weight in enumerate((WEIGHT, WEIGHT, 1)):
        losses.append(0)
        for x, targets in pieces_of(batch):
            for stage, _ in made:
                x = stage(x, targets)
            if batch < 2:
                (x * weight * SCALE).backward()
            losses[-1] += weight * x.item()
    return losses, [[p.grad for p in module.parameters()] for _, module in made]


def check_PipelineExecutor(executor_class):
    with hinted(FAILURES):
        seen = on_ranks(_trial, executor_class, ranks=2)
    _compare("", [range(2)] * 2, seen)
    yield "losses and all gradients of one process: GPipe, 1F1B, ZB-H1, ZB-V, interleaved; 2 ranks"
    yield "gradients of two batches are added up; unequal micro-batches; without gradients, too"
    yield "one message for each micro-batch and neighbour, each way; nobody waits early"
    yield "each activation is kept from its F to its backward, and not longer"
    with hinted({"": "Hand self.group on, and name peers by their rank in it: "
                     "dist.isend(tensor, group=self.group, group_dst=peer), group_src=peer."}):
        seen = on_ranks(_trial, executor_class, True, ranks=4)
        _compare(", in its group", [members_of(rank) for rank in range(4)], seen)
    yield "in groups of 1 and 3 ranks it meets nobody else"


def _compare(where, members, seen):
    for rank, found in enumerate(seen):
        place = list(members[rank]).index(rank)
        for name, of_schedule in found.items():
            schedule = SCHEDULES[name](len(members[rank]), PIECES)
            _compare_run(f"{name}, rank {rank} of {tuple(members[rank])}{where}", schedule, place,
                         of_schedule)


def _compare_run(where, schedule, place, found):
    place_of = places(schedule)
    losses, gradients = one_process(len(place_of))
    if found["early"]:
        raise Mistake(f"{where}: {found['early'][0]}", "dist.isend and dist.irecv only start a "
                      "message. Keep (handle, tensor) in self.leaving, or in self.arriving[way, "
                      "stage, m]; take() and run() wait. Send what has no graph: y.detach().")
    if found["missing"]:
        raise Mistake(f"{where}: {found['missing']} messages were never waited for", "take() waits "
                      "for what arrives, run() for what is in self.leaving.")
    for batch, (got, right) in enumerate(zip(found["losses"], losses)):
        right = torch.tensor(right if place_of[len(place_of) - 1] == place else 0.0)
        explain(f"{where}: the loss of batch {batch + 1}", got.cpu(), right, {
            "not weighted": (right / WEIGHT, "self.loss += y.detach() * self.weight"),
            "that of a mean": (right / PIECES, "self.weight is all: one over the targets of the "
                               "whole batch. Micro-batches have unequal numbers of them."),
        }, "Only the last stage of all, self.last, has a loss; others hand their output on.")
    _compare_gradients(where, found["gradients"], gradients)
    messages = [m for m in with_messages(schedule)[place] if isinstance(m, Message)]
    sends = [message for message in messages if message.kind[0] == "S"]
    nbytes = sum(4 * pieces_of(batch)[message.micro_batch][0].numel()
                 for batch in (0, 1) for message in sends)
    right = 2 * len(sends), 2 * (len(messages) - len(sends)), nbytes
    if found["sent"] != right or found["others"]:
        raise Mistake(f"{where}: it sends and receives {found['sent'][:2]} messages, "
                      f"{found['sent'][2]} bytes, {' '.join(found['others'])}; not {right[:2]}, "
                      f"{nbytes} bytes", "A message for each call of send() and receive(): a stage "
                      "on the same rank takes what is in self.there.")
    most = in_flight_activations(schedule)[place]
    if found["kept"] > most:
        raise Mistake(f"{where}: {found['kept']} outputs are kept at once, where the schedule says "
                      f"{most}", "Backward is the last use of a micro-batch: self.kept.pop().")
    if found["left"]:
        raise Mistake(f"{where}: without gradients, {found['left']} activations are kept", "Keep "
                      "something for backward only where one follows: torch.is_grad_enabled().")


def _compare_gradients(where, found, gradients):
    for stage, ours in found.items():
        for got, right in zip(ours, gradients[stage]):
            explain(f"{where}: a gradient of stage {stage}", None if got is None else got.cpu(),
                    right.cpu(), {
                        "not weighted": (right.cpu() / WEIGHT, "The last stage begins with "
                                         "self.weight * self.scale."),
                        "not scaled": (right.cpu() / SCALE, "The last stage begins with "
                                       "self.weight * self.scale."),
                        "neither weighted nor scaled": (right.cpu() / WEIGHT / SCALE, "The last "
                                                        "stage begins with both."),
                        "weighted twice": (right.cpu() * WEIGHT, "Only the last stage's backward "
                                           "begins with self.weight * self.scale."),
                    }, "Each stage begins backward with the gradient that the stage after it sends, "
                    "take(\"B\", ...), and sends that of its own input, x.grad.")
