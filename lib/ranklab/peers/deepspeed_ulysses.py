"""DeepSpeed's Ulysses and its tiles with our interface; it is imported as in lab 06 (zero)."""

import math
from types import SimpleNamespace

import torch.distributed as dist
import torch.nn.functional as F

from ranklab.basics.targets import IGNORE
from ranklab.peers.deepspeed_zero import quiet_deepspeed


def deepspeed_ulysses(q, k, v, attend, group=None):
    """Compute ulysses_attention with DeepSpeed's DistributedAttention: tensors (B, T/R, H, D)."""
    quiet_deepspeed().init_distributed(dist_init_required=False, verbose=False)
    from deepspeed.sequence.layer import DistributedAttention  # here: takes two seconds

    def local(q, k, v):
        return attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    layer = DistributedAttention(local, group or dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return layer(*(x.transpose(1, 2) for x in (q, k, v)), batch_dim_idx=0).transpose(1, 2)


def deepspeed_tiled_loss(hidden, weight, targets, tile):
    """Compute tiled_logits_loss, the mean, with DeepSpeed's TiledFusedLogitsLoss.

    weight: a parameter; forward adds to its .grad, and backward does not.
    """
    quiet_deepspeed()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    count = (targets != IGNORE).sum()

    def of_tile(head, x, y):
        return F.cross_entropy((x @ head.weight.T).float(), y, ignore_index=IGNORE,
                               reduction="sum") / count

    head, tiles = SimpleNamespace(weight=weight), math.ceil(targets.numel() / tile)
    return TiledFusedLogitsLoss.apply(of_tile, head, hidden, targets, None, tiles, [weight], "sum")


def deepspeed_tiled_mlp(mlp, x, tile):
    """Compute mlp(x), x (B, T, C), with DeepSpeed's TiledMLP."""
    quiet_deepspeed()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    return TiledMLP.apply(lambda module, part: module(part), mlp, x, math.ceil(x.shape[1] / tile),
                          [*mlp.parameters()])
