"""Lab 04: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

from statistics import fmean, median
import numpy as np
import torch
import torch.distributed as dist
from ranklab.ddp import steps_of


def _refuse(seconds, kind):
    if kind not in ("strong", "weak"):
        raise ValueError(f"kind={kind!r} is neither 'strong' nor 'weak'")
    if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
        raise ValueError(f"ranks and seconds must be positive, and there at all: {seconds}")


def scaling_efficiency__loop(seconds, kind):
    """A loop over sorted ranks, with the speed-up and the speed-up that was paid for."""
    _refuse(seconds, kind)
    base = min(seconds)
    efficiency = {}
    for ranks in sorted(seconds):
        speed_up = seconds[base] / seconds[ranks]
        efficiency[ranks] = speed_up / (ranks / base) if kind == "strong" else speed_up
    return efficiency


def scaling_efficiency__numpy(seconds, kind):
    """Vectors of ranks and seconds."""
    _refuse(seconds, kind)
    ranks, took = np.array(sorted(seconds.items()), dtype=float).T
    perfect = took[0] * (ranks[0] / ranks if kind == "strong" else np.ones(len(ranks)))
    return dict(zip(sorted(seconds), (perfect / took).tolist()))


def exposed_communication__counts(events, kind="communication"):
    """Walks along the edges, with a count of open events of each kind."""
    edges = []
    for event in events:
        edges += [(event.start, 1, event.kind), (event.end, -1, event.kind)]
    open_, exposed, last = {"compute": 0, kind: 0}, 0.0, 0.0
    for time, change, of in sorted(edges):
        if open_[kind] and not open_["compute"]:
            exposed += time - last
        last = time
        if of in open_:
            open_[of] += change
    return exposed


def exposed_communication__union_less_computing(events, kind="communication"):
    """The length of the union of both kinds, minus that of computing."""

    def length(*kinds):
        total, reached = 0.0, float("-inf")
        for start, end in sorted((e.start, e.end) for e in events if e.kind in kinds):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total

    return length(kind, "compute") - length("compute")


def _checked_steps(timelines):
    steps = [steps_of(events) for events in timelines]
    if not steps or not all(steps):
        raise ValueError(f"steps found on each rank: {[len(rank_steps) for rank_steps in steps]}; "
                         "a diagnosis needs one or more everywhere")
    return steps


def diagnose__statistics(timelines):
    """Lists and the module statistics; loading is counted where nothing is computed."""
    steps = _checked_steps(timelines)
    exposed = exposed_communication__union_less_computing

    def medians(measure):
        return [median(measure(step) for step in rank_steps) for rank_steps in steps]

    duration = max(medians(lambda step: max(e.end for e in step) - min(e.start for e in step)))
    loading = medians(lambda step: exposed(step, "loader"))
    network = medians(exposed)
    busy = medians(lambda step: exposed(step, "loader") + sum(
        e.end - e.start for e in step if e.kind == "compute"))
    busiest = busy.pop(busy.index(max(busy)))
    shares = {"loader-bound": fmean(loading) / duration,
              "communication-bound": min(network) / duration,
              "straggler": (busiest - fmean(busy)) / duration if busy else 0.0}
    verdict = max(shares, key=shares.get)
    return verdict if shares[verdict] >= 0.25 else "healthy", shares


def diagnose__numpy(timelines):
    """An array (ranks, measures); computing and loading are both sums of e.end - e.start."""

    def of_step(step):
        seconds = dict.fromkeys(("compute", "loader"), 0.0)
        for e in step:
            if e.kind in seconds:
                seconds[e.kind] += e.end - e.start
        return (max(e.end for e in step) - min(e.start for e in step),
                exposed_communication__counts(step, "loader"),
                exposed_communication__counts(step), sum(seconds.values()))

    table = np.array([np.median([of_step(step) for step in rank_steps], axis=0)
                      for rank_steps in _checked_steps(timelines)])
    duration, loading, network, busy = table.T
    R = len(table)
    others = (busy.sum() - busy.max()) / (R - 1) if R > 1 else busy.max()
    shares = dict(zip(("loader-bound", "communication-bound", "straggler"), (
        np.array([loading.mean(), network.min(), busy.max() - others]) / duration.max()).tolist()))
    share, verdict = max((share, name) for name, share in shares.items())
    return ("healthy" if share < 0.25 else verdict), shares


def compress_fp16_hook__copied_back(
        group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Copies the sum back into the bucket's own buffer."""
    buffer = bucket.buffer()
    half = (buffer / dist.get_world_size(group)).to(torch.float16)
    future = dist.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__new_tensor(
        group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Divides in place; the future holds a new float32 tensor."""
    half = bucket.buffer().div_(dist.get_world_size(group)).half()

    def widened(future):
        (summed,) = future.value()
        return summed.float()

    return dist.all_reduce(half, group=group, async_op=True).get_future().then(widened)


def top_k_compress__topk(gradient, error, k):
    """torch.topk of the sizes; the places are set to 0 in a copy."""
    rest = (gradient + error).flatten().clone()
    _, indices = rest.abs().topk(min(k, rest.numel()))
    values = rest[indices]
    rest[indices] = 0
    return values, indices, rest.view(gradient.shape)


def top_k_compress__sort(gradient, error, k):
    """A whole sort, and a mask of what is sent."""
    total = gradient + error
    flat = total.reshape(-1)
    indices = torch.argsort(flat.abs(), descending=True)[:k]
    sent = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
    sent[indices] = True
    return flat[indices], indices, total.masked_fill(sent.reshape(total.shape), 0)


def power_sgd__qr(matrix, q, error, group=None):
    """Means of P and Q, and torch's QR."""
    target, R = matrix + error, dist.get_world_size(group)
    p = (target @ q / R).contiguous()
    dist.all_reduce(p, group=group)
    p = torch.linalg.qr(p).Q
    q = (target.mT @ p / R).contiguous()
    dist.all_reduce(q, group=group)
    near = p @ q.mT
    return near, q, target - near


def power_sgd__svd(matrix, q, error, group=None):
    """Einsums, and the left singular vectors as the orthonormal columns."""
    target = matrix + error
    p = torch.einsum("...nm,...mr->...nr", target, q).clone(memory_format=torch.contiguous_format)
    dist.all_reduce(p, group=group)
    p = torch.linalg.svd(p, full_matrices=False).U
    new_q = torch.einsum("...nm,...nr->...mr", target, p).clone(
        memory_format=torch.contiguous_format)
    dist.all_reduce(new_q, group=group)
    new_q /= dist.get_world_size(group)
    approximation = torch.einsum("...nr,...mr->...nm", p, new_q)
    return approximation, new_q, target - approximation
