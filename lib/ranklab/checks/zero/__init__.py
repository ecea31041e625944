"""The exercises and predictions of lab 06, in the order of the lab.

toys.py has the models that are trained, training.py trains them beside one process.
"""

from ranklab import zero
from ranklab.checks.exercise import Exercise
from ranklab.checks.zero.deepspeed_config import check_deepspeed_config
from ranklab.checks.zero.formulas import check_zero_memory, check_zero_traffic
from ranklab.checks.zero.offload_optimizer import check_offload_optimizer
from ranklab.checks.zero.partition_flat import check_partition_flat
from ranklab.checks.zero.predictions import PREDICTIONS
from ranklab.checks.zero.stage3 import check_ZeroStage3
from ranklab.checks.zero.stages import check_ZeroStage1, check_ZeroStage2
from ranklab.checks.zero.units_to_keep import check_units_to_keep

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(zero.partition_flat, check_partition_flat, hints=(
        "How long is each shard, if all are equally long and no number is lost? How long is flat "
        "then?",
        "length = ceil(n / R), which is -(-n // R). flat has length * R numbers: begin with zeros, "
        "and write what the tensors hold into its first n.",
        "torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat[:n]); "
        "flat.view(ranks, length).unbind() cuts it.",
    )),
    Exercise(zero.zero_memory, check_zero_memory, hints=(
        "Which of parameters, gradients and optimizer state does each stage shard?",
        "Optimizer state from stage 1 on, gradients from 2 on, parameters at 3. Of what is sharded "
        "the fullest rank holds ceil(parameters / ranks) numbers.",
        "shard = math.ceil(parameters / ranks); States(parameter_bytes * (shard if stage >= 3 else "
        "parameters), ...)",
    )),
    Exercise(zero.ZeroStage1, check_ZeroStage1, hints=(
        "An all-reduce is a reduce-scatter and an all-gather. Which one belongs in backward, "
        "and which after the step?",
        "reduce() starts the reduce-scatter of bucket.flat into place_of(bucket), and keeps that "
        "place as bucket.shard_grad. step_ends() gathers the shards (not bucket.shard_grad, which "
        "is a gradient) into bucket.weights.",
        "reduce(): bucket.flat /= R; bucket.shard_grad = self.place_of(bucket); return "
        "dist.reduce_scatter_single(bucket.shard_grad, bucket.flat, group=bucket.group, "
        "async_op=True). step_ends(): bucket.update_shard(), then dist.all_gather_single().",
    )),
    Exercise(zero.ZeroStage2, check_ZeroStage2, hints=(
        "When a bucket leaves, which other buckets are no longer needed?",
        "place_of() frees the buckets before this one, and returns new memory as long as the "
        "shard. finish() does what stage 1 does, and frees all.",
        "self.free_gradients(self.buckets[: self.buckets.index(bucket)]); return "
        "torch.empty_like(bucket.shard)",
    )),
    Exercise(zero.ZeroStage3, check_ZeroStage3, hints=(
        "When does a unit need its weights, and when for the last time? There are two such spans.",
        "enter() and backward_of(): unit.end_gather(), then prefetch the next place, or the one "
        "before. leave() and backward_done(): unit.free(). Inside a backward a checkpoint runs a "
        "forward: no new place there, and leave() does nothing at all.",
        "enter(): unit.end_gather(); if not in_backward(): self.prefetch(self.place_in_order(unit) "
        "+ 1). leave(): if in_backward(): return; unit.free(). backward_of(): unit.end_gather(); "
        "self.prefetch(place - 1). backward_done(): if self.sync: self.reduce(unit); unit.free().",
    )),
    Exercise(zero.units_to_keep, check_units_to_keep, hints=(
        "What does step.seconds() say of no unit, of all that fit, and of those between?",
        "n units have 2^n sets. Begin with one of them, and look at those that differ from it a "
        "little. When is one better, and when do you stop?",
        "Add a unit, drop one, or put one in another's place: take the best of these changes, "
        "again and again, until none of them makes step.seconds(kept) less.",
    )),
    Exercise(zero.zero_traffic, check_zero_traffic, hints=(
        "An all-reduce is a reduce-scatter and an all-gather. Which of them does each stage make?",
        "Each of them sends (R-1)/R of the bytes. Stages 0 to 2: one of gradients, one of "
        "parameters. Stage 3 gathers parameters twice, but what is resident only once.",
        "share = (ranks - 1) / ranks; share * (3 * nbytes - resident_bytes) for stage 3",
    )),
    Exercise(zero.offload_optimizer, check_offload_optimizer, hints=(
        "What does the optimizer step, and where could that lie instead?",
        "Each bucket has a master. set_master() gives it another one, and must come before "
        "make_optimizer(). The place must also take the optimizer's state, and the state is made "
        "in a step.",
        "bucket.set_master(place.copy(bucket.shard)) for each bucket; in the end "
        "optimizer.register_step_post_hook(lambda *_: place.take_state(optimizer))",
    )),
    Exercise(zero.deepspeed_config, check_deepspeed_config, hints=(
        "fastest_way() knows what fits. What must hold between the three sizes of a batch?",
        "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks. "
        "zero_optimization has the stage, the bucket sizes and what is offloaded.",
        'if strategy.offload_optimizer: zero["offload_optimizer"] = {"device": "cpu", '
        '"pin_memory": True}; config[precision] = {"enabled": True} unless it is "fp32"',
    )),
)
