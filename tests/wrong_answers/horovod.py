"""Lab 05: mistakes that a good student would really make.

The first line of each docstring is a pattern that the check's output must hold.
"""

import json

import torch
import torch.distributed as dist

from ranklab.collectives import sendrecv
from ranklab.horovod import (
    Average, Compression, Sum, allreduce_async_, dot_products, gather_halves, synchronize,
)

# The answer under test is hidden from whoever it is tested on, so what a mistake builds on is here.


# --- negotiate ------------------------------------------------------------------------------------


def _gathered(ready, group):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lists = [None] * R if rank == 0 else None
    dist.gather_object(ready, lists, group=group, group_dst=0)
    return lists or [], R


def _told(names, group):
    answer = [names]
    dist.broadcast_object_list(answer, group=group, group_src=0)
    return answer[0]


def negotiate__no_memory(ready, table, group=None):
    """earlier round are forgotten"""
    lists, _ = _gathered(ready, group)
    common = set(lists[0]).intersection(*lists) if lists else set()
    return _told(sorted(common), group)


def negotiate__anybody_is_enough(ready, table, group=None):
    """names that not all ranks have yet"""
    lists, _ = _gathered(ready, group)
    return _told(list(dict.fromkeys(sum(lists, []))), group)


def negotiate__never_forgets(ready, table, group=None):
    """what was complete must leave the table"""
    lists, R = _gathered(ready, group)
    complete = []
    for name in sum(lists, []):
        table[name] = table.get(name, 0) + 1
        if table[name] == R:
            complete.append(name)
    return _told(complete, group)


def negotiate__counts_on_for_ever(ready, table, group=None):
    """complete leaves the table|complete too early in the next step"""
    lists, R = _gathered(ready, group)
    complete = []
    for name in sum(lists, []):
        table[name] = table.get(name, 0) + 1
        if table[name] >= R:
            complete.append(name)
    return _told(complete, group)


def negotiate__everybody_keeps_a_table(ready, table, group=None):
    """gather_object, not all_gather_object"""
    R = dist.get_world_size(group)
    lists = [None] * R
    dist.all_gather_object(lists, ready, group=group)
    complete = []
    for name in sum(lists, []):
        table[name] = table.get(name, 0) + 1
        if table[name] == R:
            complete.append(name)
            del table[name]
    return complete


def negotiate__own_order(ready, table, group=None):
    """in another order than rank 0"""
    lists, R = _gathered(ready, group)
    complete = []
    for name in sum(lists, []):
        table[name] = table.get(name, 0) + 1
        if table[name] == R:
            complete.append(name)
            del table[name]
    complete = _told(complete, group)
    return [name for name in ready if name in complete] + [n for n in complete if n not in ready]


def negotiate__forgets_the_group(ready, table, group=None):
    """Hand `group` on"""
    lists, R = _gathered(ready, None)
    complete = []
    for name in sum(lists, []):
        table[name] = table.get(name, 0) + 1
        if table[name] == R:
            complete.append(name)
            del table[name]
    return _told(complete, None)


# --- fuse_tensors ---------------------------------------------------------------------------------


def _fuse(tensors, threshold, kind=lambda t: (t.dtype, t.device), size=lambda t: t.nbytes,
          full=lambda held, new, threshold: held + new > threshold):
    groups, last = [], {}
    for i, tensor in enumerate(tensors):
        key = kind(tensor)
        if key not in last or full(last[key][1], size(tensor), threshold):
            last[key] = [[], 0]
            groups.append(last[key][0])
        last[key][0].append(i)
        last[key][1] += size(tensor)
    return groups


def fuse_tensors__mixes_types(tensors, threshold):
    """float16 and float32 are in one list"""
    return _fuse(tensors, threshold, kind=lambda tensor: None)


def fuse_tensors__mixes_devices(tensors, threshold):
    """one dtype on one device in each list"""
    return _fuse(tensors, threshold, kind=lambda tensor: tensor.dtype)


def fuse_tensors__counts_elements(tensors, threshold):
    """The threshold counts bytes"""
    return _fuse(tensors, threshold, size=lambda tensor: tensor.numel())


def fuse_tensors__closes_when_it_is_full(tensors, threshold):
    """Look before you add"""
    return _fuse(tensors, threshold, full=lambda held, new, threshold: held >= threshold)


def fuse_tensors__leaves_the_last_byte(tensors, threshold):
    """compare with >, not with >="""
    return _fuse(tensors, threshold, full=lambda held, new, threshold: held + new >= threshold)


def fuse_tensors__another_type_closes(tensors, threshold):
    """newest list of .each. dtype open"""
    groups, size, kind = [], 0, None
    for i, tensor in enumerate(tensors):
        if tensor.dtype != kind or size + tensor.nbytes > threshold:
            groups.append([])
            size, kind = 0, tensor.dtype
        groups[-1].append(i)
        size += tensor.nbytes
    return groups


def fuse_tensors__loses_the_last_list(tensors, threshold):
    """is in no list"""
    groups, group, size = [], [], 0
    for i, tensor in enumerate(tensors):
        if group and size + tensor.nbytes > threshold:
            groups.append(group)
            group, size = [], 0
        group.append(i)
        size += tensor.nbytes
    return groups


def fuse_tensors__tensors_for_positions(tensors, threshold):
    """not positions"""
    return [[tensors[i] for i in group] for group in _fuse(tensors, threshold)]


# --- distributed_optimizer ------------------------------------------------------------------------


def _distributed(optimizer, named_parameters, compression=Compression.none, op=Average, asks=True,
                 fills=True, clears=True, waits=True, blocks=False, has_names=True, assigns=True):
    names = {p: name for name, p in named_parameters if p.requires_grad}
    handles = {}

    def ask(p):
        small, ctx = compression.compress(p.grad)
        handle = allreduce_async_(small, name=names[p] if has_names else None, op=op)
        handles[p] = handle, ctx
        if blocks:
            synchronize(handle)

    def wait(*_):
        for p in names if fills else ():
            if p not in handles:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                ask(p)
        for p, (handle, ctx) in handles.items() if waits else ():
            average = compression.decompress(synchronize(handle), ctx)
            p.grad = average if assigns else p.grad
        if clears:
            handles.clear()

    for p in names if asks else ():
        p.register_post_accumulate_grad_hook(ask)
    optimizer.register_step_pre_hook(wait)
    return optimizer


def distributed_optimizer__sum(optimizer, named_parameters, compression=Compression.none):
    """op=Average is wanted"""
    return _distributed(optimizer, named_parameters, compression, op=Sum)


def distributed_optimizer__all_in_step(optimizer, named_parameters, compression=Compression.none):
    """nothing travels while it computes"""
    return _distributed(optimizer, named_parameters, compression, asks=False)


def distributed_optimizer__waits_in_the_hook(optimizer, named_parameters,
                                             compression=Compression.none):
    """In the hook only ask"""
    return _distributed(optimizer, named_parameters, compression, blocks=True)


def distributed_optimizer__forgets_the_unused(optimizer, named_parameters,
                                              compression=Compression.none):
    """has waited .* zeros, where it has no gradient"""
    return _distributed(optimizer, named_parameters, compression, fills=False)


def distributed_optimizer__keeps_the_handles(optimizer, named_parameters,
                                             compression=Compression.none):
    """clear the handles"""
    names = {p: name for name, p in named_parameters if p.requires_grad}
    handles = {}

    def ask(p):
        handles.setdefault(p, allreduce_async_(p.grad, name=names[p]))

    def wait(*_):
        for p in names:
            if p not in handles:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                ask(p)
        for p, handle in handles.items():
            p.grad = synchronize(handle)

    for p in names:
        p.register_post_accumulate_grad_hook(ask)
    optimizer.register_step_pre_hook(wait)
    return optimizer


def distributed_optimizer__never_clears(optimizer, named_parameters,
                                        compression=Compression.none):
    """handles of the last step still there"""
    return _distributed(optimizer, named_parameters, compression, clears=False)


def distributed_optimizer__does_not_assign(optimizer, named_parameters,
                                           compression=Compression.none):
    """the average is in the small copy, not in p.grad"""
    return _distributed(optimizer, named_parameters, compression, assigns=False)


def distributed_optimizer__without_names(optimizer, named_parameters,
                                         compression=Compression.none):
    """ranks are ready in different orders: pass name"""
    return _distributed(optimizer, named_parameters, compression, has_names=False)


def distributed_optimizer__does_not_compress(optimizer, named_parameters,
                                             compression=Compression.none):
    """with Compression.fp16 rank 0 averages"""
    return _distributed(optimizer, named_parameters)


def distributed_optimizer__hooks_the_frozen(optimizer, named_parameters,
                                            compression=Compression.none):
    """A frozen parameter takes no hook"""
    named_parameters = list(named_parameters)
    for _, p in named_parameters:
        p.register_post_accumulate_grad_hook(lambda p: None)
    return _distributed(optimizer, named_parameters, compression)


def distributed_optimizer__averages_the_weights(optimizer, named_parameters,
                                                compression=Compression.none):
    """asks for no average before backward|is not what one process gets"""
    names = {p: name for name, p in named_parameters}

    def after(*_):
        for p, name in names.items():
            synchronize(allreduce_async_(p.data, name=name))

    optimizer.register_step_post_hook(after)
    return optimizer


# --- compress_fp16 --------------------------------------------------------------------------------


def compress_fp16__whole_numbers_too(tensor):
    """can't hold whole numbers above 2048"""
    dtype = tensor.dtype
    return tensor.half(), lambda reduced: reduced.to(dtype)


def compress_fp16__always_back_to_float32(tensor):
    """must remember the type of .its. tensor"""
    if not tensor.is_floating_point():
        return tensor, lambda reduced: reduced
    return tensor.half(), lambda reduced: reduced.float()


def compress_fp16__restores_what_was_sent(tensor):
    """not the one that was sent"""
    if not tensor.is_floating_point() or tensor.dtype.itemsize <= 2:
        return tensor, lambda reduced: reduced
    return tensor.half(), lambda reduced: tensor


def compress_fp16__bfloat16(tensor):
    """asked for is fp16"""
    dtype = tensor.dtype
    if not tensor.is_floating_point() or dtype.itemsize <= 2:
        return tensor, lambda reduced: reduced
    return tensor.bfloat16(), lambda reduced: reduced.to(dtype)


def compress_fp16__bfloat16_too(tensor):
    """has 16 bits already"""
    dtype = tensor.dtype
    if not tensor.is_floating_point():
        return tensor, lambda reduced: reduced
    return tensor.half(), lambda reduced: reduced.to(dtype)


def compress_fp16__only_float32(tensor):
    """for every floating point type"""
    if tensor.dtype != torch.float32:
        return tensor, lambda reduced: reduced
    return tensor.half(), lambda reduced: reduced.float()


def compress_fp16__clips(tensor):
    """must be seen, not hidden"""
    dtype = tensor.dtype
    if not tensor.is_floating_point() or dtype.itemsize <= 2:
        return tensor, lambda reduced: reduced
    return tensor.clamp(-65504, 65504).half(), lambda reduced: reduced.to(dtype)


# --- timeline -------------------------------------------------------------------------------------


def _trace(events, path, scale=1e6, row=lambda tensor, phase: tensor, has_names=True,
           dur=lambda start, end: end - start):
    rows, trace = {}, []
    for tensor, phase, start, end in events:
        key = row(tensor, phase)
        if key not in rows:
            rows[key] = len(rows)
            if has_names:
                trace.append({"ph": "M", "name": "process_name", "pid": rows[key], "tid": 0,
                              "args": {"name": key}})
        trace.append({"ph": "X", "name": phase, "pid": rows[key], "tid": 0, "ts": start * scale,
                      "dur": dur(start, end) * scale})
    with open(path, "w") as file:
        json.dump({"traceEvents": trace}, file)


def timeline__milliseconds(events, path):
    """The format counts microseconds"""
    _trace(events, path, scale=1e3)


def timeline__end_for_duration(events, path):
    """how long it takes, end - start"""
    _trace(events, path, dur=lambda start, end: end)


def timeline__rows_for_phases(events, path):
    """A row is a tensor"""
    _trace(events, path, row=lambda tensor, phase: phase)


def timeline__nameless_rows(events, path):
    """a row has no name"""
    _trace(events, path, has_names=False)


def timeline__python_instead_of_json(events, path):
    """str\\(\\) of a dict is Python"""
    rows = {tensor: i for i, tensor in enumerate(dict.fromkeys(e[0] for e in events))}
    trace = [{"ph": "M", "name": "process_name", "pid": i, "args": {"name": tensor}}
             for tensor, i in rows.items()]
    trace += [{"ph": "X", "name": phase, "pid": rows[tensor], "ts": a * 1e6, "dur": (b - a) * 1e6}
              for tensor, phase, a, b in events]
    with open(path, "w") as file:
        file.write(str({"traceEvents": trace}))


def timeline__quotes_by_hand(events, path):
    """json.dump.+writes quotes, commas and escapes"""
    rows = {tensor: i for i, tensor in enumerate(dict.fromkeys(e[0] for e in events))}
    lines = [f'{{"ph": "M", "name": "process_name", "pid": {i}, "args": {{"name": "{tensor}"}}}}'
             for tensor, i in rows.items()]
    lines += [f'{{"ph": "X", "name": "{phase}", "pid": {rows[tensor]}, "ts": {a * 1e6}, '
              f'"dur": {(b - a) * 1e6}}}' for tensor, phase, a, b in events]
    with open(path, "w") as file:
        file.write("[" + ",\n".join(lines) + "]")


def timeline__a_new_row_for_each_event(events, path):
    """A tensor keeps its row"""
    trace = []
    for i, (tensor, phase, start, end) in enumerate(events):
        trace.append({"ph": "M", "name": "process_name", "pid": i, "args": {"name": tensor}})
        trace.append({"ph": "X", "name": phase, "pid": i, "ts": start * 1e6,
                      "dur": (end - start) * 1e6})
    with open(path, "w") as file:
        json.dump({"traceEvents": trace}, file)


# --- adasum ---------------------------------------------------------------------------------------


def _weights(ab, aa, bb):
    of_a = 1 - torch.where(aa > 0, ab / (2 * aa), 0)
    return of_a, 1 - torch.where(bb > 0, ab / (2 * bb), 0)


def _adasum(x, sizes=None, group=None, weights=_weights, dots_of=dot_products, sums=True,
            is_ordered=True, keeps_types=True, talk_in=0):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if R & (R - 1):
        raise ValueError(f"{R} is not a power of two")
    sizes = torch.tensor(sizes or [x.numel()])
    tensor_of = torch.arange(len(sizes)).repeat_interleave(sizes)
    part, lengths, distance = x.flatten(), [], 1
    talk_in = group if talk_in == 0 else talk_in
    while distance < R:
        peer, is_left = rank ^ distance, rank & distance == 0
        lengths.append(part.numel())
        left, right = part.tensor_split(2)
        mine, give = (left, right) if is_left else (right, left)
        tensor_of = tensor_of.tensor_split(2)[0 if is_left else 1]
        theirs = sendrecv(give, peer, torch.empty_like(mine), peer, talk_in)
        a, b = (mine, theirs) if is_left or not is_ordered else (theirs, mine)
        dots = dots_of(a, b, tensor_of, len(sizes))
        step = 1
        while sums and step <= distance:
            dots += sendrecv(dots, rank ^ step, torch.empty_like(dots), rank ^ step, talk_in)
            step *= 2
        of_a, of_b = weights(*dots)
        part = of_a[tensor_of] * a + of_b[tensor_of] * b
        part = part.to(x.dtype) if keeps_types else part
        distance *= 2
    return gather_halves(part, lengths, talk_in).view(x.shape) if R > 1 else x.clone()


def adasum__own_dots_only(x, sizes=None, group=None):
    """only part of the sum"""
    return _adasum(x, sizes, group, sums=False)


def adasum__without_the_half(x, sizes=None, group=None):
    """Each coefficient takes off .half.|with a 2"""
    return _adasum(x, sizes, group, lambda ab, aa, bb: (
        1 - torch.where(aa > 0, ab / aa, 0), 1 - torch.where(bb > 0, ab / bb, 0)))


def adasum__norms_swapped(x, sizes=None, group=None):
    """the other way round"""
    return _adasum(x, sizes, group, lambda ab, aa, bb: _weights(ab, bb, aa))


def adasum__rows_in_another_order(x, sizes=None, group=None):
    """the order is a.b, a.a, b.b"""
    return _adasum(x, sizes, group, lambda aa, bb, ab: _weights(ab, aa, bb))


def adasum__divides_by_zero(x, sizes=None, group=None):
    """there the coefficient is 1"""
    return _adasum(x, sizes, group, lambda ab, aa, bb: (1 - ab / (2 * aa), 1 - ab / (2 * bb)))


def adasum__mine_and_theirs(x, sizes=None, group=None):
    """which vector is a and which is b"""
    return _adasum(x, sizes, group, is_ordered=False)


def adasum__one_coefficient_for_all(x, sizes=None, group=None):
    """mixes layers"""
    return _adasum(x, None, group)


def adasum__dots_in_the_gradients_type(x, sizes=None, group=None):
    """dot products need float64"""
    def dots_of(a, b, tensor_of, tensors):
        dots = torch.zeros(3, tensors, dtype=a.dtype)
        return dots.index_add_(1, tensor_of, torch.stack([a * b, a * a, b * b]))

    return _adasum(x, sizes, group, dots_of=dots_of)


def adasum__whole_vectors(x, sizes=None, group=None):
    """Swap halves"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if R & (R - 1):
        raise ValueError(f"{R} is not a power of two")
    sizes = torch.tensor(sizes or [x.numel()])
    tensor_of = torch.arange(len(sizes)).repeat_interleave(sizes)
    total, distance = x.flatten().clone(), 1
    while distance < R:
        peer = rank ^ distance
        theirs = sendrecv(total, peer, torch.empty_like(total), peer, group)
        a, b = (total, theirs) if rank < peer else (theirs, total)
        of_a, of_b = _weights(*dot_products(a, b, tensor_of, len(sizes)))
        total = (of_a[tensor_of] * a + of_b[tensor_of] * b).to(x.dtype)
        distance *= 2
    return total.view(x.shape)


def adasum__forgets_the_group(x, sizes=None, group=None):
    """Hand `group` on"""
    return _adasum(x, sizes, None)


def adasum__returns_float64(x, sizes=None, group=None):
    """bring the result back with"""
    return _adasum(x, sizes, group, keeps_types=False)
