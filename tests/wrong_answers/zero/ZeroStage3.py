"""Lab 06: what goes wrong in stage 3."""

from mutants import mutant

from ranklab.zero import ZeroStage3

GATHER = "unit.end_gather()\n        if not"
AHEAD = "self.prefetch(self.place_in_order(unit) + 1)"
HOOK = "output.register_hook(begins)"
AFTER_BACKWARD = "self.reduce(unit)\n        unit.free()"


def _wrong(*edits, says, **named):
    return mutant(ZeroStage3, *edits, says=says, **named)


WRONG = [
    # in forward
    _wrong(GATHER, "if not", says=r"enter\(\) gathers the unit"),
    _wrong(GATHER, "unit.begin_gather()\n        if not", says="and waits: unit.end_gather"),
    _wrong(f"{HOOK}\n        unit.free()", HOOK, says=r"leave\(\) frees"),
    _wrong(AHEAD, "self.prefetch(self.place_in_order(unit))", says="is not on its way"),
    _wrong(AHEAD, "place = self.place_in_order(unit) + 1\n            if place < len(self.order):\n"
           "                self.order[place].end_gather()", says="not wait for it"),
    # in backward
    _wrong(HOOK, "pass", says="needs a hook, backward_of"),
    _wrong("in tree_leaves(outputs):", "in tree_leaves(outputs)[:1]:",
           says=r"tree_leaves\(outputs\)"),
    _wrong("in tree_leaves(outputs):", "in tree_leaves(outputs)[-1:]:", called="the_last_output",
           says=r"tree_leaves\(outputs\)"),
    _wrong("in tree_leaves(outputs):", "in (list(outputs) if isinstance(outputs, tuple) else []) + "
           "(outputs[1] if isinstance(outputs, tuple) and isinstance(outputs[1], list) else []):",
           says=r"tree_leaves\(outputs\)", called="no_dicts"),
    _wrong("unit.free()\n\n    def backward_of", "if module.training:\n            unit.free()\n\n"
           "    def backward_of", says=r"eval\(\) .*leave\(\) frees"),
    _wrong("in tree_leaves(outputs):", "in outputs:", says=r"tree_leaves\(outputs\)",
           called="outputs_are_not_nested"),
    _wrong("self.prefetch(place - 1)", "pass", says=r"self.prefetch\(place - 1\), and"),
    _wrong(AFTER_BACKWARD, "pass\n        unit.free()", says=r"backward_done\(\) reduces"),
    _wrong(AFTER_BACKWARD, "self.reduce(unit)\n            unit.free()",
           says="with sync=False: while block"),
    _wrong("if self.sync:", "if True:", says="with sync=False not at all"),
    _wrong("self.prefetch(place - 1)", "self.prefetch(self.position - 2)",
           says=r"self.prefetch\(place - 1\), and", called="place_of_the_forward"),
    # a checkpoint
    _wrong(f"        if not in_backward():\n            {AHEAD}", f"        {AHEAD}",
           says="second forward has no place"),
    _wrong("        if in_backward():\n            return\n", "", says="checkpoint"),
]
