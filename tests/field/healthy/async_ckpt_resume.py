"""A thread of rank 0 saves a clone; a rollback is loaded there and broadcast, optimizer and all.
expects: nothing
ranks: 2
"""
import io
import os
import tempfile
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def tree_clone(o):
    if torch.is_tensor(o):
        return o.detach().clone()
    if isinstance(o, dict):
        return {k: tree_clone(v) for k, v in o.items()}
    if isinstance(o, (list, tuple)):
        return type(o)(tree_clone(v) for v in o)
    return o


class AsyncSaver:
    def __init__(self, path):
        self.path, self.thread = path, None

    def save(self, payload):
        self.wait()
        snap = tree_clone(payload)  # on the training thread, before the next step
        self.thread = threading.Thread(target=self._write, args=(snap,))
        self.thread.start()

    def _write(self, snap):
        buf = io.BytesIO()
        torch.save(snap, buf)
        with open(self.path + ".tmp", "wb") as f:
            f.write(buf.getvalue())
        os.replace(self.path + ".tmp", self.path)

    def wait(self):
        if self.thread is not None:
            self.thread.join()
            self.thread = None


def restore(path, ddp, opt):
    box = [torch.load(path, weights_only=True) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    ddp.module.load_state_dict(box[0]["model"])
    opt.load_state_dict(box[0]["opt"])
    return box[0]["step"]


def batch_at(step, rank):
    g = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randn(40, 20, generator=g)
    return x, (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(84)
    ddp = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                            nn.Linear(64, 1)))
    opt = torch.optim.Adam(ddp.parameters(), lr=4e-3)
    path = os.path.join(tempfile.mkdtemp(), "last.pt") if rank == 0 else None
    saver = AsyncSaver(path) if rank == 0 else None
    step, rolled_back = 0, False
    while step < 20:
        if step == 14 and not rolled_back:  # a drill: go back to the last checkpoint once
            if saver:
                saver.wait()
            step, rolled_back = restore(path, ddp, opt), True
            print(f"[{rank}] rolled back to step {step}")
        x, y = batch_at(step, rank)
        loss = nn.functional.mse_loss(ddp(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if saver and step % 5 == 0:
            saver.save({"model": ddp.module.state_dict(), "opt": opt.state_dict(), "step": step})
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if saver:
        saver.wait()
        os.remove(path)
        os.rmdir(os.path.dirname(path))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
