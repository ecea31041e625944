"""Lab 14: batches that are another batch on other ranks."""

from mutants import mutant

from ranklab.resilience import elastic_batch

WEIGHT = "len(part) / batch"

WRONG = [mutant(elastic_batch, *edits, says=says, called=called) for *edits, says, called in (
    (WEIGHT, "1 / times / ranks", "alike for all", "mean_of_means"),
    (WEIGHT, "len(part) / max(1, len(positions))", "the rank's own number", "mean_of_the_rank"),
    (WEIGHT, "len(part) / max(1, len(positions)) / ranks", "a mean over ranks of means", "as_ddp"),
    (WEIGHT, "len(part)", "weights are n", "a_sum"),
    (WEIGHT, "len(part) / batch * ranks", "batch times the ranks", "times_the_ranks"),
    ("        positions = ",
     "        times = -(-len(shard_range(batch, rank, ranks)) // micro_batch)\n"
     "        positions = ", "ranks have .* micro-batches", "other_counts"),
    ("times = -(-largest // micro_batch)", "times = largest", "are enough", "one_by_one"),
    ("times = -(-largest // micro_batch)", "times = max(1, largest // micro_batch)",
     "a micro-batch has",
     "rounded_down"),
    ("shard_range(batch, rank, ranks)", "range(rank * (batch // ranks), (rank + 1) * (batch // "
     "ranks))", "are in no micro-batch", "rest_is_dropped"),
    ("shard_range(batch, rank, ranks)", "range(rank * largest, min(batch, (rank + 1) * largest))",
     "ranks take", "last_takes_less"),
    ("shard_range(batch, rank, ranks)", "range(len(shard_range(batch, rank, ranks)))",
     "more than once", "always_the_first"),
    ("plan.append([(", "plan.append(((", "for part in parts])", "for part in parts))",
     "not a list for each rank", "read_once"),
    ("(positions[part.start:part.stop], ", "(list(positions[part.start:part.stop]), ",
     "there is a list",
     "a_list"),
    ("    if min(batch, ranks, micro_batch) < 1:", "    if batch < 1:", "Error", "not_refused"),
)]


def elastic_batch__drops_empty_ones(batch, ranks, micro_batch):
    """ranks have .* micro-batches"""
    most = -(-batch // ranks)
    times = -(-most // micro_batch)
    plan, at = [], 0
    for rank in range(ranks):
        mine, of = batch // ranks + (rank < batch % ranks), []
        for i in range(times):
            n = mine // times + (i < mine % times)
            if n:
                of.append((range(at, at + n), n / batch))
            at += n
        plan.append(of)
    return plan
