"""PipelineExecutor: any schedule, run by real ranks with real messages."""

import contextlib
import time

import torch
import torch.distributed as dist

from ranklab.pipeline_parallel.actions import Action
from ranklab.pipeline_parallel.messages import with_messages
from ranklab.pipeline_parallel.simulate import Span


class PipelineExecutor:
    """Runs what a schedule says this rank does, for the stages that it has.

    stages      {number of a stage: (x, targets) -> its output}; the last stage's is a loss
    last        the number of the last stage of all
    new_hidden  (inputs of a micro-batch) -> an empty tensor like a stage's output for them
    group       its ranks are those of the schedule
    weight_queue  keeps what an I leaves for its W: see deferred.py
    timed       `spans` has a Span for each action, without the waits; a GPU is waited for
    cost        a message for each micro-batch between stages that are on different ranks, each way
    lab         09
    """

    def __init__(self, stages, last, new_hidden, group=None, weight_queue=None, timed=False):
        self.stages, self.last, self.new_hidden, self.group = stages, last, new_hidden, group
        self.weight_queue, self.timed = weight_queue, timed
        self.rank = dist.get_rank(group)

    def run(self, schedule, pieces, weight=1.0, scale=1.0):
        """All of this rank's part of `schedule` is done; returns the sum of the losses that it
        computed, times weight: of the ranks without the last stage 0.

        pieces  [(inputs, targets)] of the micro-batches; every rank has all of them
        weight  of each loss in gradients and result: one over the targets of the whole batch
        scale   of the gradients besides
        error   ValueError for a schedule that deadlocks, and for an output of another shape
        """
        self.pieces, self.weight, self.scale = pieces, weight, scale
        self.loss = torch.zeros((), device=pieces[0][0].device)
        self.there = {}  # ("F" or "B", stage, micro-batch) -> what that stage needs for it
        self.kept = {}  # (stage, micro-batch) -> its input and output, until backward
        self.arriving, self.leaving, self.spans = {}, [], []
        do = {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weights,
              "SF": self.send, "SB": self.send, "RF": self.receive, "RB": self.receive}
        for entry in with_messages(schedule)[self.rank]:
            self.began = self.clock()
            do[entry.kind](entry)
            if isinstance(entry, Action):
                self.spans.append(Span(self.rank, entry, self.began, self.clock()))
        for handle, _ in self.leaving:
            handle.wait()
        return self.loss

    # --- what a rank computes ---------------------------------------------------------------------

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
            return
        if y.shape != self.new_hidden(inputs).shape:
            raise ValueError(f"stage {stage} gives {tuple(y.shape)} for micro-batch {m}, but "
                             f"{tuple(self.new_hidden(inputs).shape)} is expected")
        self.there["F", stage + 1, m] = y.detach()

    def backward(self, action):
        """Gradients of the stage's weights are added up, and that of its input is there."""
        kind, stage, m = action
        x, y = self.kept.pop((stage, m))
        if stage == self.last:
            gradient = torch.ones_like(y) * (self.weight * self.scale)
        else:
            gradient = self.take("B", stage, m)
        later = self.weight_queue.later(stage, m) if kind == "I" else contextlib.nullcontext()
        with later:
            y.backward(gradient)
        if stage:
            self.there["B", stage - 1, m] = x.grad

    def weights(self, action):
        """The gradients of weights that I has left for later are added up."""
        self.weight_queue.run(action.stage, action.micro_batch)

    def take(self, way, stage, m):
        """What this stage needs for the micro-batch, once it has arrived."""
        if (way, stage, m) in self.arriving:
            handle, tensor = self.arriving.pop((way, stage, m))
            handle.wait()
            self.began = self.clock()  # a wait is no work
            return tensor
        return self.there.pop((way, stage, m))

    def clock(self):
        """Seconds, as time.time(): ranks of one machine compare."""
        if self.timed and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.time()

    # --- what a rank sends: started here, and waited for where it is needed -----------------------

    def send(self, message):
        """What the stage made is on its way to the next one, or to the one before."""
        kind, stage, m, peer = message
        tensor = self.there.pop((kind[1], stage + (1 if kind == "SF" else -1), m)).contiguous()
        self.leaving = [each for each in self.leaving if not each[0].is_completed()]
        handle = dist.isend(tensor, group=self.group, group_dst=peer)
        self.leaving.append((handle, tensor))

    def receive(self, message):
        """What the stage needs is on its way to it."""
        kind, stage, m, peer = message
        tensor = self.new_hidden(self.pieces[m][0])
        handle = dist.irecv(tensor, group=self.group, group_src=peer)
        self.arriving[kind[1], stage, m] = handle, tensor
