"""Lab 04: mistakes that a good student would really make.

The first line of each docstring is a pattern that the check's output must hold.
"""

from statistics import mean, median

import torch
import torch.distributed as dist

from ranklab.ddp import exposed_communication, steps_of

Future = torch.futures.Future[torch.Tensor]

# --- scaling_efficiency ---------------------------------------------------------------------------


def _refuse_other_kinds(kind):
    if kind not in ("strong", "weak"):
        raise ValueError(kind)


def scaling_efficiency__speed_up(seconds, kind):
    """That is the speed-up"""
    _refuse_other_kinds(kind)
    base = min(seconds)
    return {ranks: seconds[base] / seconds[ranks] for ranks in seconds}


def scaling_efficiency__needs_one_rank(seconds, kind):
    """take the fewest ranks there are"""
    _refuse_other_kinds(kind)
    return {R: seconds[1] / s / (R if kind == "strong" else 1) for R, s in seconds.items()}


def scaling_efficiency__base_is_one_rank(seconds, kind):
    """not 1/R of it"""
    _refuse_other_kinds(kind)
    base = min(seconds)
    return {R: seconds[base] / s / (R if kind == "strong" else 1) for R, s in seconds.items()}


def scaling_efficiency__strong_for_both(seconds, kind):
    """That is strong scaling"""
    _refuse_other_kinds(kind)
    base = min(seconds)
    return {R: base * seconds[base] / (R * s) for R, s in seconds.items()}


def scaling_efficiency__upside_down(seconds, kind):
    """Upside down"""
    base = min(seconds)
    return {R: (R / base if kind == "strong" else 1) * s / seconds[base]
            for R, s in seconds.items()}


def scaling_efficiency__any_kind(seconds, kind):
    """kind='string' is accepted"""
    base = min(seconds)
    return {R: (base / R if kind == "strong" else 1) * seconds[base] / s
            for R, s in seconds.items()}


def scaling_efficiency__per_cent(seconds, kind):
    """Return the fraction"""
    _refuse_other_kinds(kind)
    base = min(seconds)
    return {R: 100 * (base / R if kind == "strong" else 1) * seconds[base] / s
            for R, s in seconds.items()}


# --- exposed_communication ------------------------------------------------------------------------


def _minus(kind, events, hiding=("compute",), lanes=None):
    """The seconds of each event of `kind`, less the overlap with each that hides it."""
    total = 0.0
    for event in events:
        if event.kind == kind:
            total += event.end - event.start
            total -= sum(max(0, min(e.end, event.end) - max(e.start, event.start))
                         for e in events if e.kind in hiding and e.lane in (lanes or [e.lane]))
    return total


def exposed_communication__all_of_it(events, kind="communication"):
    """That is all of it"""
    return sum(e.end - e.start for e in events if e.kind == kind)


def exposed_communication__difference_of_sums(events, kind="communication"):
    """The difference of two sums"""
    both = [sum(e.end - e.start for e in events if e.kind == k) for k in (kind, "compute")]
    return max(0.0, both[0] - both[1])


def exposed_communication__pair_by_pair(events, kind="communication"):
    """Too much|Too little"""
    return _minus(kind, events)


def exposed_communication__waiting_hides(events, kind="communication"):
    """Waiting and loading are no computing"""
    edges = sorted((t, change, e.kind) for e in events
                   for t, change in ((e.start, 1), (e.end, -1)))
    moving, busy, exposed, before = 0, 0, 0.0, 0.0
    for t, change, what in edges:
        exposed += (t - before) * (moving > 0 and busy == 0)
        before = t
        moving, busy = moving + change * (what == kind), busy + change * (what != kind)
    return exposed


def exposed_communication__only_the_main_lane(events, kind="communication"):
    """Computing on other lanes"""
    kept = [e for e in events if e.kind != "compute" or e.lane == "main"]
    return _sweep(kept, kind)


def exposed_communication__flags_not_counts(events, kind="communication"):
    """A kernel that ends inside a longer one|keep count"""
    edges = sorted((t, change, e.kind) for e in events
                   for t, change in ((e.start, 1), (e.end, -1)))
    running, exposed, before = {}, 0.0, 0.0
    for t, change, what in edges:
        if running.get(kind) and not running.get("compute"):
            exposed += t - before
        running[what], before = change > 0, t
    return exposed


def exposed_communication__overwrites_kind(events, kind="communication"):
    """do not call the loop's variable kind"""
    edges = sorted((t, change, e.kind) for e in events
                   for t, change in ((e.start, 1), (e.end, -1)))
    running, exposed, before = {kind: 0, "compute": 0}, 0.0, 0.0
    for t, change, kind in edges:
        if running[kind] and not running["compute"]:
            exposed += t - before
        before = t
        running[kind] += change
    return exposed


def exposed_communication__counts_every_kind(events, kind="communication"):
    """Other kinds are not counted"""
    edges = sorted((t, change, e.kind) for e in events
                   for t, change in ((e.start, 1), (e.end, -1)))
    running, exposed, before = {kind: 0, "compute": 0}, 0.0, 0.0
    for t, change, what in edges:
        if running[kind] and not running["compute"]:
            exposed += t - before
        before = t
        running[what] += change
    return exposed


def exposed_communication__one_kind_only(events, kind="communication"):
    """`kind` says which events"""
    return _sweep(events, "communication")


def _sweep(events, kind):
    edges = sorted((t, change, e.kind) for e in events
                   for t, change in ((e.start, 1), (e.end, -1)))
    running, exposed, before = {kind: 0, "compute": 0}, 0.0, 0.0
    for t, change, what in edges:
        if running[kind] and not running["compute"]:
            exposed += t - before
        before = t
        if what in running:
            running[what] += change
    return exposed


# --- compress_fp16_hook ---------------------------------------------------------------------------


def compress_fp16_hook__divides_after_the_sum(group, bucket: dist.GradBucket) -> Future:
    """Divide by the number of ranks before the all-reduce"""
    buffer, R = bucket.buffer(), dist.get_world_size(group)
    future = dist.all_reduce(buffer.half(), group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]).div_(R))


def compress_fp16_hook__casts_before_it_divides(group, bucket: dist.GradBucket) -> Future:
    """100,000 is infinite in float16: divide before the cast"""
    buffer = bucket.buffer()
    halves = buffer.half() / dist.get_world_size(group)
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__blocks(group, bucket: dist.GradBucket) -> Future:
    """backward stands still until the network is done"""
    buffer = bucket.buffer()
    halves = buffer.div(dist.get_world_size(group)).half()
    dist.all_reduce(halves, group=group)
    future = torch.futures.Future()
    future.set_result(buffer.copy_(halves))
    return future


def compress_fp16_hook__waits_for_its_future(group, bucket: dist.GradBucket) -> Future:
    """backward stands still until the network is done"""
    buffer = bucket.buffer()
    halves = buffer.div(dist.get_world_size(group)).half()
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    future.wait()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__sum(group, bucket: dist.GradBucket) -> Future:
    """the sum, not the mean"""
    buffer = bucket.buffer()
    future = dist.all_reduce(buffer.half(), group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__divides_twice(group, bucket: dist.GradBucket) -> Future:
    """Once is the mean"""
    buffer, R = bucket.buffer(), dist.get_world_size(group)
    halves = buffer.div(R).half()
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]).div_(R))


def compress_fp16_hook__no_way_back(group, bucket: dist.GradBucket) -> Future:
    """Does the result get back"""
    buffer = bucket.buffer()
    halves = buffer.div_(dist.get_world_size(group)).half()
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer)


def compress_fp16_hook__rounded_but_not_compressed(group, bucket: dist.GradBucket) -> Future:
    """Cast before the all-reduce"""
    buffer = bucket.buffer()
    rounded = buffer.div_(dist.get_world_size(group)).half().float()
    future = dist.all_reduce(rounded, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__bfloat16(group, bucket: dist.GradBucket) -> Future:
    """bfloat16's precision"""
    buffer = bucket.buffer()
    halves = buffer.div_(dist.get_world_size(group)).bfloat16()
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__forgets_the_group(group, bucket: dist.GradBucket) -> Future:
    """The hook's first argument is the group"""
    buffer = bucket.buffer()
    halves = buffer.div_(dist.get_world_size()).half()
    future = dist.all_reduce(halves, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__another_name(group, gradients):
    """must be called bucket"""
    buffer = gradients.buffer()
    future = dist.all_reduce(buffer.half(), group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__returns_the_tensor(group, bucket: dist.GradBucket):
    """DDP wants a future"""
    buffer = bucket.buffer()
    halves = buffer.div_(dist.get_world_size(group)).half()
    dist.all_reduce(halves, group=group)
    return buffer.copy_(halves)


def compress_fp16_hook__without_then(group, bucket: dist.GradBucket) -> Future:
    """Does the result get back"""
    halves = bucket.buffer().div_(dist.get_world_size(group)).half()
    return dist.all_reduce(halves, group=group, async_op=True).get_future()


# --- top_k_compress -------------------------------------------------------------------------------


def _split(chosen, wanted, gradient, k):
    """(values, indices, error) when `chosen` says what is large."""
    indices = chosen.topk(min(k, wanted.numel())).indices
    left = wanted.clone()
    left[indices] = 0
    return wanted[indices], indices, left.view(gradient.shape)


def top_k_compress__without_abs(gradient, error, k):
    """Largest in size"""
    wanted = (gradient + error).flatten()
    return _split(wanted, wanted, gradient, k)


def top_k_compress__chooses_by_the_gradient(gradient, error, k):
    """Add the error first"""
    return _split(gradient.flatten().abs(), (gradient + error).flatten(), gradient, k)


def top_k_compress__values_lose_their_sign(gradient, error, k):
    """the values lost their sign"""
    wanted = (gradient + error).flatten()
    values, indices = wanted.abs().topk(min(k, wanted.numel()))
    left = wanted.clone()
    left[indices] = 0
    return values, indices, left.view(gradient.shape)


def top_k_compress__keeps_what_it_sends(gradient, error, k):
    """What is sent must not be kept"""
    wanted = gradient + error
    values, indices, _ = _split(wanted.flatten().abs(), wanted.flatten(), gradient, k)
    return values, indices, wanted


def top_k_compress__drops_what_it_keeps(gradient, error, k):
    """what is not sent must be kept"""
    wanted = (gradient + error).flatten()
    values, indices, left = _split(wanted.abs(), wanted, gradient, k)
    return values, indices, torch.zeros_like(left)


def top_k_compress__loses_the_old_error(gradient, error, k):
    """The old error is lost"""
    wanted = (gradient + error).flatten()
    values, indices, _ = _split(wanted.abs(), wanted, gradient, k)
    sent = torch.zeros_like(wanted)
    sent[indices] = values
    return values, indices, gradient - sent.view(gradient.shape)


def top_k_compress__in_place(gradient, error, k):
    """`gradient` itself is changed"""
    wanted = gradient.add_(error).flatten()
    return _split(wanted.abs(), wanted, gradient, k)


def top_k_compress__does_not_flatten(gradient, error, k):
    """flatten"""
    wanted = gradient + error
    indices = wanted.abs().topk(k).indices
    values = wanted.gather(-1, indices)
    return values, indices, wanted.scatter(-1, indices, 0)


def top_k_compress__more_than_there_are(gradient, error, k):
    """never more than there are"""
    wanted = (gradient + error).flatten()
    indices = wanted.abs().topk(k).indices
    left = wanted.clone()
    left[indices] = 0
    return wanted[indices], indices, left.view(gradient.shape)


def top_k_compress__flat_error(gradient, error, k):
    """The error has the gradient's shape"""
    wanted = (gradient + error).flatten()
    values, indices, left = _split(wanted.abs(), wanted, gradient, k)
    return values, indices, left.flatten()


# --- power_sgd ------------------------------------------------------------------------------------


def _power(matrix, q, error, group, orthonormal=lambda p: torch.linalg.qr(p).Q, sum_p=True,
           sum_q=True):
    """(wanted, p, q)."""
    wanted = matrix + error
    p = wanted @ q
    if sum_p:
        dist.all_reduce(p, group=group)
    p = orthonormal(p)
    q = wanted.mT @ p
    if sum_q:
        dist.all_reduce(q, group=group)
        q /= dist.get_world_size(group)
    return wanted, p, q


def power_sgd__p_is_not_summed(matrix, q, error, group=None):
    """Both p and q must be all-reduced"""
    wanted, p, q = _power(matrix, q, error, group, sum_p=False)
    return p @ q.mT, q, wanted - p @ q.mT


def power_sgd__q_is_not_summed(matrix, q, error, group=None):
    """Both p and q must be all-reduced"""
    wanted, p, q = _power(matrix, q, error, group, sum_q=False)
    return p @ q.mT, q, wanted - p @ q.mT


def power_sgd__not_orthonormal(matrix, q, error, group=None):
    """The columns of p must be orthonormal"""
    wanted, p, q = _power(matrix, q, error, group, orthonormal=lambda p: p)
    return p @ q.mT, q, wanted - p @ q.mT


def power_sgd__orthonormal_before_the_sum(matrix, q, error, group=None):
    """after its all-reduce|torch.linalg.qr"""
    wanted = matrix + error
    p = torch.linalg.qr(wanted @ q).Q
    dist.all_reduce(p, group=group)
    q = wanted.mT @ p
    dist.all_reduce(q, group=group)
    q /= dist.get_world_size(group)
    return p @ q.mT, q, wanted - p @ q.mT


def power_sgd__sum(matrix, q, error, group=None):
    """It is the sum over ranks"""
    wanted, p, q = _power(matrix, q, error, group)
    R = dist.get_world_size(group)
    return R * p @ q.mT, q, wanted - p @ q.mT


def power_sgd__forgets_the_error(matrix, q, error, group=None):
    """compress matrix \\+ error"""
    wanted, p, q = _power(matrix, q, 0 * error, group)
    return p @ q.mT, q, wanted - p @ q.mT


def power_sgd__loses_the_old_error(matrix, q, error, group=None):
    """The old error is lost"""
    wanted, p, q = _power(matrix, q, error, group)
    return p @ q.mT, q, matrix - p @ q.mT


def power_sgd__keeps_no_error(matrix, q, error, group=None):
    """keep what the approximation leaves out"""
    wanted, p, q = _power(matrix, q, error, group)
    return p @ q.mT, q, torch.zeros_like(error)


def power_sgd__cold_start(matrix, q, error, group=None):
    """Return the new q"""
    wanted, p, q_next = _power(matrix, q, error, group)
    return p @ q_next.mT, q, wanted - p @ q_next.mT


def power_sgd__sends_the_matrix(matrix, q, error, group=None):
    """The matrix itself travels"""
    wanted = matrix + error
    average = wanted.clone()
    dist.all_reduce(average, group=group)
    average /= dist.get_world_size(group)
    p = torch.linalg.qr(average @ q).Q
    q = average.mT @ p
    return p @ q.mT, q, wanted - p @ q.mT


def power_sgd__compresses_nothing(matrix, q, error, group=None):
    """nothing was compressed"""
    average = matrix + error
    dist.all_reduce(average, group=group)
    average /= dist.get_world_size(group)
    return average, q, matrix + error - average


def power_sgd__gram_schmidt_divides(matrix, q, error, group=None):
    """not finite"""

    def gram_schmidt(p):
        columns = []
        for column in p.mT:
            for other in columns:
                column = column - (other @ column) * other
            columns.append(column / column.norm())
        return torch.stack(columns, dim=1)

    wanted, p, q = _power(matrix, q, error, group, orthonormal=gram_schmidt)
    return p @ q.mT, q, wanted - p @ q.mT


def power_sgd__in_place(matrix, q, error, group=None):
    """`matrix` itself is changed"""
    matrix += error
    _, p, q = _power(matrix, q, 0 * error, group)
    return p @ q.mT, q, matrix - p @ q.mT


def power_sgd__turns_all_dimensions(matrix, q, error, group=None):
    """.mT transposes each matrix"""
    wanted = matrix + error
    p = wanted @ q
    dist.all_reduce(p, group=group)
    p = torch.linalg.qr(p).Q
    q = wanted.T @ p
    dist.all_reduce(q, group=group)
    q /= dist.get_world_size(group)
    return p @ q.T, q, wanted - p @ q.T


def power_sgd__forgets_the_group(matrix, q, error, group=None):
    """in the group of"""
    wanted, p, q = _power(matrix, q, error, None)
    return p @ q.mT, q, wanted - p @ q.mT


# --- diagnose -------------------------------------------------------------------------------------


def _diagnose(timelines, exposed=exposed_communication, least=min, middle=median, limit=0.25,
              stalled=lambda step: exposed_communication(step, kind="loader"), loads_count=True,
              length=lambda step: max(e.end for e in step) - min(e.start for e in step)):
    steps = [steps_of(events) for events in timelines]

    def usual(measure):
        return [middle([measure(step) for step in of_rank]) for of_rank in steps]

    duration, loading, bare = max(usual(length)), usual(stalled), usual(exposed)
    computing = usual(lambda step: sum(e.end - e.start for e in step if e.kind == "compute"))
    working = [c + loads_count * stall for c, stall in zip(computing, loading)]
    others = (sum(working) - max(working)) / max(len(working) - 1, 1)
    shares = {"loader-bound": sum(loading) / len(loading) / duration,
              "communication-bound": least(bare) / duration,
              "straggler": (max(working) - others) / duration if len(working) > 1 else 0.0}
    verdict = max(shares, key=shares.get)
    return (verdict if shares[verdict] >= limit else "healthy"), shares


def diagnose__most_exposed(timelines):
    """Ranks that are ready early only wait"""
    return _diagnose(timelines, least=max)


def diagnose__mean_exposed(timelines):
    """Ranks that are ready early only wait"""
    return _diagnose(timelines, least=mean)


def diagnose__all_communication(timelines):
    """what no computing hides"""
    return _diagnose(timelines, exposed=lambda step: sum(
        e.end - e.start for e in step if e.kind == "communication"))


def diagnose__never_healthy(timelines):
    """Below a quarter there is no culprit"""
    return _diagnose(timelines, limit=0)


def diagnose__mean_of_the_steps(timelines):
    """its median step"""
    return _diagnose(timelines, middle=mean)


def diagnose__worst_step(timelines):
    """its median step"""
    return _diagnose(timelines, middle=max)


def diagnose__seconds(timelines):
    """Shares, not seconds"""
    return _diagnose(timelines, length=lambda step: 1.0, limit=0.015)


def diagnose__of_the_whole_run(timelines):
    """the length of all of them"""
    span = max(e.end for t in timelines for e in t) - min(e.start for t in timelines for e in t)
    return _diagnose(timelines, length=lambda step: span)


def diagnose__loading_is_no_work(timelines):
    """A rank works when it computes or loads"""
    return _diagnose(timelines, loads_count=False)


def diagnose__against_everybody(timelines):
    """the mean of the \\*other\\* ranks"""
    verdict, shares = _diagnose(timelines)
    share = (len(timelines) - 1) / len(timelines)
    return verdict, {**shares, "straggler": share * shares["straggler"]}


def diagnose__needs_others(timelines):
    """With one rank there are no others"""
    1 / (len(timelines) - 1)
    return _diagnose(timelines)


def diagnose__verdict_alone(timelines):
    """a verdict and its shares"""
    return _diagnose(timelines)[0]
