"""Each rank registers its own task's head first: DDP averages heads of different tasks.
expects: collective_order
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TASKS = ["tags", "names"]


class MultiTask(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 48), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Linear(48, 6) for task in tasks})

    def forward(self, x):
        hidden = self.encoder(x)
        return {task: head(hidden) for task, head in self.heads.items()}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    own = TASKS[rank % len(TASKS)]
    model = DDP(MultiTask([own] + [task for task in TASKS if task != own]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(10 + rank)
    for step in range(25):
        x = torch.randn(16, 24, generator=generator)
        labels = {"tags": x[:, :6].argmax(1), "names": x[:, 6:12].argmin(1)}
        logits = model(x)
        loss = sum(F.cross_entropy(logits[task], labels[task]) for task in TASKS) / len(TASKS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
