"""Lab 16: trainings that are wrong, half mended or with the symptom gone."""

from mutants import mutant, slips_of

from ranklab.checks.clinic.silent_errors import SLIPS_OF_CURVE, SLIPS_OF_NORM, SLIPS_OF_RATE
from ranklab.clinic.silent_errors import START
from ranklab.clinic.trainings import (
    long_steps, moving_curve, no_faster, saved_model, two_scores, worse_together,
)

MEAN = "    mean = copy.deepcopy(model)\n"
SAMPLER = "    sampler = DistributedSampler(data, R, rank, seed=seed)\n"
NEW_ORDER = "        sampler.set_epoch(epoch)\n"
SYNC = "    model = convert_sync_batch_norm(model, group)\n"

LONG = [*slips_of(long_steps, SLIPS_OF_NORM), mutant(
    long_steps, "lr=0.5", "lr=0.25", says="longest is 0.025, and in one process 0.05")]
SAVED = [mutant(saved_model, *edits, says=says, called=called) for *edits, says, called in (
    (START + MEAN, MEAN + START, "ranks differ in `mean`.*weights are equal", "the_mean_before"),
    (START, "", "range(steps):\n", "range(steps):\n        for p in model.parameters():\n"
     "            dist.broadcast(p.detach(), group=group, group_src=0)\n", "ranks differ in `mean`",
     "in_each_step"),
    (START, "", "    return {\"start\"", START + "    return {\"start\"",
     "ranks differ in `mean`", "at_the_end"),
    (START, "", "    examples = y[torch.randperm(len(y))[:8]].tolist() if rank == 0 else []\n",
     "    examples = y[torch.randperm(len(y))[:8]].tolist()\n", "with seed.*ranks differ",
     "all_draw_examples"),
    (START, "    for p in model.parameters():\n        nn.init.zeros_(p)\n",
     "is not what a process", "zeros"),
    (START, "    for p in model.parameters():\n        dist.all_reduce(p.detach(), group=group)\n"
     "        p.detach().div_(R)\n", "is not what a process", "the_mean_of_all"),
    (START, "    for p in model.parameters():\n        dist.all_reduce(p.detach(), group=group)\n"
     "        p.detach().div_(R ** 0.5)\n", "is not what a process", "the_sum_of_all"),
    (START, "", "    torch.manual_seed(seed)\n", "", "    model = nn.Sequential(",
     "    torch.manual_seed(0)\n    model = nn.Sequential(", "with seed=.* is not what a process",
     "one_seed_for_all_runs"),
)]
FASTER = [mutant(no_faster, *edits, says=says, called=called) for *edits, says, called in (
    (NEW_ORDER, "", "epoch 1 has the order of epoch 0.*set_epoch", "no_new_order"),
    (SAMPLER, "    torch.manual_seed(seed + rank)\n", "sampler=sampler", "shuffle=True", NEW_ORDER,
     "", "epoch 0 takes 60 steps", "a_seed_for_each_rank"),
    (SAMPLER, "    data = torch.utils.data.Subset(data, range(len(x) // R))\n", "sampler=sampler",
     "shuffle=True", NEW_ORDER, "", "is read twice in one step", "a_part_alike"),
    ("batch // R", "batch", "384 images a step, not 96", "a_whole_batch_each"),
    ("DistributedSampler(data, R, rank,", "DistributedSampler(data, 4, rank,", "of 1437 images",
     "four_ranks"),
)]
WORSE = slips_of(worse_together, SLIPS_OF_RATE[1:]) + [
    mutant(worse_together, *edits, says=says, called=called) for *edits, says, called in (
        ("times = R * batch / 32", "times = R", "with batch=16.*rates", "batch_forgotten"),
        ("SGD(model.parameters(), lr)", "SGD(model.parameters(), lr * R)", "rates", "twice"),
    )]
SCORES = [mutant(two_scores, *edits, says=says, called=called) for *edits, says, called in (
    (SYNC, "", "    model.eval()\n", "    for b in model.buffers():\n        dist.broadcast(b, "
     "group=group, group_src=0)\n    model.eval()\n", "scores agree, and yet", "of_rank_0"),
    (SYNC, "", "    model.eval()\n", "    for b in model.buffers():\n        dist.all_reduce(b, "
     "group=group)\n        b //= R if b.dtype == torch.int64 else 1\n        b.div_(R) if "
     "b.is_floating_point() else None\n    model.eval()\n", "scores agree, and yet", "averaged"),
    (SYNC, "", "    model.eval()\n", "", "scores agree, and yet", "in_training_mode"),
    (SYNC, "    model.stem = convert_sync_batch_norm(model.stem, group)\n", "the scores are",
     "one_of_two_layers"),
    (SYNC, SYNC.replace("convert", "nn.SyncBatchNorm.convert").replace("batch_norm", "batchnorm"),
     "on GPUs only", "of_torch"),
    ("convert_sync_batch_norm(model, group)", "convert_sync_batch_norm(model)",
     "width=4.*without `group`", "group_forgotten"),
)]
CURVE = slips_of(moving_curve, SLIPS_OF_CURVE[1:]) + [
    mutant(moving_curve, *edits, says=says, called=called) for *edits, says, called in (
    ("dist.all_reduce(count, group=group)", "count *= R", "losses", "own_count_times_R"),
    ('rows[:, 1:], "sum") / count', "rows[:, 1:]) / pieces / R", "as it was found", "renamed"),
    ("-100).to", "0).to", "losses", "padding_counts"),
    ("lr=0.5", "lr=0.0", "losses", "learns_nothing"),
)]
WRONG = [*LONG, *SAVED, *FASTER, *WORSE, *SCORES, *CURVE]
