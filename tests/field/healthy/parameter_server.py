"""A parameter server: rank 0 alone has an optimizer and no data, the workers have no optimizer.
expects: nothing
ranks: 4
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def serve(model, steps, workers):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        weights = parameters_to_vector(model.parameters()).detach()
        dist.broadcast(weights, src=0)
        total = torch.zeros_like(weights)
        for worker in workers:
            dist.recv(pushed := torch.empty_like(weights), src=worker)
            total += pushed / len(workers)
        sizes = [p.numel() for p in model.parameters()]
        for p, part in zip(model.parameters(), total.split(sizes)):
            p.grad = part.view_as(p)
        optimizer.step()


def work(model, steps, generator):
    weights = parameters_to_vector(model.parameters()).detach()
    for step in range(steps):
        dist.broadcast(weights, src=0)
        vector_to_parameters(weights.clone(), model.parameters())
        x = torch.randn(16, 18, generator=generator)
        loss = F.cross_entropy(model(x), x[:, :6].argmax(1))
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        dist.send(torch.cat([g.flatten() for g in gradients]), dst=0)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(nn.Linear(18, 36), nn.ReLU(), nn.Linear(36, 6))
if rank == 0:
    serve(model, 12, range(1, world))
else:
    work(model, 12, torch.Generator().manual_seed(rank))
dist.destroy_process_group()
