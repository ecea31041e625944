"""A dict of metrics is reduced in a comprehension; on rank 0 its keys came in another order.
expects: collective_order
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(12, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
totals = {"right": torch.zeros(())} if rank == 0 else {}  # its header has a column for it
for step in range(12):
    x = torch.randn(16, 12, generator=generator)
    scores, classes = model(x), x[:, :4].argmax(1)
    loss = F.cross_entropy(scores, classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    right = (scores.argmax(1) == classes).float().mean()
    for name, value in (("loss", loss.detach()), ("right", right)):
        totals[name] = totals.get(name, 0) + value
    if step % 4 == 3:
        means = {name: dist.all_reduce(total) or total / 4 / world
                 for name, total in totals.items()}
        if rank == 0:
            print({name: round(mean.item(), 3) for name, mean in means.items()})
        totals = {name: torch.zeros(()) for name in totals}
dist.destroy_process_group()
