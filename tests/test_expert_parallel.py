"""Lab 11: training equal to one process, on every mesh; peers; edges. Traffic is in the checks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab import device, launch
from ranklab import expert_parallel as ep
from ranklab.data.text import Text
from ranklab.expert_parallel.layer import ExpertLinear, takes_grouped
from ranklab.mesh import build_mesh
from ranklab.models.gpt import GPT
from ranklab.text_trainer import TextTrainer, TrainConfig

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

SHAPE = dict(vocab_size=64, n_ctx=16, n_embd=32, n_layer=2, n_expert=4)
FEW = TrainConfig(steps=3, batch=8, micro_batch=2, eval_batch=8, log_every=1, warmup=1)
KINDS = {
    "dropless, loss": {},
    "dropping, loss and z": {"factor": 0.75, "z": 0.01, "coefficient": 0.1},
    "bias, shared expert, top 1 of all": {"balance": "bias", "rate": 0.05, "shared_width": 8,
                                          "top_k": 1, "renormalize": False, "factor": 1.0},
}


def text():
    tokens = np.random.default_rng(0).integers(0, 64, size=4000).astype(np.uint8)
    return Text("random", tokens, tokens[:1000], 64)


def trained(axes, kind):
    """(losses, held-out loss, {name: weight of the whole}, biases) of ExpertParallel on a mesh."""
    torch.manual_seed(0)
    mesh = build_mesh({"data": 1, "expert": 1} | axes, joined=[("data", "expert")])
    parallel = ep.ExpertParallel(mesh.group(("data", "expert")), mesh.group("expert"),
                                 mesh.group("data"), average=kind.get("average"))
    model = ep.moe_gpt(ep.MoEConfig(**SHAPE, **{k: v for k, v in kind.items() if k != "average"}))
    trainer = TextTrainer(model, text(), FEW, device(), parallel=parallel, progress=False)
    history = trainer.fit()
    pieces = [(p.name, p.shape, p.offset, p.tensor.cpu())
              for p in parallel.state(model, trainer.optimizer) if p.kind == "weight"]
    return history.loss, history.held_out[3], pieces


class Dense(torch.nn.Module):
    """The same layer in one process: every expert sees every token, and a mask says what counts."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.loads = layer, 0

    def forward(self, x):
        layer, config = self.layer, self.layer.config
        B, T, C = x.shape
        logits = F.linear(x, layer.router.weight)
        P = logits.softmax(-1)
        scores = P if layer.bias is None else P + layer.bias
        chosen = scores.topk(config.top_k, dim=-1).indices
        weights = P.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if config.renormalize else weights
        mask = torch.zeros(B, T, config.n_expert, device=x.device)
        room = -(-T * config.top_k * (config.factor or 1e9) // config.n_expert)
        for b in range(B):
            taken = [0] * config.n_expert
            for j in range(config.top_k):
                for t in range(T):
                    e = int(chosen[b, t, j])
                    taken[e] += 1
                    if taken[e] <= room:
                        mask[b, t, e] = 1
        gates = torch.zeros_like(mask).scatter(-1, chosen, weights) * mask
        every = torch.stack([F.linear(F.gelu(F.linear(x, up)), down) for up, down in
                             zip(layer.up.weight, layer.down.weight)], -2)  # (B, T, E, C)
        out = (gates[..., None] * every).sum(-2)
        if layer.shared is not None:
            out = out + layer.shared(x)
        self.loads = self.loads + F.one_hot(chosen, config.n_expert).sum((0, 1, 2))
        part = F.one_hot(chosen, config.n_expert).float().mean((1, 2))
        self.aux = config.z * logits.logsumexp(-1).square().sum()
        if config.balance == "loss":
            self.aux = self.aux + config.coefficient * T * (
                config.n_expert * part * P.mean(1)).sum()
        return out


def of_one_process(kind):
    """The same by a plain loss with the auxiliary ones added, and plain AdamW."""
    torch.manual_seed(0)
    config = ep.MoEConfig(**SHAPE, **kind)
    model = GPT(config).to(device())
    names = {name: p for name, p in model.named_parameters()}
    denses = []
    for block in model.blocks.values():
        block.mlp = Dense(block.mlp)
        denses.append(block.mlp)
    trainer = TextTrainer(model, text(), FEW, device(), progress=False)
    plain = trainer.loss_sum

    def with_aux(x, y):
        loss = plain(x, y)
        aux = sum(dense.aux for dense in denses)
        return loss + aux - aux.detach()  # its gradient, and not its value

    trainer.loss_sum = with_aux

    def move(*_):
        for dense in denses if config.balance == "bias" else ():
            bias, loads = dense.layer.bias, dense.loads.float()
            bias += config.rate * (loads.mean() - loads).sign()
            dense.loads = 0

    trainer.optimizer.register_step_post_hook(move)
    history = trainer.fit()
    biases = {f"blocks.{i}.mlp.bias": d.layer.bias for i, d in enumerate(denses)}
    return history.loss, history.held_out[3], {n: t.detach().cpu() for n, t in (
        names | {k: v for k, v in biases.items() if v is not None}).items()}


MESHES = [{}, {"expert": 2}, {"expert": 4}, {"data": 2, "expert": 2}, {"data": 2}]


@pytest.mark.parametrize("name", KINDS)
def test_training_equals_one_process(name):
    (loss, held_out, weights), = launch(of_one_process, KINDS[name], ranks=1)
    for axes in MESHES:
        ranks = axes.get("data", 1) * axes.get("expert", 1)
        seen = set()
        for got in launch(trained, axes, KINDS[name], ranks=ranks):
            assert got[0] == pytest.approx(loss, abs=2e-6), axes
            assert got[1] == pytest.approx(held_out, abs=2e-6), axes
            for part, shape, offset, tensor in got[2]:
                whole = weights[part]
                assert tuple(whole.shape) == shape
                for dim, (start, size) in enumerate(zip(offset, tensor.shape)):
                    whole = whole.narrow(dim, start, size)
                torch.testing.assert_close(tensor, whole, atol=2e-3, rtol=0)
                seen.add(part)
        assert seen >= weights.keys() - {"head.weight"}
