"""ExpertParallel: some of the experts on each rank, behind the training loop's interface.

For everything else it is a DataParallel (data_parallel). An expert's part is cut out and
reassembled like a part in tensor parallelism (tensor_parallel).
"""

import functools

import torch
import torch.distributed as dist

from ranklab.data_parallel.gradients import OverlappedDataParallel
from ranklab.data_parallel.replica import Replica
from ranklab.data_parallel.training import DataParallel
from ranklab.expert_parallel.layer import layers_of
from ranklab.mesh import mesh_grad_norm
from ranklab.tensor_parallel.split import even_split, take
from ranklab.tensor_parallel.training import in_the_whole
from ranklab.trainer.parallel import groups_here


def spread_experts(model, group):
    """Leave each rank of the group E/R consecutive experts of each layer; return the model.

    The model is changed in place.
    Raises: ValueError if R does not divide n_expert.
    """
    R = dist.get_world_size(group)
    for layer in layers_of(model):
        if layer.config.n_expert % R:
            raise ValueError(f"{R} ranks must divide n_expert={layer.config.n_expert}")
        layer.group = group
        for linear in (layer.up, layer.down):
            split = even_split(layer.config.n_expert, 0, group)
            linear.weight = take(linear.weight, split, "expert_spec")
    return model


def experts_of(model):
    """Return the parameters that belong to an expert of this rank."""
    return [linear.weight for layer in layers_of(model) for linear in (layer.up, layer.down)]


class ExpertReplica(OverlappedDataParallel):
    """A model whose experts are averaged over `own`, and everything else over `group`."""

    def __init__(self, module, group, own):
        self.own, self.experts = own, set(experts_of(module))
        super().__init__(module, group=group)

    def group_of(self, tensor):
        return self.own if tensor in self.experts else self.group

    def reduce(self, bucket):
        bucket.flat /= dist.get_world_size(self.group)  # an expert has had all ranks' tokens
        return dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)


class AveragedAfterwards(Replica):
    """An ExpertReplica that averages after backward, by a function like expert_gradients."""

    def __init__(self, module, group, own, average):
        self.own, self.experts, self.average = own, set(experts_of(module)), average
        super().__init__(module, group=group)

    group_of = ExpertReplica.group_of

    def finish(self):
        trained = [p for p in self.module.parameters() if p.requires_grad]
        experts = [p for p in trained if p in self.experts]
        shared = [p for p in trained if p not in self.experts]
        self.average(shared, experts, self.own, self.group)


class ExpertParallel(DataParallel):
    """Train with some of the experts and every R-th row on each rank; rows go to experts and back.

    group: all ranks.
    experts: the group over which the experts of a layer are spread; None: the whole of `group`.
    own: the group of the ranks that have the same experts; None: only this rank.
    average: expert_gradients or a learner's function; None: in buckets, while backward still runs.
    options: for DataParallel.
    Lab: 11
    """

    def __init__(self, group=None, experts=None, own=None, average=None, **options):
        own = own or dist.new_subgroups(1)[0]
        wrap = functools.partial(AveragedAfterwards, average=average) if average else ExpertReplica
        super().__init__(group, wrap=functools.partial(wrap, own=own), **options)
        self.spread_over, self.own = experts or group or dist.group.WORLD, own

    def apply(self, model):
        spread_experts(model, self.spread_over)
        self.model, self.parts = model, dict(model.named_parameters())
        return super().apply(model)

    def make_optimizer(self, new_optimizer, groups):
        optimizer = new_optimizer(groups_here(groups, lambda name, _: self.parts.get(name)))
        optimizer.register_step_post_hook(lambda *_: move_biases(layers_of(self.model), self.group))
        return optimizer

    def gradients(self, model):
        return with_own_copies(super().gradients(model), model, self.own)

    def grad_norm(self, parameters):
        gradients = self.gradients(self.model)
        return mesh_grad_norm([(gradient, copies) for _, gradient, copies in gradients], self.group)

    def state(self, model, optimizer):
        return in_the_whole(super().state(model, optimizer), model)


def with_own_copies(gradients, model, own):
    """Return a DataParallel's `gradients`, with experts counted only on the ranks of `own`."""
    experts, copies = set(experts_of(model)), dist.get_world_size(own)
    return [(p, gradient, copies if p in experts else ranks) for p, gradient, ranks in gradients]


@torch.no_grad()
def move_biases(layers, group=None):
    """Move the biases of MoE layers by the loads of all ranks.

    Cost: one all-reduce, 8 L E bytes.
    """
    layers = [layer for layer in layers if layer.bias is not None]
    if layers:
        loads = torch.stack([layer.loads + torch.zeros_like(layer.bias, dtype=torch.long)
                             for layer in layers])
        dist.all_reduce(loads, group=group)
        for layer, load in zip(layers, loads):
            layer.move_bias(load)
