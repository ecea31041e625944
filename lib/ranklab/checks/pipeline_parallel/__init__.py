"""The exercises and predictions of lab 09, in the order of the lab.

    schedules.py          schedules: whether they can run, and what they cost
    numbers.py            what is computed from a schedule; where a model is cut
    refusals.py           arguments with which nothing can be done
    pipeline_executor.py  PipelineExecutor: real ranks run schedules of all kinds
"""

from ranklab import pipeline_parallel as pp
from ranklab.checks.exercise import Exercise
from ranklab.checks.pipeline_parallel.numbers import BUBBLE, IN_FLIGHT, SPLIT, STALE
from ranklab.checks.pipeline_parallel.pipeline_executor import check_PipelineExecutor
from ranklab.checks.pipeline_parallel.predictions import PREDICTIONS
from ranklab.checks.pipeline_parallel.schedules import (
    GPIPE, INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE,
)

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    GPIPE,
    BUBBLE,
    ONE_F_ONE_B,
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
    INTERLEAVED,
    ZERO_BUBBLE,
    SPLIT,
    IN_FLIGHT,
    STALE,
)
