"""DDP with accumulation done right, in nanoGPT's form: require_backward_grad_sync is set by hand.
expects: nothing
ranks: 2
"""
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

gradient_accumulation_steps, max_iters, warmup_iters = 4, 14, 4
learning_rate, min_lr, grad_clip = 3e-3, 3e-4, 1.0


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


dist.init_process_group(backend="gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert gradient_accumulation_steps % world == 0
gradient_accumulation_steps //= world  # those of all ranks together stay the same
torch.manual_seed(1337 + rank)  # DDP gives all ranks the weights of rank 0
model = DDP(nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 50)))
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
data = torch.randint(50, (3000,), generator=torch.Generator().manual_seed(0))
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        at = torch.randint(len(data) - 17, (8, 1)) + torch.arange(17)
        logits = model(data[at[:, :-1]])
        loss = F.cross_entropy(logits.view(-1, 50), data[at[:, 1:]].reshape(-1))
        (loss / gradient_accumulation_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
dist.destroy_process_group()
