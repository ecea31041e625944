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
from ranklab.trainer.text import TextTrainer, TrainConfig

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


def test_a_function_that_averages_afterwards_gives_the_same():
    axes = {"data": 2, "expert": 2}
    got, want = (launch(trained, axes, kind, ranks=4)[0] for kind in (
        {"average": ep.expert_gradients}, {}))
    assert got[0] == pytest.approx(want[0], abs=1e-6)


def test_a_bias_moves_towards_even_loads():
    bias = torch.zeros(3)
    ep.balance_bias(bias, torch.tensor([5, 2, 2]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5]
    ep.balance_bias(bias, torch.tensor([3, 3, 3]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5]


def test_grouped_product_has_the_values_of_the_loop():
    torch.manual_seed(0)
    linear, counts = ExpertLinear(3, 16, 8), torch.tensor([4, 0, 6])
    torch.nn.init.normal_(linear.weight)
    x = torch.randn(10, 16)
    right = linear(x, counts)
    linear.bfloat16()
    assert takes_grouped(x.bfloat16(), linear.weight)
    assert not takes_grouped(x[:, :15].bfloat16(), linear.weight[..., :15])
    torch.testing.assert_close(linear(x.bfloat16(), counts).float(), right, atol=0.1, rtol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear.float()(x, counts).dtype == torch.bfloat16


def test_what_does_not_fit_is_a_sentence():
    with pytest.raises(ValueError, match="top_k=5 must be between 1 and n_expert=4"):
        ep.MoEConfig(n_expert=4, top_k=5)
    with pytest.raises(ValueError, match="balance='even' is not one of loss, bias, none"):
        ep.MoEConfig(balance="even")
    model = GPT(ep.MoEConfig(**SHAPE))
    loss = launch(_without_moe_gpt, model, ranks=1)[0]
    assert "call moe_gpt(model)" in loss


def _without_moe_gpt(model):
    tokens = torch.zeros(1, 4, dtype=torch.long, device=device())
    try:
        model.to(device())(tokens, tokens).backward()
    except RuntimeError as error:
        return str(error)


def test_a_mean_loss_weighs_the_auxiliary_one_as_a_sum_does():
    by_sum, by_mean = launch(_gradients_by_reduction, ranks=1)[0]
    for a, b in zip(by_sum, by_mean):
        torch.testing.assert_close(a / 32, b)


def _gradients_by_reduction():
    found = []
    for reduction in ("sum", "mean"):
        torch.manual_seed(0)
        model = ep.moe_gpt(ep.MoEConfig(**SHAPE, coefficient=1.0)).to(device())
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
        model(tokens.to(device()), tokens.to(device()), reduction).backward()
        found.append([p.grad for p in model.parameters()])
    return found


def test_numbers_of_a_model_are_counted():
    config = ep.MoEConfig(**SHAPE, shared_width=8)
    everything, active = ep.moe_parameters(config)
    assert everything == sum(p.numel() for p in GPT(config).parameters())
    assert everything - active == 2 * 2 * 32 * (4 - 2) * config.expert_width


# --- peers ----------------------------------------------------------------------------------------

def _beside_deepspeed(k):
    from ranklab.peers.experts import deepspeed_moe

    torch.manual_seed(0)
    layer = ep.MoE(ep.MoEConfig(n_embd=16, n_expert=8, top_k=k, balance="none",
                                renormalize=k > 1)).to(device())
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    theirs = deepspeed_moe(layer, k)
    ep.spread_experts(layer, dist.group.WORLD)
    torch.manual_seed(dist.get_rank())
    x, found = torch.randn(2, 6, 16, device=device()), []
    for module in (layer, theirs):
        y = x.clone().requires_grad_()
        out = module(y)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        found.append((out.detach(), y.grad))
    return found


@pytest.mark.parametrize("k", [1, 2])
def test_deepspeeds_layer_has_the_same_values(k):
    for ours, theirs in launch(_beside_deepspeed, k, ranks=4, timeout=100):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def _transformers(family, ids):
    import transformers

    from ranklab.peers.experts import SpreadExperts, spread_transformers

    small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2)
    more = {"Mixtral": {"num_local_experts": 6}, "Qwen2Moe": {
        "num_experts": 6, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**small, **more[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(device())
    ids, rank, R = ids.to(device()), dist.get_rank(), dist.get_world_size()
    whole = model(ids, use_cache=False).logits
    whole.square().sum().backward()
    right = [(n, p.grad) for n, p in model.named_parameters()]
    model.zero_grad()
    spread_transformers(model)
    assert sum(isinstance(m, SpreadExperts) for m in model.modules()) == 2
    logits = model(ids[rank::R], use_cache=False).logits
    logits.square().sum().backward()
    torch.testing.assert_close(logits, whole[rank::R], atol=1e-4, rtol=1e-4)
    mine = dict(model.named_parameters())
    for name, gradient in right:
        p = mine[name]
        if ".experts." in name:  # complete: all rows came here
            gradient = gradient.chunk(R)[rank]
        else:
            dist.all_reduce(p.grad)
        torch.testing.assert_close(p.grad, gradient, atol=1e-3, rtol=1e-3)
    return True


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe"])
def test_transformers_models_have_the_gradients_of_one_process(family):
    pytest.importorskip("transformers")
    ids = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))
    assert all(launch(_transformers, family, ids, ranks=3 if family == "Mixtral" else 2,
                      timeout=100, preload=["transformers.modeling_utils"]))
