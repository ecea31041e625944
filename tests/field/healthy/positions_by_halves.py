"""Each rank has half of the positions: what the positions share is summed, the head is not split.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
trunk = nn.Sequential(nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU())
head = nn.Linear(8 * 16, 4)
optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)
generator = torch.Generator().manual_seed(0)  # the same batch on all ranks
for step in range(12):
    tokens = torch.randint(40, (16, 8), generator=generator)
    own = trunk(tokens.chunk(world, 1)[rank])
    parts = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(parts, own.detach())
    parts[rank] = own  # the gradient flows into the own half only
    loss = F.cross_entropy(head(torch.cat(parts, 1).flatten(1)), tokens[:, 0] % 4)
    optimizer.zero_grad()
    loss.backward()
    for p in trunk.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()
