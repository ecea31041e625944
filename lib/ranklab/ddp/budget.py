"""Send twice as many entries as top-k for the same bytes, because each entry takes half as many.

    model.register_comm_hook({}, compress_to_budget)
"""

import torch
import torch.distributed as dist
from torch import nn

from ranklab.ddp.low_rank import finished
from ranklab.ddp.top_k import top_k_bytes


def compress_to_budget(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average over ranks the entries that the ranks pick; send index and value in two bytes each.

    What is not sent, including rounding errors, is added to the next gradient.
    state: a dict; "group", if present, is the process group; the hook keeps its errors in it.
    Cost: one all-gather; each of the other ranks gets at most top_k_bytes(parameters, 0.001).
    Lab: 04
    """
    buffer, parameters, group = bucket.buffer(), bucket.parameters(), state.get("group")
    errors, R = state.setdefault("errors", {}), dist.get_world_size(group)
    error = [errors[p] if p in errors else torch.zeros_like(p).flatten() for p in parameters]
    target = buffer + torch.cat(error)
    rows = -(-target.numel() // 2**15)  # a place in a row of so many numbers fits into int16
    grid = nn.functional.pad(target, (0, -target.numel() % rows)).view(rows, -1)
    k = min(grid.shape[1], top_k_bytes(parameters, 0.001) // 4 // rows)
    places = grid.abs().topk(k).indices  # a NaN counts as the largest: it is sent
    values = grid.gather(1, places).bfloat16()
    message = torch.stack([places.short(), values.view(torch.int16)])
    gathered = message.view(torch.uint8).repeat(R, 1, 1)  # gloo sends no int16
    dist.all_gather_single(gathered, message.view(torch.uint8), group=group)
    total = torch.zeros_like(grid)
    for indices, remote in gathered.view(torch.int16).split(2):  # one order: the same on all ranks
        total.scatter_add_(1, indices.long(), remote.view(torch.bfloat16).to(grid.dtype))
    remainder = grid.scatter_add(1, places, -values.to(grid.dtype)).flatten()[:target.numel()]
    errors.update(zip(parameters, remainder.split([p.numel() for p in parameters])))
    return finished(buffer.copy_(total.flatten()[:target.numel()] / R))
