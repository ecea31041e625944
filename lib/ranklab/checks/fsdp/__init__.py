"""The exercises and predictions of lab 07, in the order of the lab."""

from ranklab import fsdp
from ranklab.checks.exercise import Exercise
from ranklab.checks.fsdp.clip_grad_norm_sharded import check_clip_grad_norm_sharded
from ranklab.checks.fsdp.full_state_dict import check_full_state_dict
from ranklab.checks.fsdp.fully_sharded_block import check_FullyShardedBlock
from ranklab.checks.fsdp.hybrid_shard_groups import check_hybrid_shard_groups
from ranklab.checks.fsdp.masked_loss import check_masked_loss
from ranklab.checks.fsdp.predictions import PREDICTIONS
from ranklab.checks.fsdp.shard_parameter import SHARD_PARAMETER
from ranklab.checks.fsdp.wrap_policy import check_wrap_policy

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    SHARD_PARAMETER,
    Exercise(fsdp.FullyShardedBlock, check_FullyShardedBlock, hints=(
        "What does one message hold, seen from the rank that sends it, and from the one that gets "
        "R of them?",
        "padded_shard() of all parameters, one after the other, is what a rank sends; so what "
        "arrives is (R, numbers), and a parameter is some of its columns. Gradients go the same "
        "way back: padded_gradient() is (R, numbers), row r for rank r.",
        "begin_unshard(): message = torch.cat([p.padded_shard() for p in self.parameters]); "
        "self.work = dist.all_gather_single(self.gathered, message, group=self.group, "
        "async_op=True). unshard(): self.begin_unshard(); wait; "
        "self.gathered.view(self.ranks, -1).split([p.numbers ...], 1), and "
        "parameter.fill(part). reduce_gradients(): torch.cat([p.padded_gradient() "
        "...], dim=1) / self.ranks; dist.reduce_scatter_single(shard, grads.flatten(), ...); "
        "self.reduction = shard, work; p.whole.grad = None",
    )),
    Exercise(fsdp.clip_grad_norm_sharded, check_clip_grad_norm_sharded, hints=(
        "Norms do not add up. What does?",
        "Add up the squares of this rank's gradients, all-reduce that number, take the root. The "
        "factor max_norm / norm is 1 at most.",
        "gradients = [p.grad for p in parameters if p.grad is not None]; square = torch.zeros((), "
        "dtype=torch.float64, device=device()); add gradient.double().square().sum() of each; "
        "dist.all_reduce(square, group=group); factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
    )),
    Exercise(fsdp.wrap_policy, check_wrap_policy, hints=(
        "What would be whole with no block at all? With each layer as a block? What is between?",
        "Let no block be larger than some size, and take the largest modules within it that can "
        "be blocks. Try all sizes, from the largest down, until whole_bytes() is small enough.",
        "For each size: modules with can_be_a_block() and parameter_bytes() <= size, without those "
        "that are inside another of them. The first size that fits wins. At last drop the blocks "
        "that fit in the root as well, the smallest first.",
    )),
    Exercise(fsdp.masked_loss, check_masked_loss, hints=(
        "Ranks have different numbers of answers. What must all of them divide by?",
        "Sum the losses of this rank's answers, divide by the count of all ranks, and multiply by "
        "R, because the mean over ranks follows. Shift first: logits[:, :-1] and labels[:, 1:].",
        "targets = labels[:, 1:].flatten(); count = (targets != IGNORE).sum(); dist.all_reduce("
        "count, group=group); F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, "
        "ignore_index=IGNORE, reduction=\"sum\") * dist.get_world_size(group) / count",
    )),
    Exercise(fsdp.hybrid_shard_groups, check_hybrid_shard_groups, hints=(
        "Lay the ranks out as a table with one copy of the model in each row. What is a column?",
        "torch.arange(R).view(-1, shard_ranks): rows are shards, columns are replicas. Every rank "
        "makes every group.",
        "shards, _ = dist.new_subgroups_by_enumeration(copies.tolist()); the replicas from "
        "copies.T.tolist()",
    )),
    Exercise(fsdp.full_state_dict, check_full_state_dict, hints=(
        "Which names has the plain model, and which tensor stands behind each in the sharded one?",
        "model.state_dict(keep_vars=True) has the shards themselves, so a dict from shard to "
        "whole tensor finds them. All ranks gather each parameter; buffers are whole already.",
        "tensors = {parameter.shard: gather_rows(parameter, block.group) for block in "
        "sharded_modules(model) for parameter in block.parameters}; state[name] = tensors[tensor] "
        "if tensor in tensors else tensor.detach().cpu().clone(); {} unless the group's rank is 0",
    )),
)
