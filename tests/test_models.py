"""The GPT and its data: what it computes, what it refuses, what is held out."""

import numpy as np
import pytest
import torch

from ranklab import hardware
from ranklab.basics.targets import IGNORE
from ranklab.data import text as data
from ranklab.models.gpt import GPT, GPTConfig, count_parameters

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = GPTConfig(vocab_size=31, n_ctx=12, n_layer=2, n_head=2, n_embd=16)


def tiny(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**vars(TINY), **changes}))


def tokens(rows=3, seed=0):
    return torch.randint(31, (rows, 12), generator=torch.Generator().manual_seed(seed))


def test_flash_and_plain_attention_agree():
    flash, plain = tiny(flash=True), tiny(flash=False)
    torch.testing.assert_close(flash(tokens()), plain(tokens()))


def test_no_token_sees_the_future():
    model, x = tiny(), tokens()
    changed = x.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 31
    torch.testing.assert_close(model(x)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(x)[:, 7], model(changed)[:, 7])


def test_attention_depends_on_distance_only():
    attention = tiny().blocks["0"].attention
    x = torch.randn(1, 1, 12, 8)
    same = x[:, :, :1].expand(-1, -1, 12, -1)  # one vector at all places
    turned = attention.rotate(same)
    scores = turned[0, 0] @ turned[0, 0].T
    for distance in range(12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_the_head_is_the_embedding_and_counts_once():
    model = tiny()
    assert model.head.weight is model.token.weight
    assert sum(p.numel() for p in model.parameters()) == count_parameters(TINY)


def test_a_fresh_model_guesses_evenly():
    assert tiny()(tokens(), tokens(seed=1)).item() == pytest.approx(np.log(31), abs=0.02)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_loss_in_chunks_is_the_loss(reduction):
    whole, chunked = tiny(), tiny(loss_chunks=5)  # 36 tokens do not divide by 5
    targets = tokens(seed=1)
    targets[0, :7] = IGNORE
    losses = [model(tokens(), targets, reduction) for model in (whole, chunked)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for a, b in zip(whole.parameters(), chunked.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_part_has_the_weights_and_the_names_of_the_whole():
    whole, first, last = tiny(), tiny(), tiny()
    first.norm = first.head = None
    del first.blocks["1"]
    last.token = None
    del last.blocks["0"]
    for part in (first, last):
        torch.nn.Module.to_empty(part, device="cpu")
        for attention in (block.attention for block in part.blocks.values()):
            attention.reset_buffers()
        part.reset_parameters(seed=0)
        state = part.state_dict()
        assert all(torch.equal(state[name], whole.state_dict()[name]) for name in state)
    assert "blocks.1.mlp.up.weight" in last.state_dict() and "head.weight" in last.state_dict()
    hidden = first(tokens())
    torch.testing.assert_close(last(hidden, tokens(seed=1)), whole(tokens(), tokens(seed=1)))


def test_weights_follow_the_seed_and_not_what_was_drawn_before():
    torch.manual_seed(1)
    torch.rand(5)
    one = GPT(TINY)
    assert torch.equal(one.blocks["1"].mlp.up.weight,
                       (torch.manual_seed(1), GPT(TINY))[1].blocks["1"].mlp.up.weight)
    assert not torch.equal(one.token.weight, tiny().token.weight)
    up = [one.blocks[i].mlp.up.weight for i in "01"]
    assert not torch.equal(*up)


def test_positions_say_where_the_tokens_are():
    """Tokens in another order with their positions, and an attention that knows the order."""
    whole, x = tiny(), tokens()
    right = whole(x)
    order = torch.tensor([3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8])  # any order of the tokens

    def attend(q, k, v):
        q, k, v = (t[..., order.argsort(), :] for t in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y[..., order, :]

    for block in whole.blocks.values():
        block.attention.attend = attend
    torch.testing.assert_close(whole(x[:, order], positions=order), right[:, order])


def test_generate_goes_on_beyond_the_context():
    assert tiny().eval().generate(tokens(1), 20).shape == (1, 32)


@pytest.mark.parametrize("changes, sentence", [
    ({"n_head": 3}, "n_head=3 must divide n_embd=16"),
    ({"n_embd": 6}, "n_embd / n_head = 3 must be even"),
    ({"n_layer": 0}, "n_layer=0 must be at least 1"),
    ({"dropout": 1.0}, "dropout=1.0 must lie in"),
])
def test_a_wrong_shape_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        GPTConfig(**{**vars(TINY), **changes})


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="T=13 tokens do not fit n_ctx=12"):
        tiny()(torch.zeros(1, 13, dtype=torch.long))


# --- data -----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def text():
    return data.python_text()


def test_the_text_is_there_split_by_file_and_the_same_each_time(text):
    again = data.python_text()
    assert np.array_equal(text.train, again.train)
    assert np.array_equal(text.held_out, again.held_out)
    assert len(text.train) > 1_000_000
    assert 0.02 < len(text.held_out) / len(text.train) < 0.5
    train = set(text.train.tobytes().split(data.END))
    assert not train & set(text.held_out.tobytes().split(data.END))


def test_few_long_lines_are_on_both_sides(text):
    def long_lines(part):
        return [line for line in part.tobytes().split(b"\n") if len(line.strip()) >= 60]

    seen, held_out = set(long_lines(text.train)), long_lines(text.held_out)
    assert sum(line in seen for line in held_out) < 0.1 * len(held_out)


def test_a_batch_follows_from_seed_and_step(text):
    x, y = data.batch_at(text.train, 5, 4, 16, seed=1)
    assert x.shape == y.shape == (4, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, data.batch_at(text.train, 5, 4, 16, seed=1)[0])
    for other in ((6, 4, 16, 1), (5, 4, 16, 2)):
        assert not torch.equal(x, data.batch_at(text.train, *other)[0])


def test_held_out_windows_do_not_overlap():
    x, y = data.held_out_batch(np.arange(101), 10, 10)
    assert torch.equal(x.flatten(), torch.arange(100))
    assert torch.equal(y.flatten(), torch.arange(1, 101))
    with pytest.raises(ValueError, match="11 windows of 10 do not fit 101 held-out tokens"):
        data.held_out_batch(np.arange(101), 11, 10)


def test_too_short_a_text_is_refused():
    with pytest.raises(ValueError, match="16 tokens are too few"):
        data.batch_at(np.arange(16), 0, 1, 16)


def test_bigram_loss_by_hand():
    train = np.array([0, 1, 0, 1, 0], dtype=np.uint8)  # 0 -> 1 twice, 1 -> 0 twice
    x, y = torch.tensor([[0, 1]]), torch.tensor([[1, 0]])
    assert data.bigram_loss(train, x, y, 2) == pytest.approx(-np.log(3 / 4))
    unseen = torch.tensor([[0]]), torch.tensor([[0]])
    assert data.bigram_loss(train, *unseen, 2) == pytest.approx(-np.log(1 / 4))
    assert data.bigram_loss(train, *unseen, 50_000) == pytest.approx(-np.log(1 / 50_002))


def test_files_of_your_own(tmp_path):
    (tmp_path / "mine.txt").write_bytes(bytes(range(100)))
    mine = data.text_file(tmp_path / "mine.txt")
    assert (len(mine.train), len(mine.held_out), mine.vocab_size) == (90, 10, 256)
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    assert data.text_file(tmp_path / "tokens.bin").vocab_size == 1000


def test_a_python_without_source_gets_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="0 bytes of its own source"):
        data.python_text()


# --- hardware -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, found", [
    ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA A10", "A10"), ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA L4", "L4"), ("NVIDIA H200", "H200"),
])
def test_gpus_are_found_by_torchs_name(name, found):
    assert hardware.find(name).name == found


def test_an_unknown_gpu_is_not_guessed():
    assert hardware.find("NVIDIA A1000 Laptop GPU") is None
    assert hardware.find("NVIDIA L40S") is None


def test_levels_get_larger_and_slower():
    for gpu in hardware.GPUS:
        levels = gpu.levels()
        assert [lev.bandwidth for lev in levels] == sorted((lev.bandwidth for lev in levels),
                                                           reverse=True), gpu.name
        assert len(levels) >= 6


def test_this_cpu_is_measured():
    here = hardware.present("cpu")
    assert 1e8 < here.fp32_flops < 1e14
    assert here.memory_bandwidth > 1e8
    assert [level.name for level in here.levels()] == ["memory"]
