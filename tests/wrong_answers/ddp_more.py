"""Lab 04: mistakes that earlier checks let through: the border of a quarter, several buckets.

The first line of each docstring is a pattern that the check's output must hold.
"""

from statistics import median

import torch
import torch.distributed as dist

from ranklab.ddp import exposed_communication, steps_of

Future = torch.futures.Future[torch.Tensor]
KEPT = {}


def _diagnose(timelines, is_culprit):
    """Right but for `is_culprit`, which says of a share whether it is large enough."""
    steps = [steps_of(events) for events in timelines]
    if not steps or not all(steps):
        raise ValueError("no steps")

    def usual(measure):
        return [median(measure(step) for step in of_rank) for of_rank in steps]

    duration = max(usual(lambda step: max(e.end for e in step) - min(e.start for e in step)))
    loading = usual(lambda step: exposed_communication(step, kind="loader"))
    exposed = usual(exposed_communication)
    computing = usual(lambda step: sum(e.end - e.start for e in step if e.kind == "compute"))
    working = sorted(a + b for a, b in zip(computing, loading))
    others = sum(working[:-1]) / max(len(working) - 1, 1)
    shares = {"loader-bound": sum(loading) / len(loading) / duration,
              "communication-bound": min(exposed) / duration,
              "straggler": (working[-1] - others) / duration if len(working) > 1 else 0.0}
    verdict = max(shares, key=shares.get)
    return (verdict if is_culprit(verdict, shares[verdict]) else "healthy"), shares


def diagnose__more_than_a_quarter(timelines):
    """from a quarter on"""
    return _diagnose(timelines, lambda name, share: share > 0.25)


def diagnose__rounded_shares(timelines):
    """Below a quarter there is no culprit"""
    return _diagnose(timelines, lambda name, share: round(share, 2) >= 0.25)


def diagnose__another_border_for_loaders(timelines):
    """Below a quarter there is no culprit"""
    return _diagnose(timelines, lambda name, share: share >= (0.2 if name[0] == "l" else 0.25))


def diagnose__another_border_for_stragglers(timelines):
    """from a quarter on"""
    return _diagnose(timelines, lambda name, share: share >= (0.3 if name[0] == "s" else 0.25))


def compress_fp16_hook__halves_kept_by_size(group, bucket: dist.GradBucket) -> Future:
    """travel in the same memory"""
    buffer = bucket.buffer()
    halves = KEPT.setdefault(buffer.numel(), torch.empty_like(buffer, dtype=torch.float16))
    halves.copy_(buffer.div_(dist.get_world_size(group)))
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__only_the_last_bucket(group, bucket: dist.GradBucket) -> Future:
    """calls the hook for each"""
    buffer = bucket.buffer()
    if not bucket.is_last():
        future = torch.futures.Future()
        future.set_result(buffer)
        return future
    halves = buffer.div_(dist.get_world_size(group)).half()
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def power_sgd__always_in_float32(matrix, q, error, group=None):
    """Keep the matrix's dtype"""
    wanted = (matrix + error).float()
    p = wanted @ q.float()
    dist.all_reduce(p, group=group)
    p = torch.linalg.qr(p).Q
    q = wanted.mT @ p
    dist.all_reduce(q, group=group)
    q /= dist.get_world_size(group)
    return p @ q.mT, q, wanted - p @ q.mT
