"""The exercises and predictions of lab 09, in the order of the lab."""

from ranklab import pipeline_parallel as pp
from ranklab.checks.exercise import Exercise
from ranklab.checks.pipeline_parallel import numbers, schedules
from ranklab.checks.pipeline_parallel.pipeline_executor import check_PipelineExecutor
from ranklab.checks.pipeline_parallel.predictions import PREDICTIONS

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    Exercise(pp.gpipe_schedule, schedules.check_gpipe_schedule, hints=(
        "Write down what rank 0 does with two micro-batches. What is different on rank 1?",
        "Rank s does F of stage s for all micro-batches, then B of stage s for all, from 0 on.",
        "For each stage tuple(Action(kind, stage, m) for kind in \"FB\" for m in range(...)).",
    )),
    Exercise(pp.bubble_fraction, numbers.check_bubble_fraction, hints=(
        "How much time do all ranks have together, and how much of it do they work?",
        "1 - work / (ranks * time). The time is the last end minus the first start, of all spans.",
        "busy = sum(s.end - s.start for s in spans); 1 - busy / (len({s.rank for s in spans}) * "
        "longest). Without a flush, longest is the largest of max(end) - min(start) of each rank.",
    )),
    Exercise(pp.one_f_one_b_schedule, schedules.check_one_f_one_b_schedule, hints=(
        "How many forwards must rank s do before the first gradient can be back?",
        "One for each stage after it, at most all micro-batches. Then F and B in turn, then the "
        "B that are left.",
        "warm_up = min(stages - stage - 1, micro_batches); F of range(warm_up); for m in "
        "range(micro_batches - warm_up): F of m + warm_up, B of m; then B of the last warm_up.",
    )),
    Exercise(pp.PipelineExecutor, check_PipelineExecutor, hints=(
        "What does one process keep between forward and backward, and where would you cut it?",
        "A stage's input is a leaf that requires grad, and its output goes on without a graph. "
        "Backward starts from the next stage's gradient; x.grad goes to the previous stage.",
        "forward: x = self.take_activations(stage, m).requires_grad_(torch.is_grad_enabled()), on "
        "stage 0 the inputs; activations[stage, m] = x, y; activations_out[stage, m] = y.detach(). "
        "backward: with self.deferral(action): y.backward(gradient); gradients_out[stage, m] = "
        "x.grad. send: sends.append((dist.isend(tensor, group=self.group, group_dst=peer), "
        "tensor)). receive: activations_in[stage, m], or gradients_in, = dist.irecv(tensor, ...), "
        "tensor.",
    )),
    Exercise(pp.interleaved_schedule, schedules.check_interleaved_schedule, hints=(
        "2 stages on each of 2 ranks: what can rank 0 do while micro-batch 0 is on rank 1?",
        "List all forwards of a rank: in rounds of `ranks` micro-batches, each round through all "
        "of its stages. Backwards are the same with the stages reversed. Then it is 1F1B.",
        "Step i: stage number i // ranks % virtual of this rank, micro-batch i // (ranks * virtual)"
        " * ranks + i % ranks. warm_up = min((virtual - 1) * ranks + 2 * (ranks - rank - 1), all).",
    )),
    Exercise(pp.zero_bubble_schedule, schedules.check_zero_bubble_schedule, hints=(
        "For which of F, I and W does another rank wait? What can be done while this rank waits?",
        "Start from 1F1B, with I for each B. Each W can wait, as long as there is memory.",
        "Stage s can let s micro-batches wait for their W, and do those at the end. Or simulate "
        "ranks: each does I if it can, else F if it holds fewer than min(P, M), else W.",
    )),
    Exercise(pp.split_stages, numbers.check_split_stages, hints=(
        "Where is the last cut, if you know the best cuts of all layers before it?",
        "If the last stage begins at k, the larger of its cost and the best for k layers counts.",
        "best[n] = min over k of max(best_before[k], sum(costs[k:n])), once for each stage; keep "
        "the k. Or guess the largest sum, fill stages up to it, and take the least that works.",
    )),
    Exercise(pp.in_flight_activations, numbers.check_in_flight_activations, hints=(
        "Which action adds an activation, and which one frees it?",
        "F adds one. B frees it, or W, if B is in two halves.",
        "held += {\"F\": 1, \"B\": -1, \"I\": 0, \"W\": -1}[action.kind]; keep the largest.",
    )),
    Exercise(pp.stale_weights, numbers.check_stale_weights, hints=(
        "How many updates has a stage had when it begins an action?",
        "Count each stage's B. With stash, a B has the number that its own F had.",
        "versions[action] = versions[action._replace(kind=\"F\")] if stash and action.kind == "
        "\"B\" else updates[action.stage]; then updates[action.stage] += action.kind == \"B\"",
    )),
)
