"""Lab 12's 3D parallelism: every layout gives the losses and the weights of one process, and goes
on where another one was killed.
"""

import functools
import itertools
import math
import os
import random
import signal
import zlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.data import python_text
from ranklab.engine import RankError
from ranklab.hybrid import Hybrid, Layout, parse_layout
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.tensor_parallel.split import ShardSpec
from ranklab.text_trainer import TextTrainer, TrainConfig

pytestmark = pytest.mark.timeout(180)

MODEL = {"n_ctx": 16, "n_embd": 32, "n_head": 8, "n_layer": 6}
LAYOUTS = [*map(parse_layout, """
    1x8x1 1x1x8 8x1x1,zero 8x1x1,full 1x4x2,sp,virtual=2 2x4x1,sp,zero,recompute 2x4x1,full
    4x1x2,zero,virtual=2 4x1x2,gpipe,outermost=data 4x1x2,full,recompute
    2x2x2,sp,zero 2x2x2,recompute,virtual=2 2x2x2,zero,recompute,zb-h1 2x2x2,sp,recompute,zb-v
    2x2x2,sp,full,virtual=2,outermost=data""".split())]  # each two options meet somewhere


def every_option():
    """What `make sweep` runs besides: all that is legal, on 2, 4 and 8 ranks."""
    for dp, tp, pp in itertools.product((1, 2, 4, 8), repeat=3):
        orders = ("", ",gpipe", ",zb-h1", ",zb-v", ",virtual=2")[: 5 if pp > 1 else 1]
        for zero, order, sp, again in itertools.product(
                ("", ",zero", ",full")[: 3 if dp > 1 else 1], orders,
                ("", ",sp")[: 2 if tp > 1 else 1], ("", ",recompute")):
            stages = pp * (1 + (order in (",zb-v", ",virtual=2")))
            if dp * tp * pp in (2, 4, 8) and stages <= 8 and (zero, order[:3]) != (",full", ",zb"):
                yield parse_layout(f"{dp}x{tp}x{pp}{zero}{order}{sp}{again}")


SWEEP = [pytest.param(layout, marks=pytest.mark.sweep) for layout in every_option()
         if layout not in LAYOUTS]


@pytest.fixture(scope="module")
def text():
    whole = python_text()
    return replace(whole, train=whole.train[:200_000], held_out=whole.held_out[:20_000])


def new_trainer(text, layout, dropout=0.0, **changes):
    torch.manual_seed(0)
    # A micro-batch of which there are enough, and no more: on two cores each message takes long.
    rows = max(1, 16 // layout.dp // max(2, layout.pp)) if layout else 4
    config = TrainConfig(**{"steps": 4, "batch": 16, "micro_batch": rows, "log_every": 1,
                            "clip": 0.3, "warmup": 2, "eval_batch": 16, **changes})
    with torch.device("meta" if layout else "cpu"):  # a rank never has the whole model
        model = GPT(GPTConfig(vocab_size=text.vocab_size, dropout=dropout, **MODEL))
    parallel = layout and Hybrid(layout.new_mesh(), layout)
    return TextTrainer(model, text, config, device(), progress=False, parallel=parallel)


def pieces(trainer):
    return trainer.parallel.state(trainer.model, trainer.optimizer)


def trained(text, layout, changes=None):
    """(all losses, [(name, offset, numbers)] of the weights that are here at the end)"""
    trainer = new_trainer(text, layout, **(changes or {}))
    history = trainer.fit()
    weights = [(piece.name, piece.offset, piece.tensor.cpu().clone())
               for piece in pieces(trainer) if piece.kind == "weight"]
    return history.loss + list(history.held_out.values()), weights


@pytest.fixture(scope="module")
def alone(text):
    """What one process finds."""
    return launch(trained, text, None, ranks=1)[0]


@pytest.mark.parametrize("layout", LAYOUTS + SWEEP, ids=str)
def test_equal_to_one_process(layout, text, alone):
    right, whole = alone[0], {name: tensor for name, _, tensor in alone[1]}
    there = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for found, weights in launch(trained, text, layout, ranks=layout.ranks, timeout=120):
        assert found == pytest.approx(right, abs=2e-5)
        for name, offset, tensor in weights:
            box = tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))
            there[name][box] = 1
            torch.testing.assert_close(tensor, whole[name][box], atol=2e-4, rtol=1e-4)
    assert all(seen.all() for seen in there.values())


@pytest.mark.parametrize("layout, batch", [(Layout(2, 1, 1, zero=3), 3),
                                           (Layout(2, 1, 2, virtual=2), 7)], ids=str)
def test_data_ranks_may_have_unequal_numbers_of_rows(layout, batch, text):
    """With zero=3 all must gather as often; interleaved, 3 micro-batches are no whole rounds."""
    changes = {"batch": batch, "micro_batch": 1, "eval_batch": batch, "steps": 1}
    right = launch(trained, text, None, changes, ranks=1)[0][0]
    for found, _ in launch(trained, text, layout, changes, ranks=layout.ranks, timeout=60):
        assert found == pytest.approx(right, abs=2e-5)


# --- dropout --------------------------------------------------------------------------------------

def _masks(layout):
    """What dropout lets through on this rank: of attention, and after it; and the place."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(n_ctx=8, n_embd=32, n_head=4, n_layer=1, dropout=0.5, flash=False))
    hybrid, seen = Hybrid(layout.new_mesh(), layout), []
    hybrid.apply(model)
    block = model.blocks["0"]
    inside = block.attention.attend
    block.attention.attend = lambda *q_k_v: inside(*map(torch.ones_like, q_k_v))
    block.attention.out.register_forward_pre_hook(lambda _, args: seen.append(args[0] == 0))
    block.drop.register_forward_hook(lambda _, args, y: seen.append(y == 0))
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device())
    model(tokens, tokens)
    return tuple(hybrid.mesh.coordinates().values()), [x.cpu() for x in seen[:2]]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_differ_over_data_ranks_and_where_tensor_ranks_hold_other_numbers(sequence_parallel):
    layout = Layout(2, 2, 1, sequence_parallel=sequence_parallel)
    found = dict(launch(_masks, layout, ranks=4))
    for (one, of_one), (other, of_other) in itertools.combinations(found.items(), 2):
        is_alike = one[:2] == other[:2] and not sequence_parallel  # after attention, as it was
        assert [torch.equal(*pair) for pair in zip(of_one, of_other)] == [False, is_alike]


def _with_dropout(text, layout, folder, until, resume):
    """(the losses of the steps made here, the generator's state)"""
    trainer = new_trainer(text, layout, 0.2, steps=3, batch=4, micro_batch=2, checkpoint=folder)
    if resume:
        trainer.resume()
    state = torch.get_rng_state()
    return trainer.fit(until).loss, state


def test_dropout_goes_on_as_it_was_and_in_another_layout_alike_on_tensor_ranks(text, tmp_path):
    run, data = functools.partial(launch, _with_dropout, text, ranks=2), Layout(2, 1, 1)
    straight = run(data, None, None, False)
    run(data, str(tmp_path), 1, False)
    assert [loss for loss, _ in run(data, str(tmp_path), None, True)] == [
        loss[1:] for loss, _ in straight]
    (_, one), (_, other) = run(Layout(1, 2, 1), str(tmp_path), None, True)
    assert torch.equal(one, other)


# --- kills ----------------------------------------------------------------------------------------

WORST = 0.4  # seconds of saving before a kill


def numbers(piece, step):
    """What the piece holds at this step: whole numbers, which differ by name, kind and place."""
    first = step * 4096 + zlib.crc32(f"{piece.name} {piece.kind}".encode()) % 1024
    whole = torch.arange(first, first + math.prod(piece.shape), dtype=torch.float32)
    box = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.tensor.shape))
    return whole.view(piece.shape)[box]


def goes_on(trainer, least):
    """The trainer is at the last good checkpoint: step `least` or later, bit by bit."""
    trainer.resume()
    assert trainer.steps_done >= least
    for piece in pieces(trainer):
        assert torch.equal(piece.tensor.cpu(), numbers(piece, trainer.steps_done)), piece.name


def _live(text, layout, folder, least, seconds):
    """On each rank: checkpoints are saved until it is killed, so long after the first one. The file
    folder/step has the last step of which all is saved.
    """
    trainer = new_trainer(text, layout, checkpoint=str(folder / "saved"))
    if least:
        goes_on(trainer, least)
    else:
        trainer.step()  # makes Adam's moments
    first = trainer.steps_done + 1
    while True:
        trainer.steps_done += 1
        for piece in pieces(trainer):
            piece.tensor.copy_(numbers(piece, trainer.steps_done))
        trainer.save()
        if dist.get_rank() == 0:
            (folder / "new").write_text(str(trainer.steps_done))
            os.replace(folder / "new", folder / "step")
        if trainer.steps_done == first:
            dist.barrier()
            # Nobody catches this signal: the kernel ends the process, wherever it is.
            signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=(
    pytest.mark.sweep, pytest.mark.timeout(1800)))])  # fmt: skip
def test_killed_at_any_moment_it_goes_on_in_another_layout(kills, text, tmp_path, one_thread):
    seed, least = random.SystemRandom().randrange(10**6), 0
    print("seed", seed)
    moments, layouts = random.Random(seed), map(parse_layout, itertools.cycle((
        "2x1x2,zero", "1x2x2", "4x1x1,full", "1x1x4")))
    for layout in itertools.islice(layouts, kills):
        seconds = moments.uniform(0.001, WORST)  # 0 would be never
        with pytest.raises(RankError, match="SIGALRM"):
            launch(_live, text, layout, tmp_path, least, seconds, ranks=4)
        least = int((tmp_path / "step").read_text())
    goes_on(new_trainer(text, None, checkpoint=str(tmp_path / "saved")), least)
    assert least > kills


# --- edges ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("options, sentence", [
    ({"dp": 0}, "dp=0 must be at least 1"),
    ({"schedule": "1b1f"}, "schedule='1b1f' is not one of gpipe, 1f1b, zb-h1, zb-v"),
    ({"zero": 2}, "zero=2 must be 0, 1 or 3"),
    ({"zero": 3, "schedule": "zb-h1"}, "when with zero=3 the weights are gone"),
    ({"outermost": "tensor"}, "outermost='tensor' must be pipeline or data"),
    ({"virtual": 2, "schedule": "gpipe"}, "virtual=2 stages need schedule='1f1b'"),
])
def test_a_bad_layout_is_a_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Layout(**options)


def _meshes():
    said = []
    for layout in (Layout(2, 2, 2), Layout(1, 4, 1)):
        with pytest.raises(ValueError) as error:
            layout.new_mesh()
        said.append(str(error.value))
    return [*said, Layout(1, 4, 1).new_mesh(per_node=4).axes["tensor"]]


def test_tensor_ranks_stay_where_nvlink_joins_them():
    for of_all, of_a_host, where_nvlink_joins in launch(_meshes, ranks=4, nodes=2):
        assert of_all == "2 x 2 x 2 = 8 ranks, but the job has 4"
        assert "tp=4 tensor ranks would be on several nodes of 2" in of_a_host
        assert where_nvlink_joins == 4


def test_key_heads_that_unequal_numbers_of_ranks_hold_count_once():
    def norms():
        layout = Layout(1, 2, 1)
        hybrid, mine = Hybrid(layout.new_mesh(), layout), torch.nn.Parameter(torch.zeros(4))
        mine.grad = torch.tensor([[3.0, 3.0, 4.0, 4.0], [4.0, 4.0, 5.0, 5.0]][dist.get_rank()])
        # six numbers: this rank's own two, and two that both have
        mine.shard_spec = ShardSpec(0, 6, *[(((0, 2), (2, 4)), (1, 2)), (((2, 4), (4, 6)), (2, 1))][
            dist.get_rank()])
        hybrid.pipeline.model, hybrid.pipeline.tied = torch.nn.Module(), {}
        hybrid.data.gradients = lambda model: [(mine, mine.grad, 1)]
        whole = hybrid.grad_norm(None).item()
        hybrid.data.gradients = lambda model: [(mine, mine.grad[:3], 1)]
        with pytest.raises(ValueError, match="take tp that divides the key heads"):
            hybrid.grad_norm(None)
        return whole

    assert launch(norms, ranks=2) == pytest.approx([10.0] * 2)
