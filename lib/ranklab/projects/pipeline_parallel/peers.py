"""torch.distributed.pipelining beside our pipeline: the same parts of a GPT, the same batches."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from ranklab.engine import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.projects.pipeline_parallel.config import TORCH_SCHEDULES, schedule_of

SHAPE, PIECES = GPTConfig(n_layer=6), 8


def cut_gpt(name, shape):
    """(this rank's part of a GPT, its PipelineParallel). Nothing is tied: torch leaves a matrix
    that two stages share to its user.
    """
    torch.manual_seed(0)
    model = GPT(shape).to(device())
    model.tied, model.head.weight = {}, nn.Parameter(model.head.weight.detach().clone())
    parallel = PipelineParallel(schedule=schedule_of(name))
    return parallel.apply(model), parallel


def ours(name, shape=SHAPE):
    """(the model, (x, y) -> this rank's share of the mean loss; the gradients are there)."""
    model, parallel = cut_gpt(name, shape)
    return model, lambda x, y: parallel.forward_backward(
        lambda inputs, targets: model(inputs, targets, "sum"), x, y, len(x) // PIECES)


def torch_pipelining(name, shape=SHAPE):
    """The same by torch's schedule, on the same stages."""
    model, parallel = cut_gpt(name, shape)
    stages = [PipelineStage(part, stage, len(parallel.place), device())
              for stage, part in parallel.stages.items()]
    kind = get_schedule_class(TORCH_SCHEDULES[name])
    schedule = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, PIECES,
                    loss_fn=lambda logits, targets: F.cross_entropy(
                        logits.flatten(0, 1), targets.flatten()) / PIECES, scale_grads=False)

    def step(x, y):
        losses = []
        inputs = [x] if 0 in parallel.stages else []
        schedule.step(*inputs, target=y, losses=losses)
        return sum(losses, torch.zeros((), device=device()))

    return model, step


def train(way, name, steps):
    """On each rank: ([mean loss of each step], its last gradients, messages sent in that step)."""
    (model, step), losses = way(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randint(256, (2 * PIECES, SHAPE.n_ctx), generator=made).to(device())
        optimizer.zero_grad()
        with Traffic() as traffic:
            loss = step(x, x).detach()
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}, traffic.calls["send"]


def losses_by(way, name="1f1b", ranks=4, steps=2):
    """([mean loss of each step], [messages that each rank sent in the last step])."""
    found = launch(train, way, name, steps, ranks=ranks)
    return found[0][0], [messages for _, _, messages in found]


our_losses, torch_losses = (functools.partial(losses_by, way) for way in (ours, torch_pipelining))
