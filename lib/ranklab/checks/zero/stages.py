"""The checks of ZeroStage1 and ZeroStage2: equal to one process; the bytes sent and held."""

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ranklab.checks.prover import GROUPS, AtMost, Proof, Slip, Stage
from ranklab.checks.zero.toys import Watch, is_there, storages
from ranklab.checks.zero.training import EXPERTS, RUNS, InOneProcess, see_training
from ranklab.zero import ZeroStage1, ZeroStage2

AWAITED, EARLY = "messages that nobody waited for", "buckets whose reduce() waits for them"
AT_A_TIME, SENT, CALLS = ("buckets on their way at a time", "bytes sent in backward",
                          "messages in backward")
IN_STEP, UNSENT = "bytes sent in a step", "bytes of stepped weights that never leave their owner"
MISPLACED = "means that lie in bucket.flat, but not at this rank's part of it"
BESIDE = "means that take memory beside the whole gradients"
LEFT, WHOLE = "whole buckets after backward", "whole buckets at a time"
HELD, KEPT = ("bytes that the optimizer's gradients keep in memory",
              "places of gradients after optimizer.zero_grad()")
COST = EARLY, MISPLACED, AT_A_TIME, SENT, CALLS, IN_STEP, BESIDE
MEMORY = LEFT, WHOLE, HELD, KEPT


class Buckets(Watch):
    """A Watch that also records how many buckets are whole when a message begins, and who waits."""

    def __init__(self, wrapped):
        super().__init__(wrapped)
        self.whole, self.early, self.misplaced = [0], 0, 0
        wrapped.reduce = self._reduce
        wrapped.places = getattr(wrapped, "places", [])  # of means that are no part of bucket.flat

    def _reduce(self, bucket):
        self.message_begins()
        work = type(self.wrapped).reduce(self.wrapped, bucket)
        self.early += getattr(work, "is_here", False)
        mean = bucket.shard_grad
        if mean is not None and storages([mean]) != storages([bucket.flat]):
            self.wrapped.places.append(StorageWeakRef(mean.untyped_storage()))
        elif mean is not None:  # NCCL reduces in place only where the rank's own part lies
            own = bucket.flat.storage_offset() + bucket.rank * len(bucket.shard)
            self.misplaced += mean.storage_offset() != own
        return work

    def message_begins(self):
        self.whole.append(self.whole_now())

    def whole_now(self):
        return sum(is_there(bucket.flat) for bucket in self.wrapped.buckets)

    def of_backward(self):
        buckets, finds = self.wrapped.buckets, self.wrapped.find_unused_parameters
        numbers = sum(len(bucket.parameters) for bucket in buckets)
        extra = finds * 8 * (numbers - numbers // self.ranks)  # an all-reduce: who has used what
        return {
            AWAITED: AtMost(self.missing(), 0), EARLY: AtMost(self.early, 0),
            MISPLACED: AtMost(self.misplaced, 0),
            AT_A_TIME: AtMost(self.most, 1),
            SENT: self._sent("backward", self.wrapped.sync, extra),
            CALLS: AtMost(len(self.traffic.ops), self.wrapped.sync * len(buckets) + finds)}

    def of_step(self):
        sent = self._sent("the step", 1)
        return {AWAITED: AtMost(self.missing(), 0), IN_STEP: sent,
                UNSENT: AtMost(max(0, round(sent.limit - sent.number)), 0), **self.of_places()}

    def of_places(self):
        return {BESIDE: AtMost(len(self.wrapped.places), 0)}

    def _sent(self, phase, times, more=0):
        """Return the bytes sent, which may be `times` times all buckets."""
        nbytes = sum(bucket.flat.nbytes for bucket in self.wrapped.buckets)
        return AtMost(self.traffic.sent_bytes, times * self.once * nbytes + more,
                      f"sends {{:,.0f}} bytes in {phase}; {{:,.0f}} are enough")


class FreedBuckets(Buckets):
    """Buckets for stage 2."""

    def of_places(self):
        for bucket in self.wrapped.buckets:
            bucket.drop_gradients()
        gc.collect()
        return {KEPT: AtMost(sum(not place.expired() for place in self.wrapped.places), 0)}

    def of_backward(self):
        buckets = self.wrapped.buckets
        memory = [part.master.grad.untyped_storage() for bucket in buckets for part in bucket.parts
                  if part.master.grad is not None]
        nbytes = sum({each.data_ptr(): each.nbytes() for each in memory}.values())
        return super().of_backward() | {
            LEFT: AtMost(self.whole_now() * self.wrapped.sync, 0),
            WHOLE: AtMost(max(self.whole), 2),
            HELD: AtMost(nbytes, sum(bucket.master.nbytes for bucket in buckets))}


CAP = {"bucket_cap_bytes": 200}  # several buckets
IN_BUCKETS = *(run._replace(options=CAP) for run in RUNS), RUNS[-1]._replace(what="one bucket")
IN_GROUPS = RUNS[0]._replace(options=CAP), EXPERTS._replace(options=EXPERTS.options | CAP)


def _stages(see, holds):
    return (
        Stage({"after backward each rank has the mean gradient of its shard, on 1 and 3 ranks": (),
               "after a step all weights are those of one process: AdamW, SGD with momentum": (),
               "several backwards before a step, with and without no_sync; tied, frozen, two types":
               (),
               "in bfloat16, float32 masters are stepped, and rounded for all ranks": (),
               "(R-1)/R of the gradients travel in backward, (R-1)/R of the parameters in step()":
               COST} | holds, see, IN_BUCKETS, (3, 1), oracle=InOneProcess, through=torch.float32),
        Stage("find_unused_parameters: what another rank has used is stepped, what none has used "
              "is not; inside a group it talks only to that group's ranks", see, IN_GROUPS, (4,),
              GROUPS,
              oracle=InOneProcess, through=torch.float32))


def _see_stage_1(fn, run, ranks):
    yield from see_training(fn, run, ranks, Buckets)


def _see_stage_2(fn, run, ranks):
    yield from see_training(fn, run, ranks, FreedBuckets)


# --- stage 1 --------------------------------------------------------------------------------------

ASYNC = "\n                                          async_op=True)"
REDUCE = "return dist.reduce_scatter_single(bucket.shard_grad, bucket.flat, group=bucket.group,"
DIVIDE = "bucket.flat /= dist.get_world_size(bucket.group)"
PLACE, KEEP = ("bucket.flat.view(-1, len(bucket.shard))[bucket.rank]",
               "bucket.shard_grad = self.place_of(bucket)")
HAND = "bucket.set_optimizer_gradients({p for p in bucket.parameters if p.grad is not None})"
GATHER = "dist.all_gather_single(bucket.weights, bucket.shard, group=bucket.group)"
UPDATE, IN_STEP_ENDS = "bucket.update_shard()", '"""\n        for bucket in self.buckets:\n'
SHARD = "(bucket.shard_grad, bucket.flat,"

STAGE_1 = Proof(
    ZeroStage1, *_stages(_see_stage_1, {}),
    mistakes=(
        # reduce
        Slip("Divide bucket.flat by the number of ranks in its group before you send it.",
             (DIVIDE, "pass"), (DIVIDE, "pass", REDUCE, REDUCE.replace("return", "work ="),
                                ASYNC, f"{ASYNC}\n        bucket.shard_grad /= dist.get_world_size("
                                "bucket.group)\n        return work")),
        Slip("Divide bucket.flat only once.", (DIVIDE, f"{DIVIDE}\n        {DIVIDE}")),
        Slip("Divide by the number of ranks of the bucket's group: "
             "dist.get_world_size(bucket.group).",
             (DIVIDE, "bucket.flat /= dist.get_world_size()")),
        Slip("An all-reduce sends every mean to every rank, but only the owner needs it: use "
             "dist.reduce_scatter_single.",
             (REDUCE, "return dist.all_reduce(bucket.flat, group=bucket.group,")),
        Slip("Rank r owns part r of bucket.flat: a reduce-scatter cuts it into R equal parts.",
             (SHARD, "(bucket.shard_grad, bucket.flat.view(-1, len(bucket.shard)).roll(1, 0)"
              ".flatten(),")),
        Slip("The mean must arrive in bucket.shard_grad: reduce-scatter into it.",
             (PLACE, f"{PLACE}.clone()", SHARD, "(self.place_of(bucket), bucket.flat,")),
        Slip("Remember where the mean arrives: bucket.shard_grad = self.place_of(bucket).",
             (KEEP, "place = self.place_of(bucket)", SHARD, "(place, bucket.flat,")),
        Slip("Rank r's mean must arrive in part r of bucket.flat, self.place_of(bucket): NCCL "
             "can't reduce in place anywhere else.",
             (PLACE, "bucket.flat[: len(bucket.shard)]"),
             (KEEP, "bucket.shard_grad = bucket.flat[-len(bucket.shard) :]")),
        Slip("bucket.shard holds weights. The mean must arrive in self.place_of(bucket).",
             (KEEP, "bucket.shard_grad = bucket.shard")),
        Slip("Stage 1 frees no gradients, so the mean needs no new memory: self.place_of(bucket) "
             "must be a slice of bucket.flat.",
             (PLACE, "bucket.shard.new_zeros(len(bucket.shard))"),
             (KEEP, "bucket.shard_grad = torch.empty_like(bucket.shard)")),
        Slip("Pass the bucket's group on to every collective: group=bucket.group.",
             (f"group=bucket.group,{ASYNC}", "async_op=True)"),
             (GATHER, GATHER.replace(", group=bucket.group", ""))),
        Slip("reduce() must return the handle that async_op=True gives you.", (f",{ASYNC}", ")"),
             ("return dist.reduce", "dist.reduce")),
        Slip("Let backward continue while the message is in flight: return the handle, and the "
             "next reduce() or finish() waits.", (REDUCE, REDUCE.replace("return", "work ="), ASYNC,
                                 f"{ASYNC}\n        work.wait()\n        return work")),
        Slip("A message in flight may hold a copy of its bucket. reduce() must first wait for "
             "earlier messages: while self.works: self.works.pop().wait().",
             ("while self.works:", "while False:"), ("while self.works:", "while self.works[1:]:")),
        Slip("Wait for every handle that you pop from self.works.",
             ("self.works.pop().wait()", "self.works.pop()")),
        Slip("Send one message for each bucket, and nothing else.",
             (DIVIDE, f"dist.all_reduce(torch.ones(4).to(bucket.flat), group=bucket.group)\n"
              f"        {DIVIDE}")),
        # finish
        Slip("finish() must call bucket.set_optimizer_gradients() for every bucket, once all "
             "messages have arrived.", (HAND, "pass"),
             (f"        for bucket in self.buckets:\n            {HAND}",
              f"        for bucket in self.buckets[:1]:\n            {HAND}")),
        Slip("super().finish() sends what is left and waits for all messages: call it first.",
             ("        super().finish()\n", "")),
        Slip("Another rank has used this parameter, so super().finish() has given it a gradient. "
             "Pass such parameters to set_optimizer_gradients(): "
             "{p for p in bucket.parameters if p.grad is not None}.",
             (HAND, "bucket.set_optimizer_gradients()")),
        Slip("No rank has used this parameter: pass set_optimizer_gradients() only parameters that "
             "have a p.grad, or weight decay and momentum will move it.",
             (HAND, "bucket.set_optimizer_gradients(set(bucket.parameters))")),
        # step_ends
        Slip("step_ends() must gather the shards that their owners have updated: one all-gather "
             "for each bucket.", (GATHER, "pass")),
        Slip("step_ends() must handle all buckets, not only the first.",
             (IN_STEP_ENDS, IN_STEP_ENDS.replace("buckets:", "buckets[:1]:"))),
        Slip("The optimizer updates float32 master weights: before the all-gather, "
             "bucket.update_shard() must round them into the shard.", (UPDATE, "pass"),
             (f"{UPDATE}\n            {GATHER}", f"{GATHER}\n            {UPDATE}")),
        Slip("Send bucket.shard: bucket.master is in float32 even if the weights have 16 bits.",
             (GATHER, GATHER.replace("bucket.shard", "bucket.master"))),
        Slip("Gather the shards of the weights. bucket.shard_grad is for the gradient, and is None "
             "by now.",
             (GATHER, GATHER.replace("bucket.shard", "bucket.shard_grad"))),
        Slip("Each rank has updated only its own shard: use an all-gather, not a broadcast.",
             (GATHER, "dist.broadcast(bucket.weights, group=bucket.group, group_src=0)")),
        Slip("In step_ends(), leave out async_op, or call wait() before the forward can read the "
             "weights.", (GATHER, f"{GATHER[:-1]}, async_op=True)")),
    ), hints=(
        "An all-reduce is a reduce-scatter and an all-gather. Which one belongs in backward, "
        "and which after the step?",
        "reduce() starts the reduce-scatter of bucket.flat into place_of(bucket), and keeps that "
        "place as bucket.shard_grad. step_ends() gathers the shards (not bucket.shard_grad, which "
        "is a gradient) into bucket.weights.",
        "reduce(): bucket.flat /= R; bucket.shard_grad = self.place_of(bucket); return "
        "dist.reduce_scatter_single(bucket.shard_grad, bucket.flat, group=bucket.group, "
        "async_op=True). step_ends(): bucket.update_shard(), then dist.all_gather_single().",
    ))


# --- stage 2 --------------------------------------------------------------------------------------

OWN = "return torch.empty_like(bucket.shard)"
BEFORE = "self.free_gradients(self.buckets[: self.buckets.index(bucket)])"
IN_THE_END = "super().finish()\n        self.free_gradients(self.buckets)"
ARRIVED = ("The buckets before it have already been reduced: free them, self.buckets[: "
           "self.buckets.index(bucket)].")

STAGE_2 = Proof(
    ZeroStage2, *_stages(_see_stage_2, {
        "at most two buckets of gradients are whole; in the end 1/R of them is left": MEMORY}),
    mistakes=(
        Slip(f"When a bucket is sent, place_of() must free memory. {ARRIVED}", (BEFORE, "pass")),
        Slip("Two buckets are enough: the one being sent and the one being filled. Free the one "
             "right before this one as well.",
             (BEFORE, BEFORE.replace("self.buckets.index(bucket)]",
                                     "max(0, self.buckets.index(bucket) - 1)]"))),
        Slip(f"This bucket has not been sent yet. {ARRIVED}",
             (BEFORE, BEFORE.replace("(bucket)]", "(bucket) + 1]")),
             (BEFORE, "self.free_gradients(self.buckets)"), (BEFORE, "bucket.free_gradients()")),
        Slip("No bucket comes before bucket 0: buckets[0 - 1] is the last one.",
             (BEFORE, "self.buckets[self.buckets.index(bucket) - 1].free_gradients()")),
        Slip("bucket.shard_grad must not be a view of bucket.flat, which will be freed: give the "
             "mean memory of its own.", (OWN, "return super().place_of(bucket)")),
        Slip("Allocate only as much memory as the shard needs: torch.empty_like(bucket.shard).",
             (OWN, "return torch.empty_like(bucket.flat)[: len(bucket.shard)]"),
             (OWN, "return torch.empty_like(bucket.weights)[: len(bucket.shard)]")),
        Slip("The memory must have the shard's dtype: torch.empty_like(bucket.shard).",
             (OWN, "return torch.empty(len(bucket.shard), device=bucket.shard.device)")),
        Slip("bucket.shard holds weights, which the mean would overwrite: "
             "torch.empty_like(bucket.shard).", (OWN, "return bucket.shard"),
             (OWN, "return bucket.master.detach()")),
        Slip("After optimizer.zero_grad() the means must be gone: place_of() allocates new memory "
             "in each call, and keeps no reference to it.",
             (OWN, "if not hasattr(bucket, 'place'):\n            bucket.place = torch.empty_like("
              "bucket.shard)\n        return bucket.place"),
             (OWN, "if not hasattr(bucket, 'places'):\n            bucket.places = []\n        "
              "bucket.places.append(torch.empty_like(bucket.shard))\n        return "
              "bucket.places[-1]")),
        Slip("Once the optimizer has its part, finish() must free the gradients of all buckets: "
             "self.free_gradients(self.buckets).", (IN_THE_END, "super().finish()"),
             (IN_THE_END, f"{IN_THE_END[:-1]}[:-1])")),
        Slip("Free the gradients after super().finish(), which waits for all messages.",
             (IN_THE_END, "self.free_gradients(self.buckets)\n        super().finish()")),
        Slip("Call super().finish(): it waits for all messages and gives the optimizer its "
             "gradients.",
             (IN_THE_END, "self.free_gradients(self.buckets)")),
        Slip("bucket.drop_gradients() drops the optimizer's gradients as well. "
             "bucket.free_gradients() only frees the memory of the whole ones.",
             ("            bucket.free_gradients()", "            bucket.drop_gradients()")),
    ), hints=(
        "When a bucket is sent, which other buckets are no longer needed?",
        "place_of() frees the buckets before this one, and returns new memory the size of the "
        "shard. finish() does what stage 1 does, and then frees all buckets.",
        "self.free_gradients(self.buckets[: self.buckets.index(bucket)]); return "
        "torch.empty_like(bucket.shard)",
    ))
