"""Lab 06: what goes wrong in stage 3."""

from mutants import mutant

from ranklab.zero import ZeroStage3

GATHER = "unit.end_gather()\n        if not"
AHEAD = "self.prefetch(self.place_in_order(unit) + 1)"
BEHIND = "self.prefetch(place - 1)"
IN_LEAVE = "        if in_backward():\n            return\n"
AGAIN = "self.backward_begins()\n        unit.end_gather()"
HOOK = "output.register_hook(begins)"
AFTER_FORWARD = f"{HOOK}\n        unit.free()"
AFTER_BACKWARD = "self.reduce(unit)\n        unit.free()"
BACKWARDS = "return call_after_backward(functools.partial(self.backward_done, unit), (inputs, " \
            "kwargs))"


def _wrong(*edits, says, **named):
    return mutant(ZeroStage3, *edits, says=says, **named)


WRONG = [
    # in forward
    _wrong(GATHER, "if not", says=r"enter\(\) gathers the unit"),
    _wrong(AFTER_FORWARD, HOOK, says=r"leave\(\) frees"),
    _wrong(AHEAD, "self.place_in_order(unit)", says=r"self.prefetch\(self.place_in_order"),
    _wrong(AHEAD, "self.prefetch(self.place_in_order(unit))",
           says="comes next, and is not on its way", called="prefetches_itself"),
    _wrong(AHEAD, "self.prefetch(self.place_in_order(unit) - 1)",
           says="no other one than the next", called="prefetches_the_last"),
    _wrong(AHEAD, "place = self.place_in_order(unit) + 1\n            if place < len(self.order):\n"
           "                self.order[place].end_gather()", says="must not wait for the next one"),
    _wrong(AHEAD, "self.place_in_order(unit)\n            for each in self.order:\n"
           "                each.begin_gather()", says="gathered ahead|arrived already"),
    # in backward
    _wrong(AGAIN, "self.backward_begins()", says=r"which gathers it again"),
    _wrong(HOOK, "pass", says=r"needs a hook, backward_of"),
    _wrong(BEHIND, "pass", says=r"self.prefetch\(place - 1\)"),
    _wrong(BEHIND, "self.prefetch(place + 1)", says="not on its way", called="wrong_neighbour"),
    _wrong(AFTER_BACKWARD, "self.reduce(unit)", says=r"backward_done\(\) frees"),
    _wrong(AFTER_BACKWARD, "pass\n        unit.free()",
           says=r"backward_done\(\) reduces"),
    _wrong(AFTER_BACKWARD, "self.reduce(unit)\n            unit.free()",
           says="step 3, with sync=False: while block"),
    _wrong("if self.sync:", "if True:", says="With sync=False gradients stay",
           called="sends_in_no_sync"),
    _wrong(BACKWARDS, "return inputs, kwargs", says=r"backward_done\(\)"),
    _wrong(BACKWARDS, "self.kept = unit\n        return inputs, kwargs", BEHIND,
           f"{BEHIND}\n        self.backward_done(unit)", says="begins without its weights",
           called="freed_when_its_backward_begins"),
    _wrong("if self.sync:", "if self.sync and unit not in self.reduced:",
           says="used twice"),
    # what a unit returns
    _wrong("in tree_leaves(outputs):", "in [outputs]:", says=r"tree_leaves\(outputs\)"),
    _wrong("in tree_leaves(outputs):", "in tree_leaves(outputs)[:1]:",
           says=r"tree_leaves\(outputs\)", called="first_output_only"),
    # a checkpoint
    _wrong(IN_LEAVE, "", says="checkpoint"),
    _wrong(GATHER, "if not in_backward():\n            unit.end_gather()\n        if not",
           says="checkpoint", called="not_gathered_once_more"),
]
