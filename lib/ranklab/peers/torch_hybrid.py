"""TorchHybrid: our mesh with torch's DTensor, fully_shard or replicate, and pipelining."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from ranklab.baseline import checkpoint_blocks
from ranklab.engine import device
from ranklab.hybrid.training import Hybrid
from ranklab.peers.dtensor import parallelize_gpt, summed_loss
from ranklab.pipeline_parallel import tied_embedding_sync

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class TorchHybrid(Hybrid):
    """Hybrid with torch's own parts. With zero it shards everything, because torch has no ZeRO-1.

    Hybrid decides which layers, rows and parameters this rank has. The model must be initialised.
    Raises: ValueError for zero-bubble schedules, and if one rank has several stages.
    """

    def __init__(self, layout):
        if layout.schedule not in SCHEDULES or layout.pp < min(layout.virtual, 2):
            raise ValueError(f"{layout}: torch's zero-bubble schedules do not go with fully_shard, "
                             "and a tied matrix that two stages of one rank share does not either")
        mesh = layout.new_mesh()
        super().__init__(mesh, replace(layout, zero=0), sync=sync_dtensors)
        self.layout, self.schedule = layout, None
        self.device_mesh = init_device_mesh(device().type, tuple(mesh.axes.values()),
                                            mesh_dim_names=tuple(mesh.axes))
        self.device_mesh["data", "tensor"]._flatten()  # so that a norm takes one all-reduce

    def apply(self, model):
        layout, pipeline = self.layout, self.pipeline
        pipeline.keep_stages(model)
        if layout.tp > 1:
            parallelize_gpt(model, self.device_mesh["tensor"], layout.sequence_parallel)
            model.loss = summed_loss
        if layout.recompute:
            checkpoint_blocks(model, partial(checkpoint, use_reentrant=False))
        pipeline.make_stages(model)
        shard = fully_shard if layout.zero else replicate
        for stage in pipeline.stages.values():
            give_hooks(stage)
            for module in (*stage.blocks.values(), stage):
                shard(module, mesh=self.device_mesh["data"])
        pipeline.tie(model)
        return model

    def forward_backward(self, loss_sum, inputs, targets, micro_batch, scale=1.0):
        self.weight = scale * self.data.gradient_scale / self.token_count(targets).clamp(min=1)
        self.schedule = self.schedule or self.new_schedule(len(inputs) // micro_batch)
        losses = []
        stage_inputs = [inputs] if 0 in self.pipeline.stages else []
        with loss_parallel():
            self.schedule.step(*stage_inputs, target=targets, losses=losses, return_outputs=False,
                               targets=targets, reduction="sum")
        self.pipeline.sum_copies()
        return sum(losses, torch.zeros((), device=device())).detach() / self.data.gradient_scale

    def new_schedule(self, micro_batches):
        """Make torch's schedule for our stages. The last stage computes the loss itself."""
        pipeline, interleaves = self.pipeline, self.layout.virtual > 1
        stages = [PipelineStage(stage, number, len(pipeline.place), device(), group=pipeline.group)
                  for number, stage in pipeline.stages.items()]
        kind = ScheduleInterleaved1F1B if interleaves else SCHEDULES[self.layout.schedule]
        return kind(stages if interleaves else stages[0], micro_batches, scale_grads=False,
                    loss_fn=lambda total, _: total * self.weight)

    def grad_norm(self, parameters):
        """Take torch's norm over this rank's stages; sum over the pipeline, as torchtitan does."""
        copies, norm = self.pipeline.copies, nn.utils.get_total_norm
        twice = {id(p) for p in copies}  # another rank has them as well
        squares = norm([p.grad for p in parameters if p.grad is not None and id(p) not in twice]
                       ).full_tensor() ** 2
        if copies:
            squares += norm([p.grad for p in copies]).full_tensor() ** 2 / 2
        dist.all_reduce(squares, group=self.pipeline.group)
        return squares.sqrt()


def sync_dtensors(copies, other, group):
    """Call tied_embedding_sync: torch does not sync a matrix that two stages share."""
    for parameter in copies:
        local = SimpleNamespace(grad=parameter.grad.to_local())
        tied_embedding_sync([local], other, group)
        parameter.grad.to_local().copy_(local.grad)


def give_hooks(stage):
    """Give a stage, a shallow copy of the model, separate hooks: fully_shard needs them."""
    children = stage._modules
    nn.Module.__init__(stage)
    stage._modules = children
