"""Run any schedule on real ranks.

StageExecutor computes stages; PipelineExecutor also sends and receives real messages.
"""

import contextlib
import time

import torch
import torch.distributed as dist

from ranklab.pipeline_parallel.actions import Action
from ranklab.pipeline_parallel.messages import with_messages
from ranklab.pipeline_parallel.simulate import Span

METHODS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights",
           "SF": "send", "SB": "send", "RF": "receive", "RB": "receive"}


class ScheduleRunner:
    """Run this rank's part of a schedule, for the stages that it has.

    A subclass computes in two methods, forward(action) and backward(action). They keep their
    tensors in these attributes, which are new in each run; the keys are (stage, micro-batch):
        activations      (input, output) of the stage, from its forward to its backward
        activations_out  the output of the stage, until the next stage takes it or it is sent
        gradients_out    the gradient of the stage's input, until the previous stage takes it or
                         it is sent
        loss             a tensor, which run returns

    If the schedule has several ranks, two more methods, send(message) and receive(message), keep
    what is on its way:
        activations_in   (handle, tensor): the input of the stage
        gradients_in     (handle, tensor): the gradient of the stage's output
        sends            a list of (handle, tensor): a tensor must live until it is delivered

    stages: {number of a stage: (x, targets) -> its output}; the last stage's output is a loss.
    last: the number of the pipeline's last stage.
    new_hidden: (inputs of a micro-batch) -> an empty tensor like a stage's output for them.
    group: its ranks are the ranks of the schedule.
    weight_queue: holds the work that an I defers to its W; see deferred.py.
    timed: synchronize the GPU, so that each action's Span in `spans`, without waits, is exact.
    """

    def __init__(self, stages, last, new_hidden, group=None, weight_queue=None, timed=False):
        self.stages, self.last, self.new_hidden, self.group = stages, last, new_hidden, group
        self.weight_queue, self.timed = weight_queue, timed
        self.rank = dist.get_rank(group)
        # Sends older than these have arrived; with gloo only wait() frees their memory.
        self.max_sends = 2 * dist.get_world_size(group)

    def run(self, schedule, pieces, weight=1.0, scale=1.0):
        """Run this rank's part of `schedule`; return the sum of its losses, times weight.

        pieces: [(inputs, targets)] of the micro-batches; every rank has all of them.
        weight: factor of each loss, in gradients and result: 1 / (the targets in the whole batch).
        scale: a further factor of the gradients.
        Returns: 0 on ranks without the last stage.
        Raises: ValueError for a schedule that deadlocks, and for an output of the wrong shape.
        """
        self.pieces, self.weight, self.scale = pieces, weight, scale
        self.loss = torch.zeros((), device=pieces[0][0].device)
        self.activations_in, self.activations, self.activations_out = {}, {}, {}
        self.gradients_in, self.gradients_out = {}, {}
        self.sends, self.spans = [], []
        for entry in with_messages(schedule)[self.rank]:
            while len(self.sends) > self.max_sends:
                self.sends.pop(0)[0].wait()
            self.began = self.clock()
            with self.deferral(entry):
                getattr(self, METHODS[entry.kind])(entry)
            if isinstance(entry, Action):
                self.done(entry)
        for handle, _ in self.sends:
            handle.wait()
        return self.loss

    def take_activations(self, stage, m):
        """Return the stage's input: received, or the output of the previous stage on this rank."""
        if (stage, m) in self.activations_in:
            return self.wait(*self.activations_in.pop((stage, m)))
        return self.activations_out.pop((stage - 1, m))

    def take_gradients(self, stage, m):
        """Return the gradient of the stage's output: received, or from the next stage on this rank.
        """
        if (stage, m) in self.gradients_in:
            return self.wait(*self.gradients_in.pop((stage, m)))
        return self.gradients_out.pop((stage + 1, m))

    def wait(self, handle, tensor):
        handle.wait()
        self.began = self.clock()  # waiting is not work
        return tensor

    def weights(self, action):
        """Add up the gradients of weights that the I of this W has deferred."""
        self.weight_queue.run(action.stage, action.micro_batch)

    def deferral(self, entry):
        """Defer the gradients of weights in the block to W, if `entry` is an I."""
        kind, stage, m, *_ = entry
        return self.weight_queue.deferral(stage, m) if kind == "I" else contextlib.nullcontext()

    def done(self, action):
        """Add the action's Span; raise ValueError if the next stage expects another shape."""
        self.spans.append(Span(self.rank, action, self.began, self.clock()))
        kind, stage, m = action
        if kind == "F" and stage != self.last:
            shape = tuple(self.activations_out[stage, m].shape)
            expected = tuple(self.new_hidden(self.pieces[m][0]).shape)
            if shape != expected:
                raise ValueError(f"stage {stage} gives {shape} for micro-batch {m}, but {expected} "
                                 "is expected")

    def clock(self):
        """Return time.time(), which can be compared between ranks of one machine."""
        if self.timed and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.time()


class StageExecutor(ScheduleRunner):
    """Compute a rank's stages; losses and gradients equal those of one process.

    Cost: a micro-batch's activations are kept from its forward to its backward; if gradients are
        disabled, they are not kept at all.
    Lab: 09
    """

    def forward(self, action):
        """Compute the stage's output: keep it for the next stage, or add it to self.loss."""
        _, stage, m = action
        x, targets = self.pieces[m]
        if stage:
            x = self.take_activations(stage, m).requires_grad_(torch.is_grad_enabled())
        y = self.stages[stage](x, targets)
        if torch.is_grad_enabled():
            self.activations[stage, m] = x, y
        if stage == self.last:
            self.loss += y.detach() * self.weight
        else:
            self.activations_out[stage, m] = y.detach()

    def backward(self, action):
        """Accumulate the gradients of the stage's weights; compute the gradient of its input."""
        _, stage, m = action
        x, y = self.activations.pop((stage, m))
        if stage == self.last:
            gradient = torch.ones_like(y) * (self.weight * self.scale)
        else:
            gradient = self.take_gradients(stage, m)
        y.backward(gradient)
        if stage:
            self.gradients_out[stage, m] = x.grad


class PipelineExecutor(StageExecutor):
    """Run any schedule on any ranks.

    send and receive only start a message. take_activations() and take_gradients() wait for it, just
    before it is needed, because a rank that waits earlier loses time in which it could
    compute.
    Cost: a message for each micro-batch between stages that are on different ranks, each way.
    Lab: 09
    """

    def send(self, message):
        """Start sending the stage's output (SF) or its input's gradient (SB); do not wait."""
        kind, stage, m, peer = message
        source = self.activations_out if kind == "SF" else self.gradients_out
        tensor = source.pop((stage, m)).contiguous()
        self.sends.append((dist.isend(tensor, group=self.group, group_dst=peer), tensor))

    def receive(self, message):
        """Start receiving the stage's input (RF) or its output's gradient (RB); do not wait."""
        kind, stage, m, peer = message
        target = self.activations_in if kind == "RF" else self.gradients_in
        tensor = self.new_hidden(self.pieces[m][0])
        target[stage, m] = dist.irecv(tensor, group=self.group, group_src=peer), tensor
