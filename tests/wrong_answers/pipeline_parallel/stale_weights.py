"""Lab 09: what goes wrong when versions of weights are counted."""

from mutants import mutant

from ranklab.pipeline_parallel import stale_weights

UPDATE = '            updates[action.stage] += action.kind == "B"\n'
OLD = 'is_old = stash and action.kind == "B"'
USED = "versions[action] = versions[forward] if is_old else updates[action.stage]\n"


def _wrong(*edits, says, **named):
    return mutant(stale_weights, *edits, says=says, **named)


WRONG = [
    _wrong(OLD, "is_old = False", says="B uses the weights that its own F used"),
    _wrong(OLD, OLD.replace("stash", "not stash"), says="its own F used", called="the_other_way"),
    _wrong(OLD, 'is_old = action.kind == "B"', says="without, that of its own moment"),
    _wrong(UPDATE, "", f"            {USED}", f"{UPDATE}            {USED}",
           says="that came before the action"),
    _wrong("updates[action.stage] +=", "updates[0] +=", "else updates[action.stage]",
           "else updates[0]", says="each stage has updates of its own"),
    _wrong("        updates = Counter()\n", "", "versions = {}", "versions = {}\n    updates = "
           "Counter()", UPDATE, UPDATE.replace("action.stage", "0"), "else updates[action.stage]",
           "else updates[0]", says="that came before the action", called="all_ranks_together"),
    _wrong(UPDATE, '            updates[action.stage] += action.kind == "F"\n',
           says="Count the B of the same stage", called="an_update_after_each_forward"),
    _wrong("return versions", "return {a: n for a, n in versions.items() if a.kind == 'B'}",
           says="after None updates"),
]
