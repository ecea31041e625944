"""Lab 09's pipeline: every schedule on real ranks, equal to one process, with counted messages."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ranklab import device, launch
from ranklab.meter import Traffic
from ranklab.models.gpt import GPT, IGNORE, GPTConfig
from ranklab.pipeline_parallel import (
    Action, PipelineExecutor, Span, bubble_fraction, dualpipe_v, gpipe_schedule,
    in_flight_activations, interleaved_schedule, one_f_one_b_schedule, parse_schedule,
    pipedream_schedule, simulate, split_stages, stale_weights, zb_v_schedule, zero_bubble_schedule,
)
from ranklab.pipeline_parallel.deferred import WeightQueue
from ranklab.pipeline_parallel.emulated import SleepingStage
from ranklab.pipeline_parallel.stages import gpt_costs, stage_of
from ranklab.pipeline_parallel.stashing import PipeDreamExecutor
from ranklab.pipeline_parallel.training import PipelineParallel
from ranklab.text_trainer import TextTrainer, TrainConfig

pytestmark = pytest.mark.timeout(120)

CONFIG = GPTConfig(vocab_size=37, n_ctx=8, n_embd=16, n_head=4, n_layer=6)
SCHEDULES = {
    "GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule, "ZB-H1": zero_bubble_schedule,
    "interleaved": functools.partial(interleaved_schedule, virtual=2), "ZB-V": zb_v_schedule,
    "DualPipe": dualpipe_v,
}


def new_gpt(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**vars(CONFIG), **changes})).to(device())


def batches(rows=15, steps=2):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randint(37, (rows, 8), generator=generator)
        y = x.roll(-1, 1).clone()
        y[:, -1], y[2, :5] = IGNORE, IGNORE  # pieces have unequal numbers of targets
        yield x.to(device()), y.to(device())


# --- equal to one process -------------------------------------------------------------------------

def _train(schedule, ranks=None, recompute=False, autocast=False, micro_batch=2):
    """The largest difference of a loss or gradient from one process; and the peak of what is kept.
    """
    group = dist.new_group(ranks) if ranks else None
    if ranks and dist.get_rank() not in ranks:
        return 0.0, 0
    one, model, worst, peak = new_gpt(), new_gpt(), 0.0, 0
    for block in model.blocks.values() if recompute else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    class Watched(PipelineExecutor):
        def forward(self, action):
            nonlocal peak
            super().forward(action)
            peak = max(peak, len(self.kept))

    parallel = PipelineParallel(group, schedule, executor=Watched)
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
        share = parallel.forward_backward(loss_sum, x, y, micro_batch)
        worst = max(worst, abs(parallel.total(share) - loss).item())
        whole = dict(one.named_parameters())
        for name, p in model.named_parameters():
            right = whole[model.tied.get(name, name)].grad
            worst = max(worst, (p.grad - right).abs().max().item())
        ones.step()
        ours.step()
    return worst, peak


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_to_one_process(name):
    for ranks in (1, 2, 4) if name == "interleaved" else (1, 2, 3, 4):  # it wants whole rounds
        found = launch(_train, SCHEDULES[name], ranks=ranks, timeout=90)
        assert max(worst for worst, _ in found) < 1e-5


def test_illegal_shapes_are_a_sentence_on_every_rank():
    def train():
        with pytest.raises(ValueError) as error:
            _train(SCHEDULES["interleaved"])
        return str(error.value)

    assert launch(train, ranks=3) == ["micro_batches=8 must be a multiple of ranks=3 for the "
                                      "interleaved schedule"] * 3


@pytest.mark.parametrize("options", [{"recompute": True}, {"ranks": [0, 2, 3]}], ids=str)
def test_with_checkpointing_and_in_a_group(options):
    for name in ("1F1B", "ZB-V"):
        found = launch(functools.partial(_train, SCHEDULES[name], **options), ranks=4)
        assert 0 < max(worst for worst, _ in found) < 1e-5


def test_in_mixed_precision():
    for name in ("1F1B", "ZB-H1"):
        found = launch(functools.partial(_train, SCHEDULES[name], autocast=True), ranks=2)
        assert max(worst for worst, _ in found) < 0.01  # gradients of bf16, added in another order


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_keeps_more_than_the_schedule_says(name):
    schedule = SCHEDULES[name]
    found = launch(_train, schedule, ranks=2)
    said = in_flight_activations(schedule(2, 8))
    assert all(peak <= most for (_, peak), most in zip(found, said))
    if "ZB" not in name and name != "DualPipe":  # W holds less than a whole activation here
        assert [peak for _, peak in found] == said


def test_runs_as_on_gpus():
    def both():
        return max(_train(one_f_one_b_schedule)[0], _train(zb_v_schedule)[0])

    assert max(launch(both, ranks=2, rehearse="gpu")) < 1e-5


# --- messages -------------------------------------------------------------------------------------

def _counted(schedule):
    model = new_gpt()
    parallel = PipelineParallel(schedule=schedule)
    parallel.apply(model)
    x, y = next(batches(16))
    with Traffic() as traffic:
        parallel.forward_backward(lambda x, y: model(x, y, "sum"), x, y, 2)
    return traffic.calls["send"], traffic.sent_bytes


def test_messages_are_counted():
    piece, tied = 2 * 8 * 16 * 4, 37 * 16 * 4
    assert launch(_counted, one_f_one_b_schedule, ranks=3) == [
        (8 + 1, 8 * piece + tied), (16, 16 * piece), (8 + 1, 8 * piece + tied)]
    # a V has its first and its last stage on one rank: nothing is tied over ranks
    assert launch(_counted, zb_v_schedule, ranks=2) == [(16, 16 * piece)] * 2
    interleaved = launch(_counted, SCHEDULES["interleaved"], ranks=2)
    assert [sent for sent, _ in interleaved] == [8 * 3 + 1] * 2  # of four stages


# --- schedules that are wrong ---------------------------------------------------------------------

def _refused(schedule, stage=lambda x, y: x):
    executor = PipelineExecutor({dist.get_rank(): stage}, 1,
                                lambda x: torch.empty(2, device=device()))
    x = torch.ones(2, device=device())
    with pytest.raises(ValueError) as error:
        executor.run(schedule, [(x, x)])
    return str(error.value)


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


# --- stages ---------------------------------------------------------------------------------------

def test_stages_are_balanced():
    assert split_stages([1] * 6, 3) == [range(0, 2), range(2, 4), range(4, 6)]
    assert split_stages([0, 4, 4, 4, 4, 8], 3) == [range(0, 3), range(3, 5), range(5, 6)]
    costs = gpt_costs(GPTConfig(n_layer=6, n_embd=64, vocab_size=4096))  # a head of four blocks
    parts = split_stages(costs, 4)
    assert [layer for part in parts for layer in part] == list(range(8))
    assert max(sum(costs[i] for i in part) for part in parts) == costs[-1]
    for stages in (0, 9):
        with pytest.raises(ValueError, match=f"stages={stages} must be between 1 and the 8 layers"):
            split_stages(costs, stages)


# --- time -----------------------------------------------------------------------------------------

def _emulated(schedule, seconds):
    """Spans of a real run whose stages sleep."""
    rank, queue = dist.get_rank(), WeightQueue()
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    mine = {action.stage for action in schedule[rank]}
    work = [seconds] * 3
    executor = PipelineExecutor(
        {stage: SleepingStage(*work, queue, stage == stages - 1) for stage in mine}, stages - 1,
        lambda x: torch.empty_like(x), weight_queue=queue)
    x = torch.ones(1, device=device())
    micro_batches = 1 + max(action.micro_batch for actions in schedule for action in actions)
    dist.barrier()
    executor.run(schedule, [(x, x)] * micro_batches)
    return executor.spans


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "interleaved", "ZB-V"])
def test_the_measured_bubble_is_that_of_the_simulation(name):
    schedule = SCHEDULES[name](4, 8)
    said = bubble_fraction(simulate(schedule))
    off = []
    for seconds in (0.02, 0.05, 0.1, 0.2):  # a busy machine wakes a sleeping rank late
        found = launch(_emulated, schedule, seconds, ranks=4)
        spans = [span for of_rank in found for span in of_rank]
        assert all(isinstance(span, Span) for span in spans)
        off.append(abs(bubble_fraction(spans) - said))
        if off[-1] < 0.05:
            return
    raise AssertionError(f"bubble {said:.3f}; measured it is off by {off}")


# --- PipeDream ------------------------------------------------------------------------------------

LR, PIECES = 0.05, 6


def _pipedream(stash):
    """Losses are those of stale_weights' versions; returns the weights of this rank's stage."""
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device())
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # two ranks, two matrices
    rank, P = dist.get_rank(), dist.get_world_size()
    module = stage_of(model, split_stages(gpt_costs(CONFIG), P)[rank])
    optimizer = torch.optim.SGD(module.parameters(), LR)
    executor = PipeDreamExecutor({rank: module}, lambda stage: optimizer.step(), P - 1,
                                 lambda x: torch.empty(*x.shape, 16, device=device()), stash=stash)
    schedule = pipedream_schedule(P, PIECES)
    x, y = next(batches(2 * PIECES, 1))
    executor.run(schedule, list(zip(x.split(2), y.split(2))), weight=1 / 14)
    said = stale_weights(schedule, stash)
    assert executor.used == {action: said[action] for action in schedule[rank]}
    return {name: p.detach() for name, p in module.named_parameters()}


def test_pipedream_uses_the_versions_that_it_says():
    """With stashed weights, beside one process that takes the same old versions."""
    P = 3
    torch.manual_seed(0)
    model = GPT(CONFIG)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    stages = [stage_of(model, part) for part in split_stages(gpt_costs(CONFIG), P)]
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
    for s, weights in enumerate(launch(_pipedream, True, ranks=P)):
        for name, tensor in weights.items():
            assert torch.allclose(tensor, history[s][-1][name], atol=1e-5), name


def test_without_a_stash_the_weights_are_others():
    with_stash, without = (launch(_pipedream, stash, ranks=3) for stash in (True, False))
    assert any((with_stash[0][name] - p).abs().max() > 1e-6 for name, p in without[0].items())


# --- the training loop ----------------------------------------------------------------------------

def _trained(text, parallel, until=None, resume=False, folder=None, **options):
    torch.manual_seed(0)
    config = TrainConfig(steps=6, batch=8, micro_batch=2, log_every=1, clip=0.3, warmup=2,
                         eval_batch=8, checkpoint=folder)
    model = GPT(GPTConfig(vocab_size=text.vocab_size, n_ctx=16, n_embd=32, n_head=4, n_layer=4))
    trainer = TextTrainer(model, text, config, device(), progress=False,
                          parallel=parallel and parallel(**options))
    if resume:
        trainer.resume()
    history = trainer.fit(until)
    return history.loss + list(history.held_out.values())


def test_the_training_loop_goes_on_with_another_number_of_stages(tmp_path):
    from ranklab.data import python_text

    text, folder = python_text(), str(tmp_path)
    alone, = launch(_trained, text, None, ranks=1)
    start = functools.partial(_trained, text, PipelineParallel, 3, folder=folder)
    for losses in launch(functools.partial(start, schedule=zero_bubble_schedule), ranks=4):
        assert losses == pytest.approx(alone[:3], abs=2e-5)
    go_on = functools.partial(_trained, text, PipelineParallel, resume=True, folder=folder,
                              schedule=SCHEDULES["interleaved"])
    for losses in launch(go_on, ranks=2):
        assert losses == pytest.approx(alone[3:], abs=2e-5)
