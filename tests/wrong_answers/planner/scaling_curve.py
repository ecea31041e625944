"""Lab 13: curves that keep the wrong thing, or compare with the wrong one."""

from mutants import mutant

from ranklab.planner.scaling import scaling_curve

WHOLE = "plan.gpus // plan.dp"
PIECES = "(plan.micro_batches, 0) if weak else divmod("
PER_GPU = "speed / gpus / (curve[0][1] / counts[0]) if curve else 1.0"
SPEED = "step_time(model, each, machine).tokens_per_second(each)"
BY_BATCH = "plan.batch, dp * plan.micro_batch)"

WRONG = [mutant(scaling_curve, *edits, says=says, called=called) for *edits, says, called in (
    (PIECES, PIECES.replace("if weak", "if not weak"), "weak and strong exchanged", "exchanged"),
    (PIECES, PIECES.replace("if weak", "if True"), "weak and strong exchanged|keeps its micro",
     "always_weak"),
    (PIECES, PIECES.replace("if weak", "if False"), "exchanged|it raised ValueError",
     "always_strong"),
    (BY_BATCH, "plan.batch, dp)", "micro-batch forgotten|divides? by", "no_micro_batch"),
    (f"speed = {SPEED}", f"speed = {SPEED.replace('(each)', '(plan)')}", "tokens of the first",
     "tokens_of_the_plan"),
    (SPEED, f"{SPEED} / plan.sequence", "sequences/s", "sequences"),
    (SPEED, f"{SPEED} / gpus", "tokens/s of a GPU", "of_a_gpu"),
    ("replace(plan, dp=dp, micro_batches=pieces)", "replace(plan, dp=dp, micro_batches=pieces, "
     "recompute='none')", "tokens/s is", "recompute_dropped"),
    ("replace(plan, dp=dp, micro_batches=pieces)", "replace(plan, dp=dp, micro_batches=pieces, "
     "offload=False)", "tokens/s is", "offload_dropped"),
    ("replace(plan, dp=dp, micro_batches=pieces)", "replace(plan, dp=dp, micro_batches=pieces, "
     "precision='bf16')", "tokens/s is", "precision_dropped"),
    (WHOLE, "plan.tp * plan.pp", "cp forgotten", "no_cp"),
    (PER_GPU, "speed / curve[0][1] if curve else 1.0", "is speed-up", "speed_up"),
    (PER_GPU, "speed / gpus / (step_time(model, plan, machine).tokens_per_second(plan) / "
     "plan.gpus)", "beside the plan itself", "beside_the_plan"),
    (PER_GPU, f"100 * ({PER_GPU})", "efficiency is 100, not 1", "percent"),
    (PER_GPU, "speed / gpus / (curve[-1][1] / curve[-1][0]) if curve else 1.0", "efficiency is",
     "beside_the_last"),
    ("(gpus, speed,", "(dp, speed,", "GPUs is", "data_ranks"),
    ("if rest or not dp:", "if not dp:", "72 GPUs.* no ValueError", "rest_is_dropped"),
    ("if remainder or not pieces:", "if not pieces:", "48 GPUs.* no ValueError", "left_sequences"),
    ("plan.micro_batches, 0) if weak", "plan.micro_batches, plan.batch % (dp * plan.micro_batch)) "
     "if weak", "it raised ValueError.*called with .*weak, counts=", "weak_must_divide_too"),
    ("divmod(gpus, replica_gpus)", "divmod(gpus, plan.gpus)", "it raised ValueError|not ",
     "multiples"),
    ("    return curve", "    return dict(zip(counts, curve))", "A list of", "a_dictionary"),
    ("    return curve", "    return [each[:2] for each in curve]", "A list of", "pairs"),
)]  # fmt: skip


def scaling_curve__linear(model, plan, machine, counts, weak=False):
    """tokens/s is|efficiency is"""
    from ranklab.planner.step import step_time

    speed = step_time(model, plan, machine).tokens_per_second(plan) / plan.gpus
    return [(gpus, speed * gpus, 1.0) for gpus in counts]
