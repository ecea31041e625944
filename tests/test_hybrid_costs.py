"""Lab 12's costs of a layout: as predicted, so counted; and the layouts that follow from them."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from ranklab import hardware, launch
from ranklab.hybrid import (
    Cluster, Job, Layout, choose_layout, layout_memory, layout_seconds, layout_traffic,
    megatron_memory, parse_layout,
)
from ranklab.hybrid.choose import legal
from ranklab.hybrid.counted import dry_run_here
from ranklab.mesh import Mesh
from ranklab.models.gpt import GPTConfig
from ranklab.projects.hybrid.config import JOBS, SIZES

LARGE = [name for name in SIZES if name not in ("laptop", "mixtral")]

pytestmark = pytest.mark.timeout(300)


def wide(n_layer, **changes):
    return Job(GPTConfig(50304, 2048, n_layer, 32, 4096), 64, **changes)


def _counted(cases):
    """Several dry runs in one process."""
    found = []
    for job, layout in cases:
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=1)
        found.append(dry_run_here(job, layout))
    return found


# --- as predicted, so counted ---------------------------------------------------------------------

SMALL = Job(GPTConfig(256, 16, 6, 8, 32), 32, 2, "fp32")
SENT = [(SMALL, parse_layout(words)) for words in """
    2x2x2,full 1x4x2,sp,virtual=2 2x1x4,zb-v 2x2x2,recompute,virtual=2 8x1x1,full,recompute
    1x1x8 4x1x2,gpipe,zero 2x1x1,cp=4 1x2x2,cp=2,recompute 2x1x2,full,cp=2
    2x2x2,sp,recompute,outermost=data""".split()]
BF16 = [(replace(SMALL, precision="bf16"), layout) for _, layout in SENT[-2:]]


@pytest.mark.parametrize("cases", [
    SENT[:3] + BF16[:1], pytest.param(SENT[3:] + BF16[1:], marks=pytest.mark.sweep)])
def test_every_layout_sends_what_is_predicted(cases):
    [found] = launch(_counted, cases, ranks=1, timeout=280)
    for case, (_, sent) in zip(cases, found):
        assert layout_traffic(*case) == pytest.approx(sent, abs=64), case


HELD = [
    (wide(4, micro_batch=4), Layout(1, 8, 2, sequence_parallel=True, recompute=True)),
    (wide(2, micro_batch=4, precision="fp32"), Layout(1, 8, 2, recompute=True)),
    (wide(3), Layout(16)), (wide(8), Layout(2, 8, 2, virtual=2, zero=1)),
    (wide(4), Layout(4, 2, 2, zero=3)),
]


def test_as_much_is_held_as_is_predicted():
    [found] = launch(_counted, HELD, ranks=1, timeout=280)
    for case, (counted, _) in zip(HELD, found):
        said = layout_memory(*case)
        assert said.total == pytest.approx(counted.total, rel=0.05), case
        assert (said.parameters, said.gradients) == (counted.parameters, counted.gradients)
        assert said.optimizer_state == pytest.approx(counted.optimizer_state, rel=0.01)


# --- what is published ----------------------------------------------------------------------------

def test_the_sizes_have_the_parameters_of_their_names():
    for name in LARGE:
        job, layout = JOBS[name], SIZES[name][2]
        assert layout_memory(job, Layout()).parameters == (
            pytest.approx(4e9 * int(name[:-1]), rel=0.05))
        assert (layout, job.micro_batch) in set(legal(job, Cluster(layout.ranks)))


def test_megatrons_states_have_the_bytes_of_its_guide():
    job, layout = wide(4), Layout(4, 2, 2)
    n = layout_memory(job, layout).parameters / 4
    for precision, zero, right in (("bf16", 0, 18), ("bf16", 1, 6 + 12 / 4), ("bf16", 3, 18 / 4),
                                   ("fp16", 1, 4 + 16 / 4), ("fp32", 1, 8 + 8 / 4)):
        held = megatron_memory(replace(job, precision=precision), replace(layout, zero=zero))
        states = held.parameters + held.gradients + held.optimizer_state
        assert states / n == pytest.approx(right)


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
    job, layout = JOBS["100b"], SIZES["100b"][2]
    found = layout_seconds(job, layout, Cluster(64))
    faster = layout_seconds(job, layout, Cluster(64, hardware.H100))
    assert faster.computing == pytest.approx(found.computing * 312 / 989.4)
    assert faster.weights == pytest.approx(found.weights * 2039 / 3350)
    assert (faster.tensor, faster.data) == (found.tensor, found.data)
    plain = layout_seconds(job, replace(layout, virtual=1), Cluster(64))
    assert plain.bubble == pytest.approx(2 * found.bubble)
    kept = layout_seconds(job, replace(layout, recompute=False), Cluster(64))
    assert kept.computing == pytest.approx(found.computing * 3 / 4, rel=0.01)
    larger = layout_seconds(replace(job, micro_batch=4), layout, Cluster(64))
    assert larger.weights == pytest.approx(found.weights / 2)


@pytest.mark.parametrize("size", LARGE)
def test_the_sizes_layouts_are_about_as_fast_as_the_best(size):
    job, layout = JOBS[size], SIZES[size][2]
    cluster = Cluster(layout.ranks)
    best, micro_batch = choose_layout(job, cluster)
    least = layout_seconds(replace(job, micro_batch=micro_batch), best, cluster).total
    assert least <= layout_seconds(job, layout, cluster).total <= 1.05 * least


def test_where_no_layout_is_legal_that_is_a_sentence():
    with pytest.raises(ValueError, match="no layout of 8 GPUs is legal"):
        choose_layout(replace(SMALL, batch=3), Cluster(8, links=((1, 1e9), (8, 1e9))))
