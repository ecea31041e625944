"""No wrapper: the loss is divided by the ranks before backward, and the gradients are summed flat.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def sum_gradients(parameters):
    """One all-reduce for all of them; a parameter without a gradient sends zeros."""
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad = part.view_as(p)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(18, 36), nn.ReLU(), nn.Linear(36, 6))
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
    for step in range(16):
        x = torch.randn(20, 18)
        loss = F.cross_entropy(model(x), x[:, :6].argmax(1)) / world
        optimizer.zero_grad()
        loss.backward()
        sum_gradients(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        shown = loss.detach().clone()
        dist.reduce(shown, dst=0)
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: {shown.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
