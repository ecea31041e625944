"""The check of ZeroStage3: equal to one process; gathered, used and freed at the right time."""

from ranklab.checks.beside import IN_GROUPS, expect
from ranklab.checks.failures import LEFT
from ranklab.checks.trial import explain
from ranklab.checks.zero.stages import WAITS
from ranklab.checks.zero.toys import Watch, is_there
from ranklab.checks.zero.training import RUNS, on_ranks_together, train

COMPUTES = ("A unit computes with weights that are freed already. Does it stay whole until its "
            "backward is over?")
FAILURES = {
    ".*forward begins without.*": "enter() gathers the unit, and waits: unit.end_gather().",
    ".*backward begins without.*": "leave() frees the unit after its forward, so each output that "
    "requires a gradient, in any nesting (tree_leaves(outputs)), needs a hook, backward_of(), "
    "which gathers it again: unit.end_gather().",
    ".*once more begins without.*": "A checkpoint runs the forward once more inside the backward: "
    "enter() must gather there, too.",
    ".*places in the order.*": "A checkpoint's second forward has no place: "
    "self.place_in_order(unit) where it is not in_backward().",
    "RuntimeError: .*storage of size 0.*": COMPUTES, "was killed by SIGSEGV": COMPUTES, LEFT: WAITS,
}
GIVEN = {
    ".*the optimizer's gradient of .*": "self.reduce(unit) is given, and makes the mean. "
    "backward_done() calls it where self.sync is True, also once more where a unit is used twice.",
    ".*: `.*` is .*": "The gradients were right, and the step is given: its shards are gathered "
    "when a unit is needed next.",
}
WITH_CHECKPOINT = {".*": "A checkpoint runs the forward once more inside the backward. There "
                   "leave() does nothing: if in_backward(): return. The unit's backward comes "
                   "right then, so it must stay whole; and self.position stands at the end of the "
                   "forward, so hooks that are registered there gather the wrong unit ahead."}


class Units(Watch):
    """Also notes which blocks are whole when one of them begins to compute.

    events  (what begins, the block's number, blocks that are whole, those of them that are still
            on their way, blocks with whole gradients)
    """

    def __init__(self, wrapped):
        super().__init__(wrapped)
        self.blocks, self.events = wrapped.module.blocks, []
        self.units = wrapped.units[:-1]  # the last is all that belongs to no block
        self.is_used_once = len(wrapped.module.order) == len(self.blocks)
        self.knows_order, self.recompute = len(wrapped.order) > 0, wrapped.module.recompute
        self.is_clean = all(p.grad is None for p in wrapped.module.parameters())
        for block in self.blocks:
            block.begins = self.block_begins

    def whole(self):
        """The numbers of the blocks whose weights take memory."""
        return [number for number, unit in enumerate(self.units)
                if any(is_there(bucket.weights) for bucket in unit.shards)]

    def block_begins(self, what, number):
        whole = self.whole()
        arriving = {held.tensor.data_ptr() for held in self.handles if not held.is_here}
        under_way = [n for n in whole if any(bucket.weights.data_ptr() in arriving
                                             for bucket in self.units[n].shards)]
        if number not in whole or number in under_way:
            raise RuntimeError(f"block {number}'s {what} begins without its weights")
        gradients = [n for n, block in enumerate(self.blocks)
                     if any(p.grad is not None for p in block.parameters())]
        self.events.append((what, number, whole, under_way, gradients))

    def forward_ends(self):
        self.between = self.whole()

    def after_forward(self):
        for event in self.events if self.is_used_once else ():
            self._compare_event(*event)
        expect(not self.between, f"after forward {_are(self.between)} whole", "leave() frees each "
               "unit after its forward, whether a backward will come or not: unit.free(); and what "
               "is prefetched must be used.")

    def after_backward(self, sync):
        self.after_forward()
        expect(not self.whole(), f"after backward {_are(self.whole())} whole", "backward_done() "
               "frees the unit, with sync=False too.")
        reached, places = len(self.wrapped.module.order), len(self.wrapped.order)
        expect(places <= reached, f"{places} places in the order of units, but a forward reaches "
               f"{reached}", "")
        if self.is_used_once:
            self._compare_sent(sync)

    def _compare_event(self, what, number, whole, under_way, gradients):
        """The block itself is whole, and the one that comes next is on its way; no other."""
        then, call, place, free = (
            (number + 1, "enter()", "self.place_in_order(unit) + 1", "leave() frees it after its "
             "forward") if what == "forward" else
            (number - 1, "backward_of()", "place - 1", "backward_done() frees it after its "
             "backward, and leave() after its forward"))
        now = f"while block {number}'s {what} begins, {_are(whole)} whole"
        is_prefetched = (self.knows_order or what != "forward") and not self.recompute
        expect(not is_prefetched or then in (-1, len(self.blocks), *under_way),
               f"{now}; block {then} comes next, and is not on its way", f"{call} begins the "
               f"gather of the next one, self.prefetch({place}), and does not wait for it: it "
               "travels meanwhile.")
        expect({number, then}.issuperset(whole), now, f"What has computed is freed: {free}. And no "
               f"other one than the next is gathered ahead: self.prefetch({place}).")
        is_reduced = self.is_clean and self.wrapped.sync
        expect(not is_reduced or len(gradients) <= 2,
               f"{now}; blocks {gradients} have whole gradients", "backward_done() reduces the "
               "unit's gradients as soon as its backward is over: self.reduce(unit), where "
               "self.sync is True.")

    def _compare_sent(self, sync):
        buckets = self.wrapped.buckets
        units = sum(bucket.weights.nbytes for unit in self.units for bucket in unit.shards)
        everything = sum(bucket.weights.nbytes for bucket in buckets)
        gradients = sync * sum(bucket.weights.nbytes for bucket in buckets if bucket.trained)
        explain("bytes sent", self.traffic.sent_bytes, self.once * (units + everything + gradients),
                hint="Each unit is gathered for its forward and for its backward; its gradients "
                "are reduced once, with sync=False not at all: self.reduce(unit) where self.sync "
                "is True. Is one gathered that is not used next?")


def _are(blocks):
    return f"block{'s' * (len(blocks) != 1)} {blocks} {'is' if len(blocks) == 1 else 'are'}"


def _recomputed(wrapped_class, ranks):
    for how in ("reentrant", "non-reentrant"):
        yield from train(wrapped_class, ranks, Units, runs=RUNS[1:2], recompute=how)


def check_ZeroStage3(wrapped_class):
    for ranks in (3, 1):
        on_ranks_together(train, wrapped_class, Units, ranks=ranks, failures=FAILURES | GIVEN)
    yield "a unit is whole while it computes, and the next is on its way; then it is freed"
    yield "also with sync=False, and without gradients; in backward gradients go unit by unit"
    yield "units travel twice in a step, all other parameters once, gradients once: (R-1)/R"
    yield "equal to one process on 1 and 3 ranks: AdamW, SGD with momentum, several backwards"
    yield "tied, frozen, a unit that is used twice, float64, bfloat16 with float32 masters"
    on_ranks_together(_recomputed, wrapped_class, ranks=2, failures=FAILURES | WITH_CHECKPOINT)
    yield "a checkpoint runs the forward once more, and nothing travels for it"
    on_ranks_together(train, wrapped_class, Units, {}, RUNS[:1], groupings=IN_GROUPS, failures={
        ".*": "Pass the group on: what the units do by themselves is over bucket.group."})
    yield "inside a group it talks to nobody outside"
