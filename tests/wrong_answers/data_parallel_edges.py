"""Lab 03, its functions once more: right in the plain case, wrong at an edge.

The first line of each docstring is a pattern that the check's output must hold.
"""

import hashlib

import torch
import torch.distributed as dist

# --- broadcast_parameters -----------------------------------------------------------------------


def broadcast_parameters__freezes_the_model(model, src=0, group=None):
    """requires_grad of a parameter has changed"""
    for t in [*model.parameters(), *model.buffers()]:
        dist.broadcast(t.requires_grad_(False), group=group, group_src=src)


def broadcast_parameters__state_dict(model, src=0, group=None):
    """state_dict\\(\\) not all of them"""
    for t in {t.data_ptr(): t for t in model.state_dict().values()}.values():  # tied ones once
        dist.broadcast(t, group=group, group_src=src)


def broadcast_parameters__buffers_without_the_group(model, src=0, group=None):
    """in the group of ranks .*Hand `group` on"""
    for p in model.parameters():
        dist.broadcast(p.data, group=group, group_src=src)
    for b in model.buffers():
        dist.broadcast(b, group_src=src)


def broadcast_parameters__zeros_and_a_sum(model, src=0, group=None):
    """One broadcast of each tensor is all that is needed"""
    for t in [*model.parameters(), *model.buffers()]:
        if dist.get_rank(group) != src:
            t.data.zero_()
        dist.all_reduce(t.data, group=group)


def broadcast_parameters__in_float32(model, src=0, group=None):
    """Each tensor travels in its own type"""
    for t in [*model.parameters(), *model.buffers()]:
        number = t.detach().float()
        dist.broadcast(number, group=group, group_src=src)
        t.data.copy_(number)


def broadcast_parameters__takes_over_by_rank_of_the_world(model, src=0, group=None):
    """Ranks in arguments count inside it"""
    for t in [*model.parameters(), *model.buffers()]:
        theirs = t.detach().clone()
        dist.broadcast(theirs, group=group, group_src=src)
        if dist.get_rank() != src:
            t.data.copy_(theirs)


# --- shard_sampler ------------------------------------------------------------------------------


def shard_sampler__a_list_of_tensors(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """list\\(tensor\\) cuts a tensor into tensors"""
    order = list(torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)))
    each = n // ranks if drop_last else -(-n // ranks)
    return (order * ranks)[rank : each * ranks : ranks]


# --- average_gradients --------------------------------------------------------------------------


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def average_gradients__zeros_in_float32(model, group=None):
    """torch.zeros_like\\(parameter\\) has type, shape and device"""
    for p in _trained(model):
        if p.grad is None:
            p.grad = torch.zeros(p.shape)
        p.grad /= dist.get_world_size(group)
        dist.all_reduce(p.grad, group=group)


def average_gradients__missing_ones_last(model, group=None):
    """in the same order: put zeros there"""
    for p in sorted(_trained(model), key=lambda p: p.grad is None):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad /= dist.get_world_size(group)
        dist.all_reduce(p.grad, group=group)


def average_gradients__row_by_row(model, group=None):
    """All-reduce each gradient once, whole"""
    for p in _trained(model):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad /= dist.get_world_size(group)
        for row in p.grad:
            dist.all_reduce(row, group=group)


def average_gradients__sent_in_float32(model, group=None):
    """Each gradient travels in its own type"""
    for p in _trained(model):
        mean = (torch.zeros_like(p) if p.grad is None else p.grad).float()
        dist.all_reduce(mean, group=group)
        p.grad = (mean / dist.get_world_size(group)).to(p.dtype)


# --- assign_buckets -----------------------------------------------------------------------------


def _buckets(parameters, cap, size=lambda p: p.nbytes, kind=lambda p: (p.dtype, p.device)):
    if cap < 1:
        raise ValueError(f"cap_bytes={cap} must be at least 1")
    closed, still_open = [], {}
    for p in reversed(list(parameters)):
        bucket = still_open.setdefault(kind(p), [])
        bucket.append(p)
        if sum(map(size, bucket)) >= cap:
            closed.append(still_open.pop(kind(p)))
    return closed, list(still_open.values())


def assign_buckets__device_ignored(parameters, cap_bytes):
    """a bucket holds what lies on two devices"""
    return sum(_buckets(parameters, cap_bytes, kind=lambda p: p.dtype), [])


def assign_buckets__four_bytes_each(parameters, cap_bytes):
    """A number in bfloat16 has two bytes, not four"""
    return sum(_buckets(parameters, cap_bytes, size=lambda p: 4 * p.numel()), [])


def assign_buckets__open_ones_backwards(parameters, cap_bytes):
    """in the order in which they were opened"""
    closed, still_open = _buckets(parameters, cap_bytes)
    return closed + still_open[::-1]


def assign_buckets__another_type_closes(parameters, cap_bytes):
    """another type does not close a bucket"""
    buckets = []
    for p in reversed(list(parameters)):
        last = buckets[-1] if buckets else []
        if not last or last[0].dtype != p.dtype or sum(q.nbytes for q in last) >= cap_bytes:
            buckets.append([])
        buckets[-1].append(p)
    return buckets


def assign_buckets__takes_from_a_list(parameters, cap_bytes):
    """no list but a generator"""
    parameters.reverse()
    return sum(_buckets(parameters[::-1], cap_bytes), [])


# --- scale_learning_rate ------------------------------------------------------------------------


def _power(batch, base_batch, warmup, rule):
    if batch < 1 or base_batch < 1 or warmup < 0 or rule not in ("linear", "sqrt"):
        raise ValueError(f"batch={batch}, base_batch={base_batch}, warmup={warmup}, rule={rule!r}")
    return 1 if rule == "linear" else 0.5


def _rate(lr, scaled, step, warmup):
    return scaled if step is None or step >= warmup else lr + (scaled - lr) * step / warmup


def scale_learning_rate__a_warmup_needs_a_step(lr, batch, base_batch, step=None, warmup=0,
                                               rule="linear"):
    """return the scaled rate when step is None"""
    scaled = lr * (batch / base_batch) ** _power(batch, base_batch, warmup, rule)
    return scaled if not warmup or step >= warmup else _rate(lr, scaled, step, warmup)


def scale_learning_rate__warms_up_the_batch(lr, batch, base_batch, step=None, warmup=0,
                                            rule="linear"):
    """from 0.1 to 0.2, sqrt rule.* Evenly from lr to the scaled rate"""
    part = 1 if step is None or step >= warmup else step / warmup
    power = _power(batch, base_batch, warmup, rule)
    return lr * (1 + (batch / base_batch - 1) * part) ** power


def scale_learning_rate__never_above_the_scaled_one(lr, batch, base_batch, step=None, warmup=0,
                                                    rule="linear"):
    """from 0.1 to 0.05, linear rule"""
    scaled = lr * (batch / base_batch) ** _power(batch, base_batch, warmup, rule)
    return min(scaled, _rate(lr, scaled, step, warmup))


def scale_learning_rate__whole_multiples(lr, batch, base_batch, step=None, warmup=0,
                                         rule="linear"):
    """batch 384: 0.1; 0.15 is right"""
    k = batch // base_batch or batch / base_batch
    scaled = lr * k ** _power(batch, base_batch, warmup, rule)
    return _rate(lr, scaled, step, warmup)


def scale_learning_rate__no_warmup_divides_by_0(lr, batch, base_batch, step=None, warmup=0,
                                                rule="linear"):
    """the scaled rate from the first step on"""
    scaled = lr * (batch / base_batch) ** _power(batch, base_batch, warmup, rule)
    return _rate(lr, scaled, step, warmup) if step != warmup else lr + (scaled - lr) * step / warmup


def scale_learning_rate__any_base_batch(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """base_batch=0 gives a ZeroDivisionError"""
    scaled = lr * (batch / base_batch) ** _power(batch, 1, warmup, rule)
    return _rate(lr, scaled, step, warmup)


# --- replicas_agree -----------------------------------------------------------------------------


def _same_everywhere(sent, group, op=dist.ReduceOp.MAX):
    sent = torch.tensor(sent)
    dist.all_reduce(sent, op, group=group)
    return sent.tolist()


def _hash(model, bytes_of=lambda p: p.detach().view(-1).view(torch.uint8).numpy()):
    digest = hashlib.blake2b(digest_size=7)
    for p in model.parameters():
        digest.update(bytes_of(p).tobytes())
    return int.from_bytes(digest.digest(), "big")


def replicas_agree__sign_forgotten(model, group=None):
    """comes back as the largest of -mine"""
    largest, smallest = _same_everywhere([_hash(model), -_hash(model)], group)
    return largest == smallest


def replicas_agree__largest_of_both(model, group=None):
    """MAX of \\[mine, -mine\\] brings both"""
    largest, smallest = _same_everywhere([_hash(model), _hash(model)], group)
    return largest == smallest


def replicas_agree__narrows(model, group=None):
    """a float64 loses half of its bits"""
    mine = _hash(model, lambda p: p.detach().float().numpy())
    largest, smallest = _same_everywhere([mine, -mine], group)
    return largest == -smallest


def replicas_agree__numpy_only(model, group=None):
    """numpy knows no bfloat16"""
    mine = _hash(model, lambda p: p.detach().numpy())
    largest, smallest = _same_everywhere([mine, -mine], group)
    return largest == -smallest
