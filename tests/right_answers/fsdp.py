"""Lab 07: right answers that differ from the library's. Each must pass."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranklab.basics.targets import IGNORE
from ranklab.engine import device
from ranklab.fsdp.shards import ShardedModule, sharded_modules
from ranklab.fsdp.wrapping import can_be_a_block, parameter_bytes, whole_bytes


def shard_parameter__split(parameter, group=None):
    if not parameter.shape:
        raise ValueError("no rows")
    each = max(1, math.ceil(len(parameter) / dist.get_world_size(group)))
    pieces, rank = parameter.detach().split(each), dist.get_rank(group)
    return torch.clone(pieces[rank] if rank < len(pieces) else parameter.detach()[:0])


def shard_parameter__pad_and_cut(parameter, group=None):
    if parameter.dim() == 0:
        raise ValueError("no rows")
    R, n = dist.get_world_size(group), len(parameter)
    padded = torch.cat([parameter.detach(), parameter.new_zeros(-n % R, *parameter.shape[1:])])
    rank, each = dist.get_rank(group), len(padded) // R
    mine = padded.reshape(R, each, *parameter.shape[1:])[rank]
    return mine[: max(0, n - rank * each)].clone()


class FullyShardedBlock__lists(ShardedModule):
    """Messages as lists, one tensor for each rank; parameters are filled one rank at a time."""

    def begin_unshard(self):
        if self.parameters and not self.is_whole and not self.work:
            mine = torch.cat([p.padded_shard() for p in self.parameters])
            self.gathered = [torch.empty_like(mine) for _ in range(self.ranks)]
            self.work = dist.all_gather(self.gathered, mine, group=self.group, async_op=True)

    def unshard(self):
        self.begin_unshard()
        if self.work:
            self.work.wait()
            begin, message = 0, torch.stack(list(self.gathered))
            for p in self.parameters:
                p.fill(message[:, begin : begin + p.numbers])
                begin += p.numbers
            self.work = self.gathered = None
            self.is_whole = True

    def reduce_gradients(self):
        if len(self.trained) == 0:
            return
        rows = torch.cat([p.padded_gradient() for p in self.trained], dim=1).div(self.ranks)
        mine = torch.zeros_like(rows[0])
        self.reduction = mine, dist.reduce_scatter(mine, list(rows.contiguous()), group=self.group,
                                                   async_op=True)
        for p in self.trained:
            p.whole.grad = None


class FullyShardedBlock__into_one(FullyShardedBlock__lists):
    """The rank's own part is written into the message where it belongs; no list."""

    def begin_unshard(self):
        if self.is_whole or self.work is not None or not self.parameters:
            return
        numbers = sum(p.numbers for p in self.parameters)
        self.gathered = self.parameters[0].whole.new_empty(self.ranks, numbers)
        mine = self.gathered[self.rank]
        torch.cat([p.padded_shard() for p in self.parameters], out=mine)
        self.work = dist.all_gather_into_tensor(self.gathered.view(-1), mine.clone(),
                                                group=self.group, async_op=True)


def clip_grad_norm_sharded__linalg(parameters, max_norm, group=None):
    gradients = [p.grad for p in parameters if p.grad is not None]
    square = torch.zeros(1, device=device())
    for gradient in gradients:
        square += torch.linalg.vector_norm(gradient.float())**2
    dist.all_reduce(square, group=group)
    norm = square.sqrt()[0]
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(float(max_norm / norm))
    return norm


def clip_grad_norm_sharded__float(parameters, max_norm, group=None):
    parameters = [p for p in parameters if p.grad is not None]
    square = torch.tensor(sum(p.grad.double().pow(2).sum().item() for p in parameters),
                          dtype=torch.float64, device=device())
    dist.all_reduce(square, group=group)
    norm = math.sqrt(square.item()) if square.isfinite() else square.item()
    for p in parameters:
        p.grad = p.grad * min(1.0, max_norm / (norm + 1e-12))
    return norm


def clip_grad_norm_sharded__by_torch(parameters, max_norm, group=None):
    parameters = list(parameters)
    own = torch.nn.utils.get_total_norm([p.grad.float() for p in parameters if p.grad is not None])
    square = own.to(device(), torch.float64).square()
    dist.all_reduce(square, group=group)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, square.sqrt())
    return square.sqrt()


def wrap_policy__from_the_top(model, most_bytes):
    """Cuts what is too large into its children; then all that fits goes back into the root."""
    def cut(module, largest):
        if (module is not model and parameter_bytes(module) <= largest
                and can_be_a_block(model, module)):
            return [module]
        return [block for child in module.children() for block in cut(child, largest)]

    for largest in sorted({parameter_bytes(module) for module in model.modules()}, reverse=True):
        blocks = sorted(dict.fromkeys(cut(model, largest)), key=parameter_bytes, reverse=True)
        if whole_bytes(model, blocks) <= most_bytes:
            while blocks and whole_bytes(model, blocks[:-1]) <= most_bytes:
                blocks.pop()
            return blocks
    raise ValueError(f"{most_bytes} bytes are not enough")


def masked_loss__log_softmax(logits, labels, count=None, group=None):
    logits, targets = logits[:, :-1], labels[:, 1:]
    is_answer = targets != IGNORE
    if count is None:
        count = is_answer.sum()
        dist.all_reduce(count, group=group)
    if int(count) < 1:
        raise ValueError("no answer")
    each = F.log_softmax(logits, -1, dtype=torch.float32).gather(
        -1, targets.clamp(min=0)[..., None])[..., 0]
    return -(each * is_answer).sum() * (dist.get_world_size(group) / count)


def hybrid_shard_groups__by_hand(shard_ranks):
    rank, R = dist.get_rank(), dist.get_world_size()
    if shard_ranks not in range(1, R + 1) or R % shard_ranks:
        raise ValueError("does not divide")
    for first in range(0, R, shard_ranks):
        made = dist.new_group([first + place for place in range(shard_ranks)])
        if first <= rank < first + shard_ranks:
            shards = made
    for place in range(shard_ranks):
        made = dist.new_group(list(range(place, R, shard_ranks)))
        if rank % shard_ranks == place:
            replicas = made
    return shards, replicas


def hybrid_shard_groups__its_own_only(shard_ranks):
    rank, R = dist.get_rank(), dist.get_world_size()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError("does not divide")
    first = rank - rank % shard_ranks
    mine = range(first, first + shard_ranks), range(rank % shard_ranks, R, shard_ranks)
    return [dist.new_group(list(ranks), use_local_synchronization=True) for ranks in mine]


def hybrid_shard_groups__mesh(shard_ranks):
    R = dist.get_world_size()
    if shard_ranks < 1 or R % shard_ranks:
        raise ValueError("does not divide")
    mesh = dist.init_device_mesh(device().type, (R // shard_ranks, shard_ranks))
    return mesh.get_group(1), mesh.get_group(0)


def full_state_dict__gathered_into_one(model):
    blocks, found = sharded_modules(model), {}
    for block in blocks:
        for p in block.parameters:
            mine = p.padded_shard(p.shard.dtype)
            whole = mine.new_empty(p.ranks, len(mine)) if block.rank == 0 else None
            dist.gather(mine, whole if whole is None else list(whole), group=block.group,
                        group_dst=0)
            if block.rank == 0:
                whole = whole.flatten()
                found[id(p.shard)] = whole[: p.shape.numel()].view(p.shape).cpu()
    if blocks[0].rank:
        return {}
    return {name: found.get(id(tensor), tensor).detach().cpu().clone()
            for name, tensor in model.state_dict(keep_vars=True).items()}
