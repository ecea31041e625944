"""Lab 06: what goes wrong in stage 2."""

from mutants import mutant

from ranklab.zero import ZeroStage2

OWN = "return torch.empty_like(bucket.shard)"
BEFORE = "self.free_gradients(self.buckets[: self.buckets.index(bucket)])"
IN_THE_END = "super().finish()\n        self.free_gradients(self.buckets)"


def _wrong(*edits, says, **named):
    return mutant(ZeroStage2, *edits, says=says, **named)


WRONG = [
    _wrong(BEFORE, "pass", says="buckets are whole at a time"),
    _wrong(BEFORE, "self.buckets[self.buckets.index(bucket) - 1].free_gradients()",
           says="This one is still to be sent", called="frees_what_it_sends_where_it_is_alone"),
    _wrong(BEFORE, "self.free_gradients(self.buckets[: max(0, self.buckets.index(bucket) - 1)])",
           says="3 of . buckets are whole at a time", called="frees_one_bucket_later"),
    _wrong(OWN, "if not hasattr(type(self), 'places_kept'):\n            type(self).places_kept = "
           "{}\n        return type(self).places_kept.setdefault(bucket, torch.empty_like(bucket."
           "shard))", says="places of gradients are kept|is .*not"),
    _wrong(IN_THE_END, "super().finish()", says=r"finish\(\) frees the gradients of all buckets"),
    _wrong(BEFORE, BEFORE.replace("(bucket)]", "(bucket) + 1]"),
           says="This one is still to be sent"),
    _wrong(OWN, "return super().place_of(bucket)", says="must not be a view of bucket.flat"),
    _wrong(OWN, "return torch.empty_like(bucket.flat)[: len(bucket.shard)]",
           says="A place as large as the shard"),
    _wrong(IN_THE_END, "self.free_gradients(self.buckets)\n        super().finish()",
           says="First super.*then free"),
]
