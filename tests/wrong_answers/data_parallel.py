"""Lab 03, its functions: mistakes that a good student would really make.

The first line of each docstring is a pattern that the check's output must hold.
"""

import hashlib
import math

import torch
import torch.distributed as dist

# --- broadcast_parameters -----------------------------------------------------------------------


def broadcast_parameters__buffers_forgotten(model, src=0, group=None):
    """model.buffers\\(\\) lists them"""
    for p in model.parameters():
        dist.broadcast(p.data, group=group, group_src=src)


def broadcast_parameters__only_what_is_trained(model, src=0, group=None):
    """Frozen parameters differ between ranks too"""
    for p in model.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, group=group, group_src=src)
    for b in model.buffers():
        dist.broadcast(b, group=group, group_src=src)


def broadcast_parameters__always_rank_0(model, src=0, group=None):
    """Here src is 1, not 0|It is not its own either"""
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t.data, group=group, group_src=0)


def broadcast_parameters__the_mean(model, src=0, group=None):
    """Is there a mean, or another source"""
    for p in model.parameters():
        dist.all_reduce(p.data, group=group)
        p.data /= dist.get_world_size(group)


def broadcast_parameters__tied_ones_twice(model, src=0, group=None):
    """The tied weight travels twice"""
    every = [p.data for _, p in model.named_parameters(remove_duplicate=False)]
    for t in [*every, *model.buffers()]:
        dist.broadcast(t, group=group, group_src=src)


def broadcast_parameters__into_copies(model, src=0, group=None):
    """Nothing has changed on this rank"""
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t.detach().clone(), group=group, group_src=src)


def broadcast_parameters__new_objects(model, src=0, group=None):
    """An optimizer that exists already holds the old objects"""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            copied = p.detach().clone()
            dist.broadcast(copied, group=group, group_src=src)
            setattr(module, name, torch.nn.Parameter(copied))
    for b in model.buffers():
        dist.broadcast(b, group=group, group_src=src)


def broadcast_parameters__src_of_the_world(model, src=0, group=None):
    """group_src=src"""
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t.data, src, group=group)


def broadcast_parameters__without_the_group(model, src=0, group=None):
    """Hand `group` on to every collective"""
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t.data, src)


# --- shard_sampler ------------------------------------------------------------------------------


def _order(n, seed):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def _take(order, rank, ranks, drop_last):
    each = len(order) // ranks if drop_last else math.ceil(len(order) / ranks)
    order = (order * ranks)[: each * ranks]
    return order[rank::ranks]


def shard_sampler__epoch_forgotten(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """epoch 1 gives rank 0 the same samples"""
    return _take(_order(n, seed), rank, ranks, drop_last)


def shard_sampler__seed_forgotten(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """seed 1 gives rank 0 the same samples"""
    return _take(_order(n, epoch), rank, ranks, drop_last)


def shard_sampler__each_rank_shuffles(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """All ranks must shuffle alike"""
    return _take(_order(n, seed + epoch + rank), rank, ranks, drop_last)


def shard_sampler__not_filled_up(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """Every rank gets as many"""
    return _order(n, seed + epoch)[rank::ranks]


def shard_sampler__filled_up_once(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """more than once round"""
    order, each = _order(n, seed + epoch), n // ranks if drop_last else math.ceil(n / ranks)
    order += order[: each * ranks - n]
    return order[rank : each * ranks : ranks]


def shard_sampler__always_drops(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """rank 0 gets 2 samples; 3|n / ranks rounded up"""
    return _take(_order(n, seed + epoch), rank, ranks, True)


def shard_sampler__never_drops(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """With drop_last each rank gets n // ranks"""
    return _take(_order(n, seed + epoch), rank, ranks, False)


def shard_sampler__blocks(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """Take every ranks-th index"""
    order, each = _order(n, seed + epoch), n // ranks if drop_last else math.ceil(n / ranks)
    return (order * ranks)[rank * each : (rank + 1) * each]


def shard_sampler__global_random_state(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """make a torch.Generator\\(\\) of your own"""
    torch.manual_seed(seed + epoch)
    return _take(torch.randperm(n).tolist(), rank, ranks, drop_last)


def shard_sampler__not_shuffled(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """the same samples, in the same order"""
    return _take(list(range(n)), rank, ranks, drop_last)


def shard_sampler__a_tensor(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """Return a list of ints"""
    return torch.tensor(_take(_order(n, seed + epoch), rank, ranks, drop_last))


def shard_sampler__any_rank(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """n=10, rank 4 of 4 gives"""
    return _take(_order(n, seed + epoch), rank, ranks, drop_last)


# --- average_gradients --------------------------------------------------------------------------


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def _zeros(parameters):
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)


def average_gradients__the_sum(model, group=None):
    """is the sum, 3 times the mean"""
    _zeros(_trained(model))
    for p in _trained(model):
        dist.all_reduce(p.grad, group=group)


def average_gradients__the_weights(model, group=None):
    """Average parameter.grad, not the parameter"""
    for p in _trained(model):
        dist.all_reduce(p.data, group=group)
        p.data /= dist.get_world_size(group)


def average_gradients__none_is_skipped(model, group=None):
    """All ranks must call the same all-reduces"""
    for p in _trained(model):
        if p.grad is not None:
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)


def average_gradients__frozen_ones_too(model, group=None):
    """Skip what does not require a gradient"""
    _zeros(model.parameters())
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)


def average_gradients__of_a_copy(model, group=None):
    """is still its own"""
    _zeros(_trained(model))
    for p in _trained(model):
        mean = p.grad / dist.get_world_size(group)
        dist.all_reduce(mean, group=group)


def average_gradients__gathers_all(model, group=None):
    """Gathering everybody's gradients"""
    _zeros(_trained(model))
    for p in _trained(model):
        every = [torch.empty_like(p) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, p.grad, group=group)
        p.grad = torch.stack([g.detach() for g in every]).mean(0)


def average_gradients__divides_by_the_world(model, group=None):
    """divide by the size of the group"""
    _zeros(_trained(model))
    for p in _trained(model):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, group=group)


def average_gradients__without_the_group(model, group=None):
    """Hand `group` on to every collective"""
    _zeros(_trained(model))
    for p in _trained(model):
        p.grad /= dist.get_world_size(group)
        dist.all_reduce(p.grad)


# --- assign_buckets -----------------------------------------------------------------------------


def _buckets(parameters, cap, size=lambda p: p.nbytes, kind=lambda p: (p.dtype, p.device),
             is_full=lambda total, cap: total >= cap):
    closed, still_open = [], {}
    for p in parameters:
        bucket = still_open.setdefault(kind(p), [])
        bucket.append(p)
        if is_full(sum(map(size, bucket)), cap):
            closed.append(still_open.pop(kind(p)))
    return closed, list(still_open.values())


def _checked(cap_bytes):
    if cap_bytes < 1:
        raise ValueError(f"cap_bytes={cap_bytes} must be at least 1")


def assign_buckets__from_the_front(parameters, cap_bytes):
    """go through them in reverse"""
    return sum(_buckets(parameters, cap_bytes), [])


def assign_buckets__never_above_the_cap(parameters, cap_bytes):
    """a bucket may be larger than the cap|close the bucket if it has reached"""
    buckets, room = [], 0
    for p in reversed(list(parameters)):
        if not buckets or p.nbytes > room or p.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = cap_bytes
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets


def assign_buckets__elements_not_bytes(parameters, cap_bytes):
    """The cap is in bytes, not in elements"""
    return sum(_buckets(reversed(list(parameters)), cap_bytes, size=torch.Tensor.numel), [])


def assign_buckets__last_one_lost(parameters, cap_bytes):
    """is in no bucket"""
    return _buckets(reversed(list(parameters)), cap_bytes)[0]


def assign_buckets__types_mixed(parameters, cap_bytes):
    """holds float32 and bfloat16"""
    return sum(_buckets(reversed(list(parameters)), cap_bytes, kind=lambda p: 0), [])


def assign_buckets__more_than_the_cap(parameters, cap_bytes):
    """compare with >=, not with >"""
    ordered = reversed(list(parameters))
    return sum(_buckets(ordered, cap_bytes, is_full=lambda total, cap: total > cap), [])


def assign_buckets__a_list_is_assumed(parameters, cap_bytes):
    """a generator"""
    return sum(_buckets(parameters[::-1], cap_bytes), [])


def assign_buckets__any_cap(parameters, cap_bytes):
    """cap_bytes=0 is accepted"""
    return sum(_buckets(reversed(list(parameters)), cap_bytes), [])


def assign_buckets__an_empty_one(parameters, cap_bytes):
    """There is an empty bucket"""
    _checked(cap_bytes)
    closed, still_open = _buckets(reversed(list(parameters)), cap_bytes)
    return closed + (still_open or [[]])


def assign_buckets__reversed_too_late(parameters, cap_bytes):
    """Begin with the last parameter"""
    closed, still_open = _buckets(parameters, cap_bytes)
    return (closed + still_open)[::-1]


def assign_buckets__all_of_it_reversed_too_late(parameters, cap_bytes):
    """Begin with the last parameter"""
    closed, still_open = _buckets(parameters, cap_bytes)
    return [bucket[::-1] for bucket in (closed + still_open)[::-1]]


# --- scale_learning_rate ------------------------------------------------------------------------


def _rate(lr, k, step, warmup, start=None):
    scaled, start = lr * k, lr if start is None else start
    if step is None or step >= warmup:
        return scaled
    return start + (scaled - start) * step / warmup


def _power(rule):
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"rule={rule!r}")
    return 1 if rule == "linear" else 0.5


def scale_learning_rate__divides(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """do not divide"""
    return _rate(lr, (base_batch / batch) ** _power(rule), step, warmup)


def scale_learning_rate__rule_ignored(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """takes the square root"""
    return _rate(lr, batch / base_batch, step, warmup)


def scale_learning_rate__never_smaller(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """A smaller batch gets a smaller rate"""
    return _rate(lr, max(1, batch / base_batch) ** _power(rule), step, warmup)


def scale_learning_rate__from_zero(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """does not begin at 0 but at lr"""
    return _rate(lr, (batch / base_batch) ** _power(rule), step, warmup, start=0.0)


def scale_learning_rate__grows_on(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """it must not grow on"""
    scaled = lr * (batch / base_batch) ** _power(rule)
    return scaled if step is None or not warmup else lr + (scaled - lr) * step / warmup


def scale_learning_rate__a_step_early(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """from step 0 on"""
    step = None if step is None else step + 1
    return _rate(lr, (batch / base_batch) ** _power(rule), step, warmup)


def scale_learning_rate__any_rule(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """rule='cubic' gives"""
    return _rate(lr, (batch / base_batch) ** (0.5 if rule == "sqrt" else 1), step, warmup)


def scale_learning_rate__any_batch(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """batch=0 gives 0"""
    return _rate(lr, (batch / base_batch) ** _power(rule), step, warmup)


# --- replicas_agree -----------------------------------------------------------------------------


def _same_everywhere(number, group):
    extremes = torch.tensor([number, -number], dtype=torch.float64)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return extremes[0].item() == -extremes[1].item()


def _bytes_of(p):
    return p.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def _hash(parameters):
    digest = hashlib.blake2b(digest_size=6)
    for p in parameters:
        digest.update(_bytes_of(p))
    return int.from_bytes(digest.digest(), "big")


def replicas_agree__gathers_the_model(model, group=None):
    """make a short hash of its own weights"""
    same = True
    for p in model.parameters():
        every = [torch.empty_like(p) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, p.detach(), group=group)
        same = same and len({_hash([one]) for one in every}) == 1
    return same


def replicas_agree__a_sum(model, group=None):
    """NaN is not equal to itself"""
    return _same_everywhere(sum(p.sum().item() for p in model.parameters()), group)


def replicas_agree__a_sum_of_bytes(model, group=None):
    """A sum, a norm, a maximum do not see it"""
    return _same_everywhere(sum(sum(_bytes_of(p)) for p in model.parameters()), group)


def replicas_agree__a_sum_without_nan(model, group=None):
    """A sum does not see it"""
    total = sum(p.double().nan_to_num().sum().item() for p in model.parameters())
    return _same_everywhere(round(total, 9), group)


def replicas_agree__hashes_added_up(model, group=None):
    """not a sum of their hashes"""
    return _same_everywhere(sum(_hash([p]) % 2**40 for p in model.parameters()), group)


def replicas_agree__rounded(model, group=None):
    """a sum in floating point rounds it away"""
    total = sum((p.detach().nan_to_num() * torch.arange(1.0, p.numel() + 1).view_as(p)).sum()
                * (i + 1) for i, p in enumerate(model.parameters()))
    return _same_everywhere(total.item(), group)


def replicas_agree__trained_ones_only(model, group=None):
    """Frozen parameters are weights too"""
    return _same_everywhere(_hash(p for p in model.parameters() if p.requires_grad), group)


def replicas_agree__last_layer_only(model, group=None):
    """Look at all parameters"""
    return _same_everywhere(_hash(list(model.parameters())[-1:]), group)


def replicas_agree__buffers_too(model, group=None):
    """Only a buffer differs here, and may"""
    return _same_everywhere(_hash([*model.parameters(), *model.buffers()]), group)


def replicas_agree__own_against_the_largest(model, group=None):
    """Every rank must come to the same answer"""
    mine = _hash(model.parameters())
    largest = torch.tensor(mine)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return mine == largest.item()


def replicas_agree__a_tensor(model, group=None):
    """Return True or False"""
    mine = torch.tensor(_hash(model.parameters()))
    largest, smallest = mine.clone(), mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    return largest == smallest


def replicas_agree__without_the_group(model, group=None):
    """Each group answers for itself"""
    mine = _hash(model.parameters())
    extremes = torch.tensor([mine, -mine])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return extremes[0].item() == -extremes[1].item()


def replicas_agree__in_float32(model, group=None):
    """float32 keeps 24 of the 56 bits"""
    mine = _hash(model.parameters())
    extremes = torch.tensor([float(mine), -float(mine)])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return extremes[0].item() == -extremes[1].item()


def replicas_agree__in_float64(model, group=None):
    """in torch.float64"""
    return _same_everywhere(_hash(model.parameters()), group)


def replicas_agree__gathers_objects(model, group=None):
    """one all-reduce is enough"""
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, _hash(model.parameters()), group=group)
    return len(set(every)) == 1


def replicas_agree__two_messages(model, group=None):
    """can travel together"""
    mine = torch.tensor(_hash(model.parameters()))
    largest, smallest = mine.clone(), mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
    return largest.item() == smallest.item()
