"""Sequence parallelism: the norms' partial gradients are not summed over the tensor group.
expects: replicas_drift
ranks: 2
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def _gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 0)


def _split(x):
    return x.chunk(dist.get_world_size(), 0)[dist.get_rank()].contiguous()


def _reduce_scatter(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return _split(x)


def _region(name, fwd, bwd):
    return type(name, (torch.autograd.Function,), {
        "forward": staticmethod(lambda ctx, x: fwd(x)),
        "backward": staticmethod(lambda ctx, g: bwd(g))}).apply


scatter_to_sp = _region("ScatterToSP", _split, _gather)
gather_from_sp = _region("GatherFromSP", _gather, _reduce_scatter)
gather_output = _region("GatherOutput", _gather, _split)
reduce_scatter_to_sp = _region("ReduceScatterToSP", _reduce_scatter, _gather)


class ParallelLayer(nn.Module):
    """Sequence-first activations [s/tp, b, h] between the blocks."""

    def __init__(self, h, heads, tp, rank):
        super().__init__()
        self.heads = heads // tp
        self.input_layernorm = nn.LayerNorm(h)
        self.post_layernorm = nn.LayerNorm(h)
        g = torch.Generator().manual_seed(1000 + rank)
        shard = lambda o, i: nn.Parameter(torch.randn(o, i, generator=g) * 0.1)
        self.qkv, self.dense = shard(3 * h // tp, h), shard(h, h // tp)
        self.fc1, self.fc2 = shard(4 * h // tp, h), shard(h, 4 * h // tp)

    def forward(self, x):
        y = gather_from_sp(self.input_layernorm(x))
        s, b, _ = y.shape
        q, k, v = [t.view(s, b, self.heads, -1).permute(1, 2, 0, 3)
                   for t in F.linear(y, self.qkv).chunk(3, -1)]
        ctx = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(
            2, 0, 1, 3).reshape(s, b, -1)
        x = x + reduce_scatter_to_sp(F.linear(ctx, self.dense))
        y = gather_from_sp(self.post_layernorm(x))
        return x + reduce_scatter_to_sp(F.linear(F.gelu(F.linear(y, self.fc1)), self.fc2))


class Model(nn.Module):
    def __init__(self, vocab=32, h=32, seq=16, layers=2):
        super().__init__()
        tp, rank = dist.get_world_size(), dist.get_rank()
        self.word, self.pos = nn.Embedding(vocab, h), nn.Embedding(seq, h)
        self.layers = nn.ModuleList(ParallelLayer(h, 4, tp, rank) for _ in range(layers))
        self.final = nn.LayerNorm(h)

    def forward(self, ids):
        x = scatter_to_sp(self.word(ids) + self.pos.weight[:, None])
        for l in self.layers:
            x = l(x)
        return F.linear(self.final(gather_output(x)), self.word.weight)


def pretrain():
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    g = torch.Generator().manual_seed(7)  # all tensor ranks read the same batch
    for it in range(20):
        tok = torch.randint(0, 32, (17, 8), generator=g)
        tok[1::2] = (tok[::2][:8] * 5 + 3) % 32
        loss = F.cross_entropy(model(tok[:-1]).flatten(0, 1), tok[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 5 == 0 and dist.get_rank() == 0:
            print(f" iteration {it:4d} | lm loss: {loss.item():.6E}")
    ln = model.layers[0].input_layernorm
    print("tp rank", dist.get_rank(), "ln", ln.weight.norm().item(), ln.bias.norm().item(),
          "word", model.word.weight.norm().item())


pretrain()
dist.destroy_process_group()
