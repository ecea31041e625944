"""Lab 11: losses that balance something else."""

from mutants import mutant

from ranklab.expert_parallel import load_balance_loss

COUNTS = "torch.nn.functional.one_hot(chosen.flatten(-2), E).sum(-2)"
PART = "counts / chosen[..., 0].shape[-1] / chosen.shape[-1]"
MEAN = "logits.float().softmax(-1).mean(-2)"
RETURN = f"E * (part * {MEAN}).sum(-1)"

WRONG = [mutant(load_balance_loss, *edits, says=says, called=called)
         for *edits, says, called in (
    ("return E * ", "return ", "without E", "without_e"),
    (PART, "counts / chosen[..., 0].shape[-1]", "f of all choices", "without_k"),
    (PART, "counts", "a count, not a part", "counts"),
    (MEAN, "logits.float().softmax(-1).sum(-2)", "a sum over tokens", "sum_over_tokens"),
    (RETURN, f"E * {MEAN}.square().sum(-1)", "P squared", "p_squared"),
    (RETURN, "E * part.square().sum(-1)", "f squared", "f_squared"),
    (RETURN, f"({RETURN}).mean()", "mean of all sequences|shape", "one_mean"),
    (RETURN, f"E * (part * {MEAN}.detach()).sum(-1)", "no gradient", "detached"),
    (RETURN, f"E * (part * {MEAN.replace('.softmax(-1)', '.sigmoid()')}).sum(-1)", " is ",
     "sigmoid"),
    (MEAN, "logits.softmax(-1).mean(-2)", "bfloat16", "in_16_bits"),
    (COUNTS, "torch.nn.functional.one_hot(chosen.flatten(-2)).sum(-2)", "size of tensor",
     "without_the_number_of_experts"),
    ("    E = logits", "    chosen = logits.topk(chosen.shape[-1]).indices\n    E = logits",
     "chosen are any experts", "the_k_best_again"),
    (COUNTS, "torch.nn.functional.one_hot(chosen[..., 0], E).sum(-2)", " is ", "first_choice"),
)]  # fmt: skip


def load_balance_loss__of_the_whole_batch(logits, chosen):
    """one number for all sequences|shape"""
    import torch

    E = logits.shape[-1]
    f = torch.nn.functional.one_hot(chosen, E).float().flatten(0, -2).mean(0)
    return E * (f * logits.float().softmax(-1).flatten(0, -2).mean(0)).sum()
