"""Lab 08's tensor parallelism: equal to one process, and exactly what is sent and kept."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranklab import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, IGNORE, GPTConfig
from ranklab.projects.fsdp.llama import PRELOAD
from ranklab.tensor_parallel import (
    ColumnParallelLinear, TPConfig, dropout_seeds, parallel_gpt, parallel_llama, tensor_parallel,
    vocab_parallel_cross_entropy,
)
from ranklab.tensor_parallel.plan import row
from ranklab.tensor_parallel.regions import identity, gather_tokens, scatter_tokens
from ranklab.tensor_parallel.split import split_of, take
from ranklab.tensor_parallel.training import TensorParallel
from ranklab.text_trainer import TextTrainer, TrainConfig

pytestmark = pytest.mark.timeout(120)

CONFIG = GPTConfig(vocab_size=61, n_ctx=12, n_embd=48, n_head=12, n_layer=2)  # 61: nothing divides
LAYER = 3 * 12 * 48 * 4  # bytes of one hidden state: B * T * C numbers
SP = {"sequence_parallel": True}


def new_gpt(key_heads=None):
    """A GPT; with so many heads of k and v, where that is given."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for block in model.blocks.values() if key_heads else ():
        for name in "kv":
            setattr(block.attention, name, nn.Linear(48, 4 * key_heads, bias=False))
    return model.to(device())


def batches(steps=3):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randint(61, (3, 12), generator=generator)
        y = x.roll(-1, 1).clone()
        y[:, -1], y[1, :5] = IGNORE, IGNORE
        yield x.to(device()), y.to(device())


def largest_difference(model, one):
    """Of a gradient, over all parameters: this rank's part beside that of one process."""
    whole, worst = dict(one.named_parameters()), 0.0
    for name, p in model.named_parameters():
        right = nn.Parameter(whole[name].grad)
        right = take(right, split_of(p)) if split_of(p) else right
        worst = max(worst, (p.grad - right).abs().max().item())
    return worst


def _train(key_heads=None, ranks=None, **changes):
    """The largest difference of a loss or gradient from one process, over three steps."""
    group = dist.new_group(ranks) if ranks else None
    if ranks and dist.get_rank() not in ranks:
        return 0.0
    one, model, worst = new_gpt(key_heads), new_gpt(key_heads), 0.0
    parallel_gpt(model, TPConfig(group, **changes))
    ones, ours = (torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (one, model))
    for x, y in batches():
        losses = one(x, y), model(x, y)
        for loss, optimizer in zip(losses, (ones, ours)):
            optimizer.zero_grad()
            (loss / 2).backward(retain_graph=True)
            (loss / 2).backward()  # accumulated
        worst = max(worst, abs((losses[0] - losses[1]).item()), largest_difference(model, one))
        ones.step()
        ours.step()
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_to_one_process(ranks):
    for changes in ({}, SP, {"overlap": True}):
        assert max(launch(functools.partial(_train, **changes), ranks=ranks)) < 1e-5


@pytest.mark.parametrize("key_heads", [6, 2, 1])
def test_grouped_queries_are_equal_to_one_process(key_heads):
    for ranks, changes in ((2, {}), (3, SP), (4, {})):
        assert max(launch(functools.partial(_train, key_heads, **changes), ranks=ranks)) < 1e-5


def test_in_a_group_that_is_not_all_ranks():
    for changes in ({}, SP):
        found = launch(functools.partial(_train, 2, ranks=[1, 2, 3], **changes), ranks=4)
        assert 0 < max(found) < 1e-5


# --- a model that nobody here wrote ---------------------------------------------------------------

def _llama(key_heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=61, hidden_size=48, intermediate_size=72, num_hidden_layers=2,
                         num_attention_heads=12, num_key_value_heads=key_heads,
                         attention_bias=True, mlp_bias=True)  # fmt: skip
    return _split_and_whole(LlamaForCausalLM, config)


def _split_and_whole(kind, config):
    """How far the model over all ranks is from one process, after one backward."""
    torch.manual_seed(0)
    one = kind(config).to(device())
    torch.manual_seed(0)
    model = parallel_llama(kind(config).to(device()))
    for x, y in batches(1):
        losses = one(x, labels=y).loss, model(x, labels=y).loss
    for loss in losses:
        loss.backward()
    return max(abs((losses[0] - losses[1]).item()), largest_difference(model, one))


def _qwen3(key_heads):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=61, hidden_size=48, intermediate_size=72, num_hidden_layers=2,
                         num_attention_heads=12, num_key_value_heads=key_heads, head_dim=4)
    return _split_and_whole(Qwen3ForCausalLM, config)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_transformers_llama_is_equal_to_one_process(ranks):
    pytest.importorskip("transformers")
    for key_heads in (12, 2):
        assert max(launch(_llama, key_heads, ranks=ranks, preload=PRELOAD)) < 1e-5


def test_norms_of_heads_see_the_heads_of_all_ranks():
    pytest.importorskip("transformers")
    for key_heads in (12, 2):
        assert max(launch(_qwen3, key_heads, ranks=3, preload=PRELOAD)) < 1e-5


def test_what_the_plan_for_llama_does_not_know_is_refused_by_name():
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 61, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    for kind, name in ("Olmo2", "self_attn.q_norm.weight"), ("DiffLlama", "self_attn.lambda_q1"):
        config = getattr(transformers, f"{kind}Config")(**small)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        with pytest.raises(ValueError, match=f"model.layers.0.{name}"):
            parallel_llama(model)


# --- what is sent, and what is kept ---------------------------------------------------------------

def _counted(**changes):
    model = parallel_gpt(new_gpt(), TPConfig(**changes))
    x, y = next(batches(1))
    with Traffic() as traffic:
        model(x, y).backward()
    return traffic


def test_a_layer_sends_four_all_reduces():
    for traffic in launch(_counted, ranks=4):
        sizes = [op.payload_bytes for op in traffic.ops]
        # two layers; one of the embedding forward, one of the head backward
        assert traffic.calls == {"all_reduce": 4 * 2 + 2 + 2}
        assert sorted(sizes)[2:] == [LAYER] * 10
        assert sorted(sizes)[:2] == [4 * 36, 8 * 36]  # the loss: 12 bytes a token, not 4 * V


def test_sequence_parallelism_sends_the_same_bytes():
    plain, split = (launch(functools.partial(_counted, **changes), ranks=4)[0]
                    for changes in ({}, SP))
    norms = [op for op in split.ops if op.name == "all_reduce" and op.payload_bytes == 48 * 4]
    assert len(norms) == 2 * 2 + 1
    assert split.sent_bytes - sum(op.sent_bytes for op in norms) == plain.sent_bytes
    assert split.calls["all_gather"] == split.calls["reduce_scatter"] == 4 * 2 + 2


def _saved_for_norms(**changes):
    """Bytes that the norms and residuals of the blocks keep: all that is not inside a region."""
    model = parallel_gpt(new_gpt(), TPConfig(**changes))
    kept = []
    for block in model.blocks.values():
        for norm in (block.norm1, block.norm2):
            norm.register_forward_pre_hook(lambda _, args: kept.append(args[0].nbytes))
    for x, y in batches(1):
        model(x, y)
    return sum(kept)


def test_sequence_parallelism_divides_what_is_outside():
    whole, = set(launch(_saved_for_norms, ranks=4))
    part, = set(launch(functools.partial(_saved_for_norms, **SP), ranks=4))
    assert whole == 4 * LAYER == 4 * part


def _held():
    model = parallel_gpt(new_gpt())
    return sum(p.numel() for p in model.parameters())


def test_each_rank_holds_its_part():
    whole = sum(p.numel() for p in new_gpt().parameters())
    norms = 5 * 48
    assert sum(launch(_held, ranks=4)) == whole - norms + 4 * norms


# --- fused matrices -------------------------------------------------------------------------------

def _fused():
    torch.manual_seed(0)
    q, k, v = nn.Linear(8, 12), nn.Linear(8, 4), nn.Linear(8, 4)
    fused = nn.Linear(8, 20)
    fused.weight.data = torch.cat([part.weight for part in (q, k, v)])
    fused.bias.data = torch.cat([part.bias for part in (q, k, v)])
    x = torch.randn(3, 8)
    mine = ColumnParallelLinear(fused, parts=(12, 4, 4))(x)
    apart = [ColumnParallelLinear(part)(x) for part in (q, k, v)]
    return (mine - torch.cat(apart, -1)).abs().max().item()


def test_a_fused_matrix_is_split_part_by_part():
    assert max(launch(_fused, ranks=4)) < 1e-6


# --- dropout --------------------------------------------------------------------------------------

def _masks(sequence_parallel, recompute):
    """What a dropout after attention, and one of attention's, let through: forward and backward."""
    config = GPTConfig(n_ctx=8, n_embd=32, n_head=4, n_layer=1, dropout=0.5, flash=False)
    torch.manual_seed(0)
    model = GPT(config).to(device())
    shared, own = dropout_seeds(0, 0, dist.get_rank(), dist.get_world_size())
    torch.manual_seed(shared)
    parallel_gpt(model, TPConfig(own=own, sequence_parallel=sequence_parallel))
    block, seen = model.blocks["0"], []
    inside = block.attention.attend
    block.attention.attend = lambda q, k, v: inside(
        torch.ones_like(q), torch.ones_like(k), torch.ones_like(v))
    block.attention.out.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach().clone()))
    block.drop.register_forward_hook(lambda _, args, y: seen.append((y == 0).detach()))
    if recompute:
        forward = block.forward
        block.forward = lambda *args: torch.utils.checkpoint.checkpoint(
            forward, *args, use_reentrant=False)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device())
    model(tokens, tokens).backward()
    return seen


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_are_alike_where_ranks_hold_the_same_and_else_differ(sequence_parallel):
    first, second = launch(_masks, sequence_parallel, False, ranks=2)
    assert not torch.equal(first[0], second[0])  # other heads
    assert torch.equal(first[1], second[1]) != sequence_parallel  # other tokens, or the same


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_computing_again_drops_the_same(sequence_parallel):
    for seen in launch(_masks, sequence_parallel, True, ranks=2):
        assert len(seen) == 5 and all(map(torch.equal, seen[:2], seen[3:]))  # the last: not needed


def test_all_seeds_of_all_runs_differ():
    seeds = [seed for run in range(3) for data in range(8) for rank in range(8)
             for seed in dropout_seeds(run, data, rank, 8)[rank > 0 :]]  # shared once
    assert len(seeds) == len(set(seeds)) == 3 * 8 * 9


def _dropped_by_the_loop():
    """What dropout lets through in attention, and outside of it."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(n_ctx=8, n_embd=32, n_head=4, n_layer=1, dropout=0.5)).to(device())
    TensorParallel().apply(model)
    attention, x = model.blocks["0"].attention, torch.ones(2, 8, 32, device=device())
    attention.forward = nn.functional.dropout
    return attention(x).cpu(), nn.functional.dropout(x).cpu()


def test_the_loop_seeds_dropout_by_itself():
    first, second = launch(_dropped_by_the_loop, ranks=2)
    assert not torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


# --- the training loop ----------------------------------------------------------------------------

def _losses(text, parallel, **changes):
    torch.manual_seed(0)
    config = TrainConfig(steps=4, batch=6, micro_batch=4, log_every=1, clip=0.3, warmup=2,
                         eval_batch=8)
    model = GPT(GPTConfig(vocab_size=text.vocab_size, n_ctx=16, n_embd=32, n_head=4, n_layer=2))
    trainer = TextTrainer(model, text, config, device(), progress=False,
                          parallel=parallel and parallel(**changes))
    history = trainer.fit()
    return history.loss + list(history.held_out.values())


def test_the_training_loop_gives_the_losses_of_one_process():
    from ranklab.data import python_text

    text = python_text()
    alone, = launch(_losses, text, None, ranks=1)
    for ranks, changes in ((2, {}), (4, SP)):
        for losses in launch(functools.partial(_losses, text, TensorParallel, **changes),
                             ranks=ranks):
            assert losses == pytest.approx(alone, abs=2e-5)


# --- the loss, and bad input ----------------------------------------------------------------------

def _edges():
    rows = [range(0, 4), range(4, 8), range(8, 11)][dist.get_rank()]
    logits = torch.tensor([[1e4, *[0.0] * 9, -1e4], [3.0] * 11])[:, rows].to(device())
    targets = torch.tensor([10, IGNORE]).to(device())
    return vocab_parallel_cross_entropy(logits.bfloat16(), targets, 11).tolist()


def test_the_loss_of_large_logits_and_of_ignored_targets():
    assert launch(_edges, ranks=3) == [[torch.tensor(2e4).bfloat16().item(), 0.0]] * 3


def _sentence(what):
    with pytest.raises(ValueError) as error:
        what()
    return str(error.value)


def _sentences():
    tokens = functools.partial(scatter_tokens, torch.ones(1, 8, 2))
    heads = functools.partial(parallel_gpt, GPT(GPTConfig(n_head=4)))
    width = functools.partial(ColumnParallelLinear, nn.Linear(6, 8))
    parts = functools.partial(ColumnParallelLinear, nn.Linear(6, 9), parts=(3, 3))
    name = functools.partial(tensor_parallel, GPT(GPTConfig()), {"blocks.*.mlp.upp": row},
                             TPConfig())
    return [_sentence(what) for what in (tokens, heads, width, parts, name)]


def test_bad_input_is_a_sentence_on_every_rank():
    for found in launch(_sentences, ranks=3):
        assert found == [
            "tp=3 must divide the T=8 tokens of a sequence",
            "tp=3 and n_kv_head=4 must divide n_head=4",
            "tp=3 must divide the 8 rows or columns of a matrix",
            "parts=(3, 3) add up to 6, but the matrix has 9 rows",
            "no module of the model is called 'blocks.*.mlp.upp'",
        ]


# --- under a GPU's rules --------------------------------------------------------------------------

def _on_gpu():
    assert identity(torch.ones(2)).sum() == 2
    x = gather_tokens(torch.ones(1, 2, 2, device=device()))
    assert x.shape == (1, 4, 2)
    return max(_train(), _train(**SP), _train(6, overlap=True))


def test_runs_as_on_gpus():
    assert max(launch(_on_gpu, ranks=2, rehearse="gpu")) < 1e-5
    assert math.isfinite(max(launch(functools.partial(_masks, True, True), ranks=2,
                                    rehearse="gpu")[0][0].flatten().tolist()))
