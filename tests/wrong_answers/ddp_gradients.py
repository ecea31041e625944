"""Lab 04, smaller gradients: mistakes that were let through once, each closed since.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch
import torch.distributed as dist

Future = torch.futures.Future[torch.Tensor]

# --- compress_fp16_hook ---------------------------------------------------------------------------


def _halves(group, bucket):
    return bucket.buffer().div_(dist.get_world_size(group)).half()


def compress_fp16_hook__one_by_one(group, bucket: dist.GradBucket) -> Future:
    """5 all-reduces for 1 bucket"""
    halves = [g.div(dist.get_world_size(group)).half() for g in bucket.gradients()]
    futures = [dist.all_reduce(each, group=group, async_op=True).get_future() for each in halves]

    def back(_):
        for gradient, each in zip(bucket.gradients(), halves):
            gradient.copy_(each)
        return bucket.buffer()

    return torch.futures.collect_all(futures).then(back)


def compress_fp16_hook__returns_nothing(group, bucket: dist.GradBucket) -> Future:
    """what runs in .then\\(...\\) returns None"""
    buffer = bucket.buffer()

    def back(done):
        buffer.copy_(done.value()[0])

    future = dist.all_reduce(_halves(group, bucket), group=group, async_op=True).get_future()
    return future.then(back)


def compress_fp16_hook__takes_the_list(group, bucket: dist.GradBucket) -> Future:
    """take value\\(\\)\\[0\\]"""
    buffer = bucket.buffer()
    future = dist.all_reduce(_halves(group, bucket), group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()))


def compress_fp16_hook__not_async(group, bucket: dist.GradBucket) -> Future:
    """With async_op=True"""
    buffer = bucket.buffer()
    future = dist.all_reduce(_halves(group, bucket), group=group).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__asks_the_group(group, bucket: dist.GradBucket) -> Future:
    """dist.get_world_size\\(group\\) takes None"""
    buffer = bucket.buffer()
    halves = buffer.div_(group.size()).half()
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__all_ranks_divide(group, bucket: dist.GradBucket) -> Future:
    """in the group of ranks .*hand it to get_world_size"""
    buffer = bucket.buffer()
    halves = buffer.div_(dist.get_world_size()).half()
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def compress_fp16_hook__adds_the_mean(group, bucket: dist.GradBucket) -> Future:
    """don't add it"""
    buffer = bucket.buffer()
    future = dist.all_reduce(_halves(group, bucket), group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.add_(done.value()[0]))


def compress_fp16_hook__calls_what_then_should_call(group, bucket: dist.GradBucket) -> Future:
    """Give .then\\(...\\) a function"""
    buffer = bucket.buffer()
    future = dist.all_reduce(_halves(group, bucket), group=group, async_op=True).get_future()
    return future.then(buffer.copy_(future.value()[0]))


def compress_fp16_hook__clamps_in_float16(group, bucket: dist.GradBucket) -> Future:
    """became 16376, not 25,000"""
    buffer = bucket.buffer()
    halves = torch.nan_to_num(buffer.half()).div_(dist.get_world_size(group))
    future = dist.all_reduce(halves, group=group, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


# --- top_k_compress -------------------------------------------------------------------------------


def _split(wanted, k, shape):
    indices = wanted.abs().topk(min(k, wanted.numel())).indices
    values = wanted[indices]
    wanted[indices] = 0
    return values, indices, wanted.view(shape)


def top_k_compress__all_above_the_kth(gradient, error, k):
    """topk gives that many also where entries are 0, or equally large"""
    wanted = (gradient + error).flatten()
    least = wanted.abs().sort(descending=True).values[min(k, wanted.numel()) - 1]
    indices = (wanted.abs() >= least).nonzero().flatten()
    values = wanted[indices]
    wanted[indices] = 0
    return values, indices, wanted.view(gradient.shape)


def top_k_compress__sends_no_zeros(gradient, error, k):
    """0 entries are sent, 2 are asked"""
    wanted = (gradient + error).flatten()
    sent = torch.zeros_like(wanted)
    indices = wanted.abs().topk(min(k, wanted.numel())).indices
    sent[indices] = wanted[indices]
    indices = sent.nonzero().flatten()
    return sent[indices], indices, (wanted - sent).view(gradient.shape)


def top_k_compress__view(gradient, error, k):
    """copies where .view can't"""
    return _split((gradient + error).view(-1), k, gradient.shape)


def top_k_compress__trusts_flatten_to_be_a_view(gradient, error, k):
    """transposed.*flatten\\(\\) is a copy"""
    wanted = gradient + error
    values, indices, _ = _split(wanted.flatten(), k, gradient.shape)
    return values, indices, wanted


def top_k_compress__float32(gradient, error, k):
    """bits are lost"""
    return _split((gradient + error).float().flatten(), k, gradient.shape)


def top_k_compress__needs_a_dimension(gradient, error, k):
    """len\\(\\) of a 0-d tensor"""
    k = min(k, len(gradient) * gradient[0].numel())
    return _split((gradient + error).flatten(), k, gradient.shape)


# --- power_sgd ------------------------------------------------------------------------------------


def _summed(x, group):
    dist.all_reduce(x, group=group)
    return x


def _power(matrix, q, error, group, orthonormal=lambda p: torch.linalg.qr(p).Q):
    """(wanted, p, this rank's own part of q, the averaged q)."""
    wanted = matrix + error
    p = orthonormal(_summed(wanted @ q, group))
    own = wanted.mT @ p
    return wanted, p, own, _summed(own.clone(), group) / dist.get_world_size(group)


def power_sgd__error_before_q_is_averaged(matrix, q, error, group=None):
    """made of q after its all-reduce"""
    wanted, p, own, q = _power(matrix, q, error, group)
    return p @ q.mT, q, wanted - p @ own.mT


def power_sgd__returns_its_own_q(matrix, q, error, group=None):
    """ranks return different q"""
    wanted, p, own, q = _power(matrix, q, error, group)
    return p @ q.mT, own, wanted - p @ q.mT


def power_sgd__gram_schmidt_with_epsilon(matrix, q, error, group=None):
    """a matrix of rank 1.*is orthonormal even so"""

    def gram_schmidt(p):
        for i in range(p.shape[-1]):
            column, rest = p[..., i:i + 1], p[..., i + 1:]
            column /= column.norm(dim=-2, keepdim=True) + 1e-8
            rest -= column * (column * rest).sum(dim=-2, keepdim=True)
        return p

    wanted, p, _, q = _power(matrix, q, error, group, gram_schmidt)
    return p @ q.mT, q, wanted - p @ q.mT


def power_sgd__one_matrix_after_another(matrix, q, error, group=None):
    """6 messages, where 2 are enough"""
    one = matrix.dim() == 2
    given = [(matrix, q, error)] if one else zip(matrix, q, error)
    results = []
    for each in given:
        wanted, p, _, q_next = _power(*each, group)
        results.append((p @ q_next.mT, q_next, wanted - p @ q_next.mT))
    return results[0] if one else tuple(torch.stack(parts) for parts in zip(*results))


def power_sgd__q_and_error_of_the_first(matrix, q, error, group=None):
    """at once, as \\(3, 12, 8\\): shapes"""
    wanted, p, _, q = _power(matrix, q, error, group)
    left = wanted - p @ q.mT
    return p @ q.mT, q.reshape(-1, *q.shape[-2:])[0], left.reshape(-1, *left.shape[-2:])[0]


def power_sgd__all_ranks_divide(matrix, q, error, group=None):
    """the ranks of another group"""
    wanted, p, _, q = _power(matrix, q, error, group)
    q = q * dist.get_world_size(group) / dist.get_world_size()
    return p @ q.mT, q, wanted - p @ q.mT


def power_sgd__float64(matrix, q, error, group=None):
    """Keep the matrix's dtype"""
    wanted, p, _, q = _power(matrix.double(), q.double(), error, group)
    return (p @ q.mT).float(), q.float(), (wanted - p @ q.mT).float()
