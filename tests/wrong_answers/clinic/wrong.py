"""Lab 16: trainings that are wrong, half mended or with the symptom gone."""

from mutants import mutant

from ranklab.clinic.trainings import (
    long_steps, moving_curve, no_faster, saved_model, two_scores, worse_together,
)

NORM = """\
        norm = part.grad.square().sum()
        dist.all_reduce(norm, group=group)
        norm = norm.sqrt()
"""
START = """\
    for p in model.parameters():
        dist.broadcast(p.detach(), group=group, group_src=0)
"""
MEAN = "    mean = copy.deepcopy(model)\n"
SAMPLER = "    sampler = DistributedSampler(data, R, rank, seed=seed)\n"
NEW_ORDER = "        sampler.set_epoch(epoch)\n"
SUM_OVER_RANKS = "            dist.all_reduce(tensor, group=group)\n"
SYNC = "    model = convert_sync_batch_norm(model, group)\n"

LONG = [mutant(long_steps, *edits, says=says, called=called) for *edits, says, called in (
    ("        part.grad /= R\n", "", "most=1000.*a sum over the ranks, where the mean", "sum"),
    (NORM, "        norm = part.grad.norm()\n        dist.all_reduce(norm, dist.ReduceOp.MAX, "
     "group=group)\n", "longest.*The norm is the largest of the parts'", "largest"),
    (NORM, "        norm = part.grad.norm()\n        dist.all_reduce(norm, group=group)\n",
     "The parts' norms are added", "norms_added"),
    (NORM, "        norm = part.grad.norm()\n", "Each rank clips by the norm of its own", "own"),
    ("part.grad /= R", "part.grad /= 4", "most=1000.*by the number of all ranks", "four_ranks"),
    ("lr=0.5", "lr=0.25", "longest is 0.025, and in one process 0.05", "half_the_rate"),
)]
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
    (START, "    for p in model.parameters():\n        nn.init.zeros_(p)\n", "no model with random",
     "zeros"),
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
WORSE = [mutant(worse_together, *edits, says=says, called=called) for *edits, says, called in (
    ("1152 // (R * batch)", "1152 // batch", "schedule counts the steps of one rank", "fall"),
    ("times = R * batch / 32", "times = batch / 32", "does not grow with the images", "grow"),
    ("times = R * batch / 32", "times = 4 * batch / 32", "grows for four ranks", "four_ranks"),
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
    ("convert_sync_batch_norm(model, group)", "convert_sync_batch_norm(model)",
     "width=4.*without `group`", "group_forgotten"),
)]
CURVE = [mutant(moving_curve, *edits, says=says, called=called) for *edits, says, called in (
    ("        dist.all_reduce(count, group=group)\n", "", SUM_OVER_RANKS,
     SUM_OVER_RANKS + "            tensor /= R\n", "The pieces of a rank are right now", "ranks"),
    ("            loss = model(", "            own = (rows[:, 1:] != -100).sum()\n            "
     "dist.all_reduce(own, group=group)\n            loss = model(", "/ count", "/ own / pieces",
     "The ranks are right now", "pieces"),
    ("dist.all_reduce(count, group=group)", "count *= R", "losses", "own_count_times_R"),
    ('rows[:, 1:], "sum") / count', "rows[:, 1:]) / pieces / R", "as it was found", "renamed"),
    ("-100).to", "0).to", "losses", "padding_counts"),
    ("lr=0.5", "lr=0.0", "losses", "learns_nothing"),
)]
WRONG = [*LONG, *SAVED, *FASTER, *WORSE, *SCORES, *CURVE]
