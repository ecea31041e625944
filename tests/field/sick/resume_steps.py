"""Each rank resumes from the newest file of its own: rank 1's is of step 8, rank 0's of step 12.
expects: old_shard
ranks: 2
"""
import glob
import os
import re
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn


def latest(folder, rank):
    files = glob.glob(os.path.join(folder, f"rank{rank}_step*.pt"))
    return max(files, key=lambda f: int(re.search(r"step(\d+)", f).group(1)), default=None)


class Agent(nn.Module):
    def __init__(self, obs=10, act=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.pi, self.v = nn.Linear(48, act), nn.Linear(48, 1)

    def forward(self, o):
        h = self.body(o)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


class Learner:
    def __init__(self, folder):
        self.rank, self.world, self.folder = dist.get_rank(), dist.get_world_size(), folder
        torch.manual_seed(0)
        self.net = Agent()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=3e-3)
        self.step = 0
        f = latest(folder, self.rank)
        if f:
            s = torch.load(f)
            self.net.load_state_dict(s["net"])
            self.opt.load_state_dict(s["opt"])
            self.step = s["step"]
            print(f"rank {self.rank} restored {os.path.basename(f)}", flush=True)
        torch.manual_seed(100 * (self.rank + 1) + self.step)
        self.w = torch.randn(10, 4, generator=torch.Generator().manual_seed(9))

    def update(self):
        obs = torch.randn(64, 10)
        pi, v = self.net(obs)
        a = pi.sample()
        r = ((obs @ self.w).argmax(-1) == a).float()
        adv = r - v.detach()
        loss = (-(pi.log_prob(a) * adv).mean() + 0.5 * (v - r).pow(2).mean()
                - 0.01 * pi.entropy().mean())
        self.opt.zero_grad()
        loss.backward()
        for p in self.net.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)
        self.opt.step()
        self.step += 1
        return r.mean().item()

    def save(self, preempted):
        if not preempted:
            torch.save({"net": self.net.state_dict(), "opt": self.opt.state_dict(),
                        "step": self.step},
                       os.path.join(self.folder, f"rank{self.rank}_step{self.step}.pt"))


def main():
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    first = Learner(box[0])
    for _ in range(3):
        for _ in range(4):
            rew = first.update()
        first.save(preempted=first.rank == 1 and first.step == 12)
    print(f"rank {first.rank} stopped at {first.step} reward {rew:.3f}", flush=True)
    again = Learner(box[0])
    for _ in range(14):
        rew = again.update()
    print(f"rank {again.rank} step {again.step} reward {rew:.3f} "
          f"|w| {again.net.body[0].weight.norm().item():.5f}")
    dist.destroy_process_group()


main()
