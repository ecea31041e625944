"""The check of ZeroStage3: equal to one process; gathered, used and freed at the right time."""

import torch

from ranklab.checks.prover import GROUPS, AtMost, Must, Proof, Slip, Stage
from ranklab.checks.zero.toys import Watch, is_there
from ranklab.checks.zero.training import RUNS, InUnits, see_training
from ranklab.zero import ZeroStage3

AHEAD = "blocks that come next and are not on their way"
WAITED = "blocks that come next and were already waited for"
OTHERS = "blocks that are whole and neither compute nor come next"
UNREDUCED = "moments at which more than two blocks have whole gradients"
AFTER_FORWARD, AFTER_BACKWARD = ("the list of blocks that are whole after forward",
                                 "the list of blocks that are whole after backward")
PLACES, SENT, CALLS = "the number of places in the order of units", "bytes sent", "messages"
TIMES = PLACES, OTHERS, AHEAD, WAITED, AFTER_FORWARD, AFTER_BACKWARD, UNREDUCED
COST = SENT, CALLS


class Units(Watch):
    """A Watch that also records which blocks are whole when one of them begins to compute."""

    def __init__(self, wrapped):
        super().__init__(wrapped)
        self.blocks = wrapped.module.blocks
        self.units = wrapped.units[:-1]  # the last is all that belongs to no block
        self.is_used_once = len(wrapped.module.order) == len(self.blocks)
        self.knows_order, self.recompute = len(wrapped.order) > 0, wrapped.module.recompute
        self.is_clean = all(p.grad is None for p in wrapped.module.parameters())
        self.late, self.waited, self.others, self.unreduced = [], [], [], []
        self.gathered_again = []  # units whose backward_of() was called
        wrapped.backward_of = self._backward_of
        for block in self.blocks:
            block.begins = self.block_begins

    def _backward_of(self, unit, *args, **kwargs):
        self.gathered_again.append(unit)
        return type(self.wrapped).backward_of(self.wrapped, unit, *args, **kwargs)

    def whole(self):
        """Return the numbers of the blocks whose weights are in memory."""
        return [number for number, unit in enumerate(self.units)
                if any(is_there(bucket.weights) for bucket in unit.shards)]

    def block_begins(self, phase, number):
        """Check that the block itself is whole, the next one in transit, and no other.

        Raises: RuntimeError if the block begins without its weights; other faults are recorded
        """
        now, whole = f"as block {number}'s {phase} begins", self.whole()
        pointers = {handle.tensor.data_ptr() for handle in self.handles if not handle.is_here}
        under_way = [n for n in whole if any(bucket.weights.data_ptr() in pointers
                                             for bucket in self.units[n].shards)]
        if number not in whole or number in under_way:
            untold = phase == "backward" and self.units[number] not in self.gathered_again
            raise RuntimeError(f"block {number}'s {phase} begins without its weights; on their way "
                               f"are the weights of the blocks {under_way}"
                               + "; its backward_of() was not called" * untold)
        if not self.is_used_once:
            return
        successor = number + 1 if phase == "forward" else number - 1
        is_ahead = (self.knows_order or phase != "forward") and not self.recompute
        if is_ahead and successor not in (-1, len(self.blocks), *under_way):
            (self.waited if successor in whole else self.late).append(f"block {successor} {now}")
        self.others += [f"block {n} {now}" for n in whole if n not in (number, successor)]
        with_gradients = [block for block in self.blocks
                          if any(p.grad is not None for p in block.parameters())]
        if self.is_clean and self.wrapped.sync and len(with_gradients) > 2:
            self.unreduced.append(now)

    def forward_ends(self):
        self.between = self.whole()

    def of_forward(self):
        return {PLACES: Must(len(self.wrapped.order), len(self.wrapped.module.order)),
                OTHERS: Must(self.others, []), AHEAD: Must(self.late, []),
                WAITED: Must(self.waited, []), AFTER_FORWARD: Must(self.between, [])}

    def of_backward(self):
        order = self.wrapped.module.order
        return {PLACES: Must(len(self.wrapped.order), len(order)),
                UNREDUCED: Must(self.unreduced, []), AFTER_BACKWARD: Must(self.whole(), [])} | (
                    self._cost() if self.is_used_once else {})

    def _cost(self):
        """Return the cost of a gather of each unit for its forward and one for its backward, one of
        the root, and a reduction of all gradients.
        """
        sync, buckets = self.wrapped.sync, self.wrapped.buckets
        of_units = [bucket for unit in self.units for bucket in unit.shards]
        trained = [bucket for bucket in buckets if getattr(bucket, "trained", True)]
        messages = [*of_units, *buckets, *(trained if sync else [])]
        return {
            SENT: AtMost(self.traffic.sent_bytes,
                         self.once * sum(bucket.weights.nbytes for bucket in messages),
                         "sends {:,.0f} bytes in forward and backward; {:,.0f} are enough"),
            CALLS: AtMost(len(self.traffic.ops), len(messages))}


def _see(fn, run, ranks):
    yield from see_training(fn, run, ranks, Units)


CHECKPOINTS = tuple(RUNS[1]._replace(recompute=how) for how in ("reentrant", "non-reentrant"))

GATHER, WITHOUT = "unit.end_gather()\n        if not", "if not"
NEXT = "self.prefetch(self.place_in_order(unit) + 1)"
HOOK, OUTPUTS = "output.register_hook(begins)", "in tree_leaves(outputs):"
BEFORE = "self.prefetch(place - 1)"
IN_LEAVE, IN_ENTER = "        if in_backward():\n            return\n", "if not in_backward():"
FREE = f"{HOOK}\n        unit.free()"
IN_BACKWARD = "self.backward_begins()\n        unit.end_gather()"
REDUCE = "if self.sync:\n            self.reduce(unit)\n        unit.free()"
NESTED = ("leave() frees the unit, so every output that requires a gradient, however nested "
          "(tree_leaves(outputs)), needs a hook, backward_of(), which gathers the unit again.")

STAGE_3 = Proof(
    ZeroStage3,
    Stage({"equal to one process on 1 and 3 ranks: AdamW, SGD with momentum, several backwards": (),
           "tied, frozen, a unit that is used twice, float64, bfloat16 with float32 masters": (),
           "a unit is whole while it computes, and the next is on its way; then it is freed": TIMES,
           "also with sync=False, and without gradients; in backward gradients go unit by unit": (),
           "units travel twice in a step, all other parameters once, gradients once: (R-1)/R": COST,
           }, _see, RUNS, (3, 1), oracle=InUnits, through=torch.float32),
    Stage("a checkpoint runs the forward once more, and nothing is sent for it; inside a group it "
          "talks only to that group's ranks", _see, (RUNS[0], *CHECKPOINTS), (4,), GROUPS[:1],
          oracle=InUnits, through=torch.float32, note=("On all ranks it was right. Here there are "
                                                       "groups, and checkpointed blocks, which run "
                                                       "the forward once more inside the "
                                                       "backward.")),
    mistakes=(
        # in forward
        Slip("enter() gathers the unit, and waits: unit.end_gather().", (GATHER, WITHOUT),
             (GATHER, f"unit.begin_gather()\n        {WITHOUT}")),
        Slip("enter() must start gathering the next unit: self.prefetch(self.place_in_order(unit) "
             "+ 1).", (NEXT, "self.place_in_order(unit)"), (NEXT, NEXT.replace(" + 1", ""))),
        Slip("Each forward of a unit has one place in the order: enter() must call "
             "self.place_in_order(unit) once.",
             (NEXT, f"self.place_in_order(unit)\n            {NEXT}")),
        Slip("enter() must call self.place_in_order(unit): unless each unit's place is recorded, "
             "the next unit is unknown.", (NEXT, "self.prefetch(self.position + 1)"),
             (NEXT, "pass")),
        Slip("Gather the next unit while this one computes: self.prefetch() starts the gather, and "
             "does not wait for it.",
             (NEXT, "place = self.place_in_order(unit) + 1\n            if place < len(self.order):"
              "\n                self.order[place].end_gather()")),
        Slip("In forward, prefetch only one unit, the next: otherwise more than two are whole at "
             "once.",
             (NEXT, f"{NEXT}\n            self.prefetch(self.position + 1)"),
             (NEXT, f"{NEXT}\n            for place in range(len(self.order)):\n"
              "                self.prefetch(place)")),
        Slip("Prefetch the next unit even when gradients are disabled.",
             (IN_ENTER, "if torch.is_grad_enabled() and not in_backward():")),
        Slip("leave() frees each unit after its forward: unit.free().", (FREE, HOOK)),
        Slip("leave() must free each unit after its forward, whether or not a backward follows.",
             ("unit.free()\n\n    def backward_of", "if module.training:\n            unit.free()"
              "\n\n    def backward_of"),
             ("unit.free()\n\n    def backward_of", "if torch.is_grad_enabled():\n            "
              "unit.free()\n\n    def backward_of")),
        # in backward
        Slip(NESTED, (HOOK, "pass"), (OUTPUTS, f"{OUTPUTS[:-1]}[:1]:"),
             (OUTPUTS, f"{OUTPUTS[:-1]}[-1:]:"), (OUTPUTS, "in outputs:"),
             (OUTPUTS, "in (list(outputs) if isinstance(outputs, tuple) else []) + (outputs[1] if "
              "isinstance(outputs, tuple) and isinstance(outputs[1], list) else []):")),
        Slip("backward_of() gathers the unit, and waits: unit.end_gather().",
             (IN_BACKWARD, "self.backward_begins()"),
             (IN_BACKWARD, "self.backward_begins()\n        unit.begin_gather()")),
        Slip("In backward, the previous unit comes next: backward_of() must start gathering it "
             "with self.prefetch(place - 1), while this one computes.", (BEFORE, "pass"),
             (BEFORE, "self.prefetch(place)")),
        Slip("In backward, units come in reverse order: prefetch place - 1, not place + 1.",
             (BEFORE, "self.prefetch(place + 1)")),
        Slip("backward_of() receives `place`, the unit's own. self.position still points to the "
             "end of the forward.", (BEFORE, "self.prefetch(self.position - 2)")),
        Slip("In backward as well, use prefetch(), which starts the gather and does not wait.",
             (BEFORE, "if place:\n            self.order[place - 1].end_gather()")),
        Slip("In backward, prefetch only one unit, the previous one.",
             (BEFORE, f"{BEFORE}\n        self.prefetch(place - 2)")),
        Slip("backward_done() reduces the unit's gradients as soon as its backward is over: "
             "self.reduce(unit).", (REDUCE, "unit.free()")),
        Slip("A unit's gradients are complete only after its backward: reduce them in "
             "backward_done(), not in backward_of().",
             (REDUCE, "unit.free()", BEFORE, f"{BEFORE}\n        "
                                  "if self.sync:\n            self.reduce(unit)")),
        Slip("backward_done() frees the unit: unit.free().",
             (REDUCE, "if self.sync:\n            self.reduce(unit)")),
        Slip("backward_done() must free the unit even with sync=False.",
             (REDUCE, REDUCE.replace("        unit.free", "            unit.free"))),
        Slip("With sync=False no gradients are sent: call self.reduce(unit) only if self.sync is "
             "True.",
             ("if self.sync:", "if True:")),
        # a checkpoint
        Slip("A checkpoint's second forward has no place in the order: call "
             "self.place_in_order(unit) only if not in_backward().",
             (f"{IN_ENTER}\n            {NEXT}", NEXT)),
        Slip("A checkpoint runs the forward again inside the backward, and enter() must gather the "
             "unit then as well.",
             (f"{GATHER} in_backward():\n", f"{WITHOUT} in_backward():\n            "
                             "unit.end_gather()\n")),
        Slip("A checkpoint runs the forward again inside the backward. There leave() must do "
             "nothing (if in_backward(): return): the unit's backward comes next, and needs it "
             "whole.", (IN_LEAVE, ""),
             (IN_LEAVE, "        if in_backward():\n            return unit.free()\n")),
    ), hints=(
        "When does a unit need its weights in backward, and when are its gradients complete?",
        "backward_of(): as in forward, but the next unit is the previous one in the order: place - "
        "1. backward_done(): reduce the gradients unless self.sync is False, and free the unit in "
        "any case.",
        "backward_of(): unit.end_gather(); self.prefetch(place - 1). backward_done(): if "
        "self.sync: self.reduce(unit); unit.free().",
    ))
