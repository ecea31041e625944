"""The proofs of StageExecutor and PipelineExecutor: schedules of all kinds, against one process.

StageExecutor is looked at on one rank, then on two, where the check sends the messages.
"""

import gc
import weakref

import torch
from torch import nn

from ranklab.checks.handles import Waits
from ranklab.checks.memory import held_bytes
from ranklab.checks.prover import GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.pipeline_parallel import (
    Message, PipelineExecutor, StageExecutor, gpipe_schedule, in_flight_activations,
    interleaved_schedule, one_f_one_b_schedule, places, with_messages, zb_v_schedule,
    zero_bubble_schedule,
)
from ranklab.pipeline_parallel.deferred import WeightQueue, defer_weights

WIDTH, PIECES, WEIGHT, SCALE = 4, 6, 0.25, 3.0
SCHEDULES = {"GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule, "ZB-H1": zero_bubble_schedule,
             "ZB-V": zb_v_schedule, "interleaved": lambda P, M: interleaved_schedule(P, M, 2),
             "three stages": lambda P, M: interleaved_schedule(P, M, 3)}
WIDE = {"ZB-H1": torch.float64}  # the type of outputs, where it is not float32


class Layer(nn.Module):
    """A stage: (x, targets) -> output; the last stage's is the sum of a loss, stage 1's has other
    strides.

    living  references to outputs of all stages of a rank; most: the most alive at a time
    """

    def __init__(self, number, last, dtype, living=None):
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH).to(device(), dtype)
        self.number, self.last, self.dtype, self.living = number, last, dtype, living
        self.most = 0

    def forward(self, x, targets):
        y = self.linear(x.to(self.dtype)).tanh()
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


# --- what is seen ---------------------------------------------------------------------------------

GRAPH = "whether self.loss has a graph"
MESSAGES, SENT, AT_ONCE = "messages", "bytes sent", "activations at once"
LEFT_OUT = "tensors left in activations_out and gradients_out"
LEFT, WITHOUT = "bytes kept after training", "activations kept without gradients"
COST = GRAPH, MESSAGES, SENT, AT_ONCE, LEFT_OUT, LEFT, WITHOUT


class Arriving:
    """The handle of a message that stays in `target` until it is taken."""

    def __init__(self, work, target):
        self.work, self.target = work, target

    def wait(self, *timeout):
        assert not any(handle is self for handle, _ in self.target.values()), (
            "a message is waited for before it is taken")
        return self.work.wait(*timeout)

    def __getattr__(self, name):
        return getattr(self.work, name)


def pair_of(pair, what_it_does):
    """Return (handle, tensor); raise where it is anything else."""
    kinds = ["tensor" if isinstance(each, torch.Tensor) else "None" if each is None else "handle"
             for each in (pair if isinstance(pair, tuple | list) else (pair,))]
    assert kinds == ["handle", "tensor"], (
        f"{what_it_does} ({', '.join(kinds)}), not (handle, tensor)")
    return pair


def watched(executor_class, waits):
    """Return the class, changed to raise at once where it would hang later or depend on chance."""

    class Watched(executor_class):
        def send(self, message):
            name = "activations_out" if message.kind == "SF" else "gradients_out"
            tensor = getattr(self, name).get(message[1:3], "nothing")
            try:
                super().send(message)
            except (KeyError, AttributeError):
                assert isinstance(tensor, torch.Tensor), (
                    f"self.{name} holds {tensor} for {message.kind}")
                raise
            assert self.sends, "send() leaves nothing in self.sends"
            handle, tensor = pair_of(self.sends[-1], "send() appends")
            assert not waits.is_over(handle), "send() waits"
            assert not tensor.requires_grad, "send() sends a graph"

        def receive(self, message):
            name = "activations_in" if message.kind == "RF" else "gradients_in"
            target, place = getattr(self, name), message[1:3]
            before = {*target}
            super().receive(message)
            places = {*target} - before
            elsewhere = f", but in [{min(places)}]" if places else ""
            assert place in target, f"receive() leaves nothing in self.{name}[{place}]{elsewhere}"
            handle, tensor = pair_of(target[place], "receive() leaves")
            assert not waits.is_over(handle), "receive() waits"
            target[place] = Arriving(handle, target), tensor

    return Watched


def sending(executor_class):
    """Return the class with the library's messages."""
    if executor_class is OneProcess:
        return executor_class

    class Sending(executor_class):
        send, receive = PipelineExecutor.send, PipelineExecutor.receive

        def forward(self, action):
            super().forward(action)
            output = self.activations_out.get(action[1:])
            assert output is None or not output.requires_grad, (
                "forward() leaves a graph in self.activations_out")

    return Sending


def _see_stages(executor_class, name, ranks):
    yield from _see(sending(executor_class), name, ranks)


def _see(executor_class, name, ranks):
    """Look at a batch without gradients, then at two whose gradients are added up."""
    schedule, waits, queue = SCHEDULES[name](ranks.size, PIECES), Waits(), WeightQueue()
    place, dtype = places(schedule), WIDE.get(name, torch.float32)
    last, living = max(place), []
    stages = {s: defer_weights(Layer(s, last, dtype, living), queue) for s, rank in place.items()
              if rank == ranks.index}
    executor = watched(executor_class, waits)(
        stages, last, lambda x: torch.full_like(x, 99, dtype=dtype), ranks.group,
        weight_queue=queue)  # full of something that is no result
    parameters = {(s, each): p for s, stage in stages.items()
                  for each, p in stage.named_parameters()}

    def left_out():
        return AtMost(len(executor.activations_out) + len(executor.gradients_out), 0)

    def held():
        return held_bytes([x for x in (
            executor.loss, *losses, *(x for piece in executor.pieces for x in piece),
            *(x for _, x in executor.sends), *(p.grad for p in parameters.values()))
            if x is not None])

    forwards = tuple(tuple(a for a in actions if a.kind == "F") for actions in schedule)
    with torch.no_grad(), waits:
        losses = [executor.run(forwards, pieces_of(2))]
    waits.forget()
    yield {"the loss without gradients": losses[0].float(), LEFT_OUT: left_out(),
           WITHOUT: AtMost(len(executor.activations), 0)}
    before = held()
    with waits, Traffic() as traffic:
        losses.append(executor.run(schedule, pieces_of(0), WEIGHT, SCALE))
    assert not executor.activations_in and not executor.gradients_in, "messages were never taken"
    assert waits.missing(len(traffic.ops)) <= 0, "messages were never waited for"
    losses.append(executor.run(schedule, pieces_of(1), WEIGHT, SCALE))
    waits.forget()
    leak = held() - before
    messages = [each for each in with_messages(schedule)[ranks.index] if isinstance(each, Message)]
    numbers = sum(pieces_of(0)[each.micro_batch][0].numel() for each in messages
                  if each.kind[0] == "S")
    yield {
        "the loss of batch 1": losses[1].float(), "the loss of batch 2": losses[2].float(),
        **{f"the gradient of stage {s}'s {each.rpartition('.')[2]}": p.grad
           for (s, each), p in parameters.items()},
        GRAPH: Must(losses[1].requires_grad, False),
        MESSAGES: AtMost(len(traffic.ops), len(messages)),
        SENT: AtMost(traffic.sent_bytes, numbers * dtype.itemsize),
        AT_ONCE: AtMost(max(stage.most for stage in stages.values()),
                        in_flight_activations(schedule)[ranks.index]),
        LEFT_OUT: left_out(),
        LEFT: AtMost(leak, 0)}


class OneProcess:
    """All stages on each rank, one micro-batch after another, without messages."""

    def __init__(self, stages, last, new_hidden, group=None, weight_queue=None):
        self.stages, self.last, self.weight_queue = stages, last, weight_queue
        for stage in stages.values():
            stage.living = None  # looking after each forward takes long
        self.activations, self.activations_in, self.activations_out = {}, {}, {}
        self.gradients_in, self.gradients_out, self.sends = {}, {}, []

    def run(self, schedule, pieces, weight=1.0, scale=1.0):
        dtype = next(iter(self.stages.values())).dtype
        model = [self.stages.get(s) or Layer(s, self.last, dtype) for s in range(self.last + 1)]
        self.pieces, self.loss = pieces, torch.zeros((), device=device())
        for x, targets in pieces:
            for stage in model:
                x = stage(x, targets)
            if torch.is_grad_enabled():
                (x * weight * scale).backward()
            self.loss += weight * x.detach() * (self.last in self.stages)
        return self.loss


# --- mistakes -------------------------------------------------------------------------------------

IF_STAGE = "        if stage:\n            x"
TAKE = "self.take_activations(stage, m).requires_grad_(torch.is_grad_enabled())"
OUTPUT_OF = "self.stages[stage](x, targets)"
IF_GRADIENTS = "        if torch.is_grad_enabled():\n            self.activations"
KEPT = "self.activations[stage, m] = x, y"
IF_LOSS = "        if stage == self.last:\n            self.loss"
LOSS = "self.loss += y.detach() * self.weight"
OUTPUT = "self.activations_out[stage, m] = y.detach()"
IF_OUTPUT = f"        else:\n            {OUTPUT}"
POP = "self.activations.pop((stage, m))"
IF_LAST = "        if stage == self.last:\n            gradient"
ONES = "torch.ones_like(y) * (self.weight * self.scale)"
GRADIENT = "gradient = self.take_gradients(stage, m)"
BACKWARD = "y.backward(gradient)"
INPUT_GRADIENT = "self.gradients_out[stage, m] = x.grad"
SOURCE = 'self.activations_out if kind == "SF" else self.gradients_out'
TENSOR = "source.pop((stage, m)).contiguous()"
ISEND = "dist.isend(tensor, group=self.group, group_dst=peer)"
SEND = f"self.sends.append(({ISEND}, tensor))"
PLACED = "target[stage, m]"
TARGET = 'self.activations_in if kind == "RF" else self.gradients_in'
BUFFER = "self.new_hidden(self.pieces[m][0])"
IRECV = "dist.irecv(tensor, group=self.group, group_src=peer)"
RECEIVE = f"target[stage, m] = {IRECV}, tensor"

STAGES = Proof(
    StageExecutor,
    Stage({"losses and all gradients of one process: all stages on one rank": (),
           "nothing is left after a run, and nothing kept without gradients": COST},
          _see_stages, ("1F1B", "three stages", "ZB-V"), (1,), oracle=OneProcess,
          through=torch.float32,
          note=("A stage's input is a leaf, and its output is passed on detached. Backward begins "
                "with self.weight * self.scale on the very last stage, and with take_gradients() "
                "on the others; x.grad goes into gradients_out.")),
    Stage("the same on two ranks, where the check sends the messages", _see_stages,
          ("GPipe", "ZB-H1", "ZB-V"), (2,), oracle=OneProcess, through=torch.float32,
          note="On one rank it was right. Here the check sends between two ranks: self.last may be "
               "on the other one, and a tensor may still be on its way."),
    mistakes=(
        # forward
        Slip("Stage 0 uses its inputs as they are: tokens get no gradient.",
             (f"x = {TAKE}", f"x = {TAKE[:TAKE.index('.requires')]}\n"
              "        x = x.requires_grad_(torch.is_grad_enabled())")),
        Slip("Stage 0 receives no message: its input is self.pieces[m][0].",
             (IF_STAGE, "        if True:\n            x")),
        Slip("A stage before the last runs backward without a gradient, or with None: pass it "
             "take_gradients(). The next stage's input must be a leaf with requires_grad_(), and "
             "its x.grad goes into gradients_out after its backward.",
             (TAKE, "self.take_activations(stage, m)")),
        Slip("Every stage after the first needs the previous stage's output: "
             "self.take_activations(stage, m).",
             (OUTPUT_OF, "self.stages[stage](self.pieces[m][0], targets)")),
        Slip("A stage passes its output on without a graph: y.detach().",
             (OUTPUT, OUTPUT.replace(".detach()", ""))),
        Slip("Multiply the loss by self.weight, which is 1 over the number of targets in the whole "
             "batch.",
             (LOSS, "self.loss += y.detach()")),
        Slip("A mean over micro-batches is wrong, because they can have different numbers of "
             "targets. Multiply the loss by self.weight.",
             (LOSS, "self.loss += y.detach() / len(self.pieces)")),
        Slip("self.scale applies only to gradients: multiply the loss that run() returns by "
             "self.weight alone.",
             (LOSS, f"{LOSS} * self.scale")),
        Slip("Add up the losses of all micro-batches: self.loss += ...",
             (LOSS, LOSS.replace("+=", "="))),
        Slip("Without detach(), the loss keeps its whole graph in memory: self.loss += y.detach() "
             "* self.weight.",
             (LOSS, "self.loss += y * self.weight")),
        Slip("Only the output of the pipeline's last stage, self.last, is a loss, not the output "
             "of each rank's last stage.",
             (IF_LOSS, IF_LOSS.replace("self.last", "max(self.stages)"))),
        Slip("No other stage takes the loss, so it would stay in activations_out.",
             (IF_OUTPUT, IF_OUTPUT.replace("else", "if True"))),
        Slip("Without gradients no backward follows, so keep nothing for it: check "
             "torch.is_grad_enabled().",
             (IF_GRADIENTS, "        if True:\n            self.activations")),
        # backward
        Slip("A micro-batch's activations stay in memory after its backward: pop them from "
             "self.activations, and keep no other reference to x and y.",
             (POP, "self.activations[stage, m]"),
             (KEPT, f"{KEPT}\n            self.all = [*getattr(self, 'all', []), y]")),
        Slip("Something of each micro-batch is kept after its last use.",
             (GRADIENT, f"{GRADIENT}\n            self.gradients_out[\"used\", stage, m] = gradient"
              ),
             ("        y = self", "        self.inputs = [*getattr(self, 'inputs', []), x.detach()]"
              "\n        y = self"),
             (OUTPUT, f"{OUTPUT}\n            self.outputs = [*getattr(self, 'outputs', []), "
              "y.data]")),
        Slip("The pipeline's last stage begins backward with self.weight * self.scale, not with 1.",
             (ONES, "torch.ones_like(y)")),
        Slip("Backward begins with self.weight * self.scale: the scale is missing.",
             (ONES, "torch.ones_like(y) * self.weight")),
        Slip("Backward begins with self.weight * self.scale: the weight is missing.",
             (ONES, "torch.ones_like(y) * self.scale")),
        Slip("A mean over micro-batches is wrong in backward as well: begin with self.weight * "
             "self.scale.", (ONES, "torch.ones_like(y) * (self.scale / len(self.pieces))")),
        Slip("Weight and scale are applied once, on the pipeline's last stage. The others begin "
             "with the next stage's gradient as it is.",
             (BACKWARD, "y.backward(gradient * self.weight)"),
             (BACKWARD, "y.backward(gradient * (self.weight * self.scale))", ONES,
              "torch.ones_like(y)")),
        Slip("Every stage except self.last begins with the next stage's gradient, "
             "take_gradients(), even if it is its rank's last stage.",
             (GRADIENT, "gradient = torch.ones_like(y)"),
             (IF_LAST, IF_LAST.replace("self.last", "max(self.stages)"))),
        Slip("A received tensor might not have arrived yet: take it with take_activations() or "
             "take_gradients(), which wait for it.",
             (GRADIENT, "gradient = self.gradients_in.pop((stage, m))[1] if (stage, m) in "
              "self.gradients_in else self.take_gradients(stage, m)")),
        Slip("run() already defers the weight gradients of an I: call y.backward(gradient) in "
             "backward() without self.weight_queue.",
             (BACKWARD, f"with self.weight_queue.deferral(stage, m):\n            {BACKWARD}")),
        Slip("Weight gradients add up over the micro-batches: do not set them to None.",
             (BACKWARD, "for p in self.stages[stage].parameters():\n            p.grad = None\n"
              f"        {BACKWARD}")),
        Slip("The previous stage finds no gradient of its output: after backward, "
             "gradients_out[stage, m] = x.grad.", (INPUT_GRADIENT, "pass")),
        Slip("A hidden output's gradient has the shape of another tensor. Only stage self.last "
             "begins with self.weight * self.scale; the others begin with take_gradients(), and "
             "leave x.grad in gradients_out.",
             (INPUT_GRADIENT, INPUT_GRADIENT.replace("x.grad", "gradient"))),
        Slip("Stage 0 has no previous stage, so it must not put anything into gradients_out.",
             (f"        if stage:\n            {INPUT_GRADIENT}", f"        {INPUT_GRADIENT}")),
        Slip("Each tensor has its place: forward puts (x, y) into activations[stage, m], where "
             "backward pops it.", (KEPT, "pass")),
    ), hints=(
        "What does one process keep between forward and backward, and where would you cut it?",
        "A stage's input is a leaf that requires grad, and its output goes on without a graph. "
        "Backward starts from the next stage's gradient; x.grad goes to the previous stage.",
        "forward: x = self.take_activations(stage, m).requires_grad_(torch.is_grad_enabled()), on "
        "stage 0 the inputs; activations[stage, m] = x, y; activations_out[stage, m] = y.detach(). "
        "backward: y.backward(gradient); gradients_out[stage, m] = x.grad.",
    ))
EXECUTOR = Proof(
    PipelineExecutor,
    Stage({"losses and all gradients of one process: GPipe, 1F1B, ZB-H1, ZB-V, interleaved; 2 ranks"
           : (), "one message for each need, no early wait; nothing is left after a run": COST},
          _see, ("GPipe", "1F1B", "ZB-H1", "ZB-V", "interleaved"), (2,), oracle=OneProcess,
          through=torch.float32,
          note="An SF sends activations_out[stage, m], an SB gradients_out[stage, m]. An RF "
               "receives into activations_in[stage, m], an RB into gradients_in[stage, m]."),
    Stage("in groups of 1 and 3 ranks it sends to no rank outside", _see, ("1F1B", "ZB-V"), (4,),
          GROUPS[:1], oracle=OneProcess,
          note=("It was right with all ranks. This run uses groups whose ranks are not 0 .. n-1: "
                "pass self.group on, and name peers by their rank in it.")),
    mistakes=(
        Slip("Use pop() for what is sent: otherwise it stays in activations_out or gradients_out.",
             (TENSOR, TENSOR.replace(".pop((stage, m))", "[stage, m]"))),
        Slip("Each tensor has its place: an SF sends activations_out[stage, m], an SB "
             "gradients_out[stage, m].",
             (SOURCE, "self.activations_out"), (SOURCE, "self.gradients_out")),
        Slip("The tensors of a stage can have any strides, but a message must be contiguous: "
             "tensor.contiguous().", (TENSOR, TENSOR.replace(".contiguous()", ""))),
        Slip("isend only starts a message. Keep (handle, tensor) in self.sends: the tensor must "
             "stay alive until run() has waited.", (SEND, ISEND), (SEND, SEND.replace(", tensor))",
                                                                               ", None))"))),
        Slip("A pair in self.sends, and in activations_in and gradients_in, is (handle, tensor), "
             "in this order.",
             (SEND, f"self.sends.append((tensor, {ISEND}))"),
             (RECEIVE, f"target[stage, m] = tensor, {IRECV}")),
        Slip("send() must only start a message: run() waits for everything in self.sends.",
             (SEND, f"handle = {ISEND}\n        handle.wait()\n        self.sends.append("
              "(handle, tensor))")),
        Slip("receive() must only start a message: take_activations() and take_gradients() wait "
             "when the tensor is needed.",
             (RECEIVE, f"{RECEIVE}\n        target[stage, m][0].wait()"),
             (RECEIVE, "target[stage, m] = dist.recv(tensor, group=self.group, group_src=peer), "
              "tensor")),
        Slip("This waits for incoming messages too early: take_activations() and take_gradients() "
             "wait right before they are needed.",
             (RECEIVE, "for handle, _ in target.values():\n            handle.wait()\n        "
              f"{RECEIVE}"),
             (SEND, f"{SEND}\n        for handle, _ in self.activations_in.values():\n"
              "            handle.wait()")),
        Slip("receive() must leave (handle, tensor) under (stage, m): for an RF in "
             "activations_in, for an RB in gradients_in.", (TARGET, "self.activations_in"),
             (TARGET, TARGET.replace('"RF"', '"RB"'))),
        Slip("The message names the stage of this rank and the micro-batch that it is for: store "
             "it under (stage, m).", (PLACED, "target[stage - 1, m]"),
             (PLACED, "target[stage + 1, m]"), (PLACED, "target[m, stage]")),
        Slip("A message has the shape of its own micro-batch: self.new_hidden(self.pieces[m][0]).",
             ("self.new_hidden(self.pieces[m][0])", "self.new_hidden(self.pieces[0][0])")),
        Slip("A buffer is reused from an earlier run, whose micro-batches had other lengths: make "
             "a new one in each receive().",
             (f"tensor = {BUFFER}", "self.buffers = getattr(self, 'buffers', {})\n        "
              f"tensor = self.buffers.setdefault((kind, stage, m), {BUFFER})")),
        Slip("The buffer has the dtype of the inputs, which are whole numbers here. A hidden state "
             "arrives: self.new_hidden(self.pieces[m][0]).",
             (BUFFER, "torch.empty_like(self.pieces[m][0])")),
        Slip("A message has the dtype of self.new_hidden(inputs), which need not be float32.",
             (BUFFER, "torch.empty(self.pieces[m][0].shape, device=self.pieces[m][0].device)")),
        Slip("Pass self.group, and give each peer by its rank in that group: dist.isend(tensor, "
             "group=self.group, group_dst=peer), group_src=peer.",
             (SEND, SEND.replace("group=self.group, group_dst=peer", "dst=peer")),
             (IRECV, IRECV.replace("group_src=peer", "src=peer")),
             (SEND, SEND.replace("group_dst", "dst"), IRECV, IRECV.replace("group_src", "src"))),
    ), hints=(
        "Which two places hold what a rank sends, and which two wait for what it receives?",
        "SF and RF move outputs, SB and RB gradients; the message's stage is one of this rank's. "
        "Keep handle and tensor together: run() or take_...() waits for the handle.",
        "send: tensor = (activations_out, or gradients_out).pop((stage, m)).contiguous(); "
        "sends.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor)). receive: "
        "tensor = self.new_hidden(self.pieces[m][0]); activations_in[stage, m], or gradients_in, "
        "= dist.irecv(tensor, group=self.group, group_src=peer), tensor.",
    ))
