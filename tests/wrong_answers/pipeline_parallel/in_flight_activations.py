"""Lab 09: what goes wrong when activations are counted."""

from mutants import mutant

from ranklab.pipeline_parallel import in_flight_activations

HELD, PEAK = 'count += {"F": 1, "I": 0}.get(action.kind, -1)', "peak = max(peak, count)"


def _wrong(*edits, says, **named):
    return mutant(in_flight_activations, *edits, says=says, **named)


WRONG = [
    _wrong(HELD, 'count += {"F": 1, "W": 0}.get(action.kind, -1)', says="until its W"),
    _wrong(HELD, 'count += {"F": 1, "B": -1}.get(action.kind, 0)', says="W frees them as well"),
    _wrong(HELD, 'count += 1 if action.kind == "F" else -1', says="until its W",
           called="both_free"),
    _wrong(HELD, 'count += action.kind == "F"', says="A backward frees"),
    _wrong(HELD, 'count += {"F": 1, "W": -1}.get(action.kind, -(action.kind == "B" and not any('
           'a.kind == "W" for a in actions)))', says="B, I and W on one rank", called="b_or_w"),
    _wrong(PEAK, "if action.kind != 'F' and not peak:\n                peak = count + ("
           "action.kind in 'BW')", says="There may be more later", called="until_a_backward"),
    _wrong("peaks.append(peak)", "peaks.append(count)", says="The most that is there at any time"),
    _wrong(f"{HELD}\n            {PEAK}", f"{HELD}\n            peak = max(peak, count) if "
           'action.kind in "BIW" else peak', says="before the B that follows"),
    _wrong("        count = peak = 0\n", "", "peaks = []", "peaks = []\n    count = peak = 0",
           says="For each rank: F adds one", called="not_anew_for_each_rank"),
]
