"""A GPT small enough to read in one sitting. It knows nothing of ranks.

B batch, T tokens, C width, H heads, D = C/H head size, V vocabulary, L layers.
The children have plain names (`token`, `blocks`, `norm`, `head`; in a block `norm1`, `attention`,
`norm2`, `mlp`), because later labs cut, shard and wrap them by name. In a part of the model the
other children are None, or some blocks are missing; all names stay the same.
GPT-2's architecture with rotary positions and without biases, like most models since.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranklab.basics.targets import IGNORE
from ranklab.models.initialise import normal_by_name


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT, checked on creation."""

    vocab_size: int = 256  # V: one entry per byte
    n_ctx: int = 64  # the longest T
    n_layer: int = 2  # L
    n_head: int = 4  # H
    n_embd: int = 64  # C
    dropout: float = 0.0
    flash: bool = True  # False: plain attention, which keeps its (T, T) matrix for backward
    rotary_base: float = 100.0  # about n_ctx; usually 10000 for contexts of thousands
    loss_chunks: int = 1  # above 1: logits exist for one chunk at a time, and are computed twice

    def __post_init__(self):
        for name in ("vocab_size", "n_ctx", "n_layer", "n_head", "n_embd", "loss_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head={self.n_head} must divide n_embd={self.n_embd}")
        if self.head_size % 2:
            raise ValueError(f"n_embd / n_head = {self.head_size} must be even: rotary turns pairs")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")

    @property
    def head_size(self):
        """D."""
        return self.n_embd // self.n_head

    @property
    def mlp_width(self):
        """F: numbers per token between the two matrices of the MLP."""
        return 4 * self.n_embd

    def new_mlp(self):
        """Make the module that follows attention in each block; lab 11 puts experts there."""
        return MLP(self)


def count_parameters(config):
    """Count the trained numbers in GPT(config); the tied matrix counts once."""
    C = config.n_embd
    return config.n_layer * block_parameters(config) + config.vocab_size * C + C


def block_parameters(config):
    """Count the trained numbers in one block of GPT(config)."""
    C = config.n_embd
    return 12 * C * C + 2 * C  # q, k, v, out: 4 C^2; mlp: 8 C^2; two norms


def rotations(n_ctx, head_size, base):
    """Return (cos, sin) of the angle by which each pair of numbers turns at each position.

    Shape: (n_ctx, D) each.
    Paper: Su et al. 2021, rotary position embedding
    """
    frequency = base ** (-torch.arange(0, head_size, 2) / head_size)  # (D/2,)
    angle = torch.outer(torch.arange(n_ctx), frequency).repeat(1, 2)  # (n_ctx, D)
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    """Causal self-attention with H heads."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.n_ctx, self.head_size = config.n_ctx, config.head_size
        self.rotary_base = config.rotary_base
        self.dropout, self.flash = config.dropout, config.flash
        self.q = nn.Linear(C, C, bias=False)
        self.k = nn.Linear(C, C, bias=False)
        self.v = nn.Linear(C, C, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        self.reset_buffers()

    def reset_buffers(self):
        """Make the buffers from the config; they are neither trained nor saved to disk."""
        cos, sin = rotations(self.n_ctx, self.head_size, self.rotary_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        # -inf above the diagonal: a token does not see the future
        mask = torch.full((self.n_ctx, self.n_ctx), float("-inf")).triu(1)
        self.register_buffer("mask", None if self.flash else mask, persistent=False)

    def forward(self, x, positions=None):  # (B, T, C) -> (B, T, C)
        q, k, v = (  # x need not have all of H and T: a rank may hold some heads, or part of T
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (B, H, T, D)
            for project in (self.q, self.k, self.v)
        )
        if (sharing := q.shape[1] // k.shape[1]) > 1:  # several heads of q share a head of k and v
            k, v = k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1)
        y = self.attend(self.rotate(q, positions), self.rotate(k, positions), v)
        return self.out(y.transpose(1, 2).flatten(-2))

    def rotate(self, x, positions=None):  # (B, H, T, D)
        """Rotate each pair (x[i], x[i + D/2]) by its position, so that q.k depends on distances.

        positions: (T,), if they are not 0, 1, 2, ...
        """
        T, D = x.shape[-2:]
        cos, sin = (table[:T] if positions is None else table[positions]  # (T, D)
                    for table in (self.cos, self.sin))
        left, right = x.split(D // 2, dim=-1)
        turned = torch.cat([-right, left], dim=-1)
        return (x * cos + turned * sin).to(x.dtype)

    def attend(self, q, k, v):  # three of (B, H, T, D) -> (B, H, T, D)
        """Return each token's weighted mean of the values up to its own.

        To split attention over ranks, replace this method by a different function.
        """
        if not self.flash:
            return self.plain(q, k, v)
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    def plain(self, q, k, v):
        """Compute attention by its definition, matrix by matrix, which is easy to read and count.
        """
        T, D = q.shape[-2:]
        scores = (q * D**-0.5) @ k.transpose(-2, -1)  # (B, H, T, T)
        probability = (scores + self.mask[:T, :T]).softmax(-1)
        return F.dropout(probability, self.dropout, self.training) @ v


class MLP(nn.Module):
    """Two matrices with a GELU between them; F = 4 C, or the given width."""

    def __init__(self, config, width=0):
        super().__init__()
        C, F = config.n_embd, width or 4 * config.n_embd
        self.up, self.down = nn.Linear(C, F, bias=False), nn.Linear(F, C, bias=False)

    def forward(self, x):  # (..., C) -> (..., F) -> (..., C)
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream after."""

    def __init__(self, config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd, bias=False)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd, bias=False)
        self.mlp = config.new_mlp()
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, positions=None):  # (B, T, C)
        x = x + self.drop(self.attention(self.norm1(x), positions))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Tokens in, logits out; with targets, the loss.

    `loss` is any function (head, hidden, targets, reduction) -> loss. `tied` names parameters that
    share one matrix: {the second name: the first}.
    """

    tied = {"head.weight": "token.weight"}  # one matrix, two jobs

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layer)})
        self.norm = nn.LayerNorm(config.n_embd, bias=False)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.token.weight
        self.loss = functools.partial(cross_entropy, chunks=config.loss_chunks)
        self.reset_parameters()

    def reset_parameters(self, seed=None, draw=normal_by_name):
        """Draw fresh weights.

        Matrices are normal with a standard deviation of 0.02, scaled by depth in those that write
        to the residual stream. Norms are ones.
        Each depends only on its name and `seed` (by default the seed of torch.manual_seed), so that
        a part of the model has the same values as in the whole.
        draw: (parameter, name, std, seed), a function that fills a matrix or a part of one
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)  # norms
                continue
            ends_in_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            depth = 2 * self.config.n_layer if ends_in_residual else 1
            draw(parameter, self.tied.get(name, name), 0.02 / depth**0.5, seed)

    def forward(self, tokens, targets=None, reduction="mean", positions=None):
        """Return logits (B, T, V); with targets (B, T), their cross-entropy in nats.

        Targets equal to IGNORE do not count, neither in the sum nor in the mean. A part of the
        model without `token` takes hidden states (B, T, C); a part without `head` returns them.
        reduction: "mean" or "sum" of the loss over targets
        positions: (T,), the positions of these tokens in the sequence, if not the first T
        """
        T = tokens.shape[1]
        if T > self.config.n_ctx:
            raise ValueError(f"T={T} tokens do not fit n_ctx={self.config.n_ctx}")
        x = tokens if self.token is None else self.token(tokens)  # (B, T, C)
        for block in self.blocks.values():
            x = block(x, positions)
        if self.head is None:
            return x
        x = self.norm(x)
        if targets is None:
            return self.head(x)  # (B, T, V)
        return self.loss(self.head, x, targets, reduction)

    @torch.no_grad()
    def generate(self, tokens, n, temperature=1.0):  # (B, T) -> (B, T + n)
        """Continue `tokens` with n sampled tokens."""
        for _ in range(n):
            logits = self(tokens[:, -self.config.n_ctx :])[:, -1] / temperature  # (B, V)
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return tokens


def cross_entropy(head, hidden, targets, reduction="mean", chunks=1):
    """Compute the loss of head(hidden) against `targets`, in nats.

    reduction: "mean" over the targets that count, or "sum"
    chunks: above 1, the logits, the largest tensor of a small model, never exist all at once
    Shape: hidden (B, T, C), targets (B, T).
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()  # (B*T, C), (B*T,)

    def of(x, y, reduction):
        return F.cross_entropy(head(x), y, ignore_index=IGNORE, reduction=reduction)

    if chunks == 1:
        return of(hidden, targets, reduction)
    total = sum(checkpoint(of, x, y, "sum", use_reentrant=False)
                for x, y in zip(hidden.chunk(chunks), targets.chunk(chunks)))  # fmt: skip
    return total / (targets != IGNORE).sum() if reduction == "mean" else total
