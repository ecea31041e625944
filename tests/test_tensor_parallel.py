"""Lab 08's whole models, split by a plan, are equal to one process. The checks prove the layers."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranklab import device, launch
from ranklab.basics.targets import IGNORE
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.peers.llama import parallel_llama
from ranklab.projects.fsdp.llama import PRELOAD
from ranklab.tensor_parallel import (
    ColumnParallelLinear, TPConfig, dropout_seeds, parallel_gpt, tensor_parallel,
)
from ranklab.tensor_parallel.dropout import own_random
from ranklab.tensor_parallel.plan import row
from ranklab.tensor_parallel.regions import scatter_tokens
from ranklab.tensor_parallel.split import split_of, take
from ranklab.tensor_parallel.training import TensorParallel

pytestmark = pytest.mark.timeout(120)

CONFIG = GPTConfig(vocab_size=61, n_ctx=12, n_embd=48, n_head=12, n_layer=2)  # 61: nothing divides
SP, OVERLAP = {"sequence_parallel": True}, {"overlap": True}


def new_gpt(key_heads):
    """A GPT with so many heads of k and v."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for block in model.blocks.values():
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


def _train(key_heads, members, changes):
    """The largest difference of a loss or gradient from one process, over three steps."""
    group = dist.new_group(members) if members else None
    if members and dist.get_rank() not in members:
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


CASES = (  # heads of k and v, ranks (None: all four), how
    (12, None, SP), (6, None, OVERLAP), (1, None, {}), (2, [1, 2, 3], SP), (12, [0, 2, 3], {}),
    (12, [1, 3], OVERLAP), (6, [0, 1], SP), (12, [2], {}),
)


def test_a_gpt_is_equal_to_one_process():
    found = launch(lambda: [_train(*case) for case in CASES], ranks=4)
    for case, apart in zip(CASES, zip(*found)):
        assert max(apart) < 1e-5, case


# --- a model that nobody here wrote ---------------------------------------------------------------

def _llama(key_heads):
    """How far Llama over all ranks is from one process, after one backward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=61, hidden_size=48, intermediate_size=72, num_hidden_layers=2,
                         num_attention_heads=12, num_key_value_heads=key_heads,
                         attention_bias=True, mlp_bias=True)  # fmt: skip
    torch.manual_seed(0)
    one = LlamaForCausalLM(config).to(device())
    torch.manual_seed(0)
    model = parallel_llama(LlamaForCausalLM(config).to(device()))
    (x, y), = batches(1)
    losses = one(x, labels=y).loss, model(x, labels=y).loss
    for loss in losses:
        loss.backward()
    return max(abs((losses[0] - losses[1]).item()), largest_difference(model, one))


def test_transformers_llama_is_equal_to_one_process():
    pytest.importorskip("transformers")
    found = launch(lambda: [_llama(12), _llama(2)], ranks=3, preload=PRELOAD)
    assert max(map(max, found)) < 1e-5


@pytest.mark.parametrize("kind, name", [
    ("Olmo2", "self_attn.q_norm.weight"), ("DiffLlama", "self_attn.lambda_q1"),
    ("Qwen3", "self_attn.q_norm.weight")])
def test_what_the_plan_for_llama_does_not_know_is_refused_by_name(kind, name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=61, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with pytest.raises(ValueError, match=f"model.layers.0.{name}"):
        parallel_llama(model)


# --- dropout --------------------------------------------------------------------------------------

def _masks(sequence_parallel):
    """What a dropout after attention, and one of attention's, let through: forward, and again."""
    config = GPTConfig(n_ctx=8, n_embd=32, n_head=4, n_layer=1, dropout=0.5, flash=False)
    torch.manual_seed(0)
    model = GPT(config).to(device())
    shared, own = dropout_seeds(0, 0, dist.get_rank(), dist.get_world_size())
    torch.manual_seed(shared)
    parallel_gpt(model, TPConfig(dropout_seed=own, sequence_parallel=sequence_parallel))
    block, seen = model.blocks["0"], []
    inside = block.attention.attend
    block.attention.attend = lambda q, k, v: inside(
        torch.ones_like(q), torch.ones_like(k), torch.ones_like(v))
    block.attention.out.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach().clone()))
    block.drop.register_forward_hook(lambda _, args, y: seen.append((y == 0).detach()))
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device())
    model(tokens, tokens).backward()
    return seen


@pytest.mark.parametrize("rehearse, sequence_parallel", [(None, False), ("gpu", True)])
def test_masks_are_alike_where_ranks_hold_the_same_and_computed_again(rehearse, sequence_parallel):
    first, second = launch(_masks, sequence_parallel, ranks=2, rehearse=rehearse)
    assert not torch.equal(first[0], second[0])  # other heads
    assert torch.equal(first[1], second[1]) != sequence_parallel  # other tokens, or the same
    for seen in (first, second):  # the last one is not needed again
        assert len(seen) == 5 and all(map(torch.equal, seen[:2], seen[3:]))


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


def _random_after_own_random():
    torch.manual_seed(3)
    with own_random(dist.get_rank()):
        torch.rand(1, device=device())
    return torch.rand(4, device=device()).cpu()


@pytest.mark.parametrize("rehearse", [None, "gpu"])
def test_random_numbers_of_the_device_go_on_after_own_ones(rehearse):
    assert torch.equal(*launch(_random_after_own_random, ranks=2, rehearse=rehearse))


def test_every_one_of_eight_ranks_drops_other_numbers():
    seen = set()
    for rank in range(8):
        torch.manual_seed(0)
        with own_random(dropout_seeds(0, 0, rank, 8)[1]):
            seen.add(tuple(torch.rand(4).tolist()))
    assert len(seen) == 8


# --- bad input ------------------------------------------------------------------------------------

BAD = {
    "tp=3 must divide the T=8 tokens of a sequence": lambda: scatter_tokens(torch.ones(1, 8, 2)),
    "tp=3 and n_kv_head=4 must divide n_head=4": lambda: parallel_gpt(GPT(GPTConfig(n_head=4))),
    "tp=3 must divide the 8 rows or columns of a matrix":
        lambda: ColumnParallelLinear(nn.Linear(6, 8)),
    "parts=(3, 3) add up to 6, but the matrix has 9 rows":
        lambda: ColumnParallelLinear(nn.Linear(6, 9), parts=(3, 3)),
    "no module of the model is called 'blocks.*.mlp.upp'":
        lambda: tensor_parallel(GPT(GPTConfig()), {"blocks.*.mlp.upp": row}, TPConfig()),
}


def test_bad_input_is_a_sentence_on_every_rank():
    def sentences():
        return [str(pytest.raises(ValueError, call).value) for call in BAD.values()]

    assert launch(sentences, ranks=3) == [list(BAD)] * 3
