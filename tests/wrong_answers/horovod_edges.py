"""Lab 05: mistakes that show only at an edge: a second call, zeros, another type or shape.

The first line of each docstring is a pattern that the check's output must hold.
"""

import json

import torch
import torch.distributed as dist


# --- negotiate ------------------------------------------------------------------------------------


TABLE = {}


def _negotiate(ready, table, group, is_told=True, size_of=None, source=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lists = [None] * R if rank == 0 else None
    dist.gather_object(ready, lists, group=group, group_dst=0)
    complete = []
    for name in sum(lists or [], []):
        table[name] = table.get(name, 0) + 1
        if table[name] == dist.get_world_size(size_of if size_of is not None else group):
            complete.append(name)
            del table[name]
    answer = [complete]
    where = {"group_src": 0} if source is None else {"src": source}
    dist.broadcast_object_list(answer, group=group, **where)
    return answer[0] if is_told else complete


def negotiate__one_table_for_all(ready, table, group=None):
    """counted in another table"""
    return _negotiate(ready, TABLE, group)


def negotiate__has_nothing_to_say(ready, table, group=None):
    """takes no part in a round"""
    return _negotiate(ready, table, group) if ready else []


def negotiate__only_rank_0_is_told(ready, table, group=None):
    """fills the list that it is given"""
    return _negotiate(ready, table, group, is_told=False)


def negotiate__source_is_a_global_rank(ready, table, group=None):
    """group_src=0 is the first rank of the group"""
    return _negotiate(ready, table, group, source=0)


def negotiate__counts_all_ranks_of_the_job(ready, table, group=None):
    """in the group of ranks \\(0, 1\\).+Hand `group` on"""
    return _negotiate(ready, table, group, size_of=dist.group.WORLD)


def negotiate__says_it_again_and_again(ready, table, group=None):
    """Send `ready` only"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    waiting = table.get("waiting", []) + ready
    lists = [None] * R if rank == 0 else None
    dist.gather_object(waiting, lists, group=group, group_dst=0)
    answer = [[name for name in waiting if all(name in one for one in lists or ())]]
    dist.broadcast_object_list(answer, group=group, group_src=0)
    table["waiting"] = [name for name in waiting if name not in answer[0]]
    return answer[0]


# --- fuse_tensors ---------------------------------------------------------------------------------


def _fuse(tensors, threshold, kind=lambda t: (t.dtype, t.device), size=lambda t: t.nbytes,
          is_new=lambda newest: newest is None):
    if threshold < 0:
        raise ValueError("threshold must not be negative")
    groups, last = [], {}
    for i, tensor in enumerate(tensors):
        key = kind(tensor)
        if is_new(last.get(key)) or last[key][1] + size(tensor) > threshold:
            last[key] = [[], 0]
            groups.append(last[key][0])
        last[key][0].append(i)
        last[key][1] += size(tensor)
    return groups


def fuse_tensors__counts_rows(tensors, threshold):
    """whatever its shape"""
    return _fuse(tensors, threshold, size=lambda t: len(t) * t.element_size())


def fuse_tensors__counts_the_storage(tensors, threshold):
    """not those of the memory"""
    return _fuse(tensors, threshold, size=lambda t: t.untyped_storage().nbytes())


def fuse_tensors__itemsize_for_dtype(tensors, threshold):
    """bfloat16 and float16 are in one list"""
    return _fuse(tensors, threshold, kind=lambda t: (t.element_size(), t.device))


def fuse_tensors__zero_bytes_are_no_list(tensors, threshold):
    """Ask whether there is a list"""
    return _fuse(tensors, threshold, is_new=lambda newest: newest is None or not newest[1])


def fuse_tensors__takes_any_threshold(tensors, threshold):
    """-1 byte is accepted"""
    return _fuse(tensors, max(threshold, 0))


def fuse_tensors__first_list_with_room(tensors, threshold):
    """Nothing goes back into an older list"""
    groups = []
    for i, t in enumerate(tensors):
        kind = t.dtype, t.device
        room = [g for g in groups if g[0] == kind and g[2] + t.nbytes <= threshold]
        if not room:
            _fuse([], threshold)
            room = [[kind, [], 0]]
            groups += room
        room[0][1].append(i)
        room[0][2] += t.nbytes
    return [group for _, group, _ in groups]


def fuse_tensors__large_ones_aside(tensors, threshold):
    """which is the newest from then on"""
    small = [i for i, t in enumerate(tensors) if t.nbytes <= threshold]
    groups = _fuse([tensors[i] for i in small], threshold)
    large = [[i] for i in range(len(tensors)) if i not in small]
    return [[small[k] for k in group] for group in groups] + large


def fuse_tensors__another_device_closes(tensors, threshold):
    """A tensor of another device between two does not close"""
    turn, place = 0, None
    kinds = []
    for t in tensors:
        turn, place = turn + (t.device != place), t.device
        kinds.append((t.dtype, turn))
    kind_of = dict(zip(map(id, tensors), kinds))
    return _fuse(tensors, threshold, kind=lambda t: kind_of[id(t)])


# --- compress_fp16 --------------------------------------------------------------------------------


def _compress(tensor, is_worth=lambda t: t.is_floating_point() and t.dtype.itemsize > 2,
              restore=lambda reduced, tensor: reduced.to(tensor.dtype),
              restore_others=lambda reduced, tensor: reduced):
    if not is_worth(tensor):
        return tensor, lambda reduced: restore_others(reduced, tensor)
    return tensor.half(), lambda reduced: restore(reduced, tensor)


def compress_fp16__others_get_what_was_sent(tensor):
    """restore does not give the reduced tensor back"""
    return _compress(tensor, restore_others=lambda reduced, tensor: tensor)


def compress_fp16__restores_into_the_gradient(tensor):
    """Each result is a tensor of its own"""
    return _compress(tensor, restore=lambda reduced, tensor: tensor.copy_(reduced))


def compress_fp16__complex_numbers_too(tensor):
    """loses its imaginary part"""
    whole = torch.int64, torch.int32
    return _compress(tensor, lambda t: t.dtype.itemsize > 2 and t.dtype not in whole)


def compress_fp16__makes_8_bits_16(tensor):
    """float16 would be twice as much"""
    small = torch.float16, torch.bfloat16
    return _compress(tensor, lambda t: t.is_floating_point() and t.dtype not in small)


def compress_fp16__flattens_the_others(tensor):
    """Return the tensor as it is"""
    return _compress(tensor if tensor.is_floating_point() else tensor.flatten())


# --- timeline -------------------------------------------------------------------------------------


def _trace(events, path, rows=None, mode="w", name_of=lambda tensor: "process_name",
           x_name=lambda tensor, phase: phase, place=lambda row: (row, 0)):
    rows, trace = {} if rows is None else rows, []
    for tensor, phase, start, end in events:
        is_new = tensor not in rows
        pid, tid = place(rows.setdefault(tensor, len(rows)))
        if is_new:
            trace.append({"ph": "M", "name": name_of(tensor), "pid": pid, "tid": tid,
                          "args": {"name": tensor}})
        trace.append({"ph": "X", "name": x_name(tensor, phase), "pid": pid, "tid": tid,
                      "ts": start * 1e6, "dur": (end - start) * 1e6})
    with open(path, mode) as file:
        json.dump({"traceEvents": trace}, file)


def timeline__the_last_step_only(events, path):
    """A phase comes again in every step"""
    last = {(tensor, phase): times for tensor, phase, *times in events}
    _trace([(*who, *times) for who, times in last.items()], path)


def timeline__every_event_twice(events, path):
    """Write every event once"""
    _trace([event for event in events for _ in "BE"], path)


def timeline__row_entry_called_like_the_tensor(events, path):
    """a row has no name"""
    _trace(events, path, name_of=lambda tensor: tensor)


def timeline__threads_named_as_processes(events, path):
    """two rows named"""
    _trace(events, path, place=lambda row: (0, row))


def timeline__phases_called_like_the_tensor(events, path):
    """is its phase"""
    _trace(events, path, x_name=lambda tensor, phase: tensor)


def timeline__appends(events, path):
    """begins anew"""
    _trace(events, path, mode="a")


def timeline__remembers_the_rows(events, path, rows={}):
    """called again, a row has no name.+kept from call to call"""
    _trace(events, path, rows)
