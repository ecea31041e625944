"""Lab 09: what goes wrong when idle time is counted."""

from mutants import mutant

from ranklab.pipeline_parallel import bubble_fraction

RETURN = "return 1 - busy / (len(ranks) * longest)"
LONGEST = "max(max(s.end for s in group) - min(s.start for s in group) for group in groups)"
GROUPS = "[spans] if flush else [[s for s in spans if s.rank == rank] for rank in ranks]"


def _wrong(*edits, says, **named):
    return mutant(bubble_fraction, *edits, says=says, **named)


WRONG = [
    _wrong(GROUPS, "[[s for s in spans if s.rank == rank] for rank in ranks]", RETURN,
           f"own = sum({LONGEST[4:-1]})\n    return 1 - busy / own",
           says="before its first action and after its last"),
    _wrong(GROUPS, "[[s for s in spans if s.rank == rank] for rank in ranks]",
           says="from the first start to the last end of all ranks", called="flush_is_not_used"),
    _wrong(RETURN, f"if not flush:\n        longest = sum({LONGEST[4:-1]}) / len(groups)\n    "
           f"{RETURN}", says="The slowest rank counts for all"),
    _wrong(GROUPS, "[spans]", says="without a flush, take it for each"),
    _wrong(RETURN, "return len(ranks) * longest / busy - 1", says="a part of the whole time"),
    _wrong(RETURN, "return busy / (len(ranks) * longest)", says="1 - busy / \\(ranks"),
    _wrong(LONGEST, "max(s.end for s in spans)", says="minus the first start"),
    _wrong("len(ranks) * longest", "(max(ranks) + 1) * longest", says="that are in the spans"),
    _wrong(RETURN, f"{RETURN[:7]}100 * ({RETURN[7:]})", says="1 - busy / \\(ranks"),
    _wrong(LONGEST, "max(g[-1].end - g[0].start for g in groups)", says="the last end minus "
           "the first start", called="as_if_sorted_by_end"),
]
