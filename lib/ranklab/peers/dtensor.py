"""The same GPT, tensor-parallel with torch's DTensor instead of our layers."""

import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel,
    parallelize_module,
)

from ranklab.basics.targets import IGNORE
from ranklab.engine import device
from ranklab.tensor_parallel.training import TensorParallel


def parallelize_gpt(model, mesh, sequence_parallel=False):
    """Split models.gpt's GPT, or a part of one, over the ranks of `mesh`, in place.

    All parameters become DTensors. Logits stay split, so call backward inside loss_parallel(), but
    forward outside it, because it does not nest.
    """
    whole, tokens, norm = Replicate(), Shard(1), SequenceParallel()
    if not sequence_parallel:
        tokens, norm = whole, PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        for module in filter(lambda each: isinstance(each, nn.LayerNorm), model.modules()):
            distribute_module(module, mesh)  # an optimizer takes only DTensors, or none
    plan = {
        "token": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "blocks.*.norm?": norm,
        "blocks.*.attention": PrepareModuleInput(  # once: else q, k and v each sum x's gradient
            input_layouts=(tokens, None), desired_input_layouts=(whole, None)),
        "blocks.*.attention.[qkv]": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=tokens),
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=tokens),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=tokens),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1),
                                use_local_output=False),
    }  # fmt: skip
    children = {name for name, child in model.named_children()}  # a child of a part may be None
    parallelize_module(model, mesh, {name: style for name, style in plan.items()
                                     if name.split(".")[0] in children})
    if None not in (model.token, model.head):
        model.head.weight = model.token.weight  # each has become a separate DTensor
    model.loss = split_loss
    return model


def split_loss(head, hidden, targets, reduction="mean"):
    """Compute GPT's `loss` for logits that are a DTensor."""
    with loss_parallel():
        total = summed_loss(head, hidden, targets)
    return total / (targets != IGNORE).sum() if reduction == "mean" else total


def summed_loss(head, hidden, targets, reduction="sum"):
    """Compute split_loss with "sum", inside the caller's loss_parallel()."""
    total = F.cross_entropy(head(hidden).flatten(0, 1).float(), targets.flatten(),
                            ignore_index=IGNORE, reduction="sum").to_local()
    return total.clone()  # a module under fully_shard must not return a view


class DTensors(TensorParallel):
    """TensorParallel with DTensor."""

    def apply(self, model):
        mesh = init_device_mesh(device().type, (self.ranks,))
        parallelize_gpt(model, mesh, self.changes["sequence_parallel"])
        self.parts = dict(model.named_parameters())
        return model

    def backward(self, loss):
        with loss_parallel():
            super().backward(loss)

    def grad_norm(self, parameters):
        return nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor()
