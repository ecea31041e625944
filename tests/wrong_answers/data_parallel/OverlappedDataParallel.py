"""Wrong answers to OverlappedDataParallel."""

from mutants import mutant

from ranklab.data_parallel import OverlappedDataParallel

DIVIDE = "bucket.flat /= dist.get_world_size(bucket.group)"
ALL_REDUCE = "dist.all_reduce(bucket.flat"
KEEP = "self.works.append(self.reduce(bucket))"
READY = "while self.waiting and not self.waiting[0].missing:"
IN_HOOK = "            self.launch_ready_buckets()"  # the one in finish() is less indented
REFUSE = "if parameter not in bucket.missing:"
WAIT = "for work in self.works:"
FULL = "bucket.missing = set(bucket.parameters)"
LAST = "if missing and not self.find_unused_parameters:"
OF_ALL = "for parameter in bucket.missing}"


def _wrong(*edits, says, **named):
    return mutant(OverlappedDataParallel, *edits, says=says, **named)


WRONG = [
    # what travels
    _wrong(DIVIDE, "pass", says="is 4 times what is right"),
    _wrong(FULL, f"{FULL}\n            {DIVIDE}",
           says="is 1/4 of what is right It is .*divided twice"),
    _wrong("bucket.gather()", "pass",
           says=r"is still this rank's own When nothing of a bucket is missing, call bucket"),
    _wrong(ALL_REDUCE, "dist.all_reduce(bucket.parameters[0].data",
           says="The hook gets the parameter, not its gradient"),
    _wrong(ALL_REDUCE, "dist.all_reduce(bucket.flat.clone()",
           says="than bucket.flat .*all-reduce bucket.flat itself", called="a_copy_of_it"),
    _wrong(KEEP, KEEP.replace("append", "extend"), ALL_REDUCE, "[dist.all_reduce(view",
           "async_op=True)", "async_op=True) for view in bucket.views]",
           says="than bucket.flat .*all-reduce bucket.flat itself", called="its_views"),
    _wrong("group=bucket.group, async_op", "async_op",
           says="Pass self.group on to every collective"),
    # when it leaves
    _wrong("not self.waiting[0].missing",
           "len(self.waiting[0].missing) < max(1, len(self.waiting[0].parameters))",
           says="still this rank's own When nothing of a bucket is missing"),
    _wrong(READY, "if self.waiting and not self.waiting[0].missing:",
           says="leaves right behind the one that it had to wait for"),
    _wrong(READY, "for bucket in [each for each in self.waiting if not each.missing]:",
           "bucket = self.waiting.pop(0)", "self.waiting.remove(bucket)",
           says=r"leave, in this order, \[2, 1, 0\]"),
    _wrong(IN_HOOK, "", says="types: 3 of 3 buckets leave in finish"),
    _wrong(IN_HOOK, f"            if not self.find_unused_parameters:\n    {IN_HOOK}",
           says="find_unused_parameters=True: 3 of 3 buckets leave in finish"),
    _wrong(", async_op=True", "", WAIT, "for work in ():", says="without async_op=True"),
    _wrong(", async_op=True", "", says="all_reduce returns None without async_op=True"),
    _wrong(KEEP, f"{KEEP}\n            self.works[-1].wait()",
           says="while layers are still to be computed No overlap"),
    _wrong(DIVIDE, "pass", KEEP, f"{KEEP}\n            {DIVIDE}",
           says="divided while they travelled"),
    # the hook
    _wrong("if self.sync:", "before, self.sync = self.sync, True\n        if True:", IN_HOOK,
           f"{IN_HOOK}\n            self.sync = before", says="Look at self.sync first"),
    _wrong("if self.sync:", "bucket.missing.discard(parameter)\n        if self.sync:",
           REFUSE, "if False:", "missing.remove(", "missing.discard(", says="bucket.missing as"),
    _wrong(REFUSE, "if False:", "missing.remove(", "missing.discard(",
           says="gets two gradients in one backward, and no error comes"),
    _wrong("self.backward_begins()", "pass", says="Keep self.backward_begins"),
    # the end of a backward
    _wrong(WAIT, "for work in ():", says="waited for 3 of its 3 .*half done until its"),
    _wrong(WAIT, "for work in ():", "missing = {",
           "for work in self.works:\n            work.wait()\n        missing = {",
           says="only some ranks use.* launch all that is left, then wait"),
    _wrong(FULL, "pass", says="bucket.missing must be full again"),
    _wrong(WAIT, f"works = self.works\n        {WAIT}", LAST,
           f"self.works = works\n        {LAST}", says=r"finish\(\) must leave self.works empty"),
    _wrong(LAST, f"self.waiting = self.buckets\n        {LAST}",
           says=r"self.waiting must be a copy: list\(self.buckets\)"),
    # parameters without a gradient
    _wrong("if self.find_unused_parameters else ()", "",
           says="used_anywhere.. with find_unused_parameters=False"),
    _wrong("used = self.used_anywhere()", "used = [self.used_anywhere() for _ in self.buckets][0]",
           says="3 calls of used_anywhere"),
    _wrong("fill_none(used)", "fill_none(set(bucket.parameters))",
           says="is there .*what no rank used stays None"),
    _wrong("bucket.fill_none(used)", "pass",
           says="is None .*fill_none.used.*what another rank used gets the mean"),
    _wrong(LAST, "if missing:", says="only where self.find_unused_parameters is False"),
    _wrong(OF_ALL, "for parameter in bucket.parameters if parameter.grad is None}",
           says="no gradient for layer 2 now, and this rank says: no ValueError"),
    _wrong(OF_ALL, f"{OF_ALL}\n        {LAST}\n            raise self.no_gradient(missing)",
           says="before it raises"),
    _wrong("bucket.fill_none(used)", f"{LAST}\n                raise self.no_gradient(missing)\n"
           "            bucket.fill_none(used)", says="Raise at the very end"),
]
