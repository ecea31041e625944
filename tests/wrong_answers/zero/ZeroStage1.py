"""Lab 06: what goes wrong in stage 1."""

from mutants import mutant

from ranklab.zero import ZeroStage1

DIVIDE = "bucket.flat /= dist.get_world_size(bucket.group)"
PLACE = "bucket.flat.view(-1, len(bucket.shard))[bucket.rank]"
REDUCE = "return dist.reduce_scatter_single(bucket.shard_grad, bucket.flat, group=bucket.group,"
HAND = "bucket.set_optimizer_gradients({p for p in bucket.parameters if p.grad is not None})"
GATHER = "dist.all_gather_single(bucket.weights, bucket.shard, group=bucket.group)"


def _wrong(*edits, says, **named):
    return mutant(ZeroStage1, *edits, says=says, **named)


WRONG = [
    _wrong(DIVIDE, "pass", says="the sum, 3 times the mean"),
    _wrong(REDUCE, "return dist.all_reduce(bucket.flat, group=bucket.group,",
           says="That is twice as much: an all-reduce"),
    _wrong("bucket.shard_grad, bucket.flat,",
           "bucket.shard_grad, bucket.flat.view(-1, len(bucket.shard))"
           ".roll(1, 0).flatten(),", says="Each rank gets its own shard"),
    _wrong(PLACE, f"{PLACE}.clone()", "(bucket.shard_grad, bucket",
           "(self.place_of(bucket), bucket",
           says="is this rank's own, divided"),
    _wrong("group=bucket.group,\n", "\n", says="Pass bucket.group on"),
    _wrong(HAND, "pass", says="calls bucket.set_optimizer_gradients"),
    _wrong(HAND, "bucket.set_optimizer_gradients()", says="Another rank has used it"),
    _wrong(HAND, "bucket.set_optimizer_gradients(set(bucket.parameters))",
           says="No rank has used it"),
    _wrong(PLACE, "bucket.shard.new_zeros(len(bucket.shard))", says="the mean has its place among "
           "them"),
    _wrong(GATHER, "pass", says="must gather what the owners have stepped"),
    _wrong("bucket.update_shard()", "pass", says="bucket.update_shard"),
    _wrong(GATHER, f"{GATHER[:-1]}, async_op=True)", says="nobody has waited for"),
    _wrong(REDUCE, REDUCE.replace("return", "work ="), "async_op=True)", "async_op=True)\n        "
           "work.wait()\n        return work", says="waits for its own message"),
    _wrong("while self.works:", "while False:", says="on their way at a time"),
]
