"""Lab 04: right answers that differ from the library's. Each must pass."""

import math
from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist

from ranklab.ddp import exposed_communication, finished, top_k_bytes
from ranklab.ddp.steps import steps_of


def scaling_efficiency__share_of_the_perfect_time(seconds, kind):
    if kind not in {"strong", "weak"} or not all(R > 0 and s > 0 for R, s in seconds.items()):
        raise ValueError(f"kind={kind!r}, {seconds}")
    if len(seconds) == 0:
        raise ValueError("no measurements")
    ordered = sorted(seconds.items())
    fewest, longest = ordered[0]
    shares = {}
    for R, measured in ordered:
        perfect = longest * Fraction(fewest, R) if kind == "strong" else longest
        shares[R] = float(perfect) / measured
    return shares


def scaling_efficiency__per_rank(seconds, kind):
    """Work per second and rank; the numbers are numpy's."""
    if kind not in ("strong", "weak") or not seconds or min(*seconds, *seconds.values()) <= 0:
        raise ValueError(f"{seconds}, {kind}")
    ranks = np.array(sorted(seconds))
    times = np.array([seconds[int(R)] for R in ranks])
    work = 1 / ranks if kind == "strong" else np.ones(len(ranks))
    speed = work / times
    return dict(zip(ranks.tolist(), speed / speed[0]))


def exposed_communication__unions(events, kind="communication"):
    """The length of both unions, less that of the computing."""
    def length(kinds):
        total, end = 0.0, float("-inf")
        for e in sorted((e for e in events if e.kind in kinds), key=lambda e: e.start):
            total += max(0.0, e.end - max(e.start, end))
            end = max(end, e.end)
        return total

    return length({kind, "compute"}) - length({"compute"})


def exposed_communication__cuts_holes(events, kind="communication"):
    """Spans of `kind`, out of which each kernel cuts a hole."""
    spans = []
    for start, end in sorted((e.start, e.end) for e in events if e.kind == kind):
        if spans and start <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([start, end])
    for e in events:
        if e.kind == "compute":
            spans = [part for start, end in spans
                     for part in ([start, min(end, e.start)], [max(start, e.end), end])
                     if part[0] < part[1]]
    return sum(end - start for start, end in spans)


def exposed_communication__stack_of_moments(events, kind="communication"):
    """Ends come before starts, and what runs is a list of kinds."""
    moments = [(e.start, 1, e.kind) for e in events] + [(e.end, 0, e.kind) for e in events]
    runs, parts, since = [], [], None
    for time, begins, what in sorted(moments):
        if since is not None:
            parts.append(time - since)
            since = None
        if begins:
            runs.append(what)
        else:
            runs.remove(what)
        if kind in runs and "compute" not in runs:
            since = time
    return math.fsum(parts)


def diagnose__step_by_step(timelines):
    table = []
    for events in timelines:
        rows = []
        for step in steps_of(events):
            length = max(e.end for e in step) - min(e.start for e in step)
            computing = sum(e.end - e.start for e in step if e.kind == "compute")
            rows.append((length, exposed_communication(step, "loader"),
                         exposed_communication(step), computing))
        if not rows:
            raise ValueError("a rank without a step")
        table.append([sorted(column)[len(rows) // 2] for column in zip(*rows)])
    if not table:
        raise ValueError("no ranks")
    lengths, loading, exposed, computing = np.array(table).T
    work, R = np.sort(computing + loading), len(table)
    shares = {"straggler": work[-1] - work[:-1].mean() if R > 1 else 0.0,
              "loader-bound": loading.mean(), "communication-bound": exposed.min()}
    shares = {name: float(share / lengths.max()) for name, share in shares.items()}
    name = sorted(shares, key=lambda each: shares[each])[-1]
    return name if shares[name] >= 0.25 else "healthy", shares


def diagnose__gain_over_the_mean(timelines):
    """The busiest less the others' mean is R/(R-1) of the busiest less the mean of all."""
    steps = list(map(steps_of, timelines))
    if not steps or [] in steps:
        raise ValueError("no steps")

    def of_ranks(measure):
        return torch.tensor([np.median([measure(step) for step in each]) for each in steps],
                            dtype=torch.float64)

    R = len(steps)
    step = of_ranks(lambda s: max(e.end for e in s) - min(e.start for e in s)).max()
    loading = of_ranks(lambda s: exposed_communication(s, kind="loader")) / step
    work = loading + of_ranks(lambda s: sum((e.kind == "compute") * (e.end - e.start)
                                            for e in s)) / step
    shares = {
        "loader-bound": loading.mean().item(),
        "communication-bound": (of_ranks(exposed_communication) / step).min().item(),
        "straggler": ((work.max() - work.mean()) * R / (R - 1)).item() if R > 1 else 0.0,
    }
    most = max(shares.values())
    if most < 0.25:
        return "healthy", shares
    return [name for name, share in shares.items() if share == most][0], shares


def top_k_compress__sorts(gradient, error, k):
    whole = (gradient + error).reshape(-1)
    order = whole.abs().argsort(descending=True, stable=True)[:k]
    rest = whole.clone()
    rest.index_fill_(0, order, 0)
    return whole[order], order, rest.reshape(gradient.shape)


def top_k_compress__a_mask(gradient, error, k):
    """In the order of places, which are int32."""
    whole = gradient + error
    flat = whole.flatten()
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[torch.topk(flat.abs(), min(k, len(flat)), sorted=False).indices] = True
    left = torch.where(mask.view(whole.shape), 0, whole)
    return flat[mask], mask.nonzero().squeeze(1).int(), left


def top_k_compress__subtracts(gradient, error, k):
    whole = torch.add(gradient, error)
    n = whole.numel()
    _, places = whole.reshape(n).square().topk(k if k < n else n)
    values = whole.reshape(n).gather(0, places)
    sent = torch.zeros(n, dtype=whole.dtype).scatter_(0, places, values)
    return values, places, whole - sent.view_as(whole)


def power_sgd__projects_by_svd(matrix, q, error, group=None):
    """Means and not sums; another orthonormal basis."""
    R = dist.get_world_size(group)
    target = torch.add(matrix, error)
    p = torch.matmul(target, q) / R
    dist.all_reduce(p, group=group)
    basis = torch.linalg.svd(p, full_matrices=False).U
    q = torch.einsum("...nm,...nr->...mr", target, basis).contiguous() / R
    dist.all_reduce(q, group=group, async_op=True).wait()
    near = basis @ q.transpose(-1, -2)
    return near, q, target.sub(near)


def power_sgd__on_its_side(matrix, q, error, group=None):
    """With p and q transposed, as rows."""
    target = (matrix + error).mT
    p = (q.mT @ target).contiguous()
    dist.all_reduce(p, dist.ReduceOp.SUM, group)
    p = torch.linalg.qr(p.mT)[0].mT
    rows = (p @ target.mT).contiguous()
    dist.all_reduce(rows, dist.ReduceOp.SUM, group)
    rows = rows * (1 / dist.get_world_size(group))
    near = torch.einsum("...rn,...rm->...nm", p, rows)
    return near, rows.mT, (target.mT - near).clone()


def compress_fp16_hook__an_empty_future(group, bucket: dist.GradBucket):
    """Its own future, set when the sum is there; a new tensor, not the bucket's."""
    halves = bucket.buffer().mul(1 / dist.get_world_size(group)).half()
    work, future = dist.all_reduce(halves, group=group, async_op=True), torch.futures.Future()
    work.get_future().add_done_callback(lambda done: future.set_result(
        bucket.buffer().copy_(done.value()[0])))
    return future


def compress_fp16_hook__two_steps(state, bucket: dist.GradBucket):
    def widen(done):
        half, = done.value()
        return half.to(bucket.buffer().dtype)

    def back(done):
        buffer = bucket.buffer()
        buffer[:] = done.value()
        return buffer

    R = dist.get_world_size(state)
    half = (bucket.buffer() / R).to(dtype=torch.half)
    work = dist.all_reduce(half, op=dist.ReduceOp.SUM, group=state, async_op=True)
    return work.get_future().then(widen).then(back)


def place_type(n):
    return torch.int16 if n <= 2**15 else torch.int32


def compress_to_budget__one_bit_a_value(state, bucket: dist.GradBucket):
    """Places and signs in two bytes, one size for all."""
    buffer, group, parameters = bucket.buffer(), state.get("group"), bucket.parameters()
    for p in parameters:
        state.setdefault(p, torch.zeros_like(p).flatten())
    wanted = buffer + torch.cat([state[p] for p in parameters])
    kind = place_type(len(wanted))
    k = min(len(wanted), (top_k_bytes(parameters, 0.001) - 4) // kind.itemsize)
    at = wanted.abs().topk(k).indices
    size = wanted[at].abs().mean().view(1)
    code = torch.where(wanted[at] < 0, -1 - at, at).to(kind)
    mine = torch.cat([size.view(torch.uint8), code.view(torch.uint8)])
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    total = torch.zeros_like(wanted)
    for rank, each in enumerate(gathered):
        size, code = each[:4].clone().view(torch.float32), each[4:].clone().view(kind).long()
        theirs = torch.zeros_like(wanted)
        theirs[code[code >= 0]] = 1
        theirs[-1 - code[code < 0]] = -1
        total += theirs * size
        if rank == dist.get_rank(group):
            left = wanted - theirs * size
    for p, part in zip(parameters, left.split([p.numel() for p in parameters])):
        state[p] = part
    return finished(buffer.copy_(total / len(gathered)))


def compress_to_budget__without_waiting(state, bucket: dist.GradBucket):
    """Backward goes on while it travels. Six bytes an entry: values stay as they are."""
    buffer, group, parameters = bucket.buffer(), state.get("group"), bucket.parameters()
    R, errors = dist.get_world_size(group), state.setdefault("errors", {})
    for p in parameters:
        errors.setdefault(p, torch.zeros(p.numel(), device=p.device))
    wanted = buffer + torch.cat([errors[p] for p in parameters])
    kind = place_type(len(wanted))
    k = min(len(wanted), top_k_bytes(parameters, 0.001) // (4 + kind.itemsize))
    at = wanted.abs().topk(k).indices
    mine = torch.cat([wanted[at].view(torch.uint8), at.to(kind).view(torch.uint8)])
    left = wanted.index_fill(0, at, 0)
    errors.update(zip(parameters, left.split([p.numel() for p in parameters])))
    gathered = mine.repeat(R)
    work = dist.all_gather_single(gathered, mine, group=group, async_op=True)

    def unpack(_):
        buffer.zero_()
        for each in gathered.split(len(mine)):
            values, places = each[:4 * k].clone(), each[4 * k:].clone()
            buffer.index_add_(0, places.view(kind).long(), values.view(torch.float32) / R)
        return buffer

    return work.get_future().then(unpack)


def compress_to_budget__bytes(state, bucket: dist.GradBucket):
    """Three bytes an entry: the value in one, as a share of the largest."""
    buffer, group, parameters = bucket.buffer(), state.get("group"), bucket.parameters()
    R, sizes = dist.get_world_size(group), [p.numel() for p in parameters]
    wanted = buffer.clone()
    for part, p in zip(wanted.split(sizes), parameters):
        part += state.get(p, 0)
    kind = place_type(len(wanted))
    k = min(len(wanted), (top_k_bytes(parameters, 0.001) - 4) // (1 + kind.itemsize))
    at = wanted.abs().topk(k).indices
    scale = wanted[at].abs().max().view(1) / 127
    values = (wanted[at] / scale.clamp(min=1e-30)).round().to(torch.int8)
    mine = torch.cat([part.contiguous().view(torch.uint8) for part in (scale, at.to(kind), values)])
    gathered = mine.new_empty(R * len(mine))
    dist.all_gather_single(gathered, mine, group=group)
    total, cuts = torch.zeros_like(wanted), [4, kind.itemsize * k, k]
    for each in gathered.split(len(mine)):
        scale, places, values = (part.clone() for part in each.split(cuts))
        theirs = values.view(torch.int8) * scale.view(torch.float32)
        total.index_add_(0, places.view(kind).long(), theirs)
    own = mine[-k:].view(torch.int8) * mine[:4].view(torch.float32)
    left = wanted.index_add(0, at, -own)
    state.update(zip(parameters, left.split(sizes)))
    return finished(buffer.copy_(total / R))


class DiLoCo__averages_parameters:
    """Average the parameters themselves, in one flat vector, and step by hand."""

    def __init__(self, inner, every, lr=0.7, momentum=0.9, group=None):
        if not every > 0:
            raise ValueError(f"{every} local steps")
        self.inner, self.left, self.every = inner, every, every
        self.lr, self.momentum, self.group = lr, momentum, group
        self.start = self.flat()
        self.velocity = torch.zeros_like(self.start)

    def flat(self):
        return torch.nn.utils.parameters_to_vector(self.all()).detach().clone()

    def all(self):
        return [p for part in self.inner.param_groups for p in part["params"]]

    def step(self):
        self.inner.step()
        self.left -= 1
        if self.left == 0:
            self.left, now = self.every, self.flat()
            dist.all_reduce(now, group=self.group)
            moved = self.start - now / dist.get_world_size(self.group)
            self.velocity.mul_(self.momentum).add_(moved)
            self.start.sub_(self.lr * moved + self.lr * self.momentum * self.velocity)
            with torch.no_grad():
                torch.nn.utils.vector_to_parameters(self.start.clone(), self.all())


class DiLoCo__steps_the_model_back:
    """As in torchft: restore the model, give it pseudo-gradients, and step it with SGD."""

    def __init__(self, inner, every, lr=0.7, momentum=0.9, group=None):
        if every <= 0:
            raise ValueError("every")
        self.model = sum((list(part["params"]) for part in inner.param_groups), [])
        self.saved = [p.data.clone() for p in self.model]
        self.sgd = torch.optim.SGD(self.model, lr=lr, momentum=momentum, nesterov=momentum != 0)
        self.inner, self.every, self.group, self.local = inner, every, group, 0

    def step(self):
        self.inner.step()
        self.local += 1
        if self.local < self.every:
            return
        self.local = 0
        moved = torch._utils._flatten_dense_tensors(
            [old - p.data for old, p in zip(self.saved, self.model)])
        moved /= dist.get_world_size(self.group)
        dist.all_reduce(moved, group=self.group)
        parts = torch._utils._unflatten_dense_tensors(moved, self.saved)
        for p, old, part in zip(self.model, self.saved, parts):
            p.data.copy_(old)
            p.grad = part
        self.sgd.step()
        self.sgd.zero_grad()
        for p, old in zip(self.model, self.saved):
            old.copy_(p.data)


class DiLoCo__by_the_formulas:
    """The two formulas, with a velocity for each parameter, and all differences in one buffer."""

    def __init__(self, inner, every, lr=0.7, momentum=0.9, group=None):
        if every < 1:
            raise ValueError("every must be at least 1")
        self.inner, self.every, self.lr, self.momentum = inner, every, lr, momentum
        self.group, self.count = group, 0
        self.params = []
        for each in inner.param_groups:
            self.params.extend(each["params"])
        self.outer = [p.detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(p) for p in self.outer]

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.count += 1
        if self.count == self.every:
            self.count = 0
            self.outer_step()

    def outer_step(self):
        R, start = dist.get_world_size(self.group), 0
        buffer = self.params[0].new_empty(sum(p.numel() for p in self.params))
        for o, p in zip(self.outer, self.params):
            buffer[start:start + p.numel()] = (o - p).reshape(-1)
            start += p.numel()
        dist.all_reduce(buffer, group=self.group)
        start = 0
        for o, p, v in zip(self.outer, self.params, self.velocity):
            delta = buffer[start:start + p.numel()].reshape(p.shape) / R
            start += p.numel()
            v.copy_(self.momentum * v + delta)
            o.sub_(self.lr * (delta + self.momentum * v))
            p.copy_(o)
