"""Checkpoints by torch's async_save: its thread has a group of its own and communicates meanwhile.
expects: nothing
ranks: 2
"""
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("cpu:gloo")
    group = dist.new_group(backend="gloo")  # the saving must not come between the steps' calls
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    saving = None
    for step in range(16):
        x = torch.randn(16, 24, generator=generator)
        loss = F.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            if saving is not None:
                saving.result()  # one at a time
            weights, state = get_state_dict(model, optimizer)
            saving = dcp.async_save({"model": weights, "optimizer": state, "step": step},
                                    checkpoint_id=f"{folder[0]}/{step}", process_group=group)
    saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
