"""The check of PipelineExecutor: real ranks run schedules of all kinds, beside one process."""

import functools
import gc
import weakref

import torch
from torch import nn

from ranklab.checks.beside import IN_GROUPS, expect, on_groups
from ranklab.checks.handles import Waits
from ranklab.checks.memory import held_bytes
from ranklab.checks.trial import explain
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
FORGOTTEN = {"not weighted": WEIGHT, "not scaled": SCALE,
             "neither weighted nor scaled": WEIGHT * SCALE,
             "a mean over micro-batches": WEIGHT * PIECES}
HANDLE = ("isend and irecv only start a message. Keep (handle, tensor) in self.sends, or in "
          "self.activations_in[stage, m] or self.gradients_in[stage, m]: the tensor must live "
          "until a take or run() has waited.")
LEAF = ("A stage passes its output on without a graph, y.detach(), and its input is a leaf: "
        "requires_grad_(), so that backward gives x.grad for the previous stage.")
START = ("The last stage of all, self.last, begins backward with self.weight * self.scale. The "
         "others begin with the next stage's gradient, take_gradients(). Each sends x.grad.")
WEIGHTED = ("Multiply the loss by self.weight, one over the targets of the whole batch, because "
            "micro-batches have unequal numbers. Backward begins with self.weight * self.scale.")
FAILURES = {
    r"KeyError: \(.*\)": "send() takes activations_out[stage, m] for SF, and gradients_out[stage, "
    "m] for SB; receive() puts into activations_in for RF, and into gradients_in for RB. Stage 0 "
    "gets no message: its input is self.pieces[m][0].",
    "RuntimeError: .*has to be contiguous": "A stage may give any strides: tensor.contiguous().",
    r".*(waited|\(\) waits|self\.sends).*": HANDLE,
    ".*for its W.*": "with self.deferral(action): y.backward(gradient)",
    ".*loss has.*": "self.loss += y.detach() * self.weight: a graph keeps all that it comes from.",
    ".*sends a graph.*": LEAF, "RuntimeError: .*(second time|not require grad).*": LEAF,
    "(Type|Attribute)Error: 'NoneType' .*": LEAF,
    "RuntimeError: grad can be implicitly created only for scalar outputs": f"{START} {LEAF}",
    "RuntimeError: Mismatch in shape.*": "A gradient and its output are of one stage and one "
    "micro-batch.",
    ".*broadcast shape.*": "Only the output of the last stage of all, self.last, is a loss.",
    "RuntimeError: .*floating point.*": "Stage 0 takes its inputs as they are: tokens get no "
    "gradient.",
}


class Stage(nn.Module):
    """(x, targets) -> output; of the last one the sum of a loss, of stage 1 with other strides.

    living  references to outputs, of all stages of a rank; most: how many were there at a time
    """

    def __init__(self, number, last, living=None):
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH).to(device())
        self.number, self.last, self.living, self.most = number, last, living, 0

    def forward(self, x, targets):
        y = self.linear(x.float()).tanh()
        if self.number == self.last:
            y = ((y - targets).square() * (targets > 0)).sum()
        elif self.number == 1:
            y = y.T.contiguous().T
        if self.living is not None:
            self.living.append(weakref.ref(y))
            gc.collect()  # some may live in a circle only
            self.most = max(self.most, sum(output() is not None for output in self.living))
        return y


def pieces_of(batch):
    """Unequal micro-batches with unequal numbers of targets; inputs are integers, as tokens are."""
    torch.manual_seed(batch)
    rows = [2 + batch] * (PIECES - 1) + [1]
    return [(torch.randint(-2, 3, (n, WIDTH), dtype=torch.int32).to(device()),
             torch.randn(n, WIDTH).to(device())) for n in rows]


@functools.cache
def one_process(count):
    """The losses of three batches, and `count` stages with their gradients of the first two."""
    stages, losses = [Stage(number, count - 1) for number in range(count)], []
    for batch, weight in enumerate((WEIGHT, WEIGHT, 1)):
        losses.append(torch.zeros((), device=device()))
        for x, targets in pieces_of(batch):
            for stage in stages:
                x = stage(x, targets)
            (x * weight * SCALE * (batch < 2)).backward()
            losses[-1] += weight * x.detach()
    return losses, stages


def watched(executor_class, waits):
    """The class; what would hang later, or could not be seen, is an error at once."""

    class Watched(executor_class):
        def send(self, message):
            super().send(message)
            handle, tensor = self.sends[-1] if self.sends else (None, None)
            assert isinstance(tensor, torch.Tensor), (
                "send() leaves no (handle, tensor) in self.sends")
            assert not waits.is_over(handle), "send() waits"
            assert not tensor.requires_grad, "send() sends a graph"

        def receive(self, message):
            super().receive(message)
            name = "activations_in" if message.kind == "RF" else "gradients_in"
            handle, _ = getattr(self, name).get(message[1:3], (None, None))
            assert handle is not None and not waits.is_over(handle), (
                f"receive() waits, or leaves nothing in self.{name}")

        def weights(self, action):
            assert self.weight_queue.pending.get(action[1:]), "an I leaves nothing for its W"
            super().weights(action)

    return Watched


def _runs(executor_class, ranks, names):
    """Looks at two batches, whose gradients are added up, then at one without gradients."""
    for name in names:
        schedule, waits, queue = SCHEDULES[name](ranks.size, PIECES), Waits(), WeightQueue()
        place = places(schedule)
        last, where, living = max(place), f"{ranks}, {name}", []
        stages = {s: defer_weights(Stage(s, last, living), queue) for s, rank in place.items()
                  if rank == ranks.index}
        executor = watched(executor_class, waits)(
            stages, last, lambda x: torch.empty_like(x, dtype=torch.float32), ranks.group,
            weight_queue=queue)
        held = held_bytes()
        with waits, Traffic() as traffic:
            losses = [executor.run(schedule, pieces_of(0), WEIGHT, SCALE)]
        assert not losses[0].requires_grad, "self.loss has a graph"
        missing = waits.missing(len(traffic.ops))
        assert missing <= 0, f"{missing} messages were never waited for"
        losses.append(executor.run(schedule, pieces_of(1), WEIGHT, SCALE))
        waits.forget()
        left = held_bytes([
            executor.loss, *losses, *(x for piece in executor.pieces for x in piece),
            *(x for _, x in executor.sends),
            *(p.grad for stage in stages.values() for p in stage.parameters())]) - held
        at_once = max(stage.most for stage in stages.values())
        forwards = tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule)
        with torch.no_grad():
            losses.append(executor.run(forwards, pieces_of(2)))
        yield from _values(where, losses, stages, last)
        messages = [each for each in with_messages(schedule)[ranks.index]
                    if isinstance(each, Message)]
        nbytes = sum(pieces_of(0)[each.micro_batch][0].nbytes for each in messages
                     if each.kind[0] == "S")  # inputs and outputs have 4 bytes a number
        counts = (
            ("messages", len(traffic.ops), len(messages), "Inside a rank nothing is sent."),
            ("bytes sent", traffic.sent_bytes, nbytes, "A message has the shape of an output."),
            ("activations at once", at_once, in_flight_activations(schedule)[ranks.index],
             "Backward is the last use of a micro-batch: self.activations.pop()."),
            ("tensors left in activations_out and gradients_out",
             len(executor.activations_out) + len(executor.gradients_out), 0,
             "pop() what is used or sent."),
            ("activations kept without gradients", len(executor.activations), 0,
             "No backward follows: torch.is_grad_enabled() tells."),
            ("bytes kept after training", left, 0, "Inputs, outputs and gradients of micro-batches "
             "are not needed any more: pop() what is used or sent."),
        )
        for what, got, most, hint in counts:
            yield functools.partial(expect, got <= most, f"{where}: {got} {what}, not {most}", hint)


def _values(where, losses, stages, last):
    right, whole = one_process(last + 1)
    values = [(f"the loss of batch {batch + 1}", loss, right[batch] * (last in stages))
              for batch, loss in enumerate(losses)]
    values += [(f"a gradient of stage {s}", p.grad, q.grad) for s, stage in stages.items()
               for p, q in zip(stage.parameters(), whole[s].parameters())]
    for what, got, right in values:
        slips = {name: (right / factor, WEIGHTED) for name, factor in FORGOTTEN.items()}
        yield functools.partial(explain, f"{where}: {what}", got, right, slips, START)


def check_PipelineExecutor(executor_class):
    on_groups(_runs, executor_class, tuple(SCHEDULES), ranks=2, failures=FAILURES)
    yield "losses and all gradients of one process: GPipe, 1F1B, ZB-H1, ZB-V, interleaved; 2 ranks"
    yield "one message for each need, no early wait; nothing is left after a run"
    on_groups(_runs, executor_class, ("1F1B", "ZB-V"), groupings=IN_GROUPS, failures={
        ".*": "Pass self.group on, and name peers by their rank in it: dist.isend(tensor, "
        "group=self.group, group_dst=peer), group_src=peer."})
    yield "in groups of 1 and 3 ranks it sends to no rank outside"
