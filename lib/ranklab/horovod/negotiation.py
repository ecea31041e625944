"""Which tensors do all ranks have? The smallest answer; coordinator.py has the whole one."""

import torch.distributed as dist


def negotiate(ready, table, group=None):
    """Every rank ends with the same list: the names that are ready on all ranks, in one order.

    `ready` are the names that became ready here since the last call, in any order. `table` is a
    dict that each rank keeps from call to call; rank 0's says on how many ranks a name is ready.

    cost   each rank sends its new names to rank 0, which sends one list to all
    paper  Sergeev & Del Balso 2018, "Horovod: fast and easy distributed deep learning"
    lab    05
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    lists = [None] * R if rank == 0 else None
    dist.gather_object(ready, lists, group=group, group_dst=0)
    complete = []
    for names in lists or ():  # only rank 0 has lists, and only its table is ever filled
        for name in names:
            table[name] = table.get(name, 0) + 1
            if table[name] == R:
                complete.append(name)
                del table[name]
    answer = [complete]
    dist.broadcast_object_list(answer, group=group, group_src=0)
    return answer[0]
