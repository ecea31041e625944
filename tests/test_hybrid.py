"""Lab 12's 3D parallelism: every layout of eight ranks gives the losses of one process."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from ranklab import device, launch
from ranklab.data import python_text
from ranklab.hybrid import Hybrid, Layout
from ranklab.hybrid.layout import SCHEDULES
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.tensor_parallel.split import ShardSpec
from ranklab.text_trainer import TextTrainer, TrainConfig

pytestmark = pytest.mark.timeout(180)

MODEL = {"n_ctx": 16, "n_embd": 32, "n_head": 8, "n_layer": 6}
SIZES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3)
         if sizes[0] * sizes[1] * sizes[2] == 8]
OPTIONS = {  # by pairs: each two of them meet in some layout
    (2, 2, 2): [{"sequence_parallel": True, "zero": 1}, {"virtual": 2, "recompute": True},
                {"schedule": "zb-h1", "zero": 1, "recompute": True},
                {"schedule": "zb-v", "sequence_parallel": True, "recompute": True},
                {"zero": 3, "sequence_parallel": True, "virtual": 2, "outermost": "data"}],
    (4, 1, 2): [{"virtual": 2, "zero": 1}, {"schedule": "gpipe", "outermost": "data"},
                {"zero": 3, "recompute": True}],
    (1, 4, 2): [{"virtual": 2, "sequence_parallel": True}],
    (2, 4, 1): [{"zero": 1, "sequence_parallel": True, "recompute": True},
                {"zero": 3, "schedule": "gpipe"}],
    (8, 1, 1): [{"zero": 1}, {"zero": 3}],
}
LAYOUTS = [Layout(*sizes, **options) for sizes in SIZES
           for options in [{}, *OPTIONS.get(sizes, [])]]


def every_option():
    """What `make sweep` runs besides: all that is legal, on 2, 4 and 8 ranks."""
    all_sizes = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3)
                 if sizes[0] * sizes[1] * sizes[2] in (2, 4, 8)]
    orders = [{"schedule": name} for name in SCHEDULES] + [{"virtual": 2}]
    for (dp, tp, pp), zero, order in itertools.product(all_sizes, (0, 1, 3), orders):
        if pp == 1 and order != {"schedule": "1f1b"} or zero and dp == 1:
            continue  # nothing that another one has not
        if pp == 8 and (order.get("virtual") or order.get("schedule") == "zb-v"):
            continue  # 16 stages, 8 layers
        if zero == 3 and order.get("schedule", "").startswith("zb"):
            continue
        for sequence_parallel, recompute in itertools.product({False, tp > 1}, (False, True)):
            layout = Layout(dp, tp, pp, zero=zero, recompute=recompute, **order,
                            sequence_parallel=sequence_parallel)
            if layout not in LAYOUTS:
                yield layout


SWEEP = [pytest.param(layout, 10, marks=pytest.mark.sweep) for layout in every_option()]


@pytest.fixture(scope="module")
def text():
    return python_text()


def new_trainer(text, layout, **changes):
    torch.manual_seed(0)
    config = TrainConfig(**{"steps": 4, "batch": 16, "micro_batch": rows_for(layout),
                            "log_every": 1, "clip": 0.3, "warmup": 2, "eval_batch": 16, **changes})
    with torch.device("meta" if layout else "cpu"):  # a rank never has the whole model
        model = GPT(GPTConfig(vocab_size=text.vocab_size, **MODEL))
    parallel = layout and Hybrid(layout.new_mesh(), layout)
    return TextTrainer(model, text, config, device(), progress=False, parallel=parallel)


def rows_for(layout):
    """A micro-batch of which there are enough, and no more: on two cores each message takes long.
    """
    return 4 if layout is None else max(1, 16 // layout.dp // max(2, layout.pp))


def losses(text, layout, until=None, resume=False, **changes):
    trainer = new_trainer(text, layout, **changes)
    if resume:
        trainer.resume()
    history = trainer.fit(until)
    return history.loss + list(history.held_out.values())


@pytest.fixture(scope="module")
def alone(text):
    """(steps) -> what one process finds in so many."""
    return functools.cache(lambda steps: launch(trained, text, None, steps, ranks=1)[0])


def trained(text, layout, steps):
    """(all losses, [(name, offset, numbers)] of the weights that are here at the end)"""
    trainer = new_trainer(text, layout, steps=steps)
    history = trainer.fit()
    weights = [(piece.name, piece.offset, piece.tensor.cpu().clone())
               for piece in trainer.parallel.state(trainer.model, trainer.optimizer)
               if piece.kind == "weight"]
    return history.loss + list(history.held_out.values()), weights


@pytest.mark.parametrize("layout, steps", [(layout, 4) for layout in LAYOUTS] + SWEEP, ids=str)
def test_equal_to_one_process(layout, steps, text, alone):
    right, whole = alone(steps)
    whole = {name: tensor for name, _, tensor in whole}
    there = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for found, weights in launch(trained, text, layout, steps, ranks=layout.ranks, timeout=120):
        assert found == pytest.approx(right, abs=2e-5)
        for name, offset, tensor in weights:
            box = tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))
            there[name][box] = 1
            torch.testing.assert_close(tensor, whole[name][box], atol=2e-4, rtol=1e-4)
    assert all(seen.all() for seen in there.values())


def test_goes_on_in_any_other_layout(text, alone, tmp_path):
    right = alone(4)[0]
    run = functools.partial(losses, text, checkpoint=str(tmp_path))
    steps = [(Layout(2, 2, 2, zero=1), 1), (Layout(1, 4, 2, sequence_parallel=True), 2),
             (Layout(4, 1, 2, zero=3, virtual=2), 3), (None, 4)]
    for i, (layout, until) in enumerate(steps):
        found = launch(functools.partial(run, layout, until, resume=i > 0),
                       ranks=layout.ranks if layout else 1, timeout=120)
        for each in found:
            assert each == pytest.approx(right[until - 1 :][: len(each)], abs=5e-5)


@pytest.mark.parametrize("layout, batch", [(Layout(2, 1, 1, zero=3), 3),
                                           (Layout(2, 1, 2, virtual=2), 7)], ids=str)
def test_data_ranks_may_have_unequal_numbers_of_rows(layout, batch, text):
    """With zero=3 all must gather as often; interleaved, 3 micro-batches are no whole rounds."""
    run = functools.partial(losses, text, batch=batch, micro_batch=1, eval_batch=batch, steps=1)
    right = launch(run, None, ranks=1)[0]
    for found in launch(run, layout, ranks=layout.ranks, timeout=60):
        assert found == pytest.approx(right, abs=2e-5)


def _masks(layout):
    """What dropout lets through on this rank: of attention, and after it; and the place."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(n_ctx=8, n_embd=32, n_head=4, n_layer=1, dropout=0.5, flash=False))
    hybrid, seen = Hybrid(layout.new_mesh(), layout), []
    hybrid.apply(model)
    block = model.blocks["0"]
    inside = block.attention.attend
    block.attention.attend = lambda q, k, v: inside(
        torch.ones_like(q), torch.ones_like(k), torch.ones_like(v))
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
    config = TrainConfig(steps=3, batch=4, micro_batch=2, log_every=1, warmup=1, eval_batch=4,
                         checkpoint=folder)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=text.vocab_size, **MODEL | {"dropout": 0.2}))
    trainer = TextTrainer(model, text, config, device(), progress=False,
                          parallel=Hybrid(layout.new_mesh(), layout))
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


def _traffic(text, layout):
    trainer = new_trainer(text, layout)
    trainer.step()
    with Traffic() as traffic:
        trainer.step()
    mesh = trainer.parallel.mesh
    return {axis: sent for axis, sent in traffic.by_axis(mesh).items()}, mesh.coordinates()


def test_what_travels_along_each_axis(text):
    T, C = 16, 32
    hidden = 16 // 2 * T * C * 4  # of all micro-batches of a data rank
    for sent, place in launch(_traffic, text, Layout(2, 2, 2), ranks=8):
        # the embedding's part is on the first and the last rank of a pipeline of two
        parameters = 3 * (12 * C * C // 2 + 2 * C) * 4 + text.vocab_size * C // 2 * 4
        parameters += C * 4 if place["pipeline"] == 1 else 0  # the last norm
        assert sent["data"] == parameters + 8  # a ring of two; the number of targets
        tied = text.vocab_size * C // 2 * 4
        assert sent["pipeline"] == hidden + tied


def test_bad_layouts_are_sentences():
    for options, sentence in (
        ({"dp": 0}, "dp=0 must be at least 1"),
        ({"schedule": "1b1f"}, "schedule='1b1f' is not one of gpipe, 1f1b, zb-h1, zb-v"),
        ({"zero": 2}, "zero=2 must be 0, 1 or 3"),
        ({"zero": 3, "schedule": "zb-h1"}, "when with zero=3 the weights are gone"),
        ({"outermost": "tensor"}, "outermost='tensor' must be pipeline or data"),
        ({"virtual": 2, "schedule": "gpipe"}, "virtual=2 stages need schedule='1f1b'"),
    ):
        with pytest.raises(ValueError) as error:
            Layout(**options)
        assert sentence in str(error.value)


def test_a_mesh_of_another_size_is_a_sentence_on_every_rank():
    def make():
        with pytest.raises(ValueError) as error:
            Layout(2, 2, 2).new_mesh()
        return str(error.value)

    assert launch(make, ranks=2) == ["2 x 2 x 2 = 8 ranks, but the job has 2"] * 2


def test_tensor_ranks_on_several_nodes_are_a_sentence_on_every_rank():
    def make():
        with pytest.raises(ValueError) as error:
            Layout(1, 4, 1).new_mesh()
        return str(error.value)

    said = launch(make, ranks=4, nodes=2)
    assert len(set(said)) == 1 and "tp=4 tensor ranks would be on several nodes of 2" in said[0]


def test_nvlink_may_join_more_ranks_than_a_host_has():
    def make():
        return Layout(1, 4, 1).new_mesh(per_node=4).axes

    assert launch(make, ranks=4, nodes=2)[0] == {"pipeline": 1, "data": 1, "tensor": 4}


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
