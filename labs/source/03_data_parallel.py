# %% [markdown]
# # 03 Data parallel: DDP from nothing
#
# > 130 minutes · difficulty 3/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# Eight GPUs needed 29 hours to train ResNet-50 on ImageNet. A team at Facebook put the same model on 256 GPUs and was done in one
# hour, with the same accuracy (Goyal et al., 2017, arXiv 1706.02677). 32 times the hardware, 29 times the speed.
#
# The idea fits in a sentence: **every GPU holds a copy of the whole model (a replica), works on its own part of the batch, and all GPUs average their gradients before the step.** You will write it in a few lines. What makes it 29 times and not 10 is the rest of this lab: the gradients of the last layers
# travel *while* those of the first are still being computed.
#
# ResNet-50 has 25.6 million parameters. In float32, on 4 ranks, with the ring of lab 02: how many megabytes does each rank send in a step?

# %%
import contextlib
import functools
import hashlib
import math

import torch
import torch.distributed as dist
from torch import nn

from ranklab import answer, check, device, hint, launch, questions

check(step_megabytes=...)

# %% [markdown]
# This lab builds on lab 02 (all-reduce). At its end you compare your class with torch's own `DistributedDataParallel`.

# %% [markdown]
# ## 2. Picture

# %%
from ranklab.plots import data_parallel as plots

plots.replicas()

# %% [markdown]
# Look at what does *not* travel: no activations and no optimizer state. The weights travel once, at the start. Replicas that start equal and apply the same averaged gradient in every
# step stay equal for ever, to the last bit, because an all-reduce by a ring gives all ranks the same bits.

# %% [markdown]
# ## 3. Smallest working code
#
# A batch of eight rows, once in one process, and once on four ranks with two rows each:

# %%
def gradient(rows):
    torch.manual_seed(0)  # the same weights everywhere
    layer = nn.Linear(3, 1).to(rows.device)
    layer(rows).square().mean().backward()
    return layer.weight.grad


def averaged_gradient(batch):
    rank, R = dist.get_rank(), dist.get_world_size()
    mine = gradient(batch.tensor_split(R)[rank].to(device()))
    dist.all_reduce(mine)
    return mine / R


batch = torch.randn(8, 3)
print("one process ", gradient(batch))
for rank, seen in enumerate(launch(averaged_gradient, batch, ranks=4)):
    print("rank", rank, "of 4 ", seen)

# %% [markdown]
# The mean of four means is the mean of all eight, *because the parts are equally long*: 4.2 makes them equal, and
# "Further" shows what to do where they can't be. (In a language model padding makes them unequal: a rank then divides its loss by the number of tokens on *all* ranks.)

# %% [markdown]
# ## 4. Build it
#
# The model is a small convolutional network for handwritten digits of 8 x 8 pixels. It knows nothing of ranks.

# %% tags=["nbval-check-output"]
from ranklab.models.cnn import CNN, CNNConfig

model = CNN(CNNConfig())
for name, tensor in model.state_dict().items():
    print(f"{name:35} {str(tuple(tensor.shape)):18} {tensor.numel():6}")

# %% [markdown]
# ### 4.1 Start equal
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 2 lines
#
# Each rank made its own random weights. All ranks take over those of rank 0. The lines above with `running_mean` are not parameters: no optimizer
# touches them, but they are part of the model's state. They are its **buffers**.
#
# Many language models use one tensor as the embedding and as the last layer. Such parameters are **tied**: one tensor with two names, so it travels once.

# %%
def broadcast_parameters(model, src=0, group=None):
    """Every rank ends with rank src's parameters and buffers; tied ones travel once. `src` counts
    in the group."""
    # model.parameters() and model.buffers() name a shared tensor only once. Autograd must not see
    # the message: broadcast tensor.detach(), with dist.broadcast(..., group=group, group_src=src)
    raise NotImplementedError("exercise 4.1: about 2 lines")


# %%
broadcast_parameters = check(broadcast_parameters)

# %% [markdown]
# ### 4.2 Whose sample is it?
# > difficulty 2/5 · importance 5/5 · 12 minutes · about 5 lines
#
# In lab 00 a rank took a contiguous part of the data. For training the order must be shuffled, anew in each epoch and **alike on all ranks**: if each rank shuffled
# for itself, some samples would be seen twice and others never. And every rank must have *as many* samples as the others. Otherwise the mean of means is not the mean, and the rank with
# fewer batches stops while the rest wait for it in the next all-reduce. So a few samples are taken twice (or, with `drop_last`, left out).
#
# **Predict.** 1797 images, 4 ranks. How many does each rank get, without `drop_last`?

# %%
check(samples_per_rank=...)

# %%
def shard_sampler(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """The indices of `rank`'s samples in this epoch, as a list; every rank has as many.

    All ranks shuffle range(n) alike, by seed + epoch, and take every ranks-th index. What does not
    divide is filled up from the beginning of the order; with drop_last its end is left out.
    The lists are those of torch.utils.data.DistributedSampler.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be between 0 and ranks - 1 = {ranks - 1}")
    if n < 1:
        raise ValueError(f"n={n} samples must be at least 1")
    # torch.randperm takes a torch.Generator() of its own. With n < ranks more than one round is
    # needed to fill up
    raise NotImplementedError("exercise 4.2: about 5 lines")


# %%
shard_sampler = check(shard_sampler)

# %% [markdown]
# Ten samples on four ranks, in two epochs. (torch's `DistributedSampler` gives the first row in every epoch where `set_epoch` is forgotten.)
#
# Dropout must *not* be the same everywhere: give it a seed that depends on the rank, or all ranks drop the same units.

# %% tags=["nbval-check-output"]
for epoch in (0, 1):
    print("epoch", epoch, [shard_sampler(10, rank, 4, epoch) for rank in range(4)])

# %% [markdown]
# ### 4.3 Average, one by one
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 7 lines
#
# After `loss.backward()`: divide by R, all-reduce. One message for each parameter. What if a parameter got no gradient on this rank, because this
# rank's samples did not use it? Other ranks may have one, and they wait for yours: send zeros.

# %%
def average_gradients(model, group=None):
    """Every gradient is the mean over ranks; a gradient that is None counts as zeros.

    cost   one all-reduce for each parameter that requires a gradient, or fewer
    """
    R = dist.get_world_size(group)
    # the mean is to lie in parameter.grad
    raise NotImplementedError("exercise 4.3: about 7 lines")


# %%
average_gradients = check(average_gradients)

# %% [markdown]
# That is data parallelism, complete and correct, but slow. A message of 40 bytes, for a bias, pays
# the same latency as one of megabytes. And nothing is sent until all of backward is done.
#
# Clipping belongs here, between the average and the step. If each rank clipped its own gradient before the average, the result would not be the clipped gradient of the whole batch.

# %% [markdown]
# ### 4.4 Buckets
# > difficulty 2/5 · importance 4/5 · 12 minutes · about 6 lines
#
# Small gradients should travel together, in **buckets** of about `bucket_cap_bytes`. Backward begins at the *end* of the model, so the first bucket holds the
# last parameters. A bucket is one flat tensor, so it holds one type on one device. torch's rule, and ours: a parameter goes into the open bucket
# of its kind, and the bucket is closed when it reaches the cap.
#
# **Predict.** 20 layers, each with a weight of 4 MB and a bias of 4 KB, and a cap of 25 MB. How many messages does a step take? (The cap is the same for all buckets. torch's default
# closes the *first* one at 1 MiB, so that something travels early: one message more.)

# %%
check(bucket_messages=...)

# %%
def assign_buckets(parameters, bucket_cap_bytes):
    """Lists of parameters whose gradients travel together, in the order in which to send them.

    From the last parameter to the first, since backward begins at the end of the model. A bucket
    holds one type on one device, and is closed by the parameter that makes it reach
    bucket_cap_bytes.
    Buckets that never reach it come last, in the order in which they were opened.
    """
    if bucket_cap_bytes < 1:
        raise ValueError(f"bucket_cap_bytes={bucket_cap_bytes} must be at least 1")
    closed, still_open = [], {}  # still_open: (dtype, device) -> list of parameters
    # parameter.nbytes is its gradient's size, too
    raise NotImplementedError("exercise 4.4: about 6 lines")


# %%
assign_buckets = check(assign_buckets)

# %% [markdown]
# ### 4.5 Overlap
# > difficulty 4/5 · importance 5/5 · 35 minutes · about 17 lines
#
# Now the heart of DDP. Autograd calls a **hook** as soon as `parameter.grad` is there. When all parameters of a bucket have their gradients, start
# its all-reduce with `async_op=True`, and return: backward goes on with the layers before, while the bucket travels. At the end of backward, wait.
#
# One trap is worth the whole exercise. Buckets may become *ready* in different orders on different ranks. The backend pairs messages by order: the
# first all-reduce of one rank meets the first of the others, whatever is in it. So buckets must be *launched* in the same order everywhere: a bucket that is
# ready too early waits until those before it have been sent.
#
# And some models do not use every parameter in every step: an expert that no token chose gets no gradient, its hook is never called, and its bucket never becomes ready.
# With `find_unused_parameters=True` the ranks find out at the end of backward which parameters *any* rank used. Without it, a missing gradient is an error.
#
# The rest is given, in `Replica`: it broadcasts the parameters at the start (your 4.1) and the buffers before each forward, makes the `Bucket`s
# (your 4.4), and calls `finish()` at the end of each backward. Here is a bucket:

# %%
import inspect

from ranklab.data_parallel import Bucket, Replica

print(inspect.getsource(Bucket))

# %% [markdown]
# Gradients are *views* of the bucket: after `gather()`, averaging `bucket.flat` averages `parameter.grad`. No copy back.
#
# | given by `Replica` | |
# |---|---|
# | `self.buckets` | the buckets, in the order in which they must travel |
# | `self.group` | the group: it goes into every collective and into `dist.get_world_size(self.group)` |
# | `self.used_anywhere()` | the parameters that any rank used (it costs one small all-reduce). With `find_unused_parameters` all ranks ask after their last bucket is on its way, and hand it to `bucket.fill_none()`; without it `()` goes there |

# %%
class OverlappedDataParallel(Replica):
    """`module`, with gradients that are the mean over ranks when backward() returns.

    As soon as all gradients of a bucket are there, their all-reduce begins, and backward goes on
    with the layers before. Buckets travel in one order on every rank, whatever the order in which
    they become ready: the first message of one rank meets the first of the others.
    """

    def __init__(self, module, bucket_cap_bytes=25 * 2**20, group=None,
                 find_unused_parameters=False):
        super().__init__(module, bucket_cap_bytes, group, find_unused_parameters)  # makes buckets
        self.waiting, self.works = list(self.buckets), []  # not yet sent; handles of those sent
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = functools.partial(self.gradient_ready, bucket)
                parameter.register_post_accumulate_grad_hook(hook)

    def gradient_ready(self, bucket, parameter):
        """Called by autograd as soon as it has added to parameter.grad."""
        if self.sync:
            self.backward_begins()
            if parameter not in bucket.missing:
                raise self.second_gradient(parameter)
            # bucket.missing: the parameters of it that have no gradient yet
            raise NotImplementedError("exercise 4.5, first part: about 2 lines")

    def launch_ready_buckets(self):
        """What is ready is on its way, up to the first bucket that is not."""
        raise NotImplementedError("exercise 4.5, second part: about 4 lines")

    def reduce(self, bucket):
        """The bucket is on its way to become the mean over ranks; returns the handle."""
        raise NotImplementedError("exercise 4.5, third part: divide, all-reduce with async_op")

    def finish(self):
        """All gradients are averaged, and the next backward begins like the first one. What is left
        travels too, with zeros for what is missing, before an error: other ranks wait for it.
        """
        missing = {parameter for bucket in self.waiting for parameter in bucket.missing}
        # The other ranks wait for the buckets that are left. Then fill_none(used) for each bucket;
        # used: see self.used_anywhere(), or () without find_unused_parameters. For the next
        # backward all is as in __init__, and bucket.missing is full again
        raise NotImplementedError("exercise 4.5, fourth part: about 10 lines")
        if missing and not self.find_unused_parameters:
            raise self.no_gradient(missing)

# %%
OverlappedDataParallel = check(OverlappedDataParallel)

# %% [markdown]
# Does it overlap? Below is a profile of your class (lab 04 reads such profiles): two ranks, six wide layers, with six buckets of 1 MB, and with a single one. Communication with no computing beside it is **exposed**: the part
# that costs time. On two cores the ranks take turns, so much of what is exposed is waiting for the other rank. Look only at *when number 1 begins*: before the computing ends, or after.

# %%
from ranklab.meter import Timeline


def profiled(cap, width=512):
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(6)]
    model = OverlappedDataParallel(nn.Sequential(*layers).to(device()), cap)
    x = torch.randn(256, width, device=device())
    for _ in range(2):  # the first step allocates
        model(x).square().mean().backward()
    dist.barrier()
    with Timeline() as timeline:
        model(x).square().mean().backward()
    return timeline.events


plots.timeline(launch(profiled, 2**20, ranks=2), "Buckets of 1 MB")

# %%
plots.timeline(launch(profiled, 25 * 2**20, ranks=2), "One bucket: nothing to hide behind")

# %% [markdown]
# ### 4.6 Which buckets?
# > difficulty 4/5 · importance 4/5 · 20 minutes · about 12 lines · open: no recipe
#
# 25 MB is one number for every network. You know more: when each gradient is ready (a hook can note it), and what an all-reduce takes, lab 02's
# alpha + n beta. Which buckets leave least after backward? A large one waits for its last gradient. Small ones pay alpha each, and while one travels the next ones wait.

# %% tags=["nbval-check-output"]
from ranklab.data_parallel.plan import block_timeline, bucket_times, capped_buckets, exposed_seconds

case = [1.0, 2.0, 3.0], [5, 5, 5], 0.5, 0.1  # ready, nbytes, alpha, beta
for plan in ([[0], [1], [2]], [[0, 1, 2]], [[0], [1, 2]]):
    print(plan, bucket_times(plan, *case), exposed_seconds(plan, *case), "s exposed")

# %%
def plan_buckets(ready, nbytes, alpha, beta):
    """The buckets, lists of indices, for which the last all-reduce ends earliest.

    Gradient i has nbytes[i] bytes and is ready at ready[i] seconds, not before gradient i-1. A
    bucket holds neighbours. It is sent when its last gradient is ready and the bucket before it
    has arrived; then the link is busy for alpha + bytes * beta seconds. It is free from 0 on.

    returns  all indices once, in order, for 0 gradients []; both arguments are unchanged
    score    exposed_seconds: the check takes what is at most 1% above the best, on any timeline,
             with 300 gradients found in 2 s
    """
    raise NotImplementedError("exercise 4.6: about 12 lines")


# %%
plan_buckets = check(plan_buckets)

# %% [markdown]
# Your plans for the blocks of GPT-2 (8192 tokens, 4 FLOPs for each weight and token, 125 TFLOP/s; no embedding). alpha is 0.2 ms, and each byte is sent twice, as in a long ring. Below are the sizes of the first and last buckets, in MB. Several plans are equally good: yours may have other sizes.

# %%
ready, nbytes = block_timeline()
capped = capped_buckets(nbytes)
for name, GBps in (("NVLink", 200), ("400 Gbit/s", 50), ("200 Gbit/s", 25), ("100 Gbit/s", 12.5)):
    link = 2e-4, 2 / (GBps * 1e9)
    plan = plan_buckets(ready, nbytes, *link)
    mine, theirs = (1e3 * exposed_seconds(each, ready, nbytes, *link) for each in (plan, capped))
    print(f"{name:10} {mine:5.2f} ms exposed, {theirs:5.2f} with 25 MB; {len(plan)} buckets:",
          *(f"{sum(nbytes[i] for i in bucket) / 1e6:.0f}" for bucket in plan[:6]), "...",
          *(f"{sum(nbytes[i] for i in bucket) / 1e6:.0f}" for bucket in plan[-2:]))

# %%
link = 2e-4, 2 / 25e9
plans = {"25 MB": capped, "yours": plan_buckets(ready, nbytes, *link)}
plots.bucket_plans({name: bucket_times(plan, ready, nbytes, *link)
                    for name, plan in plans.items()}, ready, "GPT-2's blocks, 200 Gbit/s")

# %% [markdown]
# The first bucket is small, so that the link starts early (torch's first bucket of 1 MiB is the same idea). On a slow link each next one may be larger: it collects while the one before it travels. On a fast link all are small: only the last one is exposed.

# %% [markdown]
# ### Further
#
# Five more, all checked, not in the 130 minutes. The lab runs without them.

# %% [markdown]
# #### `replicas_agree`
# > difficulty 2/5 · importance 4/5 · 7 minutes · about 4 lines
#
# A replica that has drifted away raises no error: the loss looks plausible, and the model is bad after a week. To compare replicas, each rank reduces
# its weights to a **hash** of a few bytes, and only the hashes travel.
#
# A sum of the weights is not a hash: it does not see two numbers that changed places, and it rounds. `hashlib.blake2b` sees every bit.
# One all-reduce tells whether R numbers are equal, if the largest and the smallest travel together: MAX of (h, -h).
#
# **Predict.** ResNet-50 on 4 ranks once more. The two int64 go by a ring. How many bytes does each rank send, on average?

# %%
check(agree_bytes=...)

# %%
def replicas_agree(model, group=None):
    """True on every rank when all ranks hold the same parameters, bit for bit; else False on all.

    Parameters only: between two forwards ranks may differ in the statistics of batch norm.
    cost   one all-reduce of 16 bytes, whatever the model's size
    """
    digest, device = hashlib.blake2b(digest_size=7), "cpu"  # 56 bits: an int64 and its negative
    for parameter in model.parameters():
        device = parameter.device
        content = parameter.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(content.cpu().numpy())
    mine = int.from_bytes(digest.digest(), "big")
    # all are equal when the largest is the smallest: one all-reduce of two numbers tells both
    raise NotImplementedError("exercise replicas_agree: about 4 lines")


# %%
replicas_agree = check(replicas_agree)

# %% [markdown]
# #### `no_sync`
# > difficulty 1/5 · importance 4/5 · 5 minutes · about 5 lines
#
# A large batch in four pieces (lab 01) needs one average, not four. The hooks look at `model.sync`. (Divide each loss by the
# number of pieces. With torch's own `no_sync` the forward must be inside as well.)
#
# **Predict.** Four pieces a step, the first three inside `no_sync`, a gradient of 102.4 MB, 4 ranks. How many megabytes does each rank send in a step?

# %%
check(accumulated_megabytes=...)

# %%
@contextlib.contextmanager
def no_sync(model):
    """Inside, backward leaves gradients local and adds them up; nothing is sent.

    The next backward outside averages the sums. So a batch in several pieces costs what a batch in
    one piece does, if all but the last are inside. It holds after a failure inside, and in another
    no_sync, too.
    """
    # the hooks look at model.sync. One no_sync may stand inside another, and the block may fail
    raise NotImplementedError("exercise no_sync: about 5 lines")


# %%
no_sync = check(no_sync)

# %% [markdown]
# #### `scale_learning_rate`
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 4 lines
#
# With k times the ranks the batch is k times as large, and an epoch has k times fewer steps. To go as far, each step must be k times as long: the
# **linear scaling rule**. It fails in the first steps, when the weights still change fast. The **warm-up** is for these: it goes from the old learning rate up to the scaled one.
#
# **Predict.** ResNet-50 was trained with learning rate 0.1 for a batch of 256. Goyal et al. used a batch of 8192. What was their learning rate?

# %%
check(scaled_rate=...)

# %%
def scale_learning_rate(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """The learning rate for `batch`, when `lr` is right for `base_batch`.

    rule   "linear" (k times the batch, k times lr: for SGD) or "sqrt" (for Adam)
    With step (from 0) and warmup: from lr at step 0 evenly up to the scaled one at step `warmup`.
    """
    if batch < 1 or base_batch < 1 or warmup < 0:
        raise ValueError(f"batch={batch} and base_batch={base_batch} must be at least 1, and "
                         f"warmup={warmup} at least 0")
    powers = {"linear": 1, "sqrt": 0.5}
    if rule not in powers:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(powers)}")
    # the scaled one; without a step, or after the warm-up, that is it; else between lr and it
    raise NotImplementedError("exercise scale_learning_rate: about 4 lines")


# %%
scale_learning_rate = check(scale_learning_rate)

# %% [markdown]
# #### `sync_batch_norm`
# > difficulty 5/5 · importance 3/5 · 25 minutes · about 10 lines
#
# Batch norm takes mean and variance over the batch. With 4 ranks of 8 images, each rank normalises by its own 8: that is not the function of
# 32 images, and with 2 images a rank it hardly works at all. The cure is to sum over all ranks in forward, and in backward too: each x moved the mean and the variance,
# and so every y of every rank. With scale = 1 / sqrt(variance + eps), `normal` = (x - mean) * scale, and means taken over all ranks:
#
# gradient of x = weight * scale * (grad - mean(grad) - normal * mean(grad * normal))
#
# The variance over all is *not* the mean of the variances: send sum(x), sum(x^2) and the count. Send them in float64, because mean(x^2) - mean(x)^2 cancels.
#
# **Predict.** 64 channels. How many bytes does the all-reduce of forward carry?

# %%
check(batch_norm_bytes=...)

# %%
def sync_batch_norm(x, weight, bias, eps=1e-5, group=None, running=None):
    """`x`, normalised in each channel by mean and variance over the batches of all ranks.

    Batches may differ in size. Gradients of weight and bias are this rank's own part. Sums are in
    float64: mean(x^2) - mean(x)^2 has no digit left in float32 where the mean is far from zero.
    running  (mean, variance, momentum): the statistics for evaluation, updated in place
    cost     one all-reduce of 16 C + 8 bytes in forward, one of 16 C bytes in backward
    """
    if x.dim() < 2 or weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]:
        raise ValueError(f"x {tuple(x.shape)} must be (B, C, ...), and weight and bias (C,), not "
                         f"{tuple(weight.shape)} and {tuple(bias.shape)}")
    over = [dim for dim in range(x.dim()) if dim != 1]  # all but the channels
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]  # (C,) -> (1, C, 1, ...)

    class NormaliseOverRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            C, wide = x.shape[1], x.double()
            count = wide.new_tensor([x.numel() // C])
            # needed below: n; and, of shape (C,), mean, variance (never negative) and scale =
            # 1 / sqrt(variance + eps)
            raise NotImplementedError("exercise sync_batch_norm, forward: about 6 lines")
            if x.numel() <= C and n < 2:  # in this order: reading n waits for the device
                raise ValueError(f"n={n:.0f} values in a channel of all ranks must be at least 2")
            if running:
                running_mean, running_variance, momentum = running
                running_mean += momentum * (mean - running_mean)
                running_variance += momentum * (variance * n / (n - 1) - running_variance)
            ctx.save_for_backward(x, weight, mean, scale, n)
            normal = (wide - mean.view(shape)) * scale.view(shape)
            return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, weight, mean, scale, n = ctx.saved_tensors
            normal = (x.double() - mean.view(shape)) * scale.view(shape)
            mine = torch.cat([grad.double().sum(over), (grad * normal).sum(over)])  # (2 C,)
            # needed below: of_x; and `mine` stays this rank's own
            raise NotImplementedError("exercise sync_batch_norm, backward: about 4 lines")
            of_bias, of_weight = mine.to(weight.dtype).chunk(2)
            return of_x.to(x.dtype), of_weight, of_bias

    return NormaliseOverRanks.apply(x, weight, bias)


# %%
sync_batch_norm = check(sync_batch_norm)

# %% [markdown]
# #### `join_uneven`
# > difficulty 4/5 · importance 2/5 · 15 minutes · about 10 lines
#
# What if a rank really has fewer batches, because documents differ in length or a disk was lost? A rank with no batch left must still take part in every collective: `model.shadow()` sends
# what the others send in a step, with zeros. And before each step all ranks must learn whether anybody still has a batch. Buffers are
# those of rank `model.buffers_from`: it must be one that goes on.

# %%
def join_uneven(batches, model):
    """Yields this rank's batches; then shadows the others' steps until nobody has a batch left.

        for x, y in join_uneven(batches, model):
            ...one forward and one backward of `model`, and the optimizer's step...

    A rank with no batch left adds zeros to the mean, which is still over all ranks. Before each
    step 8 bytes tell all ranks whether anybody has a batch. At the end every rank has the weights
    of a rank that took all the steps.
    """
    batches, rank, last = iter(batches), dist.get_rank(model.group), 0
    device = next(model.parameters()).device
    try:
        model.joining = True  # it refuses no_sync and SyncBatchNorm meanwhile
        while True:
            batch = next(batches, None)  # one at a time: perhaps they don't fit in memory
            # does anybody go on? `last` is a rank that does, and so is model.buffers_from
            raise NotImplementedError("exercise join_uneven: about 10 lines")
        broadcast_parameters(model.module, last, model.group)
    finally:  # also when the loop was left early
        model.joining, model.buffers_from = False, 0


# %%
join_uneven = check(join_uneven)

# %% [markdown]
# ## 5. The real thing
#
# torch's `DistributedDataParallel` beside yours: the same CNN, the same batches, five steps on four ranks. After the first backward torch sorts its buckets anew, by
# the order in which gradients became ready. In the second step rank 0 broadcasts that order, so we count bytes in the last step.

# %%
from torch.nn.parallel import DistributedDataParallel

from ranklab.data import digits
from ranklab.meter import Traffic

images = digits()


def of_torch(model, cap):
    return DistributedDataParallel(model, bucket_cap_mb=cap / 2**20)


# %%
def train(wrap, steps=5, batch=64, cap=2**14):
    torch.manual_seed(dist.get_rank())  # each rank has other weights: both must broadcast
    model = wrap(CNN(CNNConfig()).to(device()), cap)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9), []
    for step in range(steps):
        mine = shard_sampler(batch, dist.get_rank(), dist.get_world_size(), epoch=step)
        x, y = images.train[mine].to(device()), images.train_labels[mine].to(device())
        optimizer.zero_grad()
        with Traffic() as traffic:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [p.detach().cpu() for p in model.parameters()]
    return losses, weights, dict(traffic.calls), traffic.sent_bytes, replicas_agree(model)


# %% [markdown]
# Five losses of rank 0, then what the last step sent. (The two broadcasts are batch norm's six buffers, in one message for each type.)

# %%
ours = launch(train, OverlappedDataParallel, ranks=4)
theirs = launch(train, of_torch, ranks=4)
for name, (losses, _, calls, sent, agree) in {"ours": ours[0], "torch": theirs[0]}.items():
    print(f"{name:6} {[round(loss, 6) for loss in losses]}  {calls}  {sent:,} bytes")

# %%
largest = max((a - b).abs().max().item() for (_, a_s, *_), (_, b_s, *_) in zip(ours, theirs)
              for a, b in zip(a_s, b_s))
print(f"largest difference of a weight after five steps, on any rank: {largest:.1e}")
assert ours[0][2:4] == theirs[0][2:4] and all(seen[-1] for seen in ours + theirs)

# %% [markdown]
# The same messages, the same bytes, the same weights up to rounding (the ring cuts a bucket into chunks, and the chunk decides in which order a number's parts are added). torch's class does more: it lets you change what happens to a bucket (lab 04's comm hooks), and it looks
# for unused parameters in the graph. Gradients are views of its buckets only with `gradient_as_bucket_view=True`.
#
# Before DDP there was `nn.DataParallel`: **one** process drives all GPUs with threads. In each step it copies the model to every GPU, gathers all outputs on the
# first one, and all threads share one Python interpreter. It is still in torch, but you should not use it.

# %% [markdown]
# ## 6. Project
#
# **A CNN on real handwritten digits, on 1, 2 and 4 ranks**, always 64 images in a step, three epochs, three seeds, by **your** functions. (The same code trains on MNIST and CIFAR-10, if you have their files.) If everything is right, the number of ranks changes
# only the time, and what batch norm sees: 16 images instead of 64.

# %%
from ranklab.projects import data_parallel as project

mine = {"replica": OverlappedDataParallel, "sampler": shard_sampler,
        "scale": scale_learning_rate, "agree": replicas_agree}
found = project.scale(**mine)
print(project.table(found))
assert project.ranges_overlap(found)

# %% [markdown]
# "agree" counts the epochs after which `replicas_agree` said yes: all of them. "differ by" is the largest difference between two ranks in a weight or statistic. The seed changes more than the number of ranks does. And it has become *slower*: for 64 images of 8 x 8, the messages cost more time than the ranks save. A larger model with a larger batch has more to compute for each byte:

# %%
wide = project.scale(project.Config(width=32, batch=256, base_batch=64, epochs=2), seeds=(0,))
sizes = {"8 channels, 64 images": found, "32 channels, 256 images": wide}
plots.speed_up({name: {R: project.best_seconds(runs) for R, runs in one.items()}
                for name, one in sizes.items()})

# %% [markdown]
# On two cores two ranks can be faster, and four hardly faster still.
#
# **Four times the batch, the same number of epochs**: four times fewer steps. With the old learning rate the model does not get as far. With four times the rate from the first step it does even worse:
# the first steps throw it to a place from which it does not recover. With the warm-up it comes close to the small batch. (One seed from here on, to save time: a percent more or less says nothing, and neither do the last two columns.)

# %%
one = {"seeds": (0,), **mine}
rates = project.run({"batch 16, lr 0.12": project.Config(batch=16, warmup=0)}, ranks=1, **one)
rates |= project.run({"batch 64, lr 0.12": project.Config(base_batch=64),  # not scaled
                      "batch 64, lr 0.48": project.Config(warmup=0)}, ranks=4, **one)
print(project.table(rates | {"the same, warmed up": found[4][:1]}))

# %% [markdown]
# **What is each piece good for?** Leave one out at a time. "worst" is the accuracy on the rank where it went worst; rank 0's model is the one you would save.

# %%
names = "broadcast", "average", "mean", "shard", "buffers"
missing = {"nothing is left out": found[4][:1]} | project.run(
    {f"without {name}": project.Config(without=(name,)) for name in names}, ranks=4, **one)
print(project.table(missing))

# %%
plots.held_out_errors(missing)

# %% [markdown]
# Nothing raised an error. You notice a sum in place of the mean at once: 90% wrong is guessing. Without `broadcast`, `average` or `shard` the model just looks a bit weak, and the worst
# replica is weaker than rank 0's. Without `average` and without `shard` rank 0 ends with the very same numbers, because in both it learns from its own images alone: four ranks do the work of one. And honestly: without
# `buffers` you see no difference in three epochs of 1437 images.
#
# `replicas_agree` finds two of the five, `broadcast` and `average`. The others keep the weights equal (without `buffers` ranks differ in the statistics only, which it does not look at), so only tests like yours find them.
#
# **Your turn.** Change one thing of the run on four ranks. First write down what happens to the accuracy and to the seconds of an epoch, and why. Ideas: `"norm": "sync"` (batch norm over all ranks), `"norm": "none"`, `"warmup": 0`, `"without": ("epoch",)`.

# %%
change = {"batch": 256}
changed = project.run({f"{change}": project.Config(**change)}, ranks=4, **one)
print(project.table({"4 ranks, 64 images": found[4][:1]} | changed))

# %% [markdown]
# ## 7. Measure
#
# Prediction beside count, for the CNN of part 4 on four ranks: all-reduces of a step, and bytes that the four send together, 2(R-1) times the gradient (a bias of 10 numbers does not
# divide by 4, so one rank alone may send a few bytes more than another). Counts are exact, so they are asserted.

# %% tags=["nbval-check-output"]
def one_step(cap):
    model = CNN(CNNConfig()).to(device())
    forward = OverlappedDataParallel(model, cap) if cap else model
    loss = forward(torch.randn(8, 1, 8, 8, device=device())).square().mean()
    with Traffic() as traffic:
        loss.backward()
        if not cap:
            average_gradients(model)
    return traffic.calls["all_reduce"], traffic.sent_bytes


parameters = list(CNN(CNNConfig()).parameters())
nbytes = sum(p.nbytes for p in parameters)
print(f"{'':20} {'all-reduces':^21} {'bytes':^21}\n{'':20} "
      f"{'predicted':>10} {'counted':>10} {'predicted':>10} {'counted':>10}")
for name, cap in (("one by one", 0), ("buckets of 4 KB", 2**12), ("buckets of 25 MB", 25 * 2**20)):
    messages = len(assign_buckets(parameters, cap)) if cap else len(parameters)
    calls, sent = zip(*launch(one_step, cap, ranks=4))
    print(f"{name:20} {messages:10} {calls[0]:10} {2 * 3 * nbytes:10} {sum(sent):10}")
    assert (calls[0], sum(sent)) == (messages, 2 * 3 * nbytes)

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 03` in a terminal asks these and more, with other numbers each time.

# %% tags=["nbval-check-output"]
questions("03_data_parallel")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# torchrun --nproc-per-node 8 -m ranklab.projects.data_parallel --data cifar10 --folder data
# sbatch labs/jobs/data_parallel.sbatch
# ```
#
# What changes: the backend is NCCL. Its all-reduces run on a stream of their own, beside the kernels of backward: that is real overlap, where two cores only take turns.
# It is not free: NCCL's kernels run on some of the GPU's multiprocessors, and backward has fewer of them meanwhile.
#
# What to expect, not measured by us: of a ResNet-50 step of about 100 ms on one A100 (batch 256, mixed precision), the all-reduce of 102 MB over NVLink takes about 1 ms,
# all of it hidden. Over one 100 Gbit/s Ethernet link a node it takes about 16 ms, hidden as well. At a batch of 32 the step takes only 13 ms, and most of the 16 ms show. This lab has not been run on
# several GPUs yet.

# %% [markdown]
# ## 10. What we left out
#
# - **Gradient compression and reading traces**: lab 04, with torch's DDP.
# - **Sharding**: each rank holds all of the model, its gradients and its optimizer state. Lab 06 ends that; its first two stages send no more bytes.
# - **Asynchronous training**, where nobody waits: parameter servers with stale gradients. It ended with worse accuracy than synchronous training (Chen et al., arXiv 1604.00981).
# - **Local SGD**: average the weights every H steps instead of the gradients in every step.
# - **Larger batches for ever**: beyond some batch size more images no longer mean fewer steps (McCandlish et al. 2018 say how to find it).
#
# Next: **04_ddp**: the same in production, and the traces that say what is slow.
