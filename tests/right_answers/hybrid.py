"""Lab 12: right answers that differ from the library's. Each must pass."""

import itertools
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ranklab.baseline import checkpoint_blocks
from ranklab.checkpoint import overlap
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


def transfer_weights__all_to_all(pieces, held, wanted, group=None):
    """One all-to-all: for each generator a flat vector of all that it gets from this rank."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    target = "cpu" if not pieces else pieces[0].tensor.device
    plan = []  # (sender, receiver, index of the sender's piece, of the receiver's, slices, rows)
    for receiver in range(R):
        for j, want in enumerate(wanted[receiver]):
            boxes, count = {}, 0
            for sender in range(R):
                for i, have in enumerate(held[sender]):
                    boxes.setdefault((have.name, have.offset, have.tensor.shape), []).append(
                        (sender, i))
            for (name, offset, sizes), holders in boxes.items():
                spans = [(max(a, b), min(a + n, b + m)) for a, n, b, m in
                         zip(want.offset, want.tensor.shape, offset, sizes)]
                if name != want.name or any(a >= b for a, b in spans):
                    continue
                count += math.prod(b - a for a, b in spans)
                first, last = spans[0] if spans else (0, 1)
                for k, (sender, i) in enumerate(holders):
                    cut = [first + (last - first) * e // len(holders) for e in (k, k + 1)]
                    if cut[0] < cut[1]:
                        plan.append((sender, receiver, i, j, [tuple(cut), *spans[1:]]))
            if count < want.tensor.numel():
                raise ValueError(f"{want.name}: {count} of {want.tensor.numel()}")

    def view(piece, spans):
        if not piece.offset:
            return piece.tensor.view(1)
        return piece.tensor[tuple(slice(a - o, b - o) for (a, b), o in zip(spans, piece.offset))]

    outgoing = [[] for _ in range(R)]
    for sender, receiver, i, j, spans in plan:
        if sender == rank:
            dtype = wanted[receiver][j].tensor.dtype
            outgoing[receiver].append(view(pieces[i], spans).to(dtype).reshape(-1))
    incoming = [[(j, spans) for sender, receiver, i, j, spans in plan
                 if (sender, receiver) == (source, rank)] for source in range(R)]
    dtype = next(piece.tensor.dtype for want in wanted for piece in want)
    sent = [sum(part.numel() for part in parts) for parts in outgoing]
    received = [sum(math.prod(b - a for a, b in spans) for _, spans in parts)
                for parts in incoming]
    empty = torch.empty(0, dtype=dtype, device=target)
    flat = torch.empty(sum(received), dtype=dtype, device=target)
    dist.all_to_all_single(flat, torch.cat([empty, *itertools.chain(*outgoing)]), received, sent,
                           group=group)
    at = 0
    for j, spans in itertools.chain(*incoming):
        space = view(pieces[j], spans)
        space.copy_(flat[at:at + space.numel()].view(space.shape))
        at += space.numel()


def transfer_weights__message_by_message(pieces, held, wanted, group=None):
    """Blocking sends in the order of the map; what is shared is cut flat, not by rows."""
    rank, todo = dist.get_rank(group), []
    for receiver, want in ((r, want) for r, of_rank in enumerate(wanted) for want in of_rank):
        missing = want.tensor.numel()
        for sender, have in ((r, have) for r, of_rank in enumerate(held) for have in of_rank):
            if want.name != have.name or not overlap(want, have.offset, have.tensor)[0].numel():
                continue
            copies = [r for r, of_rank in enumerate(held) for other in of_rank
                      if other[:1] + other[3:4] == have[:1] + have[3:4]
                      and other.tensor.shape == have.tensor.shape]
            todo.append((sender, receiver, want, have, copies.index(sender), len(copies)))
            if copies[0] == sender:
                missing -= overlap(want, have.offset, have.tensor)[0].numel()
        if missing:
            raise ValueError(f"nobody has {missing} numbers of {want.name}")
    number = {id(piece): i for of_rank in (*held, *wanted) for i, piece in enumerate(of_rank)}
    for sender, receiver, want, have, k, copies in todo:
        if rank not in (sender, receiver):
            continue
        own = pieces[number[id(want if rank == receiver else have)]]
        here, there = overlap(*((own, have.offset, have.tensor) if rank == receiver else
                                (want, own.offset, own.tensor)))
        n = here.numel()
        part = slice(n * k // copies, n * (k + 1) // copies)
        if part.start == part.stop:
            continue
        if rank == sender:
            dist.send(there.to(want.tensor.dtype).reshape(-1)[part].contiguous(), group=group,
                      group_dst=receiver)
        else:
            flat = here.flatten().clone()
            numbers = torch.empty_like(flat[part])
            dist.recv(numbers, group=group, group_src=sender)
            flat[part] = numbers
            here.copy_(flat.view(here.shape))


def transfer_weights__by_a_table_of_holders(pieces, held, wanted, group=None):
    """Which rank sends each number stands in a table of the whole tensor; one message a pair."""
    rank, sends = dist.get_rank(group), {}
    shapes = {piece.name: piece.shape for of_rank in (*held, *wanted) for piece in of_rank}
    # For each number of a whole tensor: which rank's which piece; a column for each holder.
    tables = {name: torch.full((len(held), max(1, math.prod(shape))), -1)
              for name, shape in shapes.items()}
    for sender, of_rank in enumerate(held):
        for i, piece in enumerate(of_rank):
            places(piece, tables[piece.name][sender], i)
    for receiver, of_rank in enumerate(wanted):
        for j, want in enumerate(of_rank):
            here = places(want, torch.zeros(max(1, math.prod(want.shape))), 1).nonzero().flatten()
            has = tables[want.name][:, here] >= 0
            if not has.any(0).all():
                raise ValueError(f"{want.name} is not held by any trainer")
            kinds, of = torch.unique(torch.cat([has, tables[want.name][:, here]]), dim=1,
                                     return_inverse=True)
            for kind in range(kinds.shape[1]):
                holders = kinds[:len(held), kind].nonzero().flatten().tolist()
                for sender, part in zip(holders, here[of == kind].tensor_split(len(holders))):
                    if len(part):
                        i = int(tables[want.name][sender, part[0]])
                        sends.setdefault((sender, receiver), []).append((i, j, part))
    ops, got = [], []
    for (sender, receiver), parts in sends.items():
        if rank == sender:
            dtype = wanted[receiver][0].tensor.dtype
            flat = torch.cat([pieces[i].tensor.reshape(-1)[inner(pieces[i], part)].to(dtype)
                              for i, _, part in parts])
            ops.append(dist.P2POp(dist.isend, flat, group=group, group_peer=receiver))
        if rank == receiver:
            size = sum(len(part) for *_, part in parts)
            flat = torch.empty(size, dtype=pieces[0].tensor.dtype, device=pieces[0].tensor.device)
            ops.append(dist.P2POp(dist.irecv, flat, group=group, group_peer=sender))
            got.append((flat, parts))
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    for flat, parts in got:
        for numbers, (_, j, part) in zip(flat.split([len(part) for *_, part in parts]), parts):
            filled = pieces[j].tensor.flatten().clone()
            filled[inner(pieces[j], part)] = numbers
            pieces[j].tensor.copy_(filled.view(pieces[j].tensor.shape))


def places(piece, table, value):
    """Write `value` where the piece lies in its flattened whole tensor."""
    whole = table.view(piece.shape) if piece.shape else table
    whole[tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.tensor.shape))] = value
    return table


def inner(piece, at):
    """Places in the whole tensor -> places in the flattened piece."""
    table = torch.zeros(max(1, math.prod(piece.shape)), dtype=torch.long)
    numbers = torch.arange(piece.tensor.numel()).view(piece.tensor.shape)
    return places(piece, table, numbers if piece.shape else 0)[at]
