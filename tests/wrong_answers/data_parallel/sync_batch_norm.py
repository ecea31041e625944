"""Wrong answers to sync_batch_norm."""

from mutants import mutant

from ranklab.data_parallel import sync_batch_norm

FORWARD = "dist.all_reduce(sums, group=group)\n            n"  # the other one is in backward
VARIANCE = "variance = (square - mean.square()).clamp(min=0)"
SAVED = "x, weight, mean, scale, n"

WRONG = [
    mutant(sync_batch_norm, FORWARD, "n", "n < 2", "n < 1",
           says="normalised by this rank's own mean and variance"),
    mutant(sync_batch_norm, FORWARD, "n", says="the count must be summed over ranks"),
    mutant(sync_batch_norm, VARIANCE, "variance = wide.var(dims, unbiased=False) * count / n\n"
           "            dist.all_reduce(variance, group=group)",
           says="Variances do not average"),
    mutant(sync_batch_norm, VARIANCE, "mean, variance = wide.mean(dims), "
           "wide.var(dims, unbiased=False)\n            for each in mean, variance:\n"
           "                dist.all_reduce(each.div_(dist.get_world_size(group)), group=group)",
           says="in one tensor, and divide at the end"),
    mutant(sync_batch_norm, VARIANCE, f"{VARIANCE} * n / (n - 1)",
           says="For normalising, batch norm divides by n"),
    mutant(sync_batch_norm, "variance + eps", "variance + 1e-5", says="with an eps of 1e-5"),
    mutant(sync_batch_norm, "grad - by_mean - normal * by_variance", "grad",
           says="Mean and variance depend on x as well"),
    mutant(sync_batch_norm, "sums / n).chunk", "local_sums * x.shape[1] / max(1, x.numel())).chunk",
           says="so their gradients count too"),
    mutant(sync_batch_norm, "sums / n).chunk", "sums * x.shape[1] / x.numel()).chunk",
           says="divide by the count of all"),
    mutant(sync_batch_norm, "local_sums.to(weight.dtype)", "sums.to(weight.dtype)",
           says="Data parallelism averages this gradient later"),
    mutant(sync_batch_norm, "running=None)", "running=None, kept={})",
           f"ctx.save_for_backward({SAVED})",
           "ctx.save_for_backward(x, weight)\n            kept[C] = mean, scale, n",
           f"{SAVED} = ctx.saved_tensors",
           "x, weight = ctx.saved_tensors\n            mean, scale, n = kept[x.shape[1]]",
           says="the gradient of x is .*what this forward has put into ctx"),
    mutant(sync_batch_norm, "if running:", "if False:", says="the running mean is zeros"),
    mutant(sync_batch_norm, "variance * n / (n - 1)", "variance", says="with n - 1, not n"),
    mutant(sync_batch_norm, FORWARD, "for part in sums[:-1], sums[-1:]:\n                "
           "dist.all_reduce(part, group=group)\n            n",
           says="in 5 calls .all_reduce.; .* in 3 are enough"),
    mutant(sync_batch_norm, FORWARD, "every = [torch.empty_like(sums) for _ in range("
           "dist.get_world_size(group))]\n            dist.all_gather(every, sums, group=group)\n"
           "            sums = sum(every)\n            n",
           says="in 3 calls .all_gather, all_reduce."),
    mutant(sync_batch_norm, "sums = local_sums.clone()",
           "sums = torch.cat([local_sums, local_sums])", "(sums / n)",
           "(sums[: len(local_sums)] / n)",
           says="sends 208 bytes in 3 calls .*160 bytes in 3 are enough"),
    mutant(sync_batch_norm, "grad - by_mean - normal * by_variance",
           "grad.sub_(by_mean + normal * by_variance)",
           says="backward changes the gradient that it was given"),
    mutant(sync_batch_norm, FORWARD, "dist.all_reduce(sums)\n            n",
           says="Pass `group` on"),
    mutant(sync_batch_norm, "group=group)  #", "group=None)  #",
           says=r"in the group of ranks? .* the gradient of x is .*Pass `group` on"),
    mutant(sync_batch_norm, "x.shape[1], x.double()", "x.shape[1], x",
           says="a small difference of two large numbers"),
    mutant(sync_batch_norm, ".clamp(min=0)", "", says=r"clamp\(min=0\)"),
    mutant(sync_batch_norm, " or weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]", "",
           says=r"weight \(1,\) and bias \(1,\): no ValueError"),
]
