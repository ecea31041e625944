"""Lab 12: right answers written from the stubs alone, by somebody who has not seen the library's.
"""

import dataclasses
import functools
import itertools
import math
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from ranklab import device
from ranklab.baseline import checkpoint_blocks
from ranklab.hybrid import Layout
from ranklab.mesh import Mesh
from ranklab.planner import memory_per_gpu, model_of, plan_of, step_time
from ranklab.tensor_parallel import TPConfig, parallel_gpt


def build_mesh__new_group(axes, joined=()):
    """new_group for each group, in loops."""
    places, ranks = math.prod(axes.values()), dist.get_world_size()
    if places != ranks:
        raise ValueError(f"the axes {axes} have {places} places, but the job has {ranks} ranks")
    mesh = Mesh(dict(axes))
    wanted = [(axis,) for axis in mesh.axes]
    for names in joined:
        names = tuple(axis for axis in mesh.axes if axis in names)
        if names not in wanted:
            wanted.append(names)
    for names in wanted:
        for group_ranks in mesh.all_along(names):
            group = dist.new_group(list(group_ranks))
            if dist.get_rank() in group_ranks:
                mesh.groups[names] = group
    return mesh


def build_mesh__enumeration(axes, joined=()):
    """new_subgroups_by_enumeration, one call for each axis; sorted by position."""
    total = functools.reduce(lambda a, b: a * b, axes.values(), 1)
    if total != dist.get_world_size():
        raise ValueError(f"{total} places in {axes}, {dist.get_world_size()} ranks")
    mesh, order = Mesh(axes), list(axes)
    keys = dict.fromkeys([(axis,) for axis in order])
    keys |= dict.fromkeys(tuple(sorted(names, key=order.index)) for names in joined)
    for key in keys:
        mesh.groups[key], _ = dist.new_subgroups_by_enumeration(
            [list(ranks) for ranks in mesh.all_along(key)])
    return mesh


def build_mesh__device_mesh(axes, joined=()):
    """torch's own mesh; its flattened dims are the joined axes."""
    mesh = Mesh(axes)
    if mesh.size != dist.get_world_size():
        raise ValueError(f"a mesh of {mesh.size} ranks on {dist.get_world_size()}")
    names = tuple(map(str, axes))
    torchs = init_device_mesh(device().type, tuple(axes.values()), mesh_dim_names=names)
    for each in [(name,) for name in axes] + [tuple(each) for each in joined]:
        key = tuple(name for name in axes if name in each)
        part = torchs[tuple(map(str, key))]
        mesh.groups[key] = (part._flatten() if len(key) > 1 else part).get_group()
    return mesh


def parallelize__stages_first(model, hybrid):
    """keep_stages, parallel_gpt, materialize, checkpoint, make_stages, data."""
    layout = hybrid.layout
    hybrid.pipeline.keep_stages(model)
    parallel_gpt(model, TPConfig(hybrid.tensor.group, layout.sequence_parallel))
    hybrid.materialize(model)
    if layout.recompute:
        checkpoint_blocks(model, functools.partial(checkpoint, use_reentrant=False))
    hybrid.pipeline.make_stages(model)
    hybrid.data.apply(model)
    return model


def parallelize__tensor_first(model, hybrid):
    """parallel_gpt on meta first, checkpoints before memory, data before make_stages."""
    config = TPConfig(group=hybrid.tensor.group,
                      sequence_parallel=hybrid.layout.sequence_parallel)
    parallel_gpt(model, config)
    hybrid.pipeline.keep_stages(model)
    if hybrid.layout.recompute:
        checkpoint_blocks(model, lambda block, *x: checkpoint(block, *x, use_reentrant=False))
    hybrid.materialize(model)
    hybrid.data.apply(model)
    hybrid.pipeline.make_stages(model)
    return model


def parallelize__memory_after_stages(model, hybrid):
    """keep_stages, parallel_gpt, make_stages, and only then memory, data and checkpoints."""
    how = TPConfig(hybrid.tensor.group, hybrid.layout.sequence_parallel)
    hybrid.pipeline.make_stages(parallel_gpt(hybrid.pipeline.keep_stages(model), how))
    hybrid.materialize(model)
    hybrid.data.apply(model)
    if hybrid.layout.recompute:
        checkpoint_blocks(model, functools.partial(checkpoint, use_reentrant=False))
    return model


def tied_embedding_sync__isend(copies, other, group=None):
    """All messages are started, then all waits."""
    started = []
    for copy in copies:
        mine = copy.grad.contiguous()
        theirs = torch.empty_like(mine)
        handles = (dist.isend(mine, group=group, group_dst=other),
                   dist.irecv(theirs, group=group, group_src=other))
        started.append((copy, mine, theirs, handles))
    for copy, mine, theirs, handles in started:
        for handle in handles:
            handle.wait()
        copy.grad.add_(theirs)


def tied_embedding_sync__batch(copies, other, group=None):
    """batch_isend_irecv for each copy; the gradient is replaced by a new sum."""
    for copy in copies:
        mine = copy.grad.clone(memory_format=torch.contiguous_format)
        theirs = torch.zeros_like(mine)
        for work in dist.batch_isend_irecv([
            dist.P2POp(dist.isend, mine, group=group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=other),
        ]):
            work.wait()
        copy.grad = mine + theirs


def tied_embedding_sync__one_batch(copies, other, group=None):
    """One batch for all copies; the sum is written into the gradient in place."""
    if not copies:
        return
    buffers = [torch.empty(copy.shape, dtype=copy.grad.dtype, device=copy.device)
               for copy in copies]
    batch = [dist.P2POp(dist.irecv, buffer, group=group, group_peer=other) for buffer in buffers]
    batch += [dist.P2POp(dist.isend, copy.grad.contiguous(), group=group, group_peer=other)
              for copy in copies]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    for copy, buffer in zip(copies, buffers):
        copy.grad += buffer


def mesh_grad_norm__squares(held, group=None):
    """Squares in float64, summed and divided."""
    total = torch.zeros((), dtype=torch.float64, device=device())
    for gradient, ranks in held:
        total += gradient.detach().double().square().sum() / ranks
    dist.all_reduce(total, group=group)
    return total.sqrt().float()


def mesh_grad_norm__vector_norm(held, group=None):
    """vector_norm in float64, squared as Python numbers, math.fsum."""
    squares = [torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 / n for g, n in held]
    message = torch.tensor([sum(squares)], dtype=torch.float64, device=device())
    dist.all_reduce(message, group=group)
    return message.sqrt().to(torch.float32)[0]


def _overlap(begin, shape, box_begin, box_shape):
    """(slices of the piece, slices of the box, numbers)"""
    mine, its, numbers = [], [], 1
    for a, n, b, k in zip(begin, shape, box_begin, box_shape):
        low, high = max(a, b), min(a + n, b + k)
        if high <= low:
            return None, None, 0
        mine.append(slice(low - a, high - a))
        its.append(slice(low - b, high - b))
        numbers *= high - low
    return tuple(mine), tuple(its), numbers


def reshard_checkpoint__plan(pieces, saved):
    """First a plan of all overlaps, checked by its counts, then the copies."""
    plan = []
    for piece, boxes in zip(pieces, saved):
        covered = 0
        for offset, tensor in boxes:
            mine, its, numbers = _overlap(piece.offset, piece.tensor.shape, offset, tensor.shape)
            covered += numbers
            if numbers:
                plan.append((piece.tensor, mine, tensor, its))
        if covered < piece.tensor.numel():
            raise ValueError(f"{piece.name} {piece.kind}: the piece has {piece.tensor.numel()} "
                             f"numbers, its boxes have {covered} of them")
    with torch.no_grad():
        for target, mine, source, its in plan:
            target[mine].copy_(source[its])


def reshard_checkpoint__staging(pieces, saved):
    """New tensors and masks are filled with narrow, then all are copied at the end."""
    new = []
    for piece, boxes in zip(pieces, saved):
        shape = piece.tensor.shape
        values = torch.zeros(shape, dtype=piece.tensor.dtype, device=piece.tensor.device)
        there = torch.zeros(shape, dtype=torch.bool)
        for offset, box in boxes:
            part, mask, apart = values, there, False
            for dim, (a, b) in enumerate(zip(piece.offset, offset)):
                low = max(a, b)
                high = min(a + shape[dim], b + box.shape[dim])
                if high <= low:
                    apart = True
                    break
                part = part.narrow(dim, low - a, high - low)
                mask = mask.narrow(dim, low - a, high - low)
                box = box.narrow(dim, low - b, high - low)
            if not apart:
                part.copy_(box)
                mask.fill_(True)
        if not there.all():
            raise ValueError(f"{piece.name}: {piece.tensor.numel()} numbers, of which the boxes "
                             f"have {int(there.sum())}")
        new.append(values)
    for piece, values in zip(pieces, new):
        piece.tensor.detach().copy_(values)


def _divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def _legal(job, gpus, machine, recomputes=(False, True)):
    """(Layout, micro_batch) of all legal ones, without those that cannot matter."""
    config = job.config
    for tp in _divisors(gpus):
        if config.n_head % tp or machine.node % tp:
            continue
        for pp in _divisors(gpus // tp):
            dp = gpus // tp // pp
            if job.batch % dp or pp > config.n_layer:
                continue
            for size in _divisors(job.batch // dp):
                for virtual in (1, 2, 4):
                    if virtual > 1 and (pp == 1 or job.batch // dp // size % pp
                                        or pp * virtual > config.n_layer):
                        continue
                    for sp, zero, outer, recompute in itertools.product(
                            (False, True) if tp > 1 and config.n_ctx % tp == 0 else (False,),
                            (0, 1, 3) if dp > 1 else (0,),
                            ("pipeline", "data") if dp > 1 and pp > 1 else ("pipeline",),
                            recomputes):
                        yield Layout(dp, tp, pp, sp, virtual, "1f1b", zero, recompute, outer), size


def choose_layout__all(job, gpus, machine):
    """Memory of all legal ones first; time of those that fit, recompute only where it must be."""
    model, least, best = model_of(job.config), math.inf, None
    for layout, size in _legal(job, gpus, machine, (False,)):
        own = dataclasses.replace(job, micro_batch=size)
        for recompute in (False, True):
            layout = dataclasses.replace(layout, recompute=recompute)
            plan = plan_of(own, layout)
            held = memory_per_gpu(model, plan, machine).total
            least = min(least, held)
            if held <= machine.memory_bytes:
                seconds = step_time(model, plan, machine).total
                if best is None or seconds < best[0]:
                    best = seconds, layout, size
                break
    if best is None:
        raise ValueError(f"no layout of {gpus} GPUs fits: the smallest needs {least / 1e9:.1f} GB")
    return best[1:]


def choose_layout__sorted(job, gpus, machine):
    """Times all that fit and takes the minimum, recompute or not."""
    model, smallest, timed = model_of(job.config), math.inf, []
    shut = set()  # with this micro-batch or a larger one it does not fit
    for layout, size in _legal(job, gpus, machine):
        if layout in shut:
            continue
        plan = plan_of(dataclasses.replace(job, micro_batch=size), layout)
        memory = memory_per_gpu(model, plan, machine).total
        smallest = min(smallest, memory)
        if memory > machine.memory_bytes:
            if size == 1:
                shut.add(layout)
            continue
        timed.append((step_time(model, plan, machine).total, len(timed), layout, size))
    if not timed:
        raise ValueError(f"needs {smallest / 1e9:.1f} GB a GPU, and there are "
                         f"{machine.memory_bytes / 1e9:.1f}")
    _, _, layout, size = min(timed)
    return layout, size
