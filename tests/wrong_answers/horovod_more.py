"""Lab 05: mistakes that earlier checks let through, or named wrongly.

The first line of each docstring is a pattern that the check's output must hold.
"""

import torch
import torch.distributed as dist

from ranklab.horovod import Compression, allreduce_async_, synchronize


def negotiate__rank_0_of_the_job_counts(ready, table, group=None):
    """need not be rank 0 of the job"""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lists = [None] * R if rank == 0 else None
    dist.gather_object(ready, lists, group=group, group_dst=0)
    complete = []
    if dist.get_rank() == 0:
        for name in sum(lists, []):
            table[name] = table.get(name, 0) + 1
            if table[name] == R:
                complete.append(name)
                del table[name]
    answer = [complete]
    dist.broadcast_object_list(answer, group=group, group_src=0)
    return answer[0]


def fuse_tensors__sorted_by_size(tensors, threshold):
    """without sorting them"""
    if threshold < 0:
        raise ValueError(threshold)
    groups, last = [], {}
    for i in sorted(range(len(tensors)), key=lambda i: tensors[i].nbytes):
        kind = tensors[i].dtype, tensors[i].device
        if kind not in last or last[kind][1] + tensors[i].nbytes > threshold:
            last[kind] = [[], 0]
            groups.append(last[kind][0])
        last[kind][0].append(i)
        last[kind][1] += tensors[i].nbytes
    return [sorted(group) for group in groups]


def _distributed(optimizer, named_parameters, compression, again=None, mine=None):
    names = {p: name for name, p in named_parameters if p.requires_grad}
    handles = {}

    def ask(p):
        if p in handles:
            again(handles, p)
        small, ctx = compression.compress(p.grad)
        handles[p] = allreduce_async_(small, name=names[p]), ctx

    def wait(*_):
        for p in names if mine is None else mine:
            if p in names and p not in handles:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                ask(p)
        for p, (handle, ctx) in handles.items():
            p.grad = compression.decompress(synchronize(handle), ctx)
        handles.clear()

    for p in names if mine is None else mine:
        if p in names:
            p.register_post_accumulate_grad_hook(ask)
    optimizer.register_step_pre_hook(wait)
    return optimizer


def distributed_optimizer__asks_a_second_time(optimizer, named_parameters,
                                              compression=Compression.none):
    """a second backward before step\\(\\) raises nothing"""
    return _distributed(optimizer, named_parameters, compression, lambda handles, p: None)


def distributed_optimizer__the_first_group_only(optimizer, named_parameters,
                                                compression=Compression.none):
    """is not the same on all ranks|Each parameter with requires_grad once"""
    def refuse(handles, p):
        raise ValueError("asked already")

    return _distributed(optimizer, named_parameters, compression, refuse,
                        optimizer.param_groups[0]["params"])
