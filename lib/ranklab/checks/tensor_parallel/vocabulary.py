"""The checks of vocab_parallel_embedding and vocab_parallel_cross_entropy."""

from functools import partial

import torch
import torch.nn.functional as F

from ranklab.checks.beside import on_groups
from ranklab.checks.exercise import Mistake
from ranklab.checks.tensor_parallel.one_process import (
    FAILURES, Whole, as_one_process, seeded,
)
from ranklab.checks.trial import explain
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.models.gpt import IGNORE
from ranklab.tensor_parallel.regions import reduce_from_region, scatter_tokens

B, T, C, N = 2, 12, 5, 24
LARGE, MOST_BYTES, MOST_CALLS = 1000, 16, 3  # the vocabulary that is counted, and what passes
# The size of the vocabulary, the type, and what logits are multiplied with.
LOSSES = {"12 entries": (12, "float32", 1), "11 entries": (11, "float32", 1),
          "bfloat16": (11, "bfloat16", 3), "logits up to 1e4": (11, "float32", 4e3),
          "logits near -120": (11, "float32", 1),
          "some targets IGNORE": (11, "float32", 1), "all targets IGNORE": (12, "float32", 1)}
MINE = "This rank has the entries shard_range(vocab_size, rank, R), at their number - start"
OUTSIDE = {r"\w+: index .* out of bounds .*": f"{MINE}; a target may be another rank's, or IGNORE.",
           "IndexError: index out of range in self":
           f"{MINE}: look up any row for the others, and put zeros."}
LOSS = {"value": "log(sum of exp(logits)) - the target's logit, both over all ranks, in float32; "
        "the largest logit of all ranks off first, or exp is infinite. 0 where a target is IGNORE. "
        f"{MINE}.",
        "logits": "softmax over all ranks - 1 at the target, times the gradient given; 0 where "
        "the target is IGNORE. Through a sum over ranks it goes as it is: reduce_from_region."}
ROWS = {"value": f"{MINE}. Zeros for tokens of other ranks, after the look-up; then "
        "leave(x, group).",
        "w_shard": "Gradients are in the rows of this rank's tokens alone, once."}


def _losses(cross_entropy, ranks):
    targets = torch.arange(N, device=device())
    for case, (V, dtype, scale) in LOSSES.items():
        made = seeded(1, N, V, dtype=dtype) * scale - 120 * ("-120" in case)
        whole = Whole(made.requires_grad_(), 1, ranks.at(V))
        wanted = targets % V
        wanted[: {"some": N // 2, "all ": N}.get(case[:4], 0)] = IGNORE
        logits = whole.leaf()
        value = cross_entropy(logits, wanted.clone(), V, ranks.group)
        yield partial(_named, case, value.detach(), made.detach().double(), wanted, whole.at)
        yield from as_one_process(
            case, ranks, lambda: cross_entropy(logits, wanted, V, ranks.group),
            {"logits": logits, "targets": wanted},
            lambda: F.cross_entropy(whole.tensor.float(), wanted, reduction="none",
                                    ignore_index=IGNORE),
            {"logits": whole}, Whole(None), LOSS, None)
    if ranks.size == 4:
        logits = Whole(seeded(1, N, LARGE), 1, ranks.at(LARGE)).leaf().mT.contiguous().mT
        with Traffic() as traffic:
            cross_entropy(logits, targets, LARGE, ranks.group)
        yield partial(_score, sum(op.sent_bytes for op in traffic.ops), len(traffic.ops))


def _named(case, got, logits, targets, at):
    """What usual mistakes get, of which rank has the columns `at`."""
    ignored = targets == IGNORE
    if got.shape == targets.shape and not got.isfinite().all():
        raise Mistake(f"{case}: a loss is {got[~got.isfinite()][0].item()}", "The largest logit of "
                      "all ranks, whatever its sign, comes off first: else the sum of exp is "
                      "infinite, or 0.")
    if got.shape == targets.shape and got[ignored].any():
        raise Mistake(f"{case}: a loss is not 0 where a target is IGNORE", "No loss is 0 by "
                      "itself there: masked_fill(targets == IGNORE, 0).")
    largest, total, own = (x.masked_fill(ignored, 0) for x in (
        logits.amax(-1), logits.logsumexp(-1), logits[:, at].logsumexp(-1)))
    of_target = logits.gather(1, targets.where(~ignored, 0)[:, None])[:, 0].masked_fill(ignored, 0)
    is_here = torch.isin(targets, at)
    all_ranks = "Both sums are over all ranks, both over all ranks' columns: reduce_from_region."
    once = "It comes off all logits, that of the target as well, so that the loss stays."
    slips = {
        "without the target's logit": (total, "The loss is the log minus the target's logit."),
        "the log alone, with the largest logit off": (total - largest, "The loss is the log minus "
                                                      "the target's logit, which is on one rank."),
        "right less the largest logit": (total - of_target - largest, once),
        "right plus the largest logit": (total - of_target + largest, once),
        "negative": (of_target - total, "The loss is the log minus the target's logit."),
        "that of this rank's columns": (own - of_target.where(is_here, largest), all_ranks),
        "that of this rank's sum of exp": (own - of_target, all_ranks),
        "that of this rank's targets": (total - of_target.where(is_here, largest), all_ranks)}
    explain(f"{case}: the value", got, (total - of_target).float(), {
        name: (wrong.float(), hint) for name, (wrong, hint) in slips.items()}, LOSS["value"])


def _score(sent, calls):
    """Bytes a target, as in one all-reduce: there each byte is sent 2 (R-1)/R times."""
    each = sent / (2 * 3 / 4) / N
    if each > MOST_BYTES or calls > MOST_CALLS:
        raise Mistake(
            f"with {LARGE} entries it sends {each:.4g} bytes a target in {calls} messages",
            f"At most {MOST_BYTES} in {MOST_CALLS} messages, counted as all-reduces. Which few "
            "numbers make a loss? What is gathered grows with the ranks, or with the vocabulary.")
    return each, calls


def check_vocab_parallel_cross_entropy(cross_entropy):
    (each, calls), = on_groups(_losses, cross_entropy, failures=OUTSIDE | FAILURES)[0]
    yield "losses and gradients as one process, on 4, 3, 2 and 1 ranks; 11 entries, too"
    yield "0 where a target is IGNORE; logits of 1e4; bfloat16 is computed in float32; inputs stay"
    yield "backward sends nothing; no rank has all logits"
    messages = "1 message" if calls == 1 else f"{calls} messages"
    yield (f"your score: {each:.4g} bytes a target in {messages}; Megatron's: 12 in 3, "
           f"gathering {LARGE} logits in bf16: {2 * LARGE} in 1")


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
