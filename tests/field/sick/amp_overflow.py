"""Each rank looks for overflow in its own shard, and skips its update and lowers its scale alone.
expects: fp16_nan
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn as nn


class LossScaler:
    def __init__(self, init=2.0 ** 16, factor=2.0):
        self.scale, self.factor = init, factor

    def update(self, overflow):
        if overflow:
            self.scale = max(1.0, self.scale / self.factor)


class FP16ShardedOptimizer:
    def __init__(self, module, lr):
        self.params = list(module.parameters())
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        flat = nn.utils.parameters_to_vector(self.params).detach()
        self.n = flat.numel()
        self.size = -(-self.n // self.world)
        self.flat = torch.cat([flat, flat.new_zeros(self.size * self.world - self.n)])
        self.master = nn.Parameter(self.flat.chunk(self.world)[self.rank].clone())
        self.inner = torch.optim.Adam([self.master], lr=lr)
        self.scaler = LossScaler()
        self.skipped = 0

    def backward(self, loss):
        (loss * self.scaler.scale).backward()

    def step(self):
        g = torch.cat([p.grad.half().flatten() for p in self.params])
        g = torch.cat([g, g.new_zeros(len(self.flat) - self.n)]).float() / self.world
        dist.all_reduce(g)
        mine = g.chunk(self.world)[self.rank]
        overflow = not torch.isfinite(mine).all()
        if not overflow:
            self.master.grad = mine / self.scaler.scale
            self.inner.step()
        else:
            self.skipped += 1
        self.scaler.update(overflow)
        dist.all_gather_into_tensor(self.flat, self.master.detach())
        nn.utils.vector_to_parameters(self.flat[:self.n], self.params)
        for p in self.params:
            p.grad = None


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 16), nn.Tanh(),
                        nn.Linear(16, 1))
    opt = FP16ShardedOptimizer(net, lr=5e-3)
    g = torch.Generator().manual_seed(20 + rank)
    for step in range(24):
        x = torch.randn(32, 16, generator=g) * 0.3
        y = 3.0 + x[:, :1] * 2
        loss = nn.functional.mse_loss(net(x), y)
        opt.backward(loss)
        opt.step()
        if step % 4 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f} "
                  f"scale {opt.scaler.scale:.0f} skipped {opt.skipped}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
