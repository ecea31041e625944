"""Lab 11: routers that choose or weigh wrongly."""

import torch
from mutants import mutant

from ranklab.expert_parallel import top_k_route

CHOICE = "scores.argsort(dim=-1, descending=True, stable=True)[..., :k]"
SCORES = "logits if bias is None else logits.softmax(-1) + bias"
AMONG_K = "logits.gather(-1, chosen).softmax(-1)"
AMONG_ALL = "logits.softmax(-1).gather(-1, chosen)"
NORMAL = f"({AMONG_ALL} / {AMONG_ALL}.sum(-1, keepdim=True))"
BIASED = "(logits.softmax(-1) + (0 if bias is None else bias)).gather(-1, chosen)"

WRONG = [mutant(top_k_route, *edits, says=says, called=called) for *edits, says, called in (
    ("descending=True", "descending=False", "chosen is the worst", "the_worst"),
    (CHOICE, f"{CHOICE}.flip(-1)", "another order", "best_last"),
    (CHOICE, "scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :k].neg() "
     "+ logits.shape[-1] - 1", "Of equal scores", "last_of_equals"),
    (AMONG_K, AMONG_ALL, "probabilities among all experts", "never_renormalized"),
    (AMONG_ALL, AMONG_K, "probabilities among the k", "always_renormalized"),
    (SCORES, "logits", "chosen without the bias", "no_bias"),
    (SCORES, "logits if bias is None else logits + bias", "chosen by logits and bias",
     "bias_on_logits"),
    (AMONG_ALL, "logits.gather(-1, chosen)", "weights is logits", "logits_as_weights"),
    (AMONG_ALL, BIASED, "with the bias", "weights_with_bias"),
    (AMONG_K, f"{BIASED} / {BIASED}.sum(-1, keepdim=True)", "with the bias", "both_with_bias"),
    (AMONG_K, NORMAL, "far apart", "zero_by_zero"),
    ("logits = logits.float()", "logits = logits", "float16|bfloat16", "in_16_bits"),
    ("descending=True, stable=True", "descending=True", "Of equal scores", "not_stable"),
    (SCORES, "logits.softmax(-1) + (0 if bias is None else bias)", "what probabilities choose",
     "by_probabilities"),
    (AMONG_ALL, "logits.bfloat16().softmax(-1).gather(-1, chosen).float()", " is ",
     "switch_in_16_bits"),
    (AMONG_K, f"{AMONG_K}.detach()", "no gradient", "detached"),
    (AMONG_K, NORMAL.replace("keepdim=True)", "keepdim=True).detach()"), "the gradient of logits",
     "detached_sum"),
    ("logits = logits.float()", "logits = logits.float().exp().log()", " is ", "exp_overflows"),
    ("if not 1 <= k <= logits.shape[-1]:", "if k > logits.shape[-1]:", "k=-1 of 8", "k_0"),
    (f"return chosen, {AMONG_K}", f"return {AMONG_K}, chosen", "chosen", "other_order"),
)]  # fmt: skip


def top_k_route__topk(logits, k, renormalize=True, bias=None):
    """Of equal scores the first|k=0|far apart"""
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
