"""All micro-steps are under no_sync(), the last one too: no gradient is ever all-reduced.
expects: replicas_drift
ranks: 2
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group(backend="gloo")
rank = dist.get_rank()
accumulation = 4

torch.manual_seed(1337)
raw_model = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(), nn.Linear(32 * 8, 64))
model = DDP(raw_model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
tokens = torch.randint(64, (4096,))
torch.manual_seed(1337 + rank)


def get_batch(size=12, length=8):
    starts = torch.randint(len(tokens) - length, (size,))
    x = torch.stack([tokens[i:i + length] for i in starts])
    return x, tokens[starts + length]


for step in range(20):
    with model.no_sync():  # meant for all micro-steps but the last
        for _ in range(accumulation):
            x, y = get_batch()
            loss = nn.functional.cross_entropy(model(x), y) / accumulation
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0 and step % 5 == 0:
        print(f"step {step}: loss {loss.item() * accumulation:.4f}")
dist.destroy_process_group()
