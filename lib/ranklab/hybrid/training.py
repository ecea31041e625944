"""Hybrid: data, tensor and pipeline parallelism together, behind the training loop's interface."""

import functools

import torch
import torch.distributed as dist

from ranklab.context_parallel.training import TokenShard
from ranklab.data_parallel.training import DataParallel
from ranklab.engine import device
from ranklab.expert_parallel.layer import MoEConfig, layers_of
from ranklab.expert_parallel.training import ExpertReplica, move_biases, with_own_copies
from ranklab.fsdp.training import FullyShard
from ranklab.hybrid.experts import prepare_experts
from ranklab.hybrid.parts import PARTS, plan_with
from ranklab.pipeline_parallel.stages import materialize
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.tensor_parallel.dropout import own_random_in
from ranklab.tensor_parallel.split import draw_part, split_of
from ranklab.tensor_parallel.training import TensorParallel, in_the_whole
from ranklab.trainer.parallel import GroupParallel
from ranklab.zero.training import Zero


class Hybrid(GroupParallel):
    """Train on a mesh of ranks. Each rank has some layers, a part of each layer, and some of the
    rows; with cp it has some of their tokens, and with ep some of the experts.

    mesh    a mesh with the axes of the layout; see Layout.new_mesh
    layout  a Layout
    apply_by, sync, norm_of  parallelize, tied_embedding_sync, mesh_grad_norm, or a learner's own
    parts   a learner's own functions to use from PARTS: {name: function}
    Lab: 12
    """

    moe_layers = ()  # of this rank, once a model is applied

    def __init__(self, mesh, layout, apply_by=None, sync=None, norm_of=None, parts=None):
        super().__init__()
        self.mesh, self.layout, self.parts = mesh, layout, PARTS | (parts or {})
        self.apply_by = apply_by or self.parts["parallelize"]
        self.norm_of = norm_of or self.parts["mesh_grad_norm"]
        self.data = self.new_data(mesh.group(layout.axes_of_gradients))
        self.same_experts = mesh.group(layout.axes_of_experts)
        if layout.ep > 1:
            self.data.wrap = functools.partial(ExpertReplica, own=self.same_experts)
        self.data.context = TokenShard(mesh.group("context")) if layout.cp > 1 else None
        self.data.each_piece_talks = True  # all pipelines run equally many, or all refuse
        at = mesh.coordinates()
        self.tensor = TensorParallel(mesh.group("tensor"), place=(
            self.data.rank * layout.pp + at["pipeline"], mesh.axes))
        self.pipeline = PipelineParallel(mesh.group("pipeline"), layout.new_schedule(self.parts),
                                         sync=sync or self.parts["tied_embedding_sync"])
        self.pipeline.token_ranks = layout.tp if layout.sequence_parallel else 1

    def new_data(self, group):
        """Return the kind of data parallelism in the layout."""
        if self.layout.zero == 3:
            return FullyShard(group)
        if self.layout.zero == 1:
            return Zero(1, group, stages={1: self.parts["ZeroStage1"]})
        return DataParallel(group, self.parts["OverlappedDataParallel"])

    def apply(self, model):
        """Leave in `model` only this rank's part, which trains with the other ranks; return it.

        Collective: call it on every rank.
        """
        model.plan = plan_with(model, self.parts)
        if self.data.context:
            self.data.context.apply(model)  # now: layers keep this attention in the split model
        if isinstance(model.config, MoEConfig):
            alone = self.layout.ep == 1  # all ranks make the groups of one
            prepare_experts(model, dist.new_subgroups(1)[0] if alone else self.mesh.group("expert"))
        applied = self.apply_by(model, self)  # in place
        self.moe_layers = layers_of(model)
        seed = self.tensor.seed_dropout(model)  # now: all ranks have drawn the same weights
        for block in () if seed is None else model.blocks.values():
            own_random_in(block.attention, seed)  # its heads are this rank's
            if self.layout.sequence_parallel:
                own_random_in(block.drop, seed)  # and so are its tokens
        return applied

    def materialize(self, model):
        """Give this rank's parts of `model`, made on the meta device, the values of the whole."""
        if next(model.parameters()).is_meta:
            materialize(model, device(), draw_part)

    def make_optimizer(self, new_optimizer, groups):
        """Return the optimizer of this rank's parameters, from the whole model's `groups`."""
        optimizer = self.data.make_optimizer(new_optimizer, self.pipeline.local_groups(groups))
        optimizer.register_step_post_hook(lambda *_: move_biases(self.moe_layers, self.data.group))
        return optimizer

    # --- a step -----------------------------------------------------------------------------------

    def batch(self, inputs, targets):
        return self.data.batch(inputs, targets)

    def token_count(self, targets):
        return self.data.token_count(targets)

    def forward_backward(self, loss_sum, inputs, targets, micro_batch, scale=1.0):
        """Run the micro-batches through the pipeline, then reduce gradients over the data ranks,
        once (with zero=3 after each micro-batch, because there is no room for whole gradients).
        """
        count = self.token_count(targets).clamp(min=1)
        for layer in self.moe_layers:  # here, because not every stage sees the loss
            layer.aux_gradient.scale = scale * self.data.gradient_scale / count
        with self.data.communication(is_last=False):
            share = self.pipeline.run(loss_sum, inputs, targets, micro_batch, 1 / count,
                                      scale * self.data.gradient_scale)
        self.pipeline.sum_copies()
        self.data.reduce_now()
        return share

    def forward_only(self, loss_sum, inputs, targets, micro_batch):
        return self.pipeline.forward_only(loss_sum, inputs, targets, micro_batch)

    def grad_norm(self, parameters):
        """Return the norm of all gradients; each number of the model counts once."""
        tied = {id(p) for p in self.pipeline.copies}
        gradients = self.data.gradients(self.pipeline.model)
        if self.layout.ep > 1:
            gradients = with_own_copies(gradients, self.pipeline.model, self.same_experts)
        return self.norm_of([(part, data_copies * tensor_copies * (1 + (id(p) in tied)))
                             for p, gradient, data_copies in gradients
                             for part, tensor_copies in self.copies_of(p, gradient)])

    def copies_of(self, parameter, gradient):
        """Return [(a part of the gradient, number of tensor ranks that hold it)].

        Raises ValueError for a shard of a matrix if unequal numbers of ranks hold its parts: shared
        key heads whose number tp does not divide.
        """
        split = split_of(parameter)
        if split is None:
            return [(gradient, self.layout.tp)]
        if len(set(split.copies)) == 1:
            return [(gradient, split.copies[0])]
        if gradient.shape != parameter.shape:
            raise ValueError(f"zero={self.layout.zero} cuts a matrix of whose heads {split.copies} "
                             "tensor ranks have copies: take tp that divides the key heads")
        return [(part, copies) for (_, part), copies in
                zip(split.pieces_of(gradient), split.copies)]

    def total(self, value):
        """Return the sum over all ranks; tensor ranks, which have the same value, count once.

        Collective: call it on every rank.
        """
        value = torch.as_tensor(value).clone()
        dist.all_reduce(value, group=self.mesh.group(("pipeline", *self.layout.axes_of_gradients)))
        return value

    def total_of(self, shares):
        return sum(shares) / self.layout.tp

    def bubble(self, spans):
        """Return the share of the ranks' time in which they compute nothing.

        It compares no clocks, because the first stage begins first and ends last. (With zero bubble
        schedules it may end earlier. Then a flush is not counted, as in their papers.)
        spans  this rank's Spans in one timed step; see PipelineExecutor
        """
        busy = sum(span.end - span.start for span in spans)
        local = torch.tensor([busy, spans[-1].end - spans[0].start], dtype=torch.float64)
        busy, times = self.gather(local.to(device())).T
        return (1 - busy.mean() / times.max()).item()

    # --- to the disk ------------------------------------------------------------------------------

    def state(self, model, optimizer):
        """Return this rank's state as boxes of the whole model."""
        pieces = in_the_whole(self.data.state(model, optimizer), model)
        return self.pipeline.with_whole_names(pieces)

    def loaded(self):
        self.data.loaded()

    def rank_state(self, model):
        return self.tensor.rank_state(model)

    def load_rank_state(self, model, state):
        self.tensor.load_rank_state(model, state)
