"""Lab 04: what goes wrong when a gradient is squeezed into top-k's bytes."""

import torch
import torch.distributed as dist
from mutants import mutant

from ranklab.ddp import TopK, finished
from ranklab.ddp import compress_to_budget as answer

KEPT = "    errors.update(zip(parameters, remainder.split([p.numel() for p in parameters])))\n"
LEFT = "grid.scatter_add(1, places, -values.to(grid.dtype))"
K = "top_k_bytes(parameters, 0.001) // 4 // rows"
WANTED = ("[errors[p] if p in errors else torch.zeros_like(p).flatten() for p in "
          "parameters]")
INDEX = "errors.get(bucket.index(), torch.zeros_like(buffer))"
BY_INDEX = "    errors[bucket.index()] = remainder\n"
WRONG = [
    mutant(answer, WANTED, f"[x if len(x := {INDEX}) == len(buffer) else 0 * buffer]", KEPT,
           BY_INDEX, says="Keep it by parameter", called="zeros_in_new_buckets"),
    mutant(answer, ".bfloat16()", ".to(torch.float8_e4m3fn).bfloat16()", LEFT,
           "grid.scatter(1, places, 0.0)", says="55 numbers.*also by rounding",
           called="eight_bits_and_no_rest"),
    mutant(answer, KEPT, "", says="must be added to the next gradient", called="no_feedback"),
    mutant(answer, K, "top_k_bytes(parameters, 0.001) // 2 // rows", says="sends 160 bytes, top-k",
           called="places_are_not_counted"),
    mutant(answer, " / R)", ")", says="the sum over ranks"),
    mutant(answer, 'state.get("group")', "None", says="it does not end|the mean of all 4 ranks|"
           "sends .* bytes, top-k", called="all_ranks"),
    mutant(answer, ".bfloat16()", ".half()", "remote.view(torch.bfloat16)",
           "remote.view(torch.float16)", says="float16 ends at 65,504"),
    mutant(answer, "target = buffer", "target = buffer.nan_to_num(0)", says="a NaN of one rank"),
    mutant(answer, "grid.abs().topk", "grid.topk", says="Largest in size"),
    mutant(answer, "2**15)", "2**17)", says="int16 ends at 32,767"),
    mutant(answer, LEFT, "grid.scatter(1, places, 0.0)", says="also by rounding",
           called="rounding_is_lost"),
    mutant(answer, K, K + ") if errors else (grid.shape[1]", says="step 0 sends",
           called="whole_in_the_first_step"),
    mutant(answer, " / R)", " / R * 3)", says="away from the mean", called="three_times_the_mean"),
    mutant(answer, WANTED, f"[{INDEX}]", KEPT, BY_INDEX, says="Keep it by parameter"),
    mutant(answer, "finished(", "(", says="DDP wants a future"),
    mutant(answer, "2**15)", "2**17)", "indices.long()", "indices.long() % grid.shape[1]",
           says="70,000 numbers.*If places have 16 bits", called="places_from_the_start"),
]


def compress_to_budget__top_k_itself(state, bucket: dist.GradBucket):
    """must be 0.03 below top-k's"""
    top_k = state.setdefault("top-k", TopK(0.001, state.get("group")))
    return TopK.hook(top_k, bucket)


def compress_to_budget__own_as_it_was(state, bucket: dist.GradBucket):
    """its own numbers as it sent them|in the same order"""
    buffer, group = bucket.buffer(), state.get("group")
    k = min(len(buffer), 2 * len(bucket.parameters()))
    places = buffer.abs().topk(k).indices
    values = buffer[places]
    mine = torch.cat([places.float(), values]).bfloat16().view(torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    buffer.zero_()
    for rank, each in enumerate(all_of_them):
        at, theirs = each.view(torch.bfloat16).float().split(k)
        if rank == dist.get_rank(group):
            at, theirs = places, values
        buffer.index_add_(0, at.long().clamp(max=len(buffer) - 1), theirs / len(all_of_them))
    return finished(buffer)


def compress_to_budget__a_scale_of_zero(state, bucket: dist.GradBucket):
    """has no sign|a gradient of zeros"""
    buffer, group = bucket.buffer(), state.get("group")
    R = dist.get_world_size(group)
    k = max(1, min(len(buffer), len(bucket.parameters())))
    places = buffer.abs().topk(k).indices
    scale = buffer[places].abs().max()
    values = (buffer[places] / scale * 127).round() * scale / 127
    mine = torch.cat([values, places.to(values.dtype)])
    all_of_them = [torch.empty_like(mine) for _ in range(R)]
    dist.all_gather(all_of_them, mine, group=group)
    buffer.zero_()
    for each in all_of_them:
        values, at = each.split(k)
        buffer.index_add_(0, at.long(), values / R)
    return finished(buffer)


def compress_to_budget__random_places_of_each_rank(state, bucket: dist.GradBucket):
    """near|away from the mean"""
    buffer, group = bucket.buffer(), state.get("group")
    R = dist.get_world_size(group)
    at = torch.randperm(len(buffer), device=buffer.device)[:2 * len(bucket.parameters())]
    values = buffer[at]
    dist.all_reduce(values, group=group)
    buffer.zero_()
    buffer[at] = values / R
    return finished(buffer)
