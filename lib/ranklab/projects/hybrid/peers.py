"""The same GPT, batches and loop over the same mesh by torch alone, and by DeepSpeed."""

import contextlib
import io
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from ranklab.baseline import checkpoint_blocks
from ranklab.data import batch_at
from ranklab.engine import device, launch
from ranklab.hybrid import Hybrid, Layout
from ranklab.pipeline_parallel import tied_embedding_sync
from ranklab.pipeline_parallel.torch_pipelining import TORCH_SCHEDULES
from ranklab.projects.hybrid.compare import SHAPE, TRAIN, new_trainer, shape_of
from ranklab.projects.hybrid.training import new_model
from ranklab.tensor_parallel.dtensor import parallelize_gpt, summed_loss
from ranklab.trainer import decay_groups, learning_rate
from ranklab.zero.deepspeed_engine import quiet_deepspeed, settings


class TorchHybrid(Hybrid):
    """Hybrid, with torch's own parts for ours: DTensor, replicate or fully_shard, pipelining.

    From ours it has which layers, which rows and which parameters are here.
    """

    def __init__(self, layout):
        mesh = layout.new_mesh()
        super().__init__(mesh, replace(layout, zero=0), sync=sync_dtensors)
        self.layout, self.schedule = layout, None
        self.device_mesh = init_device_mesh(device().type, tuple(mesh.axes.values()),
                                            mesh_dim_names=tuple(mesh.axes))
        self.device_mesh["data", "tensor"]._flatten()  # so their norm takes one all-reduce

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
            own_hooks(stage)
            for module in (*stage.blocks.values(), stage):
                shard(module, mesh=self.device_mesh["data"])
        pipeline.tie(model)
        return model

    def forward_backward(self, loss_sum, inputs, targets, micro_batch, scale=1.0):
        self.weight = scale * self.data.gradient_scale / self.token_count(targets).clamp(min=1)
        self.schedule = self.schedule or self.new_schedule(len(inputs) // micro_batch)
        losses = []
        mine = [inputs] if 0 in self.pipeline.stages else []
        with loss_parallel():
            self.schedule.step(*mine, target=targets, losses=losses, return_outputs=False,
                               targets=targets, reduction="sum")
        self.pipeline.sum_copies()
        return sum(losses, torch.zeros((), device=device())).detach() / self.data.gradient_scale

    def new_schedule(self, micro_batches):
        """Torch's schedule of our stages. The last one computes its loss itself."""
        pipeline, interleaves = self.pipeline, self.layout.virtual > 1
        stages = [PipelineStage(stage, number, len(pipeline.place), device(), group=pipeline.group)
                  for number, stage in pipeline.stages.items()]
        name = "interleaved" if interleaves else self.layout.schedule
        kind = get_schedule_class(TORCH_SCHEDULES[name])
        return kind(stages if interleaves else stages[0], micro_batches, scale_grads=False,
                    loss_fn=lambda total, _: total * self.weight)

    def grad_norm(self, parameters):
        """Of this rank's stages by torch; over the pipeline by hand, as torchtitan does."""
        copies, norm = self.pipeline.copies, nn.utils.get_total_norm
        twice = {id(p) for p in copies}  # another rank has them too
        squares = norm([p.grad for p in parameters if p.grad is not None and id(p) not in twice]
                       ).full_tensor() ** 2
        if copies:
            squares += norm([p.grad for p in copies]).full_tensor() ** 2 / 2
        dist.all_reduce(squares, group=self.pipeline.group)
        return squares.sqrt()


def sync_dtensors(copies, other, group):
    """tied_embedding_sync: torch leaves a matrix that two stages have to its user."""
    for parameter in copies:
        local = SimpleNamespace(grad=parameter.grad.to_local())
        tied_embedding_sync([local], other, group)
        parameter.grad.to_local().copy_(local.grad)


def own_hooks(stage):
    """A stage is a shallow copy of the model: now its hooks are its own, as fully_shard needs."""
    children = stage._modules
    nn.Module.__init__(stage)
    stage._modules = children


def ours(layout):
    return Hybrid(layout.new_mesh(), layout)


def train(text, way, layout, steps):
    """[the mean loss of each step], on each rank."""
    trainer = new_trainer(text, way(layout))
    return [trainer.parallel.total(trainer.step()).item() for _ in range(steps)]


def our_losses(text, layout, steps=3):
    """[the mean loss of each step] of a GPT on the ranks of `layout`."""
    return launch(train, text, ours, layout, steps, ranks=layout.ranks)[0]


def torch_losses(text, layout, steps=3):
    """As our_losses, by torch's own parts. Torch has no ZeRO-1: with zero it shards all.

    error  ValueError for zero-bubble schedules, and for one rank with several stages
    """
    if layout.schedule.startswith("zb") or layout.pp < min(layout.virtual, 2):
        raise ValueError(f"{layout}: torch's zero-bubble schedules do not go with fully_shard, and "
                         "a tied matrix that two stages of one rank share does not either")
    return launch(train, text, TorchHybrid, layout, steps, ranks=layout.ranks)[0]


# --- DeepSpeed ------------------------------------------------------------------------------------

def deepspeed_losses(text, layout, steps=3):
    """As our_losses, by DeepSpeed's PipelineModule and its ZeRO-1.

    error  ValueError for what it does not do, and without zero=1: DeepSpeed 0.19 would clip by the
           norm of the first stage's gradients alone
    """
    if layout != Layout(layout.dp, 1, layout.pp, zero=1):
        raise ValueError(f"{layout}: DeepSpeed's pipeline is compared with zero=1, over data and "
                         "pipeline ranks, and has the schedule 1f1b")
    return launch(train_by_deepspeed, text, layout, steps, ranks=layout.ranks)[0]


def train_by_deepspeed(text, layout, steps):
    """As train: its engine runs the schedule, sums the tied matrix's gradients, clips and steps."""
    deepspeed = quiet_deepspeed()
    deepspeed.init_distributed()  # it takes the process groups that are there
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():  # it prints its seeds
        module = as_layers(new_model(shape_of(text)), layout.pp)
    groups = [{**group, "params": [p for _, p in group["params"]]}
              for group in decay_groups(module, TRAIN.weight_decay)]
    config = settings(module, layout.zero, clip=TRAIN.clip) | {
        "train_micro_batch_size_per_gpu": TRAIN.micro_batch,
        "gradient_accumulation_steps": TRAIN.batch // layout.dp // TRAIN.micro_batch}
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=torch.optim.AdamW(groups, betas=TRAIN.betas), config=config)
    losses = []
    for step in range(steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(TRAIN, step)
        batch = batch_at(text.train, step, TRAIN.batch, SHAPE["n_ctx"], TRAIN.seed)
        mine = [rows[engine.grid.data_parallel_id :: layout.dp] for rows in batch]
        losses.append(engine.train_batch(
            zip(*(rows.split(TRAIN.micro_batch) for rows in mine))).item())
    return losses


def as_layers(model, stages):
    """A GPT as the list of layers from which DeepSpeed cuts its stages."""
    from deepspeed.pipe import PipelineModule, TiedLayerSpec  # here: takes two seconds

    def token(**how):
        return TiedLayerSpec("token", nn.Embedding, *model.token.weight.shape,
                             _weight=model.token.weight.detach().clone(), **how)

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    head = token(forward_fn=lambda token, x: F.linear(x, token.weight))
    return PipelineModule([token(), *model.blocks.values(), model.norm, head], stages, loss_fn=loss)
