"""The exercises and predictions of lab 08, in the order of the lab."""

from ranklab import tensor_parallel as tp
from ranklab.checks.exercise import Exercise
from ranklab.checks.tensor_parallel import layers, regions, vocabulary
from ranklab.checks.tensor_parallel.dropout_seeds import check_dropout_seeds
from ranklab.checks.tensor_parallel.predictions import PREDICTIONS

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(tp.copy_to_region, regions.check_copy_to_region, hints=(
        "All ranks read the same x, each for its part. What does each rank know of x's gradient?",
        "In forward x goes on as it is. In backward the ranks' gradients are parts of one sum.",
        "return RegionFunction.apply(x, group, identity, ...), with `all_reduce_sum` at the end",
    )),
    Exercise(tp.reduce_from_region, regions.check_reduce_from_region, hints=(
        "y = y0 + y1 + ...: what is the derivative by y0?",
        "It is copy_to_region the other way round: the sum is in forward.",
        "return RegionFunction.apply(x, group, the sum over ranks, identity)",
    )),
    Exercise(tp.ColumnParallelLinear, layers.check_ColumnParallelLinear, hints=(
        "Which numbers of weight and bias does one output need?",
        "weight is (out, in): outputs are rows, dim 0, also in the bias. x enters by self.enter.",
        "self.weight = split_parameter(linear.weight, 0, group, parts); bias likewise; forward: "
        "F.linear(self.enter(x, self.group), self.weight, self.bias)",
    )),
    Exercise(tp.RowParallelLinear, layers.check_RowParallelLinear, hints=(
        "Each rank has some inputs of every output. What is missing, and when is the bias added?",
        "weight is cut in dim 1. y = the sum over ranks of x @ weight.T; then the bias, once.",
        "split_parameter(linear.weight, 1, group); self.bias = linear.bias; forward: y = self.leave"
        "(F.linear(x, self.weight), self.group), and y + self.outside(self.bias, self.group)",
    )),
    Exercise(tp.parallel_attention, layers.check_parallel_attention, hints=(
        "Which query heads does this rank have, and which key head does each of them read?",
        "q is a column layer whose x is there already (identity), k and v are KeyValueHeads, out "
        "is a row layer. x enters before all three, once.",
        "needed = [head // (H // KV) for head in shard_range(H, rank, R)]; attention.k = "
        "KeyValueHeads(attention.k, needed, D, group); enter_before(attention, enter, group)",
    )),
    Exercise(tp.vocab_parallel_cross_entropy, vocabulary.check_vocab_parallel_cross_entropy, hints=(
        "loss = log(sum of exp(logits)) - logit of the target. Which sums can be split?",
        "Subtract the largest logit of all ranks first, so that exp stays finite. Then sum two "
        "numbers over ranks: the sum of exp, and the target's logit or 0.",
        "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) of a detached amax(-1); then "
        "reduce_from_region(torch.stack([logits.exp().sum(-1), target_logit]), group)",
    )),
    Exercise(tp.vocab_parallel_embedding, vocabulary.check_vocab_parallel_embedding, hints=(
        "Each token's row is on one rank. What can the others add?",
        "If the row is here, look up token - start. If not, look up any row, and put zeros there.",
        "mask = (tokens < rows.start) | (tokens >= rows.stop); look up (tokens - rows.start)"
        ".masked_fill(mask, 0); leave(x.masked_fill(mask[..., None], 0), group)",
    )),
    Exercise(tp.sequence_parallel_norm, layers.check_sequence_parallel_norm, hints=(
        "The weight is the same on all ranks. From which tokens does a rank know its gradient?",
        "The weight enters as x enters a region: unchanged, and with a gradient that is summed.",
        "functional_call(norm, {name: copy_to_region(p, group), ... of named_parameters()}, x)",
    )),
    Exercise(tp.dropout_seeds, check_dropout_seeds, hints=(
        "How many different seeds does one data_rank need?",
        "tensor_ranks + 1 of them: one shared, and one for each tensor rank. Number them all.",
        "first = seed * SPREAD + data_rank * (tensor_ranks + 1); own: first + 1 + tensor_rank",
    )),
)
