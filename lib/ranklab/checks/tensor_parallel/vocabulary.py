"""vocab_parallel_embedding and vocab_parallel_cross_entropy."""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F

from ranklab.basics.targets import IGNORE
from ranklab.checks.prover import AtMost, Proof, Ranks, Slip
from ranklab.checks.tensor_parallel.inputs import (
    COST, GROUP, Whole, in_one_process, normal, seen_of, stages, whole_numbers,
)
from ranklab.checks.trial import on_ranks
from ranklab.engine import device
from ranklab.meter import Traffic
from ranklab.tensor_parallel.regions import reduce_from_region, scatter_tokens
from ranklab.tensor_parallel.vocabulary import (
    vocab_parallel_cross_entropy, vocab_parallel_embedding,
)

B, T, C, N = 2, 12, 5, 24
LARGE = 1000  # entries of the vocabulary for which bytes are counted
BYTES, MESSAGES = 16, 3  # of a target, counted as all-reduces
EVEN = "range({0} * dist.get_rank(group), {0} * (dist.get_rank(group) + 1))"
EACH = "(vocab_size // dist.get_world_size(group))"
ROWS = "shard_range(vocab_size, dist.get_rank(group), dist.get_world_size(group))"


# --- the loss -------------------------------------------------------------------------------------

class Loss(NamedTuple):
    """Logits of N targets; the first `ignored` targets are IGNORE."""

    name: str
    V: int = 11
    dtype: str = "float32"
    scale: float = 1
    shift: float = 0
    ignored: int = 0

    def __str__(self):
        return self.name

    def logits(self, ranks):
        logits = normal(1, N, self.V, dtype=self.dtype) * self.scale + self.shift
        return Whole(logits.requires_grad_(), 1, ranks.at(self.V))

    def targets(self):
        targets = torch.arange(N, device=device()) % self.V
        targets[:self.ignored] = IGNORE
        return targets


COUNTED = Loss(f"{LARGE} entries", LARGE)
LOSSES = (Loss("12 entries", 12), Loss("11 entries"), Loss("bfloat16", 11, "bfloat16", 3),
          Loss("logits up to 1e4", scale=4e3), Loss("logits near -120", shift=-120),
          Loss("some targets IGNORE", ignored=N // 2), Loss("all targets IGNORE", 12, ignored=N))


def _see_loss(fn, case, ranks):
    if case == COUNTED:
        nbytes, calls = (0, 0) if fn is in_one_process else cost_of(fn, ranks)
        yield {"bytes": AtMost(nbytes, BYTES, "sends {:.4g} bytes a target; {:.0f} are enough"),
               "messages": AtMost(calls, MESSAGES)}
        return
    logits = case.logits(ranks)
    targets, local = case.targets(), logits.leaf()
    tensors = {"logits": local, "targets": targets}
    yield from seen_of(
        fn, ranks, lambda: fn(local, targets, case.V, **ranks.keywords), tensors,
        lambda: F.cross_entropy(logits.tensor.float(), case.targets(), reduction="none",
                                ignore_index=IGNORE),
        {"logits": logits, "targets": Whole(case.targets())}, Whole(normal(9, N)), None)


def cost_of(fn, ranks):
    """Return (bytes per target, as in one all-reduce that sends each 2 (R-1)/R times; messages)."""
    logits = COUNTED.logits(ranks).leaf().mT.contiguous().mT
    with Traffic() as traffic:
        fn(logits, COUNTED.targets(), LARGE, **ranks.keywords)
    sent, R = sum(op.sent_bytes for op in traffic.ops), ranks.size
    return sent / (2 * (R - 1) / R) / N, len(traffic.ops)


class Scored(Proof):
    """A Proof that prints the score last."""

    def prove(self, fn):
        yield from super().prove(fn)
        nbytes, calls = on_ranks(_score, fn, ranks=4)[0]
        yield (f"your score: {nbytes:.4g} bytes a target in {calls} message{'s' * (calls > 1)}; "
               f"Megatron's: 12 in 3, gathering {LARGE} logits in bf16: {2 * LARGE} in 1")


def _score(fn):
    return cost_of(fn, Ranks(tuple(range(dist.get_world_size())), None))


def gathered(x, group):
    """Return the tensors of all ranks, in rank order; backward returns this rank's gradient."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    parts[dist.get_rank(group)] = x
    return parts


def gathers_the_logits(logits, targets, vocab_size, group=None):
    R = dist.get_world_size(group)
    lengths = [vocab_size // R + (r < vocab_size % R) for r in range(R)]
    padded = F.pad(logits.float(), (0, lengths[0] - logits.shape[1]))
    whole = torch.cat([p[:, :n] for p, n in zip(gathered(padded, group), lengths)], 1)
    return F.cross_entropy(whole, targets, reduction="none", ignore_index=IGNORE)


def gathers_three_numbers(logits, targets, vocab_size, group=None):
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    each, more = divmod(vocab_size, R)
    start, logits = rank * each + min(rank, more), logits.float()
    is_local = (targets >= start) & (targets < start + logits.shape[1])
    top = logits.detach().amax(-1)
    own = torch.stack([top, (logits - top[:, None]).exp().sum(-1), logits.gather(
        1, (targets - start).where(is_local, 0)[:, None])[:, 0].where(is_local, 0)])
    tops, sums, of_target = torch.stack(gathered(own, group)).unbind(1)
    highest = tops.amax(0)
    losses = (sums * (tops - highest).exp()).sum(0).log() + highest - of_target.sum(0)
    return losses.where(targets != IGNORE, 0)


def summed_both_ways(x, group):
    return torch.distributed.nn.all_reduce(x, group=group or dist.group.WORLD)


LARGEST = "    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)\n"
SHIFTED = "logits = logits - largest[:, None]"
AT = "(targets - rows.start).masked_fill(mask, 0)"
OF_TARGET = "logits.gather(1, index[:, None])[:, 0].masked_fill(mask, 0)"
SUMS = "torch.stack([logits.exp().sum(-1), target_logit])"
SUM = "total, target_logit = reduce_from_region(sums, group)"
END = "(total.log() - target_logit).masked_fill(targets == IGNORE, 0)"
LOSS = Scored(
    vocab_parallel_cross_entropy,
    *stages({"losses and gradients as in one process, on 4 ranks": (),
             "11 entries; 0 where a target is IGNORE; logits of 1e4; bfloat16 in float32; inputs "
             "stay": (),
             f"at most {BYTES} bytes a target in {MESSAGES} messages; backward sends nothing":
             ("bytes", "messages", *COST)}, _see_loss, LOSSES, also=(COUNTED,)),
    mistakes=(
        Slip("Each rank subtracts its own largest logit, so the sums of exp can't be added. "
             "Subtract the largest over all ranks: ReduceOp.MAX.", (LARGEST, "")),
        Slip("Subtract the largest logit of all ranks before exp, which otherwise overflows to "
             "infinity or underflows to 0.",
             (SHIFTED, "logits = logits - 0 * largest[:, None]")),
        Slip("The largest logit can be negative. Subtract it whatever its sign.",
             ("logits.detach().amax(-1)", "logits.detach().amax(-1).clamp(min=0)")),
        Slip("The loss stays the same only if the largest logit is subtracted once from every "
             "logit, including the target's.",
             (END, END.replace("target_logit)", "target_logit - largest)")),
             (OF_TARGET, f"(logits + largest[:, None]){OF_TARGET.removeprefix('logits')}")),
        Slip("Which rank has the target's logit? It counts only there: put 0 elsewhere, before the "
             "sum.", (OF_TARGET, OF_TARGET.removesuffix(".masked_fill(mask, 0)"))),
        Slip("The loss must be 0 where a target is IGNORE. That does not happen by itself.",
             (END, END.removesuffix(".masked_fill(targets == IGNORE, 0)"))),
        Slip("The loss of bfloat16 logits is float32: convert with logits.float() first, and do "
             "not convert back.",
             ("logits = logits.float()", "logits = logits * 1"),
             (END, f"{END}.to(dtype)", "logits = logits.float()",
              "dtype, logits = logits.dtype, logits.float()")),
        Slip("All ranks have the same loss here, so the gradient passes through the sum unchanged: "
             "use reduce_from_region.",
             (SUM, SUM.replace("reduce_from_region", "summed_both_ways")),
             summed_both_ways=summed_both_ways),
        Slip("Only the log is returned: subtract the target's logit from it.",
             (END, END.replace(" - target_logit", ""))),
        Slip("The sign is wrong: the loss is the log minus the target's logit.",
             (END, f"-{END}"), (END, END.replace("total.log() - target_logit",
                                                 "target_logit - total.log()"))),
        Slip("Nothing is summed over ranks: the sum of exp covers only this rank's columns.",
             (SUM, "total, target_logit = sums")),
        Slip("The target's logit is on one rank only, but all ranks need it: sum it as well.",
             (SUM, "total = reduce_from_region(sums[0], group)")),
        Slip("The sum of exp covers only this rank's columns: sum it over ranks as well.",
             (SUM, "total, target_logit = sums[0], reduce_from_region(sums[1], group)")),
        Slip("Add the ranks' sums of exp before taking the log: log(a) + log(b) is not log(a + b).",
             (SUMS, SUMS.replace(".sum(-1)", ".sum(-1).log()"), END,
              END.replace("total.log()", "total"))),
        Slip("Sum over ranks; do not take the mean.",
             (SUM, f"{SUM} / dist.get_world_size(group)")),
        Slip("R might not divide the columns: the first ranks then have one more each, as in "
             "shard_range.",
             (ROWS, EVEN.format(EACH)), (ROWS, EVEN.format("logits.shape[1]"))),
        Slip("This rank's targets are in columns targets - rows.start. Where a target is another "
             "rank's, or IGNORE, look up any column, such as 0.",
             *[(AT, f"{wrong} if dist.get_rank(group) == {rank} else {AT}")
               for wrong in ("targets - rows.start", "targets.masked_fill(mask, 0)")
               for rank in range(4) if rank or "start" in wrong]),  # each names its own index
        Slip("This modifies the logits, which other code still reads. Subtract out of place.",
             (SHIFTED, "logits = logits.sub_(largest[:, None])"),
             (SHIFTED, "logits.detach().sub_(largest[:, None])")),
        Slip("This modifies the targets, which other code still reads.",
             ("    mask =", "    targets[targets == IGNORE] = 0\n    mask =")),
        Slip(GROUP, (SUM, SUM.replace(", group", "")), (LARGEST, LARGEST.replace(
            ", group=group", "")), (ROWS, ROWS.replace("group", ""))),
        Slip("The sum of exp is detached, so the softmax is missing from the gradient.",
             (SUMS, SUMS.replace(".sum(-1)", ".sum(-1).detach()"))),
        Slip("What is gathered grows with the vocabulary. Which few numbers determine a loss?",
             gathers_the_logits),
        Slip("12 bytes a target are enough: three float32 numbers, all-reduced. An all-gather "
             "sends more with each rank, and float64 sends twice as much.",
             gathers_three_numbers),
    ), hints=(
        "loss = log(sum of exp(logits)) - logit of the target. Which sums can be split?",
        "Subtract the largest logit of all ranks first, so that exp stays finite. Then sum two "
        "numbers over ranks: the sum of exp, and the target's logit or 0.",
        "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) of a detached amax(-1); then "
        "reduce_from_region(torch.stack([logits.exp().sum(-1), target_logit]), group)",
    ))


# --- the embedding --------------------------------------------------------------------------------

class Rows(NamedTuple):
    """An embedding of V rows.

    token       all tokens are this one
    has_tokens  outside the region each rank has its own tokens
    """

    name: str
    V: int = 12
    token: int | None = None
    dtype: str = "float32"
    is_frozen: bool = False
    has_tokens: bool = False

    def __str__(self):
        return self.name

    def tokens(self):
        tokens = 7 * torch.arange(B * T, device=device()).view(B, T) % self.V
        return tokens if self.token is None else tokens.fill_(self.token)


EMBEDDINGS = (Rows("60 rows", 60), Rows("11 rows", 11),
              Rows("all tokens on one rank", 11, token=10), Rows("frozen", is_frozen=True),
              Rows("bfloat16", dtype="bfloat16"),
              Rows("each rank its tokens", has_tokens=True))


def _see_rows(fn, case, ranks):
    weight = whole_numbers(1, case.V, C, dtype=case.dtype).requires_grad_(not case.is_frozen)
    rows = Whole(weight, 0, ranks.at(case.V))
    weights = Whole(whole_numbers(9, B, T, C, dtype=case.dtype))
    nbytes, options, backward = weights.tensor.nbytes, {}, ()
    if case.has_tokens:
        weights, backward = Whole(weights.tensor, 1, ranks.at(T)), (nbytes,)
        options = {"leave": scatter_tokens}
    shard, tokens = rows.leaf(), case.tokens()
    yield from seen_of(
        fn, ranks, lambda: fn(tokens, shard, case.V, **ranks.keywords, **options),
        {"w_shard": shard, "tokens": tokens}, lambda: F.embedding(case.tokens(), weight),
        {"w_shard": rows, "tokens": Whole(case.tokens())}, weights, (nbytes,), backward)


def gathers_the_embedding(tokens, w_shard, vocab_size, group=None, leave=reduce_from_region):
    R = dist.get_world_size(group)
    lengths = [vocab_size // R + (r < vocab_size % R) for r in range(R)]
    padded = F.pad(w_shard, (0, 0, 0, lengths[0] - len(w_shard)))
    whole = torch.cat([part[:n] for part, n in zip(gathered(padded, group), lengths)])
    return F.embedding(tokens, whole)


MASK = "x.masked_fill(mask[..., None], 0)"
LEAVE = f"leave({MASK}, group)"
LOCAL = "(tokens - rows.start).masked_fill(mask, 0)"
EMBEDDING = Proof(
    vocab_parallel_embedding,
    *stages({"each token's row, and gradients in this rank's rows: as in one process, on 4 "
             "ranks": (),
             "60 or 11 rows; frozen; tokens that are all on one rank; tokens stay": (),
             "one all-reduce of the result, or what `leave` sends": COST}, _see_rows, EMBEDDINGS),
    mistakes=(
        Slip("For other ranks' tokens, this rank adds a row that is not theirs. Put zeros there "
             "after the lookup.",
             (MASK, "x"), (LOCAL, "(tokens - rows.start).clamp(0, len(rows) - 1)", MASK, "x")),
        Slip("This rank has the rows of rows.start <= token < rows.stop, at token - rows.start. "
             "For all other tokens look up any row, such as 0.",
             (LOCAL, "tokens - rows.start"), (LOCAL, "tokens.masked_fill(mask, 0)"),
             ("tokens >= rows.stop", "tokens > rows.stop")),
        Slip("R might not divide the rows: the first ranks then have one more each, as in "
             "shard_range.",
             (ROWS, EVEN.format("len(w_shard)")), (ROWS, EVEN.format(EACH))),
        Slip("Each token's row is on one rank, and all need it: leave(x, group).", (LEAVE, MASK)),
        Slip("Use the `leave` that was passed in: outside the region, x may be split by tokens.",
             (LEAVE, f"reduce_from_region({MASK}, group)")),
        Slip(GROUP, (LEAVE, f"leave({MASK})"), (ROWS, ROWS.replace("group", ""))),
        Slip("Row rows.start belongs to this rank: mask tokens < rows.start, not <=.",
             ("tokens < rows.start", "tokens <= rows.start")),
        Slip("The result must have the dtype of w_shard: float32 zeros make it float32.",
             (MASK, "torch.where(mask[..., None], torch.zeros(x.shape, device=x.device), x)"),
             torch=torch),
        Slip("This modifies the tokens, which other code still reads: work on a copy.",
             (LOCAL, "tokens.sub_(rows.start).masked_fill_(mask, 0)")),
        Slip("No gradient reaches w_shard: it is cut off, by detach(), .data or no_grad().",
             (MASK, f"{MASK}.detach()"), ("w_shard)", "w_shard.detach())")),
        Slip("The result is divided by R. Only one rank contributes a row, so the sum is already "
             "right.",
             (LEAVE, f"{LEAVE} / dist.get_world_size(group)")),
        Slip("x leaves twice, so it is summed twice.", (LEAVE, f"leave({LEAVE}, group)")),
        Slip("The whole embedding is gathered. Look up this rank's rows, and sum the results.",
             gathers_the_embedding),
    ), hints=(
        "Each token's row is on one rank. What can the others add?",
        "If the row is here, look up token - start. Otherwise look up any row, and replace it with "
        "zeros.",
        "mask = (tokens < rows.start) | (tokens >= rows.stop); look up (tokens - rows.start)"
        ".masked_fill(mask, 0); leave(x.masked_fill(mask[..., None], 0), group)",
    ))
