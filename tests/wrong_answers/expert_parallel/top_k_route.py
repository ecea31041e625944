"""Lab 11: routers that choose or weigh wrongly."""

import torch
from mutants import mutant

from ranklab.expert_parallel import top_k_route

CHOICE = "scores.argsort(dim=-1, descending=True, stable=True)[..., :k]"
SCORES = "logits if bias is None else logits.softmax(-1) + bias"
GATHER = "logits.softmax(-1).gather(-1, chosen)"
RETURN = "weights / weights.sum(-1, keepdim=True) if renormalize else weights"

WRONG = [mutant(top_k_route, *edits, says=says, called=called) for *edits, says, called in (
    ("descending=True", "descending=False", "chosen is the worst", "the_worst"),
    (CHOICE, f"{CHOICE}.flip(-1)", "another order", "best_last"),
    (CHOICE, "scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :k].neg() "
     "+ logits.shape[-1] - 1", "Of equals the first", "last_of_equals"),
    (RETURN, "weights", "probabilities among all experts", "never_renormalized"),
    (RETURN, "weights / weights.sum(-1, keepdim=True)", "probabilities among the k",
     "always_renormalized"),
    (SCORES, "logits", "chosen without the bias", "no_bias"),
    (SCORES, "logits if bias is None else logits + bias", "chosen by logits and bias",
     "bias_on_logits"),
    (GATHER, "scores.gather(-1, chosen)", "weights is logits", "logits_as_weights"),
    (GATHER, "(logits.softmax(-1) + (0 if bias is None else bias)).gather(-1, chosen)",
     "with the bias", "weights_with_bias"),
    ("logits = logits.float()", "logits = logits", "float16|bfloat16", "in_16_bits"),
    (GATHER, f"{GATHER}.detach()", "no gradient", "detached"),
    ("weights.sum(-1, keepdim=True)", "weights.sum(-1, keepdim=True).detach()",
     "detached one", "detached_sum"),
    ("logits = logits.float()", "logits = logits.float().exp().log()", " is ", "exp_overflows"),
    ("if not 1 <= k <= logits.shape[-1]:", "if k > logits.shape[-1]:", "k=0 of 8", "k_0"),
    (f"return chosen, {RETURN}", f"return {RETURN}, chosen", "chosen", "other_order"),
)]  # fmt: skip


def top_k_route__topk(logits, k, renormalize=True, bias=None):
    """Of equals the first|k=0"""
    P = logits.float().softmax(-1)
    chosen = (P if bias is None else P + bias).topk(k).indices
    weights = P.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if renormalize else weights


def top_k_route__masks_in_place(logits, k, renormalize=True, bias=None):
    """`logits` is changed|in-place|leaf"""
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(k)
    logits -= logits.max(-1, keepdim=True).values
    P = logits.float().softmax(-1)
    chosen = (P if bias is None else P + bias).argsort(-1, descending=True, stable=True)[..., :k]
    weights = torch.gather(P, -1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if renormalize else weights
