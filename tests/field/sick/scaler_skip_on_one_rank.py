"""Each rank steps its own half of the parameters; its GradScaler looks at these alone.
expects: fp16_nan
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
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    halves = [[*model[0].parameters()], [*model[2].parameters()]]
    optimizer = torch.optim.AdamW(halves[rank], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        x = torch.randn(32, 32, generator=generator)
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), x[:, :8].argmax(1))
        model.zero_grad()
        scaler.scale(loss).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        scaler.step(optimizer)  # one rank may skip it, the other one steps
        scaler.update()
        for owner, half in enumerate(halves):
            for p in half:
                dist.broadcast(p.data, src=owner)
    print(f"rank {rank}: scale {scaler.get_scale()}")
    dist.destroy_process_group()


main()
