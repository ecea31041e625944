"""Lab 09: what goes wrong with several stages on a rank."""

from mutants import mutant

from ranklab.pipeline_parallel import interleaved_schedule

WARM_UP = "warm_up = min((virtual - 1) * ranks + 2 * (ranks - rank - 1), total)"
BACKWARDS = '[Action("B", (virtual - 1 - v) * ranks + rank, m) for v, m in order]'
SHAPE = "if micro_batches % ranks:"
ORDER = "(step // ranks % virtual, step // (ranks * virtual) * ranks + step % ranks)"


def _wrong(*edits, says, **named):
    return mutant(interleaved_schedule, *edits, says=says, **named)


WRONG = [
    _wrong(WARM_UP, "warm_up = min((virtual - 1) * ranks + 2 * (ranks - rank - 1) + 1, total)",
           says="activations at once, where"),
    _wrong(WARM_UP, "warm_up = min(virtual * ranks - rank - 1, total)", called="one_more_a_rank",
           says="two forwards more than the one after it"),
    _wrong(WARM_UP, "warm_up = min(ranks + 2 * (ranks - rank - 1), total)", called="for_two_stages",
           says="before its B|deadlock"),
    _wrong(WARM_UP, WARM_UP.replace("min(", "").replace(", total)", ""), called="for_many_only",
           says="fewer micro-batches than stages"),
    _wrong(BACKWARDS, BACKWARDS.replace("(virtual - 1 - v)", "v"),
           says="through the stages in reverse", called="backwards_from_the_first_stage"),
    _wrong(ORDER, "(step // micro_batches, step % micro_batches)",
           says="before its B|deadlock", called="each_stage_to_its_end"),
    _wrong(ORDER, "(step % virtual, step // virtual)", called="no_rounds",
           says="deadlock|rounds of P"),
    _wrong(SHAPE, "if False:", says=r"interleaved_schedule\(4, 6, 2\)"),
    _wrong("v * ranks + rank, m) for v, m in order]\n        backwards", "rank * virtual + v, m) "
           "for v, m in order]\n        backwards", BACKWARDS, '[Action("B", rank * virtual + '
           'virtual - 1 - v, m) for v, m in order]', says="Rank r has stage r, and with several"),
    _wrong("check_counts(ranks=ranks, micro_batches=micro_batches, virtual=virtual)", "",
           says="Check the numbers first|is no error"),
    _wrong("step // (ranks * virtual) * ranks + step % ranks", "step // (ranks * virtual) * ranks "
           "+ ranks - 1 - step % ranks", says="equal to the last bit"),
]
