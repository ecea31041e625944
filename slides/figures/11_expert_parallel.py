"""The figures of the deck 11_expert_parallel.md."""
import torch

from ranklab import launch
from ranklab.expert_parallel import (
    balance_bias, even_crossings, moe_traffic, mxfp8_all_to_all, place_experts, top_k_route,
)
from ranklab.plots import expert_parallel as plots


def _random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _picture():
    """Sixteen tokens of four ranks, two experts of eight for each. Expert 2 is liked."""
    return top_k_route(_random(16, 8, seed=5) + 1.5 * (torch.arange(8) == 2), 2)[0]


def layer():
    return plots.layer(_picture().tolist(), 4, 8, title=""), 8.2, 4.0


def matrix():
    counts = torch.stack([part.flatten().bincount(minlength=8) for part in _picture().chunk(4)])
    return plots.matrix(moe_traffic(counts, 2 * 4096), title=""), 4.6, 3.9


def loads():
    """The same 2,048 tokens again and again: only the bias changes who goes where."""
    E, seen = 16, {}
    logits = _random(2048, E, seed=0) + 0.7 * _random(E, seed=1)
    for name, rate in (("no bias", 0), ("rate 0.001", 0.001), ("rate 0.01", 0.01)):
        bias, steps = torch.zeros(E), []
        for step in range(301):
            counts = top_k_route(logits, 2, bias=bias)[0].flatten().bincount(minlength=E)
            if step % 15 == 0:
                steps.append((step, [(counts / counts.float().mean()).tolist()]))
            balance_bias(bias, counts, rate)
        seen[name] = steps
    return plots.loads(seen, title=""), 7.4, 2.9


def placed():
    """A trace of 4,096 tokens, 4 of 32 experts for each; 8 ranks in two nodes, 5 slots on each."""
    E, R = 32, 8
    chosen = (_random(4096, E, seed=0) + _random(E, seed=1)).topk(4).indices
    counts = chosen.flatten().bincount(minlength=E)

    def loads_of(plan):
        held = torch.stack([torch.tensor(experts).bincount(minlength=E) for experts in plan])
        per_rank = (held * (counts / held.sum(0))).sum(1)  # copies share their expert's tokens
        return (per_rank / per_rank.mean()).tolist()

    in_order = torch.arange(E).view(R, -1).tolist()
    return plots.placed(loads_of(in_order), loads_of(place_experts(chosen, E, R, 5, 4)),
                        title=""), 7.4, 2.8


def crossings():
    """8 of 256 experts, drawn evenly, on 2 to 64 nodes."""
    nodes = (2, 4, 8, 16, 32, 64)
    once, each = zip(*(even_crossings(8, 256, M) for M in nodes))
    return plots.crossings(nodes, {"once for each expert": each, "once to each node": once,
                                   "at most 4 nodes": [min(4, mean) for mean in once]},
                           title=""), 7.4, 2.9


def rounding():
    """Normal numbers, every 512th of them an outlier."""
    sizes = [10**power for power in range(7)]
    return plots.rounding(sizes, launch(_errors, sizes, ranks=1)[0], title=""), 7.4, 2.9


def _errors(sizes):
    errors = []
    for size in sizes:
        x = _random(64, 4096, seed=0)
        x[:, ::512] *= size
        row = x.abs().amax(1, keepdim=True)
        rounded = {"MXFP8": mxfp8_all_to_all(x, [64], [64]),
                   "float8, a scale a row":
                   (x * 448 / row).to(torch.float8_e4m3fn).float() * row / 448,
                   "int8, a scale a row": (x * 127 / row).round() * row / 127,
                   "bfloat16": x.bfloat16().float()}
        others = torch.arange(4096) % 512 > 0
        errors.append({name: ((y - x)[:, others].norm() / x[:, others].norm()).item()
                       for name, y in rounded.items()})
    return errors
