"""scaling_curve: the gain from more GPUs, added as data ranks."""

from dataclasses import replace

from ranklab.planner.step import step_time


def scaling_curve(model, plan, machine, counts, weak=False):
    """Return [(GPUs, tokens/s of all, efficiency)] of the plan with other numbers of data ranks.

    Everything else in the plan stays the same: recompute, offload, precision, ...
    efficiency  tokens/s per GPU, divided by the tokens/s per GPU at the first of `counts`
    weak        True: each pipeline keeps its number of micro-batches, and the batch grows; False:
                the batch stays the same, and each pipeline has fewer micro-batches
    Raises: ValueError if tp x pp x cp does not divide the GPUs, or if dp x micro-batch does not
        divide the batch.
    Lab: 13
    """
    curve, replica_gpus = [], plan.gpus // plan.dp
    for gpus in counts:
        dp, rest = divmod(gpus, replica_gpus)
        if rest or not dp:
            raise ValueError(f"tp x pp x cp = {replica_gpus} must divide {gpus} GPUs")
        pieces, remainder = (plan.micro_batches, 0) if weak else divmod(
            plan.batch, dp * plan.micro_batch)
        if remainder or not pieces:
            raise ValueError(f"{dp} data ranks with micro-batches of {plan.micro_batch} must "
                             f"divide the batch of {plan.batch}")
        each = replace(plan, dp=dp, micro_batches=pieces)
        speed = step_time(model, each, machine).tokens_per_second(each)
        curve.append((gpus, speed, speed / gpus / (curve[0][1] / counts[0]) if curve else 1.0))
    return curve
