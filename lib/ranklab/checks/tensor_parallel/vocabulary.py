"""The checks of vocab_parallel_embedding and vocab_parallel_cross_entropy."""

from functools import partial

import torch
import torch.nn.functional as F

from ranklab.basics.targets import IGNORE
from ranklab.checks.beside import expect, on_groups
from ranklab.checks.tensor_parallel.one_process import FAILURES, Whole, as_one_process, seeded
from ranklab.checks.trial import explain
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.tensor_parallel.regions import reduce_from_region, scatter_tokens

B, T, C, N = 2, 12, 5, 24
LARGE = 1000  # entries of the vocabulary for which bytes are counted
# {case: (entries, type, what logits are multiplied with, what is added, how many are IGNORE)}
LOSSES = {"12 entries": (12, "float32", 1, 0, 0), "11 entries": (11, "float32", 1, 0, 0),
          "bfloat16": (11, "bfloat16", 3, 0, 0), "logits up to 1e4": (11, "float32", 4e3, 0, 0),
          "logits near -120": (11, "float32", 1, -120, 0),
          "some targets IGNORE": (11, "float32", 1, 0, N // 2),
          "all targets IGNORE": (12, "float32", 1, 0, N)}
MINE = "This rank has the entries shard_range(vocab_size, rank, R), at their number - start"
OUTSIDE = {r"\w+: index .* out of bounds .*": f"{MINE}; a target may be another rank's, or IGNORE.",
           "IndexError: index out of range in self":
           f"{MINE}: look up any row for the others, and put zeros."}
LOSS = {"value": "log(sum of exp(logits)) - the target's logit, both over all ranks, in float32; "
        f"subtract the largest logit of all ranks first, or exp is infinite. {MINE}.",
        "logits": "softmax over all ranks - 1 at the target, times the gradient given; 0 where "
        "the target is IGNORE. A sum over ranks passes it on as it is: reduce_from_region."}
ROWS = {"value": f"{MINE}. Zeros for tokens of other ranks, after the look-up; then "
        "leave(x, group).",
        "w_shard": "Gradients are in the rows of this rank's tokens alone, once."}


def _losses(cross_entropy, ranks):
    for case, (V, dtype, scale, more, ignored) in LOSSES.items():
        made = (seeded(1, N, V, dtype=dtype) * scale + more).requires_grad_()
        whole, targets = Whole(made, 1, ranks.at(V)), torch.arange(N, device=device()) % V
        logits, targets[:ignored] = whole.leaf(), IGNORE
        yield from as_one_process(
            case, ranks, lambda: cross_entropy(logits, targets, V, ranks.group),
            {"logits": logits, "targets": targets},
            lambda: F.cross_entropy(made.float(), targets, reduction="none", ignore_index=IGNORE),
            {"logits": whole}, Whole(None), LOSS, None,
            named=partial(_named, made.detach().float(), targets, whole.at))
    if ranks.size == 4:
        logits = Whole(seeded(1, N, LARGE), 1, ranks.at(LARGE)).leaf().mT.contiguous().mT
        with Traffic() as traffic:
            cross_entropy(logits, torch.arange(N, device=device()), LARGE, ranks.group)
        yield partial(_score, traffic)


def _named(logits, targets, at, where, got):
    """Names the usual mistakes by their values, on the rank that has the columns `at`."""
    ignored = targets == IGNORE
    expect(got.isfinite().all(), f"{where} is not finite", "Subtract the largest logit of all "
           "ranks first, whatever its sign, otherwise the sum of exp is infinite, or 0.")
    expect(not got[ignored].any(), f"{where} is not 0 where a target is IGNORE", "No loss is 0 by "
           "itself there: masked_fill(targets == IGNORE, 0).")
    largest, total, own, of_target = (each.masked_fill(ignored, 0) for each in (
        logits.amax(-1), logits.logsumexp(-1), logits[:, at].logsumexp(-1),
        logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]))
    of_mine, right = of_target.where(torch.isin(targets, at), largest), total - of_target
    log = "The loss is the log minus the target's logit, which is on one rank."
    once = "Subtract it from all logits, also from the target's, so that the loss stays the same."
    sums = "Both sums are over all ranks' columns: reduce_from_region."
    explain(where, got, right, {
        "negative": (-right, log),
        "the log alone, with the largest logit off": (total - largest, log),
        "right, but for the largest logit, which is subtracted": (right - largest, once),
        "that of this rank's columns": (own - of_mine, sums),
        "that of this rank's sum of exp": (own - of_target, sums),
        "that of this rank's targets": (total - of_mine, sums)}, LOSS["value"])


def _score(traffic):
    """(bytes a target as in one all-reduce, where each byte is sent 2 (R-1)/R times; calls)"""
    each, calls = sum(op.sent_bytes for op in traffic.ops) / (2 * 3 / 4) / N, len(traffic.ops)
    expect(each <= 16 and calls <= 3, f"with {LARGE} entries it sends {each:.4g} bytes a target in "
           f"{calls} messages", "At most 16 bytes in 3 messages, counted as all-reduces, are "
           "enough. Which few numbers make a loss? What is gathered grows with the ranks, or with "
           "the vocabulary.")
    return each, calls


def check_vocab_parallel_cross_entropy(cross_entropy):
    (each, calls), = on_groups(_losses, cross_entropy, failures=OUTSIDE | FAILURES)[0]
    yield "losses and gradients as one process, on 1 to 4 ranks; backward sends nothing"
    yield "11 entries; 0 where a target is IGNORE; logits of 1e4; bfloat16 in float32; inputs stay"
    yield (f"your score: {each:.4g} bytes a target in {calls} message{'s' * (calls > 1)}; "
           f"Megatron's: 12 in 3, gathering {LARGE} logits in bf16: {2 * LARGE} in 1")


def _embeddings(embed, ranks):
    for case, V in {"12 rows": 12, "11 rows": 11, "all tokens on one rank": 11, "frozen": 12,
                    "each rank its tokens": 12}.items():
        weight = seeded(1, V, C).requires_grad_(case != "frozen")
        tokens = (torch.arange(B * T, device=device()) % V).view(B, T)
        tokens = tokens.fill_(V - 1) if "all" in case else tokens
        whole, leave, out, sent = Whole(weight, 0, ranks.at(V)), reduce_from_region, None, B * T * C
        if "its tokens" in case:
            leave, out = scatter_tokens, ranks.at(T)
        shard = whole.leaf()
        yield from as_one_process(
            case, ranks, lambda: embed(tokens, shard, V, ranks.group, leave),
            {"tokens": tokens, "w_shard": shard}, lambda: F.embedding(tokens, weight),
            {"w_shard": whole}, Whole(None, 1, out), ROWS, (4 * sent,),
            () if out is None else (4 * sent,))


def check_vocab_parallel_embedding(embed):
    on_groups(_embeddings, embed, failures=OUTSIDE | FAILURES)
    yield "each token's row, and gradients in this rank's rows: as one process, on 1 to 4 ranks"
    yield "12 or 11 rows; frozen; tokens that are all on one rank; tokens stay"
    yield "one all-reduce of the result, or what `leave` sends"
