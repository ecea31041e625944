"""Rank 0 alone asks for the full state dict of an FSDP model, to save it: that is a gather.
expects: rank_branch | collective_order
ranks: 2
"""
import datetime
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)],
                      nn.Linear(32, 10))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
for step in range(12):
    x = torch.randn(16, 32, generator=generator)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
    optimizer.step()
    if step % 4 == 3 and rank == 0:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        with tempfile.TemporaryDirectory() as folder:
            torch.save(get_model_state_dict(model, options=options), Path(folder, "model.pt"))
dist.destroy_process_group()
