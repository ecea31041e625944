"""MoE: a router and experts instead of a block's MLP; MoEConfig: a GPT that has them."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ranklab.expert_parallel.dispatch import combine_tokens, dispatch_tokens
from ranklab.expert_parallel.route import (
    balance_bias, capacity, load_balance_loss, router_z_loss, top_k_route,
)
from ranklab.models.gpt import GPT, MLP, GPTConfig

BALANCE = ("loss", "bias", "none")


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """The configuration of a GPT with experts in each block; checked when it is made.

    expert_width: F of an expert; 0: 4 C / top_k, so that a token costs as much as without experts
        (apart from the router)
    shared_width: F of an MLP that all tokens also pass (DeepSeek's shared experts); 0: none
    factor: of the capacity, in each sequence; 0: no token is dropped
    balance: by an auxiliary loss of weight `coefficient`, by a bias that moves by `rate` in each
        step, or not at all
    z: weight of the router's z-loss
    jitter: the router's input is multiplied by 1 - jitter to 1 + jitter in training
    """

    n_expert: int = 8  # E
    top_k: int = 2
    expert_width: int = 0
    shared_width: int = 0
    factor: float = 0.0
    balance: str = "loss"
    coefficient: float = 0.01
    rate: float = 0.001
    z: float = 0.0
    jitter: float = 0.0
    renormalize: bool = True

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.top_k <= self.n_expert:
            raise ValueError(f"top_k={self.top_k} must be between 1 and n_expert={self.n_expert}")
        if self.balance not in BALANCE:
            raise ValueError(f"balance={self.balance!r} is not one of {', '.join(BALANCE)}")
        if not self.expert_width:
            object.__setattr__(self, "expert_width", 4 * self.n_embd // self.top_k)

    @property
    def mlp_width(self):
        return self.top_k * self.expert_width + self.shared_width

    def new_mlp(self):
        return MoE(self)


class ExpertLinear(nn.Module):
    """A matrix for each expert: row i of x is multiplied by its expert's matrix.

    It uses torch's grouped kernel for all experts if it can, otherwise a loop over the experts.
    """

    def __init__(self, n_expert, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, n_out, n_in))

    def forward(self, x, counts):  # (n, n_in), sorted by expert -> (n, n_out)
        x, weight = autocast(x), autocast(self.weight)
        if takes_grouped(x, weight):
            ends = torch.as_tensor(counts, device=x.device).cumsum(0).int()
            return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
        parts = x.split(counts.tolist() if torch.is_tensor(counts) else counts)
        return torch.cat([F.linear(part, w) for part, w in zip(parts, weight)])


def autocast(x):
    """Cast x to autocast's type if autocast is on, which halves the bytes to send."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def takes_grouped(x, weight):
    """Return whether torch's grouped_mm takes x and weight: bfloat16, rows of n * 16 bytes."""
    return x.dtype == torch.bfloat16 and not any(size % 8 for size in weight.shape[1:])


class MoE(nn.Module):
    """Sum the outputs of each token's experts: (B, T, C) -> (B, T, C).

    A new MoE has all experts. `spread_experts` leaves only the experts of this rank.
    route, limit, dispatch, combine, balance_loss: may be a learner's own functions.
    routing: the choices of the last forward: (wanted, chosen); in chosen a dropped choice is -1.
    """

    def __init__(self, config):
        super().__init__()
        C, E, width = config.n_embd, config.n_expert, config.expert_width
        self.config, self.group = config, None
        self.router = nn.Linear(C, E, bias=False)
        self.up, self.down = ExpertLinear(E, C, width), ExpertLinear(E, width, C)
        self.shared = MLP(config, config.shared_width) if config.shared_width else None
        self.reset_buffers()
        self.aux_gradient = AuxGradient()
        self.route, self.limit, self.balance_loss = top_k_route, capacity, load_balance_loss
        self.dispatch, self.combine = dispatch_tokens, combine_tokens
        self.routing = {}

    def reset_buffers(self):
        """Reset the bias to zeros."""
        E, moves = self.config.n_expert, self.config.balance == "bias"
        self.register_buffer("bias", torch.zeros(E) if moves else None)
        self.loads = 0  # (E,) choices since the last move of the bias; recomputation counts again

    def forward(self, x):
        config, flat = self.config, x.flatten(0, 1)
        chosen, weights, aux = self.choose(x)
        rows, sent = self.dispatch(autocast(flat), chosen, config.n_expert, self.group)
        rows = self.down(F.gelu(self.up(rows, sent.counts)), sent.counts)
        out = self.combine(rows, sent, weights, self.group).to(x.dtype)
        if self.shared is not None:
            out = out + self.shared(flat)
        if aux is not None and torch.is_grad_enabled() and self.training:
            out = WithAux.apply(out, aux, self.aux_gradient)
        return out.view_as(x)

    def choose(self, x):
        """Return (chosen (N, k), weights (N, k), auxiliary loss or None) of x (B, T, C)."""
        config = self.config
        if config.jitter and self.training:
            x = x * torch.empty_like(x).uniform_(1 - config.jitter, 1 + config.jitter)
        with torch.autocast(x.device.type, enabled=False):  # small differences change the choice
            logits = self.router(x.float())  # (B, T, E)
        chosen, weights = self.route(logits, config.top_k, config.renormalize, self.bias)
        aux = self.auxiliary(logits, chosen)
        if self.training and self.bias is not None:
            self.loads = self.loads + F.one_hot(chosen, config.n_expert).flatten(0, -2).sum(0)
        limited = self.limit(chosen, config.n_expert, config.factor) if config.factor else chosen
        self.routing = {"wanted": chosen, "chosen": limited}
        return limited.flatten(0, 1), weights.flatten(0, 1), aux

    def auxiliary(self, logits, chosen):
        """Return the auxiliary loss, added to the sum of all tokens' losses, equally for each
        token; or None.
        """
        config, aux = self.config, 0
        if config.balance == "loss":
            aux = aux + config.coefficient * self.balance_loss(logits, chosen)  # (B,)
        if config.z:
            aux = aux + config.z * router_z_loss(logits)
        return aux.sum() * logits.shape[-2] if torch.is_tensor(aux) else None

    def move_bias(self, loads):
        """Move the bias by the loads (E,) of a step on all ranks."""
        balance_bias(self.bias, loads, self.config.rate)
        self.loads = 0


class AuxGradient:
    """The factor on the sum of losses in this backward, set by the caller of backward.

    part: this rank's part of the auxiliary loss: 1/tp if tp ranks count the same one.
    """

    scale, part = None, 1.0


class WithAux(torch.autograd.Function):
    """Return x unchanged; in backward, add the gradient of the auxiliary loss, in any layer.

    So no stage of a pipeline has to pass it on, and the reported loss is only the tokens' loss.
    """

    @staticmethod
    def forward(ctx, x, aux, gradient):
        ctx.like, ctx.gradient = aux, gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.gradient.scale is None:
            raise RuntimeError("no loss of this model began this backward: call moe_gpt(model)")
        scale = ctx.gradient.scale * ctx.gradient.part
        return gradient, torch.ones_like(ctx.like) * scale, None


def layers_of(model):
    """Return the MoE layers of a model, in order."""
    return [layer for layer in model.modules() if isinstance(layer, MoE)]


def moe_gpt(config):
    """Make a GPT with experts, whose loss passes the weight of the auxiliary losses to the layers.
    """
    model = GPT(config)
    model.register_forward_hook(functools.partial(_tell, layers_of(model)), with_kwargs=True)
    return model


def _tell(layers, model, args, kwargs, loss):
    if loss.dim() or not loss.requires_grad:
        return
    reduction = kwargs.get("reduction", args[2] if len(args) > 2 else "mean")
    tokens = args[0].shape[0] * args[0].shape[1] if reduction == "mean" else 1

    def tell(gradient):
        for layer in layers:
            layer.aux_gradient.scale = gradient / tokens

    loss.register_hook(tell)
