"""The checks of ZeroStage1 and ZeroStage2: equal to one process, and what is sent and held."""

import gc

from torch.multiprocessing.reductions import StorageWeakRef

from ranklab.checks.beside import IN_GROUPS, expect
from ranklab.checks.failures import LEFT
from ranklab.checks.trial import explain
from ranklab.checks.zero.toys import Watch, is_there, storages
from ranklab.checks.zero.training import EXPERTS, RUNS, on_ranks_together, train

CAP = {"bucket_cap_bytes": 200}  # several buckets
WAITS = "A rank waits for a message that another does not send: all make the same calls."
OWN_PLACE = ("bucket.shard_grad must not be a view of bucket.flat, because that is freed: the mean "
             "arrives in a place of its own.")
FAILURES = {
    ".*begins with memory that was freed.*": "Free the buckets before this one, which have arrived:"
    " self.buckets[: self.buckets.index(bucket)]. This one is still to be sent.",
    ".*freed while its message.*": "First super().finish(), which waits for all; then free.",
    ".*lies in memory that was freed.*": OWN_PLACE,
    "RuntimeError: .*storage of size 0.*": OWN_PLACE,
    "AttributeError: 'NoneType' object has no attribute 'wait'":
        "reduce() returns the handle: async_op=True makes one.",
    LEFT: WAITS,
}
OF_GROUPS = {".*": "Pass bucket.group on to every collective, with group=group, and divide by its "
             "size."}


class Buckets(Watch):
    """Also notes how many buckets are whole when a message begins, and who waits for it."""

    def __init__(self, wrapped):
        super().__init__(wrapped)
        self.whole, self.is_early = [0], False
        wrapped.reduce = self._reduce
        wrapped.places = getattr(wrapped, "places", [])  # of means that are no part of bucket.flat

    def _reduce(self, bucket):
        self.message_begins()
        work = type(self.wrapped).reduce(self.wrapped, bucket)
        self.is_early |= getattr(work, "is_here", False)
        mean = bucket.shard_grad
        if mean is not None and storages([mean]) != storages([bucket.flat]):
            self.wrapped.places.append(StorageWeakRef(mean.untyped_storage()))
        return work

    def message_begins(self):
        self.whole.append(self.whole_now())

    def whole_now(self):
        return sum(is_there(bucket.flat) for bucket in self.wrapped.buckets)

    def after_backward(self, sync):
        self._compare_waits()
        expect(self.most <= 1, f"{self.most} buckets are on their way at a time", "reduce() first "
               "waits for those before: while self.works: self.works.pop().wait(). A message under "
               "way may hold a copy of its bucket.")
        if not self.wrapped.find_unused_parameters:  # that sends more, to ask who has used what
            self._compare_sent("backward", sync * self.once, "One reduce-scatter of bucket.flat: "
                               "the mean of a shard goes to its owner alone.")

    def after_step(self):
        self._compare_waits()
        self.compare_places()
        self._compare_sent("the step", self.once, "step_ends() must gather what the owners have "
                           "stepped: one all-gather of the shards for each bucket.")

    def _compare_waits(self):
        expect(not self.missing(), f"nobody has waited for {self.missing()} messages", "Wait for "
               "every handle. In step_ends() leave async_op out, or wait() before the forward can "
               "read the weights.")
        expect(not self.is_early, "reduce() waits for its own message", "Backward goes on while it "
               "travels: return the handle, and the next reduce() or finish() waits.")

    def compare_places(self):
        expect(not self.wrapped.places, "means take memory beside the whole gradients", "In stage "
               "1 no gradient is freed, so the mean has its place among them: "
               "bucket.flat.view(-1, len(bucket.shard))[bucket.rank].")

    def _compare_sent(self, what, times, hint):
        right = times * sum(bucket.flat.nbytes for bucket in self.wrapped.buckets)
        explain(f"{what}: bytes sent", self.traffic.sent_bytes, right, {"twice as much": (
            2 * right, "That is twice as much: an all-reduce sends every mean to every rank, and "
            "only the owner needs it. dist.reduce_scatter_single.")}, hint)


class FreedBuckets(Buckets):
    """Of stage 2."""

    def compare_places(self):
        for bucket in self.wrapped.buckets:
            bucket.drop_gradients()
        gc.collect()
        kept = sum(not place.expired() for place in self.wrapped.places)
        expect(not kept, f"after optimizer.zero_grad() {kept} places of gradients are kept", "The "
               "optimizer's gradients hold them as long as they are needed: keep no other "
               "reference, and make a new torch.empty_like(bucket.shard) each time.")

    def after_backward(self, sync):
        super().after_backward(sync)
        buckets, whole = self.wrapped.buckets, self.whole_now() * sync
        of_all = f"of {len(buckets)} buckets are whole"
        expect(not whole, f"after backward {whole} {of_all}", "finish() frees the gradients of all "
               "buckets, once the optimizer has its part: self.free_gradients(self.buckets).")
        expect(max(self.whole) <= 2, f"{max(self.whole)} {of_all} at a time", "When a bucket "
               "leaves, those before it have arrived: free them, "
               "self.buckets[: self.buckets.index(bucket)].")
        memory = [part.master.grad.untyped_storage() for bucket in buckets for part in bucket.parts
                  if part.master.grad is not None]
        held = sum({each.data_ptr(): each.nbytes() for each in memory}.values())
        shards = sum(bucket.master.nbytes for bucket in buckets)
        expect(held <= shards, f"the optimizer's gradients take {held:,} bytes, its shards "
               f"{shards:,}", "A place as large as the shard: torch.empty_like(bucket.shard).")


def check_ZeroStage2(wrapped_class):
    yield from check_ZeroStage1(wrapped_class, FreedBuckets)


def _all_runs(wrapped_class, ranks, watch):
    yield from train(wrapped_class, ranks, watch, CAP)
    yield from train(wrapped_class, ranks, watch, {}, RUNS[-1:])  # one bucket


def check_ZeroStage1(wrapped_class, watch=Buckets):
    for ranks in (3, 1):
        on_ranks_together(_all_runs, wrapped_class, watch, ranks=ranks, failures=FAILURES)
    yield "after backward each rank has the mean gradient of its shard, on 1 and 3 ranks"
    yield "after a step all weights are those of one process: AdamW, SGD with momentum"
    yield "several backwards before a step, with and without no_sync; tied, frozen, two types"
    yield "in bfloat16 float32 masters are stepped, and rounded for all ranks"
    yield "(R-1)/R of the gradients travel in backward, (R-1)/R of the parameters in step()"
    if watch is FreedBuckets:
        yield "two buckets of gradients are whole at most; in the end 1/R of them is left"
    on_ranks_together(train, wrapped_class, watch, CAP | {"find_unused_parameters": True}, EXPERTS,
                      ranks=2, failures=FAILURES)
    yield "find_unused_parameters: what another rank has used is stepped, what none has used is not"
    on_ranks_together(train, wrapped_class, watch, CAP, RUNS[:1], groupings=IN_GROUPS,
                      failures=FAILURES | OF_GROUPS)
    yield "inside a group it talks to nobody outside"
