"""Twice as many entries as top-k for the same bytes, because each takes half as many.

    model.register_comm_hook({}, compress_to_budget)
"""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.ddp.low_rank import finished
from ranklab.ddp.top_k import top_k_bytes


def compress_to_budget(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The bucket holds the mean over ranks of the entries they have picked: of each its place and
    its value travel, in two bytes each. What is not sent, also by rounding, is added to the next
    gradient.

    state  a dict: its "group" is the group, where there is one; the errors are kept in it
    cost   one all-gather; each of the other ranks gets at most top_k_bytes(parameters, 0.001)
    lab    04
    """
    buffer, parameters, group = bucket.buffer(), bucket.parameters(), state.get("group")
    errors, R = state.setdefault("errors", {}), dist.get_world_size(group)
    error = [errors[p] if p in errors else torch.zeros_like(p).flatten() for p in parameters]
    wanted = buffer + torch.cat(error)
    rows = -(-wanted.numel() // 2**15)  # a place in a row of so many numbers fits into int16
    grid = nn.functional.pad(wanted, (0, -wanted.numel() % rows)).view(rows, -1)
    k = min(grid.shape[1], top_k_bytes(parameters, 0.001) // 4 // rows)
    places = grid.abs().topk(k).indices  # a NaN counts as the largest: it is sent
    values = grid.gather(1, places).bfloat16()
    mine = torch.stack([places.short(), values.view(torch.int16)])
    gathered = mine.view(torch.uint8).repeat(R, 1, 1)  # gloo sends no int16
    dist.all_gather_single(gathered, mine.view(torch.uint8), group=group)
    total = torch.zeros_like(grid)
    for at, theirs in gathered.view(torch.int16).split(2):  # in one order: the same on all ranks
        total.scatter_add_(1, at.long(), theirs.view(torch.bfloat16).to(grid.dtype))
    left = grid.scatter_add(1, places, -values.to(grid.dtype)).flatten()[:wanted.numel()]
    errors.update(zip(parameters, left.split([p.numel() for p in parameters])))
    return finished(buffer.copy_(total.flatten()[:wanted.numel()] / R))
