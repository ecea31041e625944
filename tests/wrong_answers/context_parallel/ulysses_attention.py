"""Lab 10: heads and tokens that are traded wrongly."""

import torch
from mutants import mutant

from ranklab.context_parallel import ulysses_attention
from ranklab.context_parallel.ulysses import Trade, trade

THERE, BACK = "Trade.apply(x, 1, 2, group)", "Trade.apply(attend(*heads), 2, 1, group)"
REFUSES = "    if q.shape[1] % R or k.shape[1] % R:"

WRONG = [mutant(ulysses_attention, *edits, says=says, called=called, torch=torch, trade=trade)
         for *edits, says, called in (
    (BACK, "attend(*heads)", "shape", "not_back"),
    (BACK, "Trade.apply(attend(*heads), 1, 2, group)", "shape|divide equally", "there_again"),
    (THERE, "Trade.apply(x, 2, 1, group)", "attend gets", "tokens_for_heads"),
    (THERE, "Trade.apply(x, 3, 2, group)", "attend gets|Error", "head_size_cut"),
    (THERE, "trade(x, 1, 2, group)", "Autograd must know both", "no_gradient"),
    ("for x in (q, k, v)", "for x in (q, k, k)", " is ", "k_twice"),
    (THERE, "Trade.apply(x.float(), 1, 2, group)", f"return {BACK}",
     f"return {BACK}.to(q.dtype)", "bfloat16.*bytes", "float32_travels"),
    (THERE, "Trade.apply(x, 1, 2, None)", "bytes of a message|does not end|attend gets",
     "all_ranks"),
    (REFUSES, "    if False:", "stack expects", "not_refused"),
    (REFUSES, "    if q.shape[1] % R:", "stack expects", "only_q_refused"),
)]  # fmt: skip


def ulysses_attention__all_gather(q, k, v, attend, group=None):
    """a rank sends .* bytes, not"""
    import torch.distributed as dist
    from torch.distributed.nn.functional import all_gather

    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if q.shape[1] % R or k.shape[1] % R:
        raise ValueError("heads")
    heads = [torch.cat(all_gather(x, group=group), dim=2).chunk(R, dim=1)[rank] for x in (q, k, v)]
    return Trade.apply(attend(*heads), 2, 1, group)
