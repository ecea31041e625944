"""Training runs that finish with a wrong result. The fixed programs are in trainings.py."""

from ranklab.clinic import trainings
from ranklab.clinic.case import Case

AVERAGE = """\
            dist.all_reduce(tensor, group=group)
            tensor /= R
"""
COUNT = """\
        count = torch.tensor(sum(len(line) - 1 for line in mine), device=device())
        dist.all_reduce(count, group=group)
"""
NORM = """\
        norm = part.grad.square().sum()
        dist.all_reduce(norm, group=group)
        norm = norm.sqrt()
"""
START = """\
    for p in model.parameters():
        dist.broadcast(p.detach(), group=group, group_src=0)
"""

CASES = (
    Case(
        trainings.long_steps,
        edits=(("        part.grad /= R\n", ""), (NORM, """\
        norm = part.grad.norm()
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
""")),
        hidden=(("        part.grad /= R\n", ""), ("most=0.1", "most=1e9")),
        causes=("The ranks' numbers are combined by the wrong operation",
                "Each rank clips before the ranks' gradients have come together",
                "The ranks' weights have drifted apart",
                "The learning rate grows with the number of ranks"),
        disease="wrong_reduction",
    ),
    Case(
        trainings.saved_model,
        edits=((START, ""),),
        hidden=(("    for p in model.parameters():\n        dist.broadcast",
                 "    for p in model[:2].parameters():\n        dist.broadcast"),),
        causes=("The ranks begin with different weights",
                "Some gradients are not averaged over the ranks",
                "Rank 0 trains on fewer images than the others",
                "The running mean of rank 0 lacks the last steps"),
        disease="unsynchronised_start",
    ),
    Case(
        trainings.no_faster,
        edits=(("    sampler = DistributedSampler(data, R, rank, seed=seed)\n", ""),
               ("sampler=sampler", "shuffle=True"), ("        sampler.set_epoch(epoch)\n", "")),
        hidden=(("DistributedSampler(data, R, rank,", "DistributedSampler(data, R, rank // 2,"),),
        causes=("All ranks read the same images",
                "The gradients are all-reduced more often than once a step",
                "A rank's share of a step should be 96 images, not 24",
                "The ranks begin with different weights"),
        disease="same_data",
    ),
    Case(
        trainings.worse_together,
        edits=(("times = R * batch / 32", "times = batch / 32"),
               ("each = 1152 // (R * batch)", "each = 1152 // batch")),
        hidden=(("times = R * batch / 32", "times = batch / 32"),),
        causes=("The learning rate does not follow the number of ranks",
                "The gradients are averaged, and should be summed",
                "Each rank sees only a quarter of the images",
                "The warm-up is too long for so few steps"),
        disease="learning_rate",
    ),
    Case(
        trainings.two_scores,
        edits=(("    model = convert_sync_batch_norm(model, group)\n", ""),),
        hidden=(("    model = convert_sync_batch_norm(model, group)\n",
                 "    model.stem = convert_sync_batch_norm(model.stem, group)\n"),),
        causes=("Each rank normalises by the statistics of its own images",
                "The ranks' weights have drifted apart",
                "The ranks do not count on the same images",
                "The model is still in training mode when they count"),
        disease="batch_norm",
    ),
    Case(
        trainings.moving_curve,
        edits=((COUNT, ""), ('rows[:, 1:], "sum") / count', "rows[:, 1:]) / pieces"),
               ("            dist.all_reduce(tensor, group=group)\n", AVERAGE)),
        hidden=(("        dist.all_reduce(count, group=group)\n", ""),
                ("            dist.all_reduce(tensor, group=group)\n", AVERAGE)),
        causes=("Means over different numbers of tokens are averaged as if these were equal",
                "Sums over the ranks are taken where means are due",
                "What fills up the short lines is counted as tokens",
                "Sums in another order are rounded in another way"),
        disease="token_mean",
    ),
)
