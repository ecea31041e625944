"""Lab 10: training equal to one process, on every mesh; peers; edges. Traffic is in the checks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab import context_parallel as cp, device, launch
from ranklab.baseline import checkpointed
from ranklab.basics.targets import IGNORE
from ranklab.context_parallel.seconds import layer_seconds
from ranklab.context_parallel.shard import begins_in, begins_of, contiguous_shard
from ranklab.data.text import Text
from ranklab.mesh import build_mesh
from ranklab.meter import SavedActivations, Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.peers.deepspeed_ulysses import (
    deepspeed_tiled_loss, deepspeed_tiled_mlp, deepspeed_ulysses,
)
from ranklab.peers.llama import context_llama
from ranklab.trainer.text import TextTrainer, TrainConfig

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

SHAPE = GPTConfig(vocab_size=64, n_ctx=48, n_embd=32)
END = 7  # one token in 64: documents of all lengths
FEW = TrainConfig(steps=3, batch=4, micro_batch=2, eval_batch=4, log_every=1, warmup=1)


def text():
    tokens = np.random.default_rng(0).integers(0, 64, size=4000).astype(np.uint8)
    return Text("random", tokens, tokens[:1000], 64)


def padded(trainer):
    """The trainer, for which a quarter of the targets do not count: ranks have unequal numbers."""
    plain = trainer.next_batch

    def next_batch():
        inputs, targets = plain()
        return inputs, targets.masked_fill(targets < 16, IGNORE)

    trainer.next_batch = next_batch
    return trainer


def trained(axes, end=None, shard=cp.zigzag_shard):
    """(losses, held-out loss, weights) after a few steps on a mesh with data, ring and ulysses."""
    torch.manual_seed(0)
    mesh = build_mesh({"data": 1, "ring": 1, "ulysses": 1} | axes)
    tokens = cp.TokenShard(mesh.group("ring"), mesh.group("ulysses"), shard, end)
    trainer = TextTrainer(GPT(SHAPE), text(), FEW, device(), progress=False,
                          parallel=cp.ContextParallel(tokens=tokens))
    history = padded(trainer).fit()
    return history.loss, history.held_out[3], [p.detach() for p in trainer.model.parameters()]


def of_one_process(end):
    """The same, by plain attention under a mask."""
    torch.manual_seed(0)
    model = GPT(SHAPE).to(device())
    trainer = TextTrainer(model, text(), FEW, device(), progress=False)
    if end is not None:
        causal = torch.ones(48, 48, dtype=torch.bool, device=device()).tril()
        seen = {}

        def look(module, args):
            begins = begins_in(args[0], end)
            keys = torch.arange(48, device=device())
            seen["mask"] = (causal & (keys >= begins[..., None]))[:, None]

        model.register_forward_pre_hook(look)
        for block in model.blocks.values():
            block.attention.attend = lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen["mask"])
    history = padded(trainer).fit()
    return history.loss, history.held_out[3], [p.detach() for p in model.parameters()]


MESHES = [{"ring": 3}, {"ring": 8}, {"ulysses": 4}, {"ring": 2, "ulysses": 2},
          {"data": 2, "ring": 2}, {"data": 2, "ulysses": 2}]


@pytest.mark.parametrize("end", [
    pytest.param(None, id="one document", marks=pytest.mark.sweep),
    pytest.param(END, id="packed documents")])
def test_training_equals_one_process(end):
    (loss, held_out, weights), = launch(of_one_process, end, ranks=1)
    for axes in MESHES:
        ranks = torch.tensor(list(axes.values())).prod().item()
        for got in launch(trained, axes, end, ranks=ranks):
            assert got[0] == pytest.approx(loss, abs=2e-6), axes
            assert got[1] == pytest.approx(held_out, abs=2e-6)
            for mine, right in zip(got[2], weights):  # Adam makes much of tiny gradients
                torch.testing.assert_close(mine, right, atol=2e-3, rtol=0)


def test_a_contiguous_shard_gives_the_same():
    got, want = (launch(trained, {"ring": 4}, None, shard, ranks=4)[0]
                 for shard in (contiguous_shard, cp.zigzag_shard))
    assert got[0] == pytest.approx(want[0], abs=2e-6)


def _in_bfloat16():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 32, 8, dtype=torch.bfloat16, device=device())
               for heads in (4, 2, 2))
    mine = cp.zigzag_shard(32, 2)[dist.get_rank()]
    right = F.scaled_dot_product_attention(*(x.float() for x in (q, k, v)), is_causal=True,
                                           enable_gqa=True)[:, :, mine]
    out = cp.context_attention(*(x[:, :, mine] for x in (q, k, v)),
                               cp.causal_blocks(cp.zigzag_shard(32, 2), dist.get_rank()))
    return out.dtype, (out.float() - right).abs().max().item()


def test_bfloat16_is_summed_in_float32():
    for dtype, apart in launch(_in_bfloat16, ranks=2):
        assert dtype == torch.bfloat16 and apart < 0.01  # one rounding of the result


def _kept():
    shape = GPTConfig(n_ctx=64, n_layer=1)
    tokens = cp.TokenShard(dist.group.WORLD)
    model = tokens.apply(GPT(shape).to(device()))
    x = torch.zeros(1, 64 // tokens.ranks, dtype=torch.long, device=device())
    attention = model.blocks["0"].attention
    with SavedActivations(model) as saved:
        model(x)
    q = torch.zeros(1, 4, 64 // tokens.ranks, 16, device=device(), requires_grad=True)
    with SavedActivations(attention) as of_attention:
        attention.attend(q * 1, q * 1, q * 1).sum()
    return saved.bytes, of_attention.bytes


def test_memory_is_divided_by_the_ranks_and_is_the_formulas():
    whole, parts = (launch(_kept, ranks=ranks)[0] for ranks in (1, 4))
    assert parts[0] == pytest.approx(whole[0] / 4, rel=0.01)
    for ranks, (_, nbytes) in ((1, whole), (4, parts)):
        assert nbytes == cp.attention_memory(64, 4, 4, 16, ranks, element=4)


def test_what_does_not_fit_is_a_sentence():
    with pytest.raises(ValueError, match="8 parts must divide the 44 tokens of a sequence: pad it"):
        cp.zigzag_shard(44, 4)
    with pytest.raises(ValueError, match="n_kv_head=3 must divide n_head=4"):
        cp.block_attention(*(torch.ones(1, n, 2, 2) for n in (4, 3, 3)),
                           cp.causal_blocks(torch.arange(2)[None], 0)[0])
    with pytest.raises(ValueError, match="dropout=0.1 must be 0"):
        cp.TokenShard.apply(None, GPT(GPTConfig(dropout=0.1)))


def test_documents_begin_after_their_end():
    tokens = torch.tensor([[3, END, 4, 4, END, END, 2]])
    assert begins_in(tokens, END).tolist() == [[0, 0, 2, 2, 2, 5, 6]]
    assert begins_of([2, 3, 1, 1]).tolist() == [0, 0, 2, 2, 2, 5, 6]


def test_the_model_of_time_has_the_shape_that_the_lab_says():
    seconds = layer_seconds(131_072, 32, 8, 128, ranks=[1, 2, 8, 16, 64])
    assert len(seconds["Ulysses"]) == 3, "eight key heads"
    assert seconds["ring"][0] == pytest.approx(seconds["computing"][0])
    hidden = [ring / computing for ring, computing in zip(seconds["ring"], seconds["computing"])]
    assert hidden[2] == pytest.approx(1, abs=0.01) and hidden[-1] > 1.5, hidden


# --- peers ----------------------------------------------------------------------------------------

def _by_both(H, KV):
    torch.manual_seed(dist.get_rank())
    qkv, found = [torch.randn(2, n, 4, 8, device=device()) for n in (H, KV, KV)], []
    for ulysses in (cp.ulysses_attention, deepspeed_ulysses):
        q, k, v = (x.clone().requires_grad_() for x in qkv)
        with Traffic() as traffic:
            out = ulysses(q, k, v, lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True))
            out.square().sum().backward()
        found.append(([out.detach(), q.grad, k.grad, v.grad], traffic.sent_bytes, traffic.calls))
    return found


@pytest.mark.parametrize("H, KV, ranks", [(4, 4, 4), (8, 2, 2)])
def test_deepspeeds_ulysses_has_the_same_values_and_bytes(H, KV, ranks):
    for ours, theirs in launch(_by_both, H, KV, ranks=ranks, timeout=100):
        for a, b in zip(ours[0], theirs[0]):
            torch.testing.assert_close(a, b)
        assert ours[1:] == theirs[1:]


def _llama(ids):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2)).to(device())
    ids = ids.to(device())
    gradients = []
    for how in ("whole", "shared"):
        model.zero_grad()
        shards = cp.TokenShard(dist.group.WORLD)
        forward = context_llama(model, shards) if how == "shared" else None
        logits = forward(ids) if forward else model(ids, use_cache=False).logits
        mine = ids[:, shards.positions] if forward else ids
        loss = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum") / ids.numel()
        loss.backward()
        for p in model.parameters() if forward else ():
            dist.all_reduce(p.grad)
        gradients.append([p.grad.clone() for p in model.parameters()])
    return gradients


def test_transformers_llama_has_the_gradients_of_one_process():
    pytest.importorskip("transformers")
    ids = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    for whole, shared in launch(_llama, ids, ranks=3, timeout=100,
                                preload=["transformers.modeling_utils"]):
        for a, b in zip(whole, shared):
            torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-4)


def loss_and_gradients(way, reduction=(), factor=1, dtype=torch.float32):
    """(loss, [gradients of hidden and weight]) of 2 x 21 tokens in tiles of 8, the last of 2."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(shape, device=device(), dtype=dtype, requires_grad=True)
                      for shape in ((2, 21, 16), (50, 16)))
    targets = torch.randint(50, (2, 21), device=device())
    targets[0, 3:9] = IGNORE
    loss = way(hidden, weight, targets, 8, *reduction)
    (loss * factor).backward()
    return loss.item(), [hidden.grad, weight.grad]


def whole_loss(hidden, weight, targets, tile, reduction="mean"):
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1).float(), targets.flatten(),
                           ignore_index=IGNORE, reduction=reduction)


@pytest.mark.parametrize("reduction", [(), ("sum",)])
@pytest.mark.parametrize("factor", [1, 1 / 4])
def test_a_tiled_loss_is_the_whole_one_and_so_are_its_gradients(reduction, factor):
    loss, gradients = loss_and_gradients(cp.tiled_logits_loss, reduction, factor)
    whole, right = loss_and_gradients(whole_loss, reduction, factor)
    assert loss == pytest.approx(whole, rel=1e-6)
    for one, other in zip(gradients, right):
        torch.testing.assert_close(one, other)


def test_a_tiled_loss_in_bfloat16_has_the_types_of_the_whole_one():
    loss, gradients = loss_and_gradients(cp.tiled_logits_loss, dtype=torch.bfloat16)
    whole, right = loss_and_gradients(whole_loss, dtype=torch.bfloat16)
    assert loss == pytest.approx(whole, rel=1e-3)
    for one, other in zip(gradients, right):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-2)


def test_bad_arguments_of_a_tiled_loss_are_a_sentence():
    x, y = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long)
    for keywords, says in (({"tile": 0}, "tile=0 must be at least 1 token"),
                           ({"tile": 1, "reduction": "none"}, "'mean' or 'sum'")):
        with pytest.raises(ValueError, match=says):
            cp.tiled_logits_loss(x, x[0], y, **keywords)


def test_deepspeeds_tiled_loss_has_the_same_values_but_its_weight_ignores_what_follows():
    for factor in (1, 1 / 4):
        loss, (of_hidden, of_weight) = loss_and_gradients(deepspeed_tiled_loss, factor=factor)
        own_loss, (of_own_hidden, of_own_weight) = loss_and_gradients(cp.tiled_logits_loss,
                                                                      factor=factor)
        assert loss == pytest.approx(own_loss, rel=1e-6)
        torch.testing.assert_close(of_hidden, of_own_hidden)
        torch.testing.assert_close(of_weight * factor, of_own_weight)


class SwiGLU(torch.nn.Module):
    def __init__(self, C=16, width=64):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(C, width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(width, C, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_the_formula_of_an_mlp_counts_what_is_saved():
    mlp, x = SwiGLU(), torch.randn(1, 24, 16, requires_grad=True)
    with SavedActivations(mlp) as saved:
        mlp(x)
    assert saved.bytes == cp.mlp_memory(24, 64, element=4) + x.nbytes
    assert cp.mlp_memory(24, 64, tile=5) == cp.mlp_memory(5, 64)
    assert cp.logits_memory(24, 10, tile=5) == 2 * 5 * 10 * 4
    assert cp.logits_memory(24, 10, tile=50) == cp.logits_memory(24, 10)


def test_checkpointed_tiles_of_an_mlp_are_deepspeeds_tiles():
    def in_tiles(mlp, x, tile):
        return torch.cat([checkpointed(mlp, part) for part in x.split(tile, dim=1)], dim=1)

    found = []
    for way in (in_tiles, deepspeed_tiled_mlp):
        torch.manual_seed(0)
        mlp, x = SwiGLU().to(device()), torch.randn(1, 24, 16, device=device(), requires_grad=True)
        way(mlp, x, 8).square().sum().backward()
        found.append([x.grad, *(p.grad for p in mlp.parameters())])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)
