"""Lab 04's hooks in torch's own DDP: what is kept for later, and the numbers of torch's hooks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from ranklab import device, launch
from ranklab.checks.ddp.hooks import COUNT, Given, steps_in_ddp
from ranklab.ddp import PowerSGD, TopK, top_k_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


def gradient(rank, step):
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(100 * step + rank))


def through_ddp(state, hook, steps=4, dtype=torch.float32, gradient=gradient, **options):
    """[(the gradient that a rank ends with, [Call of each bucket]) of each step]."""
    inputs = [gradient(dist.get_rank(), step).to(dtype) for step in range(steps)]
    return steps_in_ddp(state, hook, Given().to(dtype), inputs, **options)


def mean_of(step, ranks):
    return sum(gradient(rank, step) for rank in range(ranks)) / ranks


def _top_k(fraction, bucket_cap_bytes):
    state = TopK(fraction)
    seen = through_ddp(state, TopK.hook, bucket_cap_bytes=bucket_cap_bytes)
    sent = [sum(op.sent_bytes for call in calls for op in call.ops) for _, calls in seen]
    kept = torch.cat([state.errors[p].flatten() for p in state.errors]).cpu()
    return torch.stack([gradient for gradient, _ in seen]), sent, kept


@pytest.mark.parametrize("bucket_cap_bytes", [180, 2**20])
def test_top_k_loses_nothing_and_sends_8_bytes_an_entry(bucket_cap_bytes, ranks=3):
    seen = launch(_top_k, 0.05, bucket_cap_bytes, ranks=ranks)
    entries = top_k_bytes(Given().weights, 0.05) // 8
    missing = sum(mean_of(step, ranks) for step in range(4)) - seen[0][0].sum(0)
    assert sum(kept.sum() for *_, kept in seen).item() / ranks == pytest.approx(
        missing.sum().item(), abs=1e-4)  # what has not arrived is kept, whatever DDP's buckets
    for results, sent, kept in seen:
        assert torch.equal(results, seen[0][0]) and len(kept) == COUNT
        assert sent == [(ranks - 1) * entries * 8] * 4
        assert (results != 0).sum(1).max() <= ranks * entries


def _without_feedback():
    state, power = TopK(0.01, error_feedback=False), PowerSGD(2, error_feedback=False)
    through_ddp(state, TopK.hook, 2)
    through_ddp(power, PowerSGD.hook, 2)
    return len(state.errors), len(power.errors)


def test_without_feedback_no_error_is_kept():
    assert launch(_without_feedback, ranks=2) == [(0, 0)] * 2


def _beside_torch(r):
    """The largest difference to torch's hook in each step, from the same first q."""
    theirs = powerSGD_hook.PowerSGDState(None, r, start_powerSGD_iter=2)

    def hook(ours, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if ours.step == 2:  # draws as torch does, one matrix after the other
            torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
            for parameter in bucket.parameters():
                if ours._is_worth_it(parameter):
                    drawn = torch.randn(1, parameter[0].numel(), r)[0]
                    ours.qs[parameter] = drawn.to(device())
        return ours.hook(bucket)

    both = ((theirs, powerSGD_hook.powerSGD_hook), (PowerSGD(r, start=2), hook))
    seen = [through_ddp(state, hook, 6, bucket_cap_bytes=2**20) for state, hook in both]
    return [(a - b).abs().max().item() for (a, _), (b, _) in zip(*seen)]


@pytest.mark.parametrize("ranks, r", [(1, 1), (3, 2)])
def test_power_sgd_gives_the_numbers_of_torchs(ranks, r):
    for differences in launch(_beside_torch, r, ranks=ranks):
        assert len(differences) == 6 and max(differences) < 2e-4, differences


def _half_precision():
    return [through_ddp(*hook, 1, torch.bfloat16)[0][0]
            for hook in ((TopK(1.0), TopK.hook), (PowerSGD(1), PowerSGD.hook))]


def test_gradients_in_bfloat16_pass_too():
    for top, power in launch(_half_precision, ranks=2):
        assert top.dtype == power.dtype == torch.bfloat16
        assert (top - mean_of(0, 2)).abs().max() < 0.05
        assert (power - mean_of(0, 2))[-45:].abs().max() < 0.05  # no matrix: it goes as it is


@pytest.mark.parametrize("make, sentence", [
    (lambda: TopK(0), "fraction=0 must be above 0 and at most 1"),
    (lambda: TopK(1.5), "fraction=1.5 must be above 0"),
    (lambda: PowerSGD(0), "rank=0 must be at least 1"),
])
def test_bad_input_is_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
