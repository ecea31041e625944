"""PipelineParallel: a pipeline behind the training loop's interface."""

import functools

import torch

from ranklab.engine import device
from ranklab.mesh import mesh_grad_norm
from ranklab.pipeline_parallel.actions import places
from ranklab.pipeline_parallel.deferred import WeightQueue, defer_weights
from ranklab.pipeline_parallel.executor import PipelineExecutor
from ranklab.pipeline_parallel.schedules import one_f_one_b_schedule
from ranklab.pipeline_parallel.stages import (
    GPTStage, gpt_costs, keep_layers, materialize, split_stages, tied_embedding_sync,
)
from ranklab.trainer.parallel import GroupParallel, groups_here


class PipelineParallel(GroupParallel):
    """Train a GPT with some of its layers on each rank; all ranks take the same batch, in pieces.

    schedule: (ranks, micro_batches) -> a schedule; it may be a learner's own function.
    split: (costs of layers, stages) -> the layers of each stage.
    executor: the class that runs a schedule; it may be a learner's own.
    sync: the function that adds up the gradients of a matrix on two ranks.
    Lab: 09
    """

    def __init__(self, group=None, schedule=one_f_one_b_schedule, split=split_stages,
                 executor=PipelineExecutor, sync=tied_embedding_sync):  # fmt: skip
        super().__init__(group)
        self.schedule, self.split, self.executor, self.sync = schedule, split, executor, sync
        self.queue = WeightQueue()
        self.token_ranks = 1  # above 1: ranks that share a row's tokens between layers (lab 08)

    def apply(self, model):
        """Drop the other ranks' layers from the model, which then runs the stage `self.current`."""
        self.keep_stages(model)
        if next(model.parameters()).is_meta:
            materialize(model, device())
        return self.make_stages(model)

    def keep_stages(self, model):
        """Keep only this rank's layers of `model`, in place."""
        # the place of a stage does not depend on the number of micro-batches
        plan = self.schedule(self.ranks, 2 * self.ranks)
        self.place = places(plan)
        layers = self.split(gpt_costs(model.config), len(self.place))
        self.layers = {stage: layers[stage] for stage, rank in self.place.items()
                       if rank == self.rank}
        self.defers = any(action.kind == "W" for action in plan[self.rank])
        return keep_layers(model, *self.layers.values())

    def make_stages(self, model):
        """Make `model` run the stage `self.current`, which the executor chooses."""
        self.model = model
        self.tie(model)
        if self.defers:
            defer_weights(model, self.queue)
        self.stages = {stage: GPTStage(model, layers) for stage, layers in self.layers.items()}
        self.current = min(self.stages)
        model.forward = self.run_stage
        self.width, self.dtype = model.config.n_embd, next(model.parameters()).dtype
        return model

    def run_stage(self, *args, **kwargs):
        return self.stages[self.current](*args, **kwargs)

    def tie(self, model):
        """Find the copies of a matrix that is the first stage's embedding and the last stage's
        head.

        Each of the two ranks adds the other's gradient, so both copies stay equal.
        """
        ends = {self.place[0], self.place[max(self.place)]}
        self.tied = model.tied if len(ends) > 1 else {}
        self.other_end = (ends - {self.rank}).pop() if self.copies else None

    @property
    def copies(self):
        """This rank's parameters that another rank holds as well."""
        return [p for name, p in self.model.named_parameters()
                if name in {*self.tied, *self.tied.values()}]

    def sum_copies(self):
        """Add up the gradients of the copies at both ends."""
        self.sync(self.copies, self.other_end, self.group)

    def forward_backward(self, loss_sum, inputs, targets, micro_batch, scale=1.0):
        count = self.token_count(targets).clamp(min=1)
        share = self.run(loss_sum, inputs, targets, micro_batch, 1 / count, scale)
        self.sum_copies()
        return share

    def forward_only(self, loss_sum, inputs, targets, micro_batch):
        return self.run(loss_sum, inputs, targets, micro_batch)

    def run(self, loss_sum, inputs, targets, micro_batch, weight=1.0, scale=1.0):
        """Run the schedule for the pieces of this batch; under no_grad, only its forwards."""
        pieces = list(zip(inputs.split(micro_batch), targets.split(micro_batch)))
        schedule = self.schedule(self.ranks, len(pieces))
        if not torch.is_grad_enabled():
            schedule = tuple(tuple(action for action in actions if action.kind == "F")
                             for actions in schedule)
        stages = {stage: functools.partial(self.at, stage, loss_sum) for stage in self.stages}
        self.ran = self.executor(stages, max(self.place), self.new_hidden, self.group, self.queue)
        return self.ran.run(schedule, pieces, weight, scale)

    def at(self, stage, loss_sum, x, targets):
        self.current = stage
        return loss_sum(x, targets)

    def new_hidden(self, tokens):  # (B, T) -> (B, T, C)
        B, T = tokens.shape
        return torch.empty(B, T // self.token_ranks, self.width, dtype=self.dtype,
                           device=tokens.device)  # fmt: skip

    def grad_norm(self, parameters):
        """Return the norm; each number counts once: half on each rank, if two ranks hold it."""
        copies = {id(p) for p in self.copies}
        return mesh_grad_norm([(p.grad, 2 if id(p) in copies else 1) for p in parameters
                               if p.grad is not None], self.group)

    def make_optimizer(self, new_optimizer, groups):
        return new_optimizer(self.local_groups(groups))

    def local_groups(self, groups):
        """Cut `groups`, decided for the whole model, down to this rank's parameters."""
        parameters = {self.tied.get(name, name): p for name, p in self.model.named_parameters()}
        return groups_here(groups, lambda name, _: parameters.get(name))

    def state(self, model, optimizer):
        """List this rank's Pieces, under the names of the whole model."""
        return self.with_whole_names(super().state(model, optimizer))

    def with_whole_names(self, pieces):
        return [piece._replace(name=self.tied.get(piece.name, piece.name)) for piece in pieces]
