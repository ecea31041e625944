"""PipelineExecutor: any schedule, run by real ranks with real messages."""

import contextlib
import time

import torch
import torch.distributed as dist

from ranklab.pipeline_parallel.actions import Action
from ranklab.pipeline_parallel.messages import with_messages
from ranklab.pipeline_parallel.simulate import Span


class ScheduleRunner:
    """Runs this rank's part of a schedule, for the stages that it has.

    A subclass says what is computed and sent, in four methods: forward(action), backward(action),
    send(message), receive(message). They keep their tensors in these, which are new in each run:
        there     {("F", stage, m): the input of that stage for micro-batch m, made on this rank;
                  ("B", stage, m): the gradient of that stage's output}, until it is used or sent
        kept      {(stage, m): (input, output)}, from forward to backward
        arriving  {("F" or "B", stage, m): (handle, tensor)}, until take() waits for it
        leaving   [(handle, tensor)] of what is sent: a tensor must live until it has left
        loss      what run returns

    stages      {number of a stage: (x, targets) -> its output}; the last stage's is a loss
    last        the number of the last stage of all
    new_hidden  (inputs of a micro-batch) -> an empty tensor like a stage's output for them
    group       its ranks are those of the schedule
    weight_queue  keeps what an I leaves for its W: see deferred.py
    timed       `spans` has a Span for each action, without the waits; a GPU is waited for
    """

    def __init__(self, stages, last, new_hidden, group=None, weight_queue=None, timed=False):
        self.stages, self.last, self.new_hidden, self.group = stages, last, new_hidden, group
        self.weight_queue, self.timed = weight_queue, timed
        self.rank = dist.get_rank(group)
        # A send that is older than these has arrived; with gloo only wait() frees its memory.
        self.most_leaving = 2 * dist.get_world_size(group)

    def run(self, schedule, pieces, weight=1.0, scale=1.0):
        """This rank's part of `schedule` is done; returns the sum of the losses that it computed,
        times weight; 0 on ranks without the last stage.

        pieces  [(inputs, targets)] of the micro-batches; every rank has all of them
        weight  of each loss in gradients and result: one over the targets of the whole batch
        scale   of the gradients besides
        error   ValueError for a schedule that deadlocks, and for an output of another shape
        """
        self.pieces, self.weight, self.scale = pieces, weight, scale
        self.loss = torch.zeros((), device=pieces[0][0].device)
        self.there, self.kept, self.arriving, self.leaving, self.spans = {}, {}, {}, [], []
        do = {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weights,
              "SF": self.send, "SB": self.send, "RF": self.receive, "RB": self.receive}
        for entry in with_messages(schedule)[self.rank]:
            while len(self.leaving) > self.most_leaving:
                self.leaving.pop(0)[0].wait()
            self.began = self.clock()
            do[entry.kind](entry)
            if isinstance(entry, Action):
                self.spans.append(Span(self.rank, entry, self.began, self.clock()))
                self.check_shape(*entry)
        for handle, _ in self.leaving:
            handle.wait()
        return self.loss

    def take(self, way, stage, m):
        """What this stage needs for the micro-batch, once it has arrived."""
        if (way, stage, m) in self.arriving:
            handle, tensor = self.arriving.pop((way, stage, m))
            handle.wait()
            self.began = self.clock()  # a wait is no work
            return tensor
        return self.there.pop((way, stage, m))

    def weights(self, action):
        """The gradients of weights that I has left for later are added up."""
        self.weight_queue.run(action.stage, action.micro_batch)

    def later(self, action):
        """Inside, if `action` is an I, a backward leaves the gradients of weights for W."""
        kind, stage, m = action
        return self.weight_queue.later(stage, m) if kind == "I" else contextlib.nullcontext()

    def check_shape(self, kind, stage, m):
        """Raises ValueError if a stage's output does not have the shape that the next expects."""
        if kind == "F" and stage != self.last:
            got = tuple(self.there["F", stage + 1, m].shape)
            expected = tuple(self.new_hidden(self.pieces[m][0]).shape)
            if got != expected:
                raise ValueError(f"stage {stage} gives {got} for micro-batch {m}, but {expected} "
                                 "is expected")

    def clock(self):
        """Seconds, as time.time(): ranks of one machine compare."""
        if self.timed and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.time()


class PipelineExecutor(ScheduleRunner):
    """Runs any schedule: the losses and gradients are those of one process.

    send and receive only start a message. take() waits for it, right where it is needed, because a
    rank that waits earlier loses time in which it could compute.
    cost   a message for each micro-batch between stages that are on different ranks, each way;
           a micro-batch's activations are kept from its forward to its backward, and without
           gradients not at all
    lab    09
    """

    def forward(self, action):
        """The stage's output is there, for the next stage or as a loss."""
        _, stage, m = action
        inputs, targets = self.pieces[m]
        x = self.take("F", stage, m).requires_grad_(torch.is_grad_enabled()) if stage else inputs
        y = self.stages[stage](x, targets)
        if torch.is_grad_enabled():
            self.kept[stage, m] = x, y
        if stage == self.last:
            self.loss += y.detach() * self.weight
        else:
            self.there["F", stage + 1, m] = y.detach()

    def backward(self, action):
        """Gradients of the stage's weights are added up, and the gradient of its input is there."""
        _, stage, m = action
        x, y = self.kept.pop((stage, m))
        if stage == self.last:
            gradient = torch.ones_like(y) * (self.weight * self.scale)
        else:
            gradient = self.take("B", stage, m)
        with self.later(action):
            y.backward(gradient)
        if stage:
            self.there["B", stage - 1, m] = x.grad

    def send(self, message):
        """What the stage made is on its way to the next stage, or to the previous one."""
        kind, stage, m, peer = message
        tensor = self.there.pop((kind[1], stage + (1 if kind == "SF" else -1), m)).contiguous()
        self.leaving.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))

    def receive(self, message):
        """What the stage needs is on its way to it."""
        kind, stage, m, peer = message
        tensor = self.new_hidden(self.pieces[m][0])
        handle = dist.irecv(tensor, group=self.group, group_src=peer)
        self.arriving[kind[1], stage, m] = handle, tensor
