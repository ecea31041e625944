"""Lab 12's costs of a layout: as predicted, so counted; and the layouts that follow from them."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from ranklab import launch
from ranklab.hybrid import (
    Job, Layout, layout_memory, layout_traffic, parse_layout,
)
from ranklab.hybrid.counted import dry_run_on_one_rank
from ranklab.hybrid.legal import legal
from ranklab.models.gpt import GPTConfig
from ranklab.planner import choose_layout, memory_per_gpu, model_of, plan_of, step_time
from ranklab.planner.machine import machine
from ranklab.projects.hybrid.config import JOBS, SIZES

A100 = machine("A100")
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
        found.append(dry_run_on_one_rank(job, layout))
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


@pytest.mark.parametrize("cases", [HELD[2:3], pytest.param(HELD[:2] + HELD[3:],
                                                           marks=pytest.mark.sweep)])
def test_as_much_is_held_as_is_predicted(cases):
    [found] = launch(_counted, cases, ranks=1, timeout=280)
    for case, (counted, _) in zip(cases, found):
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
        assert (layout, job.micro_batch) in set(legal(job, layout.ranks, A100.node))


# --- what the planner is asked --------------------------------------------------------------------

@pytest.mark.parametrize("layout", [
    *(layout for _, layout in HELD), *map(parse_layout, ("2x1x4,gpipe,sp", "1x1x4,zb-h1,recompute",
                                                         "2x1x2,full,cp=2"))])
def test_the_planner_counts_the_same_memory(layout):
    job = wide(8, micro_batch=2)
    plan = plan_of(job, layout)
    assert (plan.gpus, plan.batch) == (layout.ranks, job.batch)
    held = memory_per_gpu(model_of(job.config), plan, A100)
    assert held.reading("allocated") == layout_memory(job, layout).total


def test_the_planner_has_no_float32_products():
    with pytest.raises(ValueError, match="precision='fp32' is not the planner's"):
        plan_of(wide(8, precision="fp32"), Layout())


@pytest.mark.parametrize("size", LARGE)
def test_the_sizes_layouts_are_about_as_fast_as_the_best(size):
    def planned(layout, micro_batch):
        case = model_of(job.config), plan_of(replace(job, micro_batch=micro_batch), layout), A100
        assert memory_per_gpu(*case).total <= A100.memory_bytes
        return step_time(*case).total

    job, layout = JOBS[size], SIZES[size][2]
    least = planned(*choose_layout(job, layout.ranks, A100))
    assert least <= planned(layout, job.micro_batch) <= 1.15 * least


def test_where_no_layout_is_legal_that_is_a_sentence():
    with pytest.raises(ValueError, match="no layout of 8 GPUs is legal"):
        choose_layout(replace(SMALL, batch=3), 8, replace(A100, node=1))
