"""torch.distributed.pipelining beside our pipeline: the same parts of a GPT, the same batches."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from ranklab.engine import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.pipeline_parallel import places, split_stages
from ranklab.pipeline_parallel.stages import gpt_costs, keep_layers, stage_of
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.projects.pipeline_parallel.config import schedule_of

TORCHS = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B,
          "interleaved": schedules.ScheduleInterleaved1F1B,
          "zb-h1": schedules.ScheduleInterleavedZeroBubble,
          "zb-v": schedules.ScheduleZBVZeroBubble}  # fmt: skip
SHAPE, PIECES = GPTConfig(n_layer=6), 8


def new_gpt(shape):
    """The same on every rank. Nothing is tied: torch leaves copies on two ranks to its user."""
    torch.manual_seed(0)
    model = GPT(shape).to(device())
    model.tied, model.head.weight = {}, nn.Parameter(model.head.weight.detach().clone())
    return model


def ours(name, model):
    """(inputs, targets) -> this rank's share of the mean loss; the gradients are there."""
    parallel = PipelineParallel(schedule=schedule_of(name))
    parallel.apply(model)
    return lambda x, y: parallel.forward_backward(
        lambda inputs, targets: model(inputs, targets, "sum"), x, y, len(x) // PIECES)


def torchs(name, model):
    """The same by torch's schedule."""
    place = places(schedule_of(name)(dist.get_world_size(), PIECES))
    layers, last = split_stages(gpt_costs(model.config), len(place)), max(place)
    mine = [stage for stage, rank in place.items() if rank == dist.get_rank()]
    stages = [PipelineStage(stage_of(model, layers[stage]), stage, len(place), device())
              for stage in mine]
    keep_layers(model, *(layers[stage] for stage in mine))
    is_single = issubclass(TORCHS[name], schedules.PipelineScheduleSingle)
    schedule = TORCHS[name](stages[0] if is_single else stages, PIECES, scale_grads=False,
                            loss_fn=lambda logits, targets: F.cross_entropy(
                                logits.flatten(0, 1), targets.flatten()) / PIECES)

    def step(x, y):
        losses = []
        schedule.step(*[x] * (0 in mine), target=y if last in mine else None, losses=losses)
        return sum(losses, torch.zeros((), device=device()))

    return step


def train(way, name, steps):
    """On each rank: ([mean loss of each step], its last gradients, messages sent in that step)."""
    model = new_gpt(SHAPE)
    step, losses = way(name, model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for tokens in torch.randint(SHAPE.vocab_size, (steps, 2 * PIECES, SHAPE.n_ctx + 1),
                                generator=torch.Generator().manual_seed(1)).to(device()):
        optimizer.zero_grad()
        with Traffic() as traffic:
            loss = step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).detach()
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}, traffic.calls["send"]


def losses(way, name="1f1b", ranks=4, steps=2):
    """([mean loss of each step], messages that each rank sent in the last one)."""
    found = launch(train, way, name, steps, ranks=ranks)
    return found[0][0], [messages for _, _, messages in found]


our_losses, torch_losses = (functools.partial(losses, way) for way in (ours, torchs))
