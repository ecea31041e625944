"""The loss in tiles of the sequence: the logits of a long sequence never exist at once.

A loss looks at one token at a time, so its logits (tokens x vocabulary) can be made, used and freed
tile by tile. models/gpt.py does it with checkpoints, which compute each logit twice. Here each tile
also computes its part of the gradients, so each logit is computed once.
"""

import torch
import torch.nn.functional as F

from ranklab.basics.targets import IGNORE


def tiled_logits_loss(hidden, weight, targets, tile, reduction="mean"):
    """Return the cross-entropy of the logits hidden @ weight.T, made for `tile` tokens at a time.

    Targets equal to IGNORE do not count. Logits are computed in the dtype of hidden and weight;
    softmax, loss and the sum of the weight's gradient are float32. The gradients have the dtype of
    hidden and weight. The arguments are not modified, and hidden may be a view.
    reduction: "mean" over the targets that count, or "sum"
    Shape: hidden (B, T, C), weight (V, C), targets (B, T); the last tile may be shorter.
    Returns: the loss, float32. Its backward gives the gradients of hidden and weight.
    Raises: ValueError if `tile` is less than 1, or for another reduction.
    Memory: at most four tiles of float32 logits, and twice the gradients of hidden and weight.
    Cost: 2 B T V C FLOPs for the logits, and as many for each gradient that is needed: none of a
        frozen tensor, and none under torch.no_grad().
    Real ones: DeepSpeed's TiledFusedLogitsLoss; Liger's fused linear cross-entropy
    Paper: Bekman et al. 2025, Arctic Long Sequence Training
    Lab: 10
    """
    if tile < 1:
        raise ValueError(f"tile={tile} must be at least 1 token")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} must be 'mean' or 'sum'")
    needs = [x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight)]
    count = (targets != IGNORE).sum() if reduction == "mean" else 1

    class TiledLogitsLoss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, targets):  # (B*T, C), (V, C), (B*T,)
            loss = torch.zeros((), device=hidden.device)
            grad_hidden = torch.zeros_like(hidden) if needs[0] else None
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
            for start in range(0, len(targets), tile):
                part = slice(start, start + tile)
                x, y = hidden[part], targets[part]
                logits = (x @ weight.T).float()  # (tile, V)
                loss += F.cross_entropy(logits, y, ignore_index=IGNORE, reduction="sum")
                if any(needs):
                    grad = logits.softmax(-1)  # of the logits: probabilities, less 1 at the target
                    grad[torch.arange(len(y)), y.clamp(min=0)] -= 1
                    grad = grad.mul_((y != IGNORE).unsqueeze(-1) / count).to(x.dtype)
                if needs[0]:
                    grad_hidden[part] = grad @ weight
                if needs[1]:
                    grad_weight += grad.T @ x
            ctx.save_for_backward(grad_hidden, grad_weight)
            return loss / count

        @staticmethod
        def backward(ctx, grad_loss):  # the loss is one number, so its gradient is a factor
            return *(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), None

    return TiledLogitsLoss.apply(hidden.flatten(0, -2), weight, targets.flatten())


def mlp_memory(tokens, width, tile=None, element=2):
    """Count the bytes that the MLP of a Llama layer keeps between its matrices.

    These are four tensors of the width of the hidden layer, `width`: gate, silu(gate), up and
    silu(gate) * up. A fused kernel keeps three.
    tile: tokens at a time; None: all
    Lab: 10
    """
    return 4 * min(tokens, tile or tokens) * width * element


def logits_memory(tokens, vocab_size, tile=None, element=4):
    """Count the bytes of the logits and of their gradient, in float32 by default.

    tile: tokens at a time; None: all
    Lab: 10
    """
    return 2 * min(tokens, tile or tokens) * vocab_size * element
