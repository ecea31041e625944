"""The parameter server: simple, and one rank does nearly all the work."""

import torch
import torch.distributed as dist


def parameter_server(x, server=0, group=None):
    """Sum `x` over ranks on rank `server`, and return the sum on every rank; `x` is unchanged.

    The result is a new tensor. Nothing is sent when x is empty.
    Cost: the server sends and receives (R-1) times x's bytes, every other rank once.
    Paper: Li et al. 2014, "Scaling distributed machine learning with the parameter server"
    Lab: 02
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    total = x.clone(memory_format=torch.contiguous_format)
    workers = [r for r in range(R) if r != server]
    if rank != server and total.numel():
        dist.send(total, group=group, group_dst=server)
        dist.recv(total, group=group, group_src=server)
    elif total.numel():
        buffer = torch.empty_like(total)
        for worker in workers:
            dist.recv(buffer, group=group, group_src=worker)
            total += buffer
        for worker in workers:
            dist.send(total, group=group, group_dst=worker)
    return total
