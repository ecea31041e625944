"""Lab 12: right answers that differ from the library's. Each must pass."""

import itertools
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ranklab.baseline import checkpoint_blocks
from ranklab.engine import device
from ranklab.hybrid import Layout
from ranklab.hybrid.legal import divisors
from ranklab.mesh import Mesh
from ranklab.planner import memory_per_gpu, model_of, plan_of, step_time
from ranklab.tensor_parallel.plan import TPConfig, parallel_gpt


def build_mesh__twice_the_same_ranks(axes, joined=()):
    """Groups of one rank, and the same ranks along other axes, are made again."""
    mesh, rank = Mesh(axes), dist.get_rank()
    if mesh.size != dist.get_world_size():
        raise ValueError(f"{mesh.size} places, but {dist.get_world_size()} ranks")
    for names in [*((name,) for name in axes), *joined]:
        for ranks in mesh.all_along(names):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                mesh.groups[tuple(name for name in axes if name in names)] = group
    return mesh


def build_mesh__by_torch(axes, joined=()):
    """A tensor of all ranks, reshaped."""
    mesh, names = Mesh(axes), list(axes)
    if mesh.size != dist.get_world_size():
        raise ValueError(f"{mesh.size} places, but {dist.get_world_size()} ranks")
    ranks = torch.arange(mesh.size).view(*axes.values())
    for each in [(name,) for name in names] + [tuple(each) for each in joined]:
        dims = sorted(names.index(name) for name in each)
        others = [dim for dim in range(len(names)) if dim not in dims]
        rows = ranks.permute(*others, *dims).reshape(-1, math.prod(ranks.shape[d] for d in dims))
        mine, _ = dist.new_subgroups_by_enumeration(rows.tolist())
        mesh.groups[tuple(names[dim] for dim in dims)] = mine
    return mesh


def build_mesh__local_synchronization(axes, joined=()):
    """Only members make a group, and torch is told so."""
    mesh = Mesh(axes)
    if mesh.size != dist.get_world_size():
        raise ValueError(f"{mesh.size} places, but {dist.get_world_size()} ranks")
    for names in [mesh._known(each) for each in (*axes, *joined)]:
        ranks = list(mesh.ranks_along(names))
        mesh.groups[names] = dist.new_group(ranks, use_local_synchronization=True)
    return mesh


def parallelize__layers_after_parts(model, hybrid):
    """What will go is split, too; only memory must wait. Recompute comes last of all."""
    parallel_gpt(model, TPConfig(hybrid.tensor.group, hybrid.layout.sequence_parallel))
    hybrid.pipeline.keep_stages(model)
    hybrid.pipeline.make_stages(model)
    hybrid.materialize(model)
    hybrid.data.apply(model)
    return checkpoint_blocks(model) if hybrid.layout.recompute else model


def parallelize__recompute_first(model, hybrid):
    if hybrid.layout.recompute:
        for block in model.blocks.values():
            plain = block.forward
            block.forward = lambda x, positions=None, plain=plain: checkpoint(
                plain, x, positions, use_reentrant=False)
    hybrid.pipeline.keep_stages(model)
    how = TPConfig(hybrid.mesh.group("tensor"), hybrid.layout.sequence_parallel)
    model = parallel_gpt(model, how)
    hybrid.materialize(model)
    hybrid.data.apply(model)
    hybrid.pipeline.make_stages(model)
    return model


def tied_embedding_sync__the_lower_rank_sends_first(copies, other, group=None):
    for parameter in copies:
        mine = parameter.grad.clone(memory_format=torch.contiguous_format)
        theirs = torch.zeros_like(mine)
        if dist.get_rank(group) < other:
            dist.send(mine, group=group, group_dst=other)
            dist.recv(theirs, group=group, group_src=other)
        else:
            dist.recv(theirs, group=group, group_src=other)
            dist.send(mine, group=group, group_dst=other)
        parameter.grad += theirs


def tied_embedding_sync__all_begin_at_once(copies, other, group=None):
    mine = [parameter.grad.contiguous() for parameter in copies]
    theirs = [torch.empty_like(gradient) for gradient in mine]
    works = [dist.isend(gradient, group=group, group_dst=other) for gradient in mine]
    works += [dist.irecv(gradient, group=group, group_src=other) for gradient in theirs]
    for work in works:
        work.wait()
    for parameter, gradient in zip(copies, theirs):
        parameter.grad = parameter.grad + gradient


def mesh_grad_norm__norms(held, group=None):
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) / copies**0.5
             for gradient, copies in held] or [torch.zeros((), device=device())]
    total = torch.stack(norms).double().norm() ** 2
    dist.all_reduce(total, group=group)
    return total.sqrt().to(torch.float32)


def mesh_grad_norm__gathered(held, group=None):
    mine = torch.zeros(1, dtype=torch.float64, device=device())
    for gradient, copies in held:
        mine += gradient.double().pow(2).div(copies).sum()
    dist.all_reduce(mine, op=dist.ReduceOp.SUM, group=group)
    return mine.float().sqrt()[0] if mine < 1e37 and mine > 1e-30 else mine[0].sqrt().float()


def reshard_checkpoint__masks(pieces, saved):
    """A copy of each piece is filled, and what was not filled is counted."""
    filled = []
    for piece, boxes in zip(pieces, saved):
        new, missing = piece.tensor.clone(), torch.ones(piece.tensor.shape, dtype=torch.bool)
        for offset, box in boxes:
            here, there = [], []
            for a, n, b, m in zip(piece.offset, piece.tensor.shape, offset, box.shape):
                start, stop = max(a, b), min(a + n, b + m)
                here.append(slice(start - a, stop - a))
                there.append(slice(start - b, stop - b))
            new[tuple(here)] = box[tuple(there)].to(new.dtype)
            missing[tuple(here)] = False
        if missing.any():
            raise ValueError(f"{piece.name}: {int(missing.sum())} of its {missing.numel()} numbers "
                             "were not saved")
        filled.append(new)
    for piece, new in zip(pieces, filled):
        piece.tensor.copy_(new)


def reshard_checkpoint__narrow(pieces, saved):
    todo = []
    for piece, boxes in zip(pieces, saved):
        left = piece.tensor.numel()
        for offset, box in boxes:
            here = piece.tensor
            for dim, (a, b) in enumerate(zip(piece.offset, offset)):
                start = max(a, b)
                length = min(a + piece.tensor.shape[dim], b + box.shape[dim]) - start
                here = here.narrow(dim, start - a, length)
                box = box.narrow(dim, start - b, length)
            todo.append((here, box))
            left -= box.numel()
        if left:
            raise ValueError(f"{left} of the {piece.tensor.numel()} numbers of {piece.name}")
    for here, box in todo:
        here[...] = box


def choose_layout__by_dims(job, gpus, machine):
    """Every number up to the GPUs, and micro-batch; memory before seconds."""
    best, least, model = None, math.inf, model_of(job.config)
    for tp, pp in itertools.product(range(1, gpus + 1), repeat=2):
        dp = gpus // tp // pp
        if dp * tp * pp != gpus or job.config.n_head % tp or machine.node % tp:
            continue
        for size, virtual, more in itertools.product(
                divisors(job.batch // dp), (1, 2, 4), range(24)):
            pieces, rest = divmod(job.batch, dp * size)
            if rest or pp * virtual > job.config.n_layer:
                continue
            if virtual > 1 and (pp == 1 or pieces % pp):
                continue
            layout = Layout(dp, tp, pp, virtual=virtual, zero=(0, 1, 3)[more % 3],
                            recompute=more // 3 % 2 == 1,
                            sequence_parallel=more % 12 > 5 and tp > 1,
                            outermost="data" if more > 11 else "pipeline")
            plan = plan_of(replace(job, micro_batch=size), layout)
            need = memory_per_gpu(model, plan, machine).total
            least = min(least, need)
            if need <= machine.memory_bytes:
                seconds = step_time(model, plan, machine).total
                best = min(best or (math.inf,), (seconds, size, layout), key=lambda each: each[0])
    if best is None:
        raise ValueError(f"at least {least} bytes are needed")
    return best[2], best[1]
