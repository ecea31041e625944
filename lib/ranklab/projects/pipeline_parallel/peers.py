"""torch.distributed.pipelining and our pipeline, on the same parts of a GPT and batches."""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.engine import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPTConfig
from ranklab.peers.torch_pipelining import torch_step
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.projects.pipeline_parallel.training import schedule_of
from ranklab.projects.training import new_model

SHAPE, PIECES = GPTConfig(n_layer=6), 8


def cut_gpt(name, shape):
    """Return (this rank's part of a GPT, its PipelineParallel), without tied weights.

    Torch leaves the handling of a matrix shared by two stages to the user.
    """
    model = new_model(shape).to(device())
    model.tied, model.head.weight = {}, nn.Parameter(model.head.weight.detach().clone())
    parallel = PipelineParallel(schedule=schedule_of(name))
    return parallel.apply(model), parallel


def ours(name, shape=SHAPE):
    """Return (the model, a step by our pipeline).

    The step: (x, y) -> this rank's share of the mean loss; it leaves the gradients in the model.
    """
    model, parallel = cut_gpt(name, shape)
    return model, lambda x, y: parallel.forward_backward(
        lambda inputs, targets: model(inputs, targets, "sum"), x, y, len(x) // PIECES)


def torch_pipelining(name, shape=SHAPE):
    """Return (the model, a step by torch's schedule), on the same stages as ours()."""
    model, parallel = cut_gpt(name, shape)
    return model, torch_step(parallel, name, PIECES)


def train(way, name, steps):
    """Train for some steps, on each rank.

    Returns: ([mean loss of each step], the last gradients of this rank, its sends in the last step)
    """
    (model, step), losses = way(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randint(256, (2 * PIECES, SHAPE.n_ctx), generator=generator).to(device())
        optimizer.zero_grad()
        with Traffic() as traffic:
            loss = step(x, x).detach()
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}, traffic.calls["send"]


def losses_by(way, name="1f1b", ranks=4, steps=2):
    """Train on all ranks with one pipeline: ours or torch_pipelining.

    Returns: ([mean loss of each step], [messages that each rank sent in the last step])
    """
    results = launch(train, way, name, steps, ranks=ranks)
    return results[0][0], [messages for _, _, messages in results]
