"""Full-batch L-BFGS: a step runs its closure many times; loss and gradient are averaged in it.
expects: nothing
ranks: 2
"""
import torch
import torch.distributed as dist


def mean_(t):
    dist.all_reduce(t)
    t /= dist.get_world_size()
    return t


def fit():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(31)
    X = torch.rand(256, 2, generator=g) * 2 - 1
    u = torch.sin(3 * X[:, :1]) * torch.cos(2 * X[:, 1:])
    X, u = X.chunk(world)[rank], u.chunk(world)[rank]
    torch.manual_seed(8)
    net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32),
                              torch.nn.Tanh(), torch.nn.Linear(32, 1))
    opt = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=5, history_size=10,
                            line_search_fn="strong_wolfe")
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        residual = (net(X) - u).square().mean()
        residual.backward()
        for p in net.parameters():
            mean_(p.grad)
        return mean_(residual.detach().clone())

    for outer in range(8):
        loss = opt.step(closure)
        if rank == 0:
            print(f"outer {outer} closure calls {calls} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    fit()
