"""Lab 07: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import math
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranklab import device
from ranklab.data import IGNORE
from ranklab.fsdp import (
    ShardedModule, can_be_a_block, gather_rows, outermost, parameter_bytes, sharded_modules,
    whole_bytes, without_needless,
)


def shard_parameter__slice(parameter, group=None):
    """Bounds by arithmetic, a slice of the detached parameter, cloned."""
    if parameter.dim() == 0:
        raise ValueError("a parameter of shape () has no rows: give it the shape (1,)")
    each = -(-len(parameter) // dist.get_world_size(group))
    start = each * dist.get_rank(group)
    return parameter.detach()[start : start + each].clone(memory_format=torch.contiguous_format)


def shard_parameter__index_select(parameter, group=None):
    """torch.arange(n).chunk says which rows, index_select copies them."""
    if parameter.dim() == 0:
        raise ValueError("a parameter of shape () has no rows: give it the shape (1,)")
    R, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = torch.arange(parameter.shape[0], device=parameter.device).chunk(R)
    rows = parts[rank] if rank < len(parts) else parts[0][:0]
    with torch.no_grad():
        return parameter.index_select(0, rows)


class FullyShardedBlock__cat(ShardedModule):
    """torch.cat and split; the mean is taken by dividing the message before it travels."""

    def begin_unshard(self):
        if not self.parameters or self.is_whole or self.work:
            return
        mine = torch.cat([p.padded_shard() for p in self.parameters])
        self.gathered = mine.new_empty(self.ranks * mine.numel())
        self.work = dist.all_gather_single(self.gathered, mine, group=self.group, async_op=True)

    def unshard(self):
        self.begin_unshard()
        if not self.work:
            return
        self.work.wait()
        parts = self.gathered.view(self.ranks, -1).split([p.numbers for p in self.parameters], 1)
        for p, part in zip(self.parameters, parts):
            p.fill(part)
        self.work = self.gathered = None
        self.is_whole = True

    def reduce_gradients(self):
        if not self.trained:
            return
        whole = torch.cat([p.padded_gradient() for p in self.trained], dim=1)
        for p in self.trained:
            p.whole.grad = None
        whole /= self.ranks
        mine = whole.new_empty(whole.shape[1])
        handle = dist.reduce_scatter_single(mine, whole.flatten(), group=self.group, async_op=True)
        self.reduction = mine, handle


class FullyShardedBlock__buffers(ShardedModule):
    """Buffers of zeros and loops with narrow and copy_; each gradient is divided on its own."""

    def begin_unshard(self):
        if not self.parameters or self.is_whole or self.work:
            return
        total = sum(p.numbers for p in self.parameters)
        mine, start = None, 0
        for p in self.parameters:
            shard = p.padded_shard()
            if mine is None:
                mine = torch.zeros(total, dtype=shard.dtype, device=shard.device)
            mine[start : start + p.numbers] = shard
            start += p.numbers
        self.gathered = torch.zeros(self.ranks * total, dtype=mine.dtype, device=mine.device)
        self.work = dist.all_gather_single(self.gathered, mine, group=self.group, async_op=True)

    def unshard(self):
        self.begin_unshard()
        if not self.work:
            return
        handle, self.work = self.work, None
        message, self.gathered = self.gathered, None
        handle.wait()
        rows, start = message.reshape(self.ranks, message.numel() // self.ranks), 0
        for p in self.parameters:
            p.fill(rows.narrow(1, start, p.numbers))
            start += p.numbers
        self.is_whole = True

    def reduce_gradients(self):
        if not self.trained:
            return
        total, whole, start = sum(p.numbers for p in self.trained), None, 0
        for p in self.trained:
            gradient = p.padded_gradient()
            if whole is None:
                whole = torch.zeros(self.ranks, total, dtype=gradient.dtype, device=gradient.device)
            torch.div(gradient, self.ranks, out=whole.narrow(1, start, p.numbers))
            start += p.numbers
            p.whole.grad = None
        mine = torch.zeros(total, dtype=whole.dtype, device=whole.device)
        self.reduction = (mine, dist.reduce_scatter_single(mine, whole.view(-1), group=self.group,
                                                           async_op=True))


def clip_grad_norm_sharded__float64(parameters, max_norm, group=None):
    """Squares in float64; multiplies only if the factor is below 1; the norm is a number."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.zeros((), dtype=torch.float64, device=device())
    for gradient in gradients:
        total += gradient.double().square().sum().to(total.device)
    dist.all_reduce(total, group=group)
    norm = math.sqrt(total.item())
    factor = max_norm / (norm + 1e-6)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm


def clip_grad_norm_sharded__clamp(parameters, max_norm, group=None):
    """vector_norm(dtype=float64) squared; the factor is clamped as in torch and always multiplied.
    """
    mine = [p.grad.detach() for p in parameters if p.grad is not None]
    squares = torch.zeros(1, dtype=torch.float64)
    for gradient in mine:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        squares += norm.cpu() ** 2
    squares = squares.to(device())
    dist.all_reduce(squares, group=group)
    norm = squares[0].sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in mine:
        gradient *= factor.to(gradient.device)
    return norm


def wrap_policy__limits(model, most_bytes):
    """For each size as a limit: the outermost modules up to it, without the needless ones."""
    possible = [m for m in model.modules()
                if m is not model and parameter_bytes(m) and can_be_a_block(model, m)]
    found = []
    for limit in [0, *sorted({parameter_bytes(m) for m in possible})]:
        blocks = outermost([m for m in possible if parameter_bytes(m) <= limit])
        if whole_bytes(model, blocks) <= most_bytes:
            found.append(without_needless(model, blocks, most_bytes))
    if not found:
        raise ValueError(f"no blocks of this model keep at most {most_bytes} bytes whole")
    return min(found, key=len)


def wrap_policy__largest_first(model, most_bytes):
    """For each limit take the largest outermost modules, one after the other, until it fits."""
    possible = [m for m in model.modules()
                if m is not model and parameter_bytes(m) > 0 and can_be_a_block(model, m)]
    best = [] if whole_bytes(model, []) <= most_bytes else None
    for limit in sorted({parameter_bytes(m) for m in possible}, reverse=True):
        fitting = outermost([m for m in possible if parameter_bytes(m) <= limit])
        fitting = sorted(fitting, key=parameter_bytes, reverse=True)
        for number in range(1, len(fitting) + 1):
            if best is not None and number >= len(best):
                break
            if whole_bytes(model, fitting[:number]) <= most_bytes:
                best = fitting[:number]
                break
    if best is None:
        raise ValueError("the smallest blocks are too large")
    return best


def masked_loss__cross_entropy(logits, labels, count=None, group=None):
    """F.cross_entropy with the sum."""
    targets = labels[:, 1:]
    if count is None:
        number = (targets != IGNORE).sum()
        dist.all_reduce(number, group=group)
        count = number.item()
    if count == 0:
        raise ValueError("no label of the batch counts")
    total = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(),
                            ignore_index=IGNORE, reduction="sum")
    return total * (dist.get_world_size(group) / count)


def masked_loss__chosen(logits, labels, count=None, group=None):
    """Chooses the places that count, then logsumexp minus the right logit."""
    after = labels[:, 1:]
    counts = after != IGNORE
    if count is None:
        count = torch.tensor([int(counts.sum())], dtype=torch.float64, device=logits.device)
        dist.all_reduce(count, group=group)
        count = count.item()
    if not count:
        raise ValueError("not one label of this batch counts, on any rank")
    chosen, right = logits[:, :-1][counts].float(), after[counts].long()
    losses = chosen.logsumexp(-1) - chosen.gather(-1, right.unsqueeze(-1)).squeeze(-1)
    return losses.sum() / count * dist.get_world_size(group)


def hybrid_shard_groups__enumeration(shard_ranks):
    """Two calls of new_subgroups_by_enumeration."""
    R = dist.get_world_size()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError(f"shard_ranks={shard_ranks} must divide the {R} ranks")
    table = torch.arange(R).view(-1, shard_ranks)
    shards, _ = dist.new_subgroups_by_enumeration(table.tolist())
    replicas, _ = dist.new_subgroups_by_enumeration(table.T.tolist())
    return shards, replicas


def hybrid_shard_groups__new_group(shard_ranks):
    """new_group in loops: every rank makes every group, and keeps its own."""
    R, rank = dist.get_world_size(), dist.get_rank()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError(f"shard_ranks={shard_ranks} must divide the {R} ranks")
    for first in range(0, R, shard_ranks):
        group = dist.new_group(list(range(first, first + shard_ranks)))
        if first <= rank < first + shard_ranks:
            shards = group
    for place in range(shard_ranks):
        group = dist.new_group(list(range(place, R, shard_ranks)))
        if rank % shard_ranks == place:
            replicas = group
    return shards, replicas


def full_state_dict__by_name(model):
    """Goes through the names, gathers at the first name of a parameter, keeps it for tied ones."""
    owners, group = {}, None
    for block in sharded_modules(model):
        group = block.group
        for p in block.parameters:
            owners[id(p.shard)] = p, block.group
    first, whole, state = dist.get_rank(group) == 0, {}, {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in whole:
            if id(tensor) in owners:
                value = gather_rows(*owners[id(tensor)])
            elif isinstance(tensor, torch.Tensor):
                value = tensor.detach().to("cpu", copy=True) if first else None
            else:
                value = tensor
            whole[id(tensor)] = value
        if first:
            state[name] = whole[id(tensor)]
    return state


def full_state_dict__by_block(model):
    """First gathers block by block, then gives each name its tensor."""
    gathered, group = {}, None
    for block in sharded_modules(model):
        group = block.group
        for p in block.parameters:
            if p.shard not in gathered:
                gathered[p.shard] = gather_rows(p, block.group)
    if dist.get_rank(group) != 0:
        return {}
    return {name: gathered[t] if t in gathered else t.detach().cpu().clone()
            for name, t in model.state_dict(keep_vars=True).items()}
