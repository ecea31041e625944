"""Lab 09: what goes wrong when forwards and backwards take turns."""

from mutants import mutant

from ranklab.pipeline_parallel import one_f_one_b_schedule

WARM_UP = "warm_up = min(stages - stage - 1, micro_batches)"
PAIR = '[Action("F", stage, m + warm_up), Action("B", stage, m)]'
LATE = "range(micro_batches - warm_up, micro_batches)"


def _wrong(*edits, says, **named):
    return mutant(one_f_one_b_schedule, *edits, says=says, **named)


WRONG = [
    _wrong(WARM_UP, "warm_up = min(stages - stage, micro_batches)",
           says="activations at once.*Rank s does P - s - 1 forwards first"),
    _wrong(WARM_UP, "warm_up = min(max(stages - stage - 2, 0), micro_batches)",
           says="With fewer it waits for the first gradient"),
    _wrong(WARM_UP, "warm_up = min(stage, micro_batches)", says="That is a deadlock"),
    _wrong(WARM_UP, "warm_up = stages - stage - 1", says="a warm-up is no longer than that"),
    _wrong(WARM_UP, "warm_up = min(stages - 1, micro_batches)", called="alike_on_all_ranks",
           says="activations at once"),
    _wrong(LATE, f"reversed({LATE})", says="the sums are equal to the last bit"),
    _wrong(PAIR, '[Action("B", stage, m), Action("F", stage, m + warm_up)]',
           says="before its B|deadlock"),
    _wrong(f'        actions += [Action("B", stage, m) for m in {LATE}]\n', "",
           says="after the last F"),
    _wrong("check_counts(stages=stages, micro_batches=micro_batches)", "", says="is no error"),
    _wrong(WARM_UP, "warm_up = micro_batches", says="activations at once", called="it_is_gpipe"),
]
