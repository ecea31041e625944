"""Lab 09's pipeline on a GPT is equal to one process. The checks prove executor and schedules."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ranklab import device, launch
from ranklab.basics.targets import IGNORE
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.pipeline_parallel import (
    Action, PipelineExecutor, dualpipe_v, gpipe_schedule, interleaved_schedule,
    one_f_one_b_schedule, parse_schedule, pipedream_schedule, split_stages, stale_weights,
    zb_v_schedule, zero_bubble_schedule,
)
from ranklab.pipeline_parallel.pipedream import PipeDreamExecutor
from ranklab.pipeline_parallel.stages import GPTStage, gpt_costs
from ranklab.pipeline_parallel.training import PipelineParallel

pytestmark = pytest.mark.timeout(120)

CONFIG = GPTConfig(vocab_size=37, n_ctx=8, n_embd=16, n_head=4, n_layer=6)
SCHEDULES = {
    "GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule, "ZB-H1": zero_bubble_schedule,
    "interleaved": functools.partial(interleaved_schedule, virtual=2), "ZB-V": zb_v_schedule,
    "DualPipe": dualpipe_v,
}


def new_gpt(tied=True):
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device())
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def batches(rows=15, steps=2):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randint(37, (rows, 8), generator=generator)
        y = x.roll(-1, 1).clone()
        y[:, -1], y[2, :5] = IGNORE, IGNORE  # pieces have unequal numbers of targets
        yield x.to(device()), y.to(device())


# --- equal to one process -------------------------------------------------------------------------

def _train(schedule, members=None, recompute=False, autocast=False):
    """The largest difference of a loss or gradient from one process."""
    group = dist.new_group(members) if members else None
    if members and dist.get_rank() not in members:
        return 0.0
    one, model, worst = new_gpt(), new_gpt(), 0.0
    for block in model.blocks.values() if recompute else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    parallel = PipelineParallel(group, schedule)
    parallel.apply(model)
    ones, ours = (torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (one, model))

    def loss_sum(x, y, of=model):
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
            return of(x, y, "sum")

    for x, y in batches():
        ones.zero_grad()
        ours.zero_grad()
        loss = loss_sum(x, y, one) / (y != IGNORE).sum()
        loss.backward()
        share = parallel.forward_backward(loss_sum, x, y, micro_batch=2)
        worst = max(worst, abs(parallel.total(share) - loss).item())
        whole = dict(one.named_parameters())
        for name, p in model.named_parameters():
            right = whole[model.tied.get(name, name)].grad
            worst = max(worst, (p.grad - right).abs().max().item())
        ones.step()
        ours.step()
    return worst


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_equal_to_one_process(ranks):
    names = [name for name in SCHEDULES if name != "interleaved" or ranks != 3]  # whole rounds
    found = launch(lambda: [_train(SCHEDULES[name]) for name in names], ranks=ranks, timeout=90)
    for name, apart in zip(names, zip(*found)):
        assert max(apart) < 1e-5, name


@pytest.mark.parametrize("name, ranks, options, most", [
    ("1F1B", 4, {"recompute": True}, 1e-5), ("ZB-V", 4, {"members": [0, 2, 3]}, 1e-5),
    # gradients of bf16, added in another order
    ("1F1B", 2, {"autocast": True}, 0.01), ("ZB-H1", 2, {"autocast": True}, 0.01)], ids=str)
def test_with_checkpointing_in_a_group_and_in_mixed_precision(name, ranks, options, most):
    found = launch(functools.partial(_train, SCHEDULES[name], **options), ranks=ranks)
    assert 0 < max(found) < most


# --- schedules that are wrong ---------------------------------------------------------------------

def _refused(schedule, stage=lambda x, y: x):
    executor = PipelineExecutor({dist.get_rank(): stage}, 1,
                                lambda x: torch.empty(2, device=device()))
    x = torch.ones(2, device=device())
    return str(pytest.raises(ValueError, executor.run, schedule, [(x, x)]).value)


def test_a_deadlock_is_a_sentence_and_nobody_waits():
    found = launch(_refused, parse_schedule("B0 F0\nF0 B0"), ranks=2)
    assert found == ["no rank can go on: rank 0 waits for F0.0 and B1.0 to do B0.0; "
                     "rank 1 waits for F0.0 to do F1.0"] * 2


def test_another_shape_is_a_sentence():
    def of_rank_0():
        if dist.get_rank() == 0:
            return _refused(parse_schedule("F0\n"), lambda x, y: x[:1])

    assert launch(of_rank_0, ranks=2)[0] == ("stage 0 gives (1,) for micro-batch 0, but (2,) is "
                                             "expected")


# --- PipeDream ------------------------------------------------------------------------------------

LR, PIECES, P = 0.05, 6, 3


def _pipedream(stash):
    """The versions are those of stale_weights; returns the weights of this rank's stage."""
    model, rank = new_gpt(tied=False), dist.get_rank()  # two ranks, two matrices
    module = GPTStage(model, split_stages(gpt_costs(CONFIG), P)[rank])
    optimizer = torch.optim.SGD(module.parameters(), LR)
    executor = PipeDreamExecutor({rank: module}, lambda stage: optimizer.step(), P - 1,
                                 lambda x: torch.empty(*x.shape, 16, device=device()), stash=stash)
    schedule = pipedream_schedule(P, PIECES)
    x, y = next(batches(2 * PIECES, 1))
    executor.run(schedule, list(zip(x.split(2), y.split(2))), weight=1 / 14)
    said = stale_weights(schedule, stash)
    assert executor.versions == {action: said[action] for action in schedule[rank]}
    return {name: p.detach() for name, p in module.named_parameters()}


def test_pipedream_uses_the_versions_that_it_says():
    """With stashed weights, beside one process that takes the same old versions."""
    model = new_gpt(tied=False)
    stages = [GPTStage(model, part) for part in split_stages(gpt_costs(CONFIG), P)]
    history = [[{n: p.detach().clone() for n, p in stage.named_parameters()}] for stage in stages]
    said = stale_weights(pipedream_schedule(P, PIECES))
    x, y = next(batches(2 * PIECES, 1))
    for m, (hidden, targets) in enumerate(zip(x.split(2), y.split(2))):
        used = [{n: p.clone().requires_grad_() for n, p in
                 history[s][said[Action("F", s, m)]].items()} for s in range(P)]
        for stage, weights in zip(stages, used):
            hidden = functional_call(stage, weights, (hidden, targets, "sum"))
        (hidden / 14).backward()
        for s in range(P):
            history[s].append({n: p - LR * used[s][n].grad for n, p in history[s][-1].items()})
    with_stash, without = (launch(_pipedream, stash, ranks=P) for stash in (True, False))
    for s, weights in enumerate(with_stash):
        for name, tensor in weights.items():
            assert torch.allclose(tensor, history[s][-1][name], atol=1e-5), name
    assert any((with_stash[0][name] - p).abs().max() > 1e-6 for name, p in without[0].items())
