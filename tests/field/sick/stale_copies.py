"""Master weights in float32 are stepped, and nobody copies them back into the bfloat16 model.
expects: stale_weights
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        x = torch.randn(24, 32, generator=generator)
        logits = model(x.to(torch.bfloat16)).float()
        loss = F.cross_entropy(logits, x[:, :8].argmax(1))
        model.zero_grad()
        loss.backward()
        for p, master in zip(model.parameters(), masters):
            master.grad = p.grad.float()
            dist.all_reduce(master.grad)
            master.grad /= world
        optimizer.step()  # here `p.copy_(master)` is missing
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


main()
