"""Four heads and four losses, which are added, on four ranks: the sum is of tasks, not of ranks.
expects: nothing
ranks: 4
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES = {"colour": 6, "shape": 4, "size": 3, "place": 5}


class Attributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 48), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(48, n) for name, n in CLASSES.items()})

    def forward(self, x):
        hidden = self.trunk(x)
        return {name: head(hidden) for name, head in self.heads.items()}


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(Attributes())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(12):
        x = torch.randn(12, 24, generator=generator)
        losses = {name: F.cross_entropy(logits, x[:, :CLASSES[name]].argmax(1))
                  for name, logits in model(x).items()}
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
