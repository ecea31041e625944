"""Sparse embedding gradients under DDP: other rows on each rank; the dense part has an Adagrad.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class DLRMish(nn.Module):
    def __init__(self, n_items=400, d=16):
        super().__init__()
        self.items = nn.EmbeddingBag(n_items, d, mode="sum", sparse=True)
        self.bottom = nn.Sequential(nn.Linear(8, d), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(2 * d + 1, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, bag):
        e, b = self.items(bag), self.bottom(dense)
        return self.top(torch.cat([e, b, (e * b).sum(1, keepdim=True)], 1)).squeeze(1)


def click_batches(rank, n):
    g = torch.Generator().manual_seed(rank * 7919 + 1)
    taste = torch.randn(400, generator=torch.Generator().manual_seed(0))
    for _ in range(n):
        bag = torch.randint(0, 400, (32, 3), generator=g)
        dense = torch.randn(32, 8, generator=g)
        p = torch.sigmoid(taste[bag].sum(1) + dense[:, 0])
        yield dense, bag, torch.bernoulli(p, generator=g)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(53)
    model = DDP(DLRMish())
    sparse_opt = torch.optim.SparseAdam(list(model.module.items.parameters()), lr=1e-2)
    dense_opt = torch.optim.Adagrad([p for n, p in model.module.named_parameters()
                                     if not n.startswith("items")], lr=5e-2)
    for step, (dense, bag, click) in enumerate(click_batches(rank, 28)):
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, bag), click)
        for o in (sparse_opt, dense_opt):
            o.zero_grad()
        loss.backward()
        for o in (sparse_opt, dense_opt):
            o.step()
        if rank == 0 and step % 4 == 0:
            g = model.module.items.weight.grad.coalesce()
            print(f"step {step} logloss {loss.item():.4f} rows touched {g.indices().shape[1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
