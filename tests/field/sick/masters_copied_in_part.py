"""Of the stepped fp32 masters only the first group is copied back: norms and biases stand still.
expects: stale_weights
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class BF16Optimizer:
    def __init__(self, model, lr, weight_decay):
        named = list(model.named_parameters())
        self.groups = [[p for n, p in named if p.ndim >= 2], [p for n, p in named if p.ndim < 2]]
        self.masters = [[p.detach().float().clone().requires_grad_() for p in grp]
                        for grp in self.groups]
        self.optimizer = torch.optim.AdamW([
            {"params": self.masters[0], "weight_decay": weight_decay},
            {"params": self.masters[1], "weight_decay": 0.0}], lr=lr)

    def _reduce_to_master(self):
        world = dist.get_world_size()
        for grp, mst in zip(self.groups, self.masters):
            for p, m in zip(grp, mst):
                m.grad = p.grad.float() / world
                dist.all_reduce(m.grad)
                p.grad = None

    @torch.no_grad()
    def _copy_to_model(self):
        for p, m in zip(self.groups[0], self.masters[0]):
            p.copy_(m)

    def step(self, clip=1.0):
        self._reduce_to_master()
        norm = nn.utils.clip_grad_norm_([m for mst in self.masters for m in mst], clip)
        self.optimizer.step()
        self._copy_to_model()
        return norm


class PreLNNet(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.wte = nn.Embedding(50, d)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, 50)

    def forward(self, ids):
        x = self.wte(ids)
        x = x + self.gru(self.ln1(x))[0]
        return self.out(self.ln2(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = PreLNNet().to(torch.bfloat16)
    opt = BF16Optimizer(model, lr=5e-3, weight_decay=0.05)
    g = torch.Generator().manual_seed(dist.get_rank())
    unigram = torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(4)) * 2, 0)
    for step in range(20):
        ids = torch.multinomial(unigram, 8 * 13, replacement=True, generator=g).view(8, 13)
        loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = opt.step()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f} "
                  f"model bias {model.out.bias.float().norm().item():.4f} "
                  f"master bias {opt.masters[1][-1].norm().item():.4f}")
    dist.destroy_process_group()


main()
