"""Lab 12's costs of a layout: as predicted, so counted; and the layouts that follow from them."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ranklab import device, hardware, launch
from ranklab.baseline import mfu
from ranklab.hybrid import (
    Cluster, Hybrid, Job, Layout, choose_layout, layout_memory, layout_seconds, layout_traffic,
    megatron_memory,
)
from ranklab.hybrid.choose import legal, refuse_misfits
from ranklab.mesh import Mesh
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.projects.hybrid import dry_run
from ranklab.projects.hybrid.sizes import PUBLISHED, SIZES
from ranklab.text_trainer import TextTrainer, TrainConfig

pytestmark = pytest.mark.timeout(300)

SMALL = Job(GPTConfig(256, 16, 6, 8, 32), 32, 2, "fp32")
SIZES_OF_8 = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=3)
              if sizes[0] * sizes[1] * sizes[2] == 8]
LAYOUTS = [Layout(*sizes) for sizes in SIZES_OF_8] + [
    Layout(2, 2, 2, sequence_parallel=True, zero=1), Layout(2, 2, 2, virtual=2, recompute=True),
    Layout(2, 2, 2, sequence_parallel=True, recompute=True, outermost="data"),
    Layout(1, 4, 2, virtual=2, sequence_parallel=True), Layout(4, 1, 2, schedule="gpipe", zero=1),
    Layout(2, 2, 2, zero=3), Layout(2, 1, 4, schedule="zb-v"), Layout(8, zero=3, recompute=True),
]  # fmt: skip


def assert_same(predicted, counted):
    for axis, nbytes in predicted.items():
        assert nbytes == pytest.approx(counted[axis], abs=64), axis


def _counted(cases):
    """Several dry runs in one process."""
    found = []
    for job, layout in cases:
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=1)
        found.append(dry_run._dry_run(job, layout))
    return found


# --- what is sent ---------------------------------------------------------------------------------

@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_every_layout_sends_what_is_predicted(part):
    cases = [(SMALL, layout) for layout in LAYOUTS]
    cases += [(replace(SMALL, precision="bf16"), layout) for layout in LAYOUTS[-8:-5]]
    [found] = launch(_counted, cases[part::2], ranks=1, timeout=280)
    for case, (_, sent) in zip(cases[part::2], found):
        assert_same(layout_traffic(*case), sent)


def _sent(layout):
    torch.manual_seed(0)
    config = TrainConfig(batch=SMALL.batch, micro_batch=SMALL.micro_batch)
    trainer = TextTrainer(GPT(SMALL.config), None, config, device(), progress=False,
                          parallel=Hybrid(layout.new_mesh(), layout))
    tokens = torch.zeros(SMALL.batch // layout.dp, SMALL.config.n_ctx, dtype=torch.long)
    with Traffic() as traffic:
        trainer.step((tokens, tokens))
    return dict(traffic.by_axis(trainer.parallel.mesh))


@pytest.mark.parametrize("layout", [
    Layout(2, 2, 2, sequence_parallel=True, zero=1, virtual=2, recompute=True),
    Layout(2, 2, 2, zero=3)], ids=str)
def test_so_do_real_ranks(layout):
    sent = launch(_sent, layout, ranks=8, timeout=200)[0]
    assert_same(layout_traffic(SMALL, layout), sent)


# --- what is held ---------------------------------------------------------------------------------

def wide(n_layer, **changes):
    return Job(GPTConfig(50304, 2048, n_layer, 32, 4096), 64, **changes)


HELD = [
    (wide(4, micro_batch=4), Layout(1, 8, 2, sequence_parallel=True, recompute=True)),
    (wide(2, micro_batch=4, precision="fp32"), Layout(1, 8, 2, recompute=True)),
    (wide(3), Layout(16)), (wide(8), Layout(2, 8, 2, virtual=2, zero=1)),
    (wide(4), Layout(4, 2, 2, zero=3)),
]


def test_as_much_is_held_as_is_predicted():
    [found] = launch(_counted, HELD, ranks=1, timeout=280)
    for (job, layout), (counted, _) in zip(HELD, found):
        said = layout_memory(job, layout)
        print(layout, f"{said.total / counted.total - 1:+.2%}")
        assert said.total == pytest.approx(counted.total, rel=0.05)
        assert (said.parameters, said.gradients) == (counted.parameters, counted.gradients)
        assert said.optimizer_state == pytest.approx(counted.optimizer_state, rel=0.01)


def test_the_sizes_have_the_parameters_of_their_names():
    for name, (job, layout) in SIZES.items():
        assert layout_memory(job, replace(layout, dp=1, tp=1, pp=1, virtual=1)).parameters == (
            pytest.approx(4e9 * int(name[:-1]), rel=0.05))
        assert (layout, job.micro_batch) in set(legal(job, Cluster(layout.ranks)))


def test_megatrons_states_have_the_bytes_of_its_guide():
    job, layout = wide(4), Layout(4, 2, 2)
    n = layout_memory(job, layout).parameters / 4
    for precision, bytes_of, sharded in (("bf16", 18, 6 + 12 / 4), ("fp16", 20, 4 + 16 / 4),
                                         ("fp32", 16, 8 + 8 / 4)):
        for zero, right in ((0, bytes_of), (1, sharded), (3, bytes_of / 4)):
            held = megatron_memory(replace(job, precision=precision), replace(layout, zero=zero))
            states = held.parameters + held.gradients + held.optimizer_state
            assert states / n == pytest.approx(right)


def test_what_was_trained_fits_where_it_was_trained_by_megatrons_memory_alone():
    found = {name: tuple(memory(job, layout).total / 1e9
                         for memory in (layout_memory, megatron_memory))
             for name, (job, layout, _) in PUBLISHED.items()}
    assert found == {"BLOOM 176B": pytest.approx((90, 50), abs=1),  # 60 GB were measured
                     "GLM-130B": pytest.approx((66, 24), abs=1),
                     "Llama 3 405B": pytest.approx((311, 85), abs=1)}


@pytest.mark.parametrize("size", [
    *(pytest.param(name, marks=pytest.mark.sweep) for name in ("10b", "100b")),
    pytest.param("130b", marks=pytest.mark.slow)])
def test_large_models_hold_and_send_what_is_predicted(size):
    job, layout = SIZES[size]
    counted, sent = dry_run.dry_run(job, layout)
    assert layout_memory(job, layout).total == pytest.approx(counted.total, rel=0.01)
    assert counted.total < Cluster(layout.ranks).memory_budget
    for axis, nbytes in layout_traffic(job, layout).items():
        assert nbytes == pytest.approx(sent[axis], rel=1e-6, abs=64)


def test_the_report(monkeypatch):
    job, layout = SIZES["130b"]
    found = layout_memory(job, layout), layout_traffic(job, layout)
    monkeypatch.setattr(dry_run, "dry_run", lambda *_: found)
    text = dry_run.dry_run_report("130b")
    assert "130b on 128 GPUs: dp 1 x tp 8 x pp 16 sp, 2048 micro-batches" in text
    assert "It fits in the 78 GB" in text and max(map(len, text.splitlines())) <= 100


# --- how long it takes ----------------------------------------------------------------------------

def test_the_narrowest_level_that_a_group_crosses_counts_with_all_its_cards():
    cluster = Cluster(64, links=((8, 300.0), (32, 50.0), (64, 1.0)))
    mesh = Mesh({"pipeline": 2, "data": 4, "tensor": 8})
    assert [cluster.bandwidth(mesh, axis) for axis in mesh.axes] == [1.0, 50.0, 300.0]
    mesh = Mesh({"data": 16, "pipeline": 2, "tensor": 2})
    # two of a data group in each node, eight in each rack
    assert [cluster.bandwidth(mesh, axis) for axis in mesh.axes] == [8.0, 300.0, 300.0]
    assert cluster.bandwidth(Mesh({"pipeline": 2, "tensor": 3}), "tensor") == 300.0  # six in all
    assert cluster.bandwidth(Mesh({"pipeline": 4, "tensor": 3}), "tensor") == 50.0  # 6, 7 and 8


def test_the_parts_of_a_step():
    job, layout = SIZES["100b"]
    found = layout_seconds(job, layout, Cluster(64))
    assert found.total == pytest.approx(sum(found))
    faster = layout_seconds(job, layout, Cluster(64, hardware.H100))
    assert faster.computing == pytest.approx(found.computing * 312 / 989.4)
    assert (faster.tensor, faster.data) == (found.tensor, found.data)
    plain = layout_seconds(job, replace(layout, virtual=1), Cluster(64))
    assert plain.bubble == pytest.approx(2 * found.bubble)
    kept = layout_seconds(job, replace(layout, recompute=False), Cluster(64))
    assert kept.computing == pytest.approx(found.computing * 3 / 4, rel=0.01)


# --- which to take --------------------------------------------------------------------------------

@pytest.mark.parametrize("size, used", [("10b", 0.6), ("100b", 0.43), ("130b", 0.5)])
def test_the_sizes_layouts_are_about_as_fast_as_the_best(size, used):
    job, layout = SIZES[size]
    cluster = Cluster(layout.ranks)
    best, micro_batch = choose_layout(job, cluster)
    least = layout_seconds(replace(job, micro_batch=micro_batch), best, cluster).total
    seconds = layout_seconds(job, layout, cluster).total
    assert least <= seconds <= 1.05 * least
    speed = job.batch * job.config.n_ctx / seconds
    assert mfu(job.config, speed, cluster.gpu.bf16_flops, layout.ranks) > used


def test_the_best_of_all():
    job, cluster = SMALL, Cluster(8, hardware.A10, links=((4, 100e9), (8, 1e9)))
    layout, micro_batch = choose_layout(job, cluster)
    trials = [(replace(job, micro_batch=size), each) for each, size in legal(job, cluster)]
    assert len(set(trials)) == len(trials)
    best = min(layout_seconds(*trial, cluster).total for trial in trials)
    assert layout_seconds(replace(job, micro_batch=micro_batch), layout, cluster).total == best
    assert all(each.tp in (1, 2, 4) and each.ranks == 8 for _, each in trials)


def test_slow_links_turn_the_mesh():
    # Two sites: what crosses them is the axis that sends least.
    job = SIZES["10b"][0]
    cluster = Cluster(16, hardware.A100, links=((8, 300e9), (16, 0.1e9)))
    layout, _ = choose_layout(job, cluster)
    assert layout.pp > 1 and layout.mesh.axes["tensor"] <= 8


def test_tokens_that_tensor_ranks_do_not_divide_are_a_sentence():
    job = replace(SMALL, config=replace(SMALL.config, n_ctx=18))
    refuse_misfits(Layout(tp=4), job, 4)
    with pytest.raises(ValueError, match="tp=4 must divide the 18 tokens of a sequence"):
        refuse_misfits(Layout(tp=4, sequence_parallel=True), job, 4)


def test_what_does_not_fit_is_a_sentence():
    with pytest.raises(ValueError) as error:
        choose_layout(SIZES["130b"][0], Cluster(8))
    assert "no layout fits in the 78.0 GB of a GPU: the smallest" in str(error.value)
    with pytest.raises(ValueError) as error:
        choose_layout(replace(SMALL, batch=3), Cluster(8, links=((1, 1e9), (8, 1e9))))
    assert "no layout of 8 GPUs is legal" in str(error.value)
