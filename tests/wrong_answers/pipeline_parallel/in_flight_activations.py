"""Lab 09: what goes wrong when activations are counted."""

from mutants import mutant

from ranklab.pipeline_parallel import in_flight_activations

HELD, PEAK = "held += _change(action)", "peak = max(peak, held)"


def _wrong(*edits, says, **named):
    return mutant(in_flight_activations, *edits, says=says, **named)


WRONG = [
    _wrong(HELD, 'held += {"F": 1, "W": 0}.get(action.kind, -1)', says="until its W"),
    _wrong(HELD, 'held += {"F": 1, "B": -1}.get(action.kind, 0)', says="W sets them free, as well"),
    _wrong(HELD, 'held += 1 if action.kind == "F" else -1', says="I changes nothing"),
    _wrong(HELD, 'held += action.kind == "F"', says="count down"),
    _wrong("peaks.append(peak)", "peaks.append(held)", says="The most that is there at any time"),
    _wrong(f"{HELD}\n            {PEAK}", f"{HELD}\n            peak = max(peak, held) if "
           'action.kind in "BIW" else peak', says="before the B that follows|is .* at element"),
    _wrong("        held = peak = 0\n", "", "peaks = []", "peaks = []\n    held = peak = 0",
           says="F one more, B or W one less", called="not_anew_for_each_rank"),
]
