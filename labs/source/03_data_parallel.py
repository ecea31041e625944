# %% [markdown]
# # 03 Data parallel: DDP from nothing
#
# > 130 minutes, 68 more with Further, 70 with its bugs · difficulty 3/5 · **spine**: 4.1, 4.3 to 4.5, 8.1 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# Eight GPUs needed 29 hours to train ResNet-50 on ImageNet. A team at Facebook put the same model on 256 GPUs and was done
# in one hour, with the same accuracy (Goyal et al., 2017, arXiv 1706.02677). They had 32 times the hardware and got 29 times
# the speed.
#
# The idea fits in a sentence: **every GPU holds a copy of the whole model (a replica) and works on its own part of the
# batch, and all GPUs average their gradients before the step.** You will write it in a few lines. But then communication
# costs time, and you get nowhere near 29 times the speed. The rest of this lab is about that difference. The trick is to send
# the gradients of the last layers *while* backward still computes the gradients of the first layers.
#
# ResNet-50 has 25.6 million parameters, here in float32. Four ranks use the ring from lab 02. How many megabytes does
# each rank send in a step?

# %%
import contextlib
import functools
import hashlib
import math

import torch
import torch.distributed as dist
from torch import nn

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status


begin("03_data_parallel")
check(step_megabytes=...)

# %% [markdown]
# You need the all-reduce from lab 02. At the end of this lab you compare your own class with torch's
# `DistributedDataParallel`.

# %% [markdown]
# ## 2. Picture

# %%
from ranklab.plots import data_parallel as plots

plots.replicas()

# %% [markdown]
# Look at what does *not* travel: no activations and no optimizer state. The weights travel once, at the start. The replicas
# start equal and apply the same averaged gradient in every step. So they stay equal to the last bit, because a ring
# all-reduce gives all ranks the same bits.

# %% [markdown]
# ## 3. Smallest working code
#
# Compute the gradient of a batch of eight rows, once in one process, and once on four ranks with two rows each:

# %%
def gradient(rows):
    torch.manual_seed(0)  # the same weights everywhere
    layer = nn.Linear(3, 1).to(rows.device)
    layer(rows).square().mean().backward()
    return layer.weight.grad


def averaged_gradient(batch):
    rank, R = dist.get_rank(), dist.get_world_size()
    grad = gradient(batch.tensor_split(R)[rank].to(device()))
    dist.all_reduce(grad)
    return grad / R


batch = torch.randn(8, 3)
print("one process ", gradient(batch))
for rank, grad in enumerate(launch(averaged_gradient, batch, ranks=4)):
    print("rank", rank, "of 4 ", grad)

# %% [markdown]
# The mean of four means is the mean of all eight, but only *because the parts are equally long*. In 4.2 you make them
# equal, and "Further" shows what to do if you can't. (In a language model, padding makes the parts unequal. Then each rank
# divides its loss by the number of tokens on *all* ranks.)

# %% [markdown]
# ## 4. Build it
#
# The model is a small convolutional network for handwritten digits of 8 x 8 pixels. It knows nothing about ranks.

# %% tags=["nbval-check-output"]
from ranklab.models import CNN, CNNConfig

model = CNN(CNNConfig())
for name, tensor in model.state_dict().items():
    print(f"{name:35} {str(tuple(tensor.shape)):18} {tensor.numel():6}")

# %% [markdown]
# ### 4.1 Start equal
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 2 lines
#
# *After this you can make all replicas start from the same weights and buffers.*
#
# Each rank has made its own random weights. Now all ranks take the weights of rank 0. But look at `running_mean` and
# `running_var` in the list above. They are not parameters, and no optimizer touches them, but they are part of the model's
# state. Such tensors are called **buffers**, and they must be equal too.
#
# Many language models use one tensor both as the embedding and as the last layer. Such parameters are **tied**: one tensor
# with two names. Send it once.

# %%
def broadcast_parameters(model, src=0, group=None):
    """Copy rank src's parameters and buffers to every rank; send tied ones once.

    src: rank number within the group.
    """
    # model.parameters() and model.buffers() name a shared tensor only once. Autograd must not see
    # the message: broadcast tensor.detach(), with dist.broadcast(..., group=group, group_src=src)
    raise NotImplementedError("exercise 4.1: about 2 lines")


# %%
broadcast_parameters = check(broadcast_parameters)

# %% [markdown]
# ### 4.2 Whose sample is it?
# > difficulty 2/5 · importance 5/5 · 12 minutes · about 5 lines
#
# *After this you can deal out a shuffled data set so that no sample is used twice.*
#
# In lab 00 a rank took a contiguous part of the data. For training you shuffle the data in each epoch, and **all ranks must
# shuffle in the same way**. If each rank shuffled for itself, you would train on some samples twice and on others never.
# And all ranks must get *the same number* of samples. Otherwise the mean of the ranks' means is wrong, and a rank with fewer
# batches stops while the others wait for it in the next all-reduce. So you take a few samples twice (or, with `drop_last`,
# leave a few out).
#
# **Predict.** 4 ranks share 1797 images. How many does each rank get, without `drop_last`?

# %%
check(samples_per_rank=...)

# %%
def shard_sampler(n, rank, ranks, epoch=0, seed=0, drop_last=False):
    """List the indices of `rank`'s samples in this epoch; all ranks' lists have the same length.

    All ranks shuffle range(n) in the same way, seeded with seed + epoch, and take every ranks-th
    index. If `ranks` does not divide n, the beginning of the order is repeated at its end; with
    drop_last the end is left out. torch.utils.data.DistributedSampler gives the same lists.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be between 0 and ranks - 1 = {ranks - 1}")
    if n < 1:
        raise ValueError(f"n={n} samples must be at least 1")
    # Give torch.randperm a torch.Generator() of its own. If n < ranks, you must repeat the order
    # more than once
    raise NotImplementedError("exercise 4.2: about 5 lines")


# %%
shard_sampler = check(shard_sampler)

# %% [markdown]
# This is how four ranks share ten samples in two epochs. (If you forget `set_epoch`, torch's `DistributedSampler` gives you
# the first row in every epoch.)
#
# Dropout is different: it must *not* be the same on all ranks. Give it a seed that depends on the rank, or all ranks drop
# the same units.

# %% tags=["nbval-check-output"]
for epoch in (0, 1):
    print("epoch", epoch, [shard_sampler(10, rank, 4, epoch) for rank in range(4)])

# %% [markdown]
# ### 4.3 Average, one by one
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 7 lines
#
# *After this you can average gradients so that R ranks train like one process.*
#
# After `loss.backward()`, divide each gradient by R and all-reduce it, one message for each parameter. What if a parameter
# got no gradient on this rank, because the samples here did not use it? Other ranks may have one, and they wait for yours.
# So send zeros.

# %%
def average_gradients(model, group=None):
    """Replace every gradient by its mean over ranks; a gradient that is None counts as zeros.

    Cost: one all-reduce for each parameter that requires a gradient, or fewer; each gradient is
        sent once, in its own dtype.
    """
    R = dist.get_world_size(group)
    # leave the mean in parameter.grad
    raise NotImplementedError("exercise 4.3: about 7 lines")


# %%
average_gradients = check(average_gradients)

# %% [markdown]
# Now you have data parallelism. It is complete and correct, but slow, for two reasons. A bias of 40 bytes pays the same
# latency as a weight of megabytes. And you send nothing until all of backward is done.
#
# If you clip gradients, do it here, between the average and the step. If each rank clipped its own gradient before the
# average, you would not get the clipped gradient of the whole batch.

# %% [markdown]
# ### 4.4 Buckets
# > difficulty 2/5 · importance 4/5 · 12 minutes · about 6 lines
#
# *After this you can cut the number of messages of a step by putting gradients into buckets.*
#
# So far every gradient travels alone. Put small gradients together into **buckets** of about `bucket_cap_bytes`. Backward
# starts at the *end* of the model, so the first bucket to fill up holds the last parameters. A bucket is one flat tensor, so
# it can hold only one type on one device, and there is one open bucket for each type and device. We use torch's rule: a
# parameter goes into the open bucket, and when the bucket reaches the cap, it is closed.
#
# **Predict.** A model has 20 layers, each with a weight of 4 MB and a bias of 4 KB. The cap is 25 MB, the same for all
# buckets. How many messages does a step take? (torch's default closes the *first* bucket at 1 MiB, so that something travels
# early. That makes one more message.)

# %%
check(bucket_messages=...)

# %%
def assign_buckets(parameters, bucket_cap_bytes):
    """Group parameters whose gradients are sent together; list the groups in sending order.

    Go from the last parameter to the first, since backward begins at the end of the model. A bucket
    holds one dtype on one device. The parameter with which it reaches bucket_cap_bytes is its last.
    Buckets that never reach bucket_cap_bytes come last, in the order in which they were opened.
    """
    if bucket_cap_bytes < 1:
        raise ValueError(f"bucket_cap_bytes={bucket_cap_bytes} must be at least 1")
    closed, still_open = [], {}  # still_open: (dtype, device) -> list of parameters
    # parameter.nbytes is the size of its gradient too
    raise NotImplementedError("exercise 4.4: about 6 lines")


# %%
assign_buckets = check(assign_buckets)

# %% [markdown]
# ### 4.5 Overlap
# > difficulty 4/5 · importance 5/5 · 35 minutes · about 17 lines
#
# *After this you can hide the gradients' messages behind backward, and show that they are hidden.*
#
# This is the heart of DDP. Autograd calls a **hook** as soon as `parameter.grad` is there. When all parameters of a bucket
# have their gradients, start the all-reduce of the bucket with `async_op=True`, and return. Backward goes on with the
# earlier layers while the bucket travels. At the end of backward, wait for all buckets.
#
# There is a trap. Buckets may become *ready* in different orders on different ranks. But the backend pairs messages by their
# order: the first all-reduce of one rank is matched with the first of the others, whatever is in it. So all ranks must
# *launch* their buckets in the same order. If a bucket is ready too early, it waits until the buckets before it are sent.
#
# And some models do not use every parameter in every step. Then a parameter gets no gradient, its hook is never called, and
# its bucket never becomes ready. With `find_unused_parameters=True` the ranks find out at the end of backward which
# parameters *any* rank used. Without it, a missing gradient is an error.
#
# `Replica` does the rest for you. It broadcasts the parameters at the start (your 4.1) and the buffers before each forward,
# makes the `Bucket`s (your 4.4), and calls `finish()` at the end of each backward. Here is a bucket:

# %%
import inspect

from ranklab.data_parallel import Bucket, Replica

print(inspect.getsource(Bucket))

# %% [markdown]
# Gradients are *views* of the bucket. So after `gather()` you only average `bucket.flat`, and `parameter.grad` is averaged
# with it. You copy nothing back.
#
# | given by `Replica` | |
# |---|---|
# | `self.buckets` | the buckets, in the order in which they must travel |
# | `self.group` | the group: pass it to every collective and to `dist.get_world_size(self.group)` |
# | `self.used_anywhere()` | the parameters that any rank used. It is a small all-reduce, so all ranks must call it, after their last bucket is on its way, and only with `find_unused_parameters` |
# | `bucket.fill_none(used)` | gives the mean to the parameters that only other ranks used. `used` is what `used_anywhere()` returned, or `()` without `find_unused_parameters` |

# %%
class OverlappedDataParallel(Replica):
    """Wrap `module` so that its gradients are means over ranks when backward() returns.

    The all-reduce of a bucket begins as soon as all its gradients are ready, and backward continues
    with the earlier layers.
    All ranks send their buckets in the same order, regardless of the order in which they become
    ready: the first message of one rank is matched with the first of the others.
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
        """Cross the parameter off its bucket; autograd calls this once parameter.grad is ready."""
        if self.sync:
            self.backward_begins()
            if parameter not in bucket.missing:
                raise self.second_gradient(parameter)
            # bucket.missing: its parameters that have no gradient yet
            raise NotImplementedError("exercise 4.5, first part: about 2 lines")

    def launch_ready_buckets(self):
        """Start sending buckets in order, up to the first one that is not ready."""
        raise NotImplementedError("exercise 4.5, second part: about 4 lines")

    def reduce(self, bucket):
        """Start averaging the bucket over ranks; return the work handle."""
        raise NotImplementedError("exercise 4.5, third part: divide, all-reduce with async_op")

    def finish(self):
        """Wait until all gradients are averaged, and prepare for the next backward.

        Called at the end of backward. First send the remaining buckets, with zeros for missing
        gradients, even before raising an error, because other ranks wait for them.
        """
        missing = {parameter for bucket in self.waiting for parameter in bucket.missing}
        # First send the buckets that are left, and wait for all. Then call fill_none(used) on each
        # bucket. For the next backward make everything as in __init__, and bucket.missing full
        raise NotImplementedError("exercise 4.5, fourth part: about 10 lines")
        if missing and not self.find_unused_parameters:
            raise self.no_gradient(missing)

# %%
OverlappedDataParallel = check(OverlappedDataParallel)

# %% [markdown]
# Does it overlap? Below is a profile of your class (lab 04 reads such profiles). Two ranks train six wide layers, first with
# six buckets of 1 MB, then with a single bucket. Communication is **exposed** while nothing is computed at the same time:
# then it costs time. On two cores the ranks take turns, so much of what is exposed is waiting for the other rank. Look only
# at *when number 1 begins*: before the computation ends, or after it.

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


plots.timeline(launch(profiled, 2**20, ranks=2), "Buckets of 1 MB: they leave during backward")

# %%
plots.timeline(launch(profiled, 25 * 2**20, ranks=2), "One bucket: nothing to hide behind")

# %% [markdown]
# Look at number 1 in both pictures: with small buckets it leaves early, and the one large bucket has to wait for the end of backward.
#
# > **Take away.** In a step each rank sends 2 (R-1)/R of the gradient's bytes, in any number of buckets: for 7 billion parameters in bf16 (14 GB) on 64 ranks, 27.6 GB. With overlap the step gets longer by the last bucket's time at least, and by the time of all buckets at most.

# %% [markdown]
# > **Spine**: from here go to the bug in 8.1; the rest of this lab is extra.

# %% [markdown]
# ### 4.6 Which buckets?
# > difficulty 4/5 · importance 4/5 · 20 minutes · about 12 lines · open: no recipe
#
# *After this you can choose bucket sizes for a given network and model, and defend them by times.*
#
# 25 MB is the same number for every network. You know more. A hook can tell you when each gradient is ready, and lab 02's
# alpha + n beta tells you how long an all-reduce takes. Which buckets leave the least to do after backward? A large bucket
# has to wait for its last gradient. Small buckets pay alpha each, and while one travels, the next ones wait.

# %% tags=["nbval-check-output"]
from ranklab.data_parallel import block_timeline, bucket_times, capped_buckets, exposed_seconds

case = [1.0, 2.0, 3.0], [5, 5, 5], 0.5, 0.1  # ready, nbytes, alpha, beta
for plan in ([[0], [1], [2]], [[0, 1, 2]], [[0], [1, 2]]):
    print(plan, bucket_times(plan, *case), exposed_seconds(plan, *case), "s exposed")

# %%
def plan_buckets(ready, nbytes, alpha, beta):
    """Find the buckets for which the last all-reduce ends earliest.

    Gradient i has nbytes[i] bytes and is ready at ready[i] seconds, not before gradient i-1. A
    bucket holds consecutive gradients. It is sent once its last gradient is ready and the previous
    bucket has arrived; then the link is busy for alpha + bytes * beta seconds. At time 0 the link
    is free.
    Returns: lists of indices of gradients: each index once, in order; [] for 0 gradients. Both
        arguments stay unchanged.
    Score: exposed_seconds: the check accepts up to 1% above the best, on any timeline, and allows
        2 s for 300 gradients.
    """
    raise NotImplementedError("exercise 4.6: about 12 lines")


# %%
plan_buckets = check(plan_buckets)

# %% [markdown]
# Now plan the buckets for the blocks of GPT-2 (8192 tokens, 4 FLOPs for each weight and token, 125 TFLOP/s, no embedding).
# alpha is 0.2 ms, and each byte is sent twice, as in a long ring. The last numbers of a line are the sizes of the first and
# the last buckets, in MB. Several plans are equally good, so yours may have other sizes.

# %%
ready, nbytes = block_timeline()
capped_plan = capped_buckets(nbytes)
for name, GBps in (("NVLink", 200), ("400 Gbit/s", 50), ("200 Gbit/s", 25), ("100 Gbit/s", 12.5)):
    link = 2e-4, 2 / (GBps * 1e9)
    plan = plan_buckets(ready, nbytes, *link)
    plan_ms, capped_ms = (1e3 * exposed_seconds(buckets, ready, nbytes, *link)
                          for buckets in (plan, capped_plan))
    print(f"{name:10} {plan_ms:5.2f} ms exposed, {capped_ms:5.2f} with 25 MB; {len(plan)} buckets:",
          *(f"{sum(nbytes[i] for i in bucket) / 1e6:.0f}" for bucket in plan[:6]), "...",
          *(f"{sum(nbytes[i] for i in bucket) / 1e6:.0f}" for bucket in plan[-2:]))

# %%
link = 2e-4, 2 / 25e9
plans = {"25 MB": capped_plan, "yours": plan_buckets(ready, nbytes, *link)}
plots.bucket_plans({name: bucket_times(plan, ready, nbytes, *link)
                    for name, plan in plans.items()}, ready, "GPT-2's blocks, 200 Gbit/s")

# %% [markdown]
# The first bucket is small, so that the link starts early. (torch's first bucket of 1 MiB is the same idea.) On a slow link
# each bucket may be larger than the one before, because it collects gradients while that one travels. On a fast link all
# buckets are small, because only the last one is exposed.

# %% [markdown]
# ### Further
#
# Here are five more exercises with checks. They are not in the 130 minutes, and the lab runs without them.

# %% [markdown]
# #### `replicas_agree`
# > difficulty 2/5 · importance 4/5 · 7 minutes · about 4 lines
#
# If a replica drifts away, you get no error. The loss looks plausible, and after a week the model is bad. To compare
# replicas, each rank computes a **hash** of its weights, a few bytes long, and only the hashes travel.
#
# Don't take the sum of the weights as a hash. A sum stays the same if two numbers change places, and it rounds.
# `hashlib.blake2b` sees every bit. How can one all-reduce tell whether R hashes are equal? They are equal if the largest is
# the smallest, and MAX of (h, -h) gives you both.
#
# **Predict.** Take ResNet-50 on 4 ranks again. The two int64 travel by a ring. How many bytes does each rank send on average?

# %%
check(agree_bytes=...)

# %%
def replicas_agree(model, group=None):
    """Return True on every rank if all hold the same parameters, bit for bit; else False on all.

    Compares only parameters, because the statistics of batch norm may differ between two forwards.
    Cost: one all-reduce of 16 bytes, regardless of the model's size.
    """
    digest, device = hashlib.blake2b(digest_size=7), "cpu"  # 56 bits: an int64 and its negative
    for parameter in model.parameters():
        device = parameter.device
        content = parameter.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(content.cpu().numpy())
    number = int.from_bytes(digest.digest(), "big")
    # all are equal if the largest is the smallest: one all-reduce of two numbers gives both
    raise NotImplementedError("exercise replicas_agree: about 4 lines")


# %%
replicas_agree = check(replicas_agree)

# %% [markdown]
# #### `no_sync`
# > difficulty 1/5 · importance 4/5 · 5 minutes · about 5 lines
#
# If you cut a large batch into four pieces (lab 01), you need one average, not four. The hooks look at `model.sync`, so
# `no_sync` can switch them off. (Divide each loss by the number of pieces. With torch's own `no_sync`, the forward must be
# inside too.)
#
# **Predict.** A step has four pieces, and the first three are inside `no_sync`. The gradient has 102.4 MB, and there are 4
# ranks. How many megabytes does each rank send in a step?

# %%
check(accumulated_megabytes=...)

# %%
@contextlib.contextmanager
def no_sync(model):
    """Keep gradients local in the block: backward accumulates them and sends nothing.

    The next backward outside averages the sums. So a batch in several pieces sends as much as a
    batch in one piece, if all pieces but the last are inside. This also holds after an error in
    the block, and inside another no_sync.
    """
    # the hooks look at model.sync. One no_sync may stand inside another, and the block may fail
    raise NotImplementedError("exercise no_sync: about 5 lines")


# %%
no_sync = check(no_sync)

# %% [markdown]
# #### `scale_learning_rate`
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 4 lines
#
# With k times the ranks the batch is k times as large, and an epoch has 1/k of the steps. To get just as far, each step
# must be k times as long. This is the **linear scaling rule**. It fails in the first steps, when the weights still change
# fast. So you add a **warm-up**, which goes from the old learning rate up to the scaled one.
#
# **Predict.** ResNet-50 was trained with learning rate 0.1 for a batch of 256. Goyal et al. used a batch of 8192. What was their learning rate?

# %%
check(scaled_rate=...)

# %%
def scale_learning_rate(lr, batch, base_batch, step=None, warmup=0, rule="linear"):
    """Scale the learning rate `lr`, which is right for `base_batch`, to `batch`.

    With step (from 0) and warmup: linear from lr at step 0 to the scaled rate at step `warmup`.
    rule: "linear" (k times the batch, k times lr: for SGD) or "sqrt" (for Adam).
    """
    if batch < 1 or base_batch < 1 or warmup < 0:
        raise ValueError(f"batch={batch} and base_batch={base_batch} must be at least 1, and "
                         f"warmup={warmup} at least 0")
    powers = {"linear": 1, "sqrt": 0.5}
    if rule not in powers:
        raise ValueError(f"rule={rule!r} must be one of {', '.join(powers)}")
    # the scaled rate; without a step, or after the warm-up, return it; else go between lr and it
    raise NotImplementedError("exercise scale_learning_rate: about 4 lines")


# %%
scale_learning_rate = check(scale_learning_rate)

# %% [markdown]
# #### `sync_batch_norm`
# > difficulty 5/5 · importance 3/5 · 25 minutes · about 10 lines
#
# Batch norm takes mean and variance over the batch. If 4 ranks have 8 images each, every rank normalises by its own 8. That
# is not the same as a batch of 32, and with 2 images on a rank it works badly. The cure is to sum over all ranks, in forward
# and also in backward. Why in backward? Each x moves the mean and the variance, and these move every y on every rank. With
# scale = 1 / sqrt(variance + eps), `normal` = (x - mean) * scale, and means over all ranks, the result is
#
# gradient of x = weight * scale * (grad - mean(grad) - normal * mean(grad * normal))
#
# The variance over all ranks is *not* the mean of the variances, so send sum(x), sum(x^2) and the count. Send them in
# float64, because mean(x^2) - mean(x)^2 is the small difference of two large numbers.
#
# **Predict.** A layer has 64 channels. How many bytes does the all-reduce in forward carry?

# %%
check(batch_norm_bytes=...)

# %%
def sync_batch_norm(x, weight, bias, eps=1e-5, group=None, running=None):
    """Normalise each channel of x by its mean and variance over the batches of all ranks.

    Batches may differ in size. Gradients of weight and bias are this rank's own part. Sums are in
    float64: in float32 mean(x^2) - mean(x)^2 has no digit left if the mean is far from zero.
    running: (mean, variance, momentum), the statistics for evaluation, updated in place.
    Cost: one all-reduce of 16 C + 8 bytes in forward, one of 16 C bytes in backward.
    """
    if x.dim() < 2 or weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]:
        raise ValueError(f"x {tuple(x.shape)} must be (B, C, ...), and weight and bias (C,), not "
                         f"{tuple(weight.shape)} and {tuple(bias.shape)}")
    dims = [dim for dim in range(x.dim()) if dim != 1]  # all but the channels
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
            local_sums = torch.cat([grad.double().sum(dims), (grad * normal).sum(dims)])  # (2 C,)
            # needed below: x_grad; and `local_sums` keeps this rank's part
            raise NotImplementedError("exercise sync_batch_norm, backward: about 4 lines")
            bias_grad, weight_grad = local_sums.to(weight.dtype).chunk(2)
            return x_grad.to(x.dtype), weight_grad, bias_grad

    return NormaliseOverRanks.apply(x, weight, bias)


# %%
sync_batch_norm = check(sync_batch_norm)

# %% [markdown]
# #### `join_uneven`
# > difficulty 4/5 · importance 2/5 · 15 minutes · about 10 lines
#
# What if a rank really has fewer batches, because documents differ in length, or because a disk was lost? A rank with no
# batch left must still take part in every collective. `model.shadow()` sends what the others send in a step, but with zeros.
# And before each step all ranks must find out whether any rank still has a batch. Each forward takes the buffers of rank
# `model.buffers_from`, so this must be a rank that still has one.

# %%
def join_uneven(batches, model):
    """Yield this rank's batches; then shadow the other ranks' steps until no rank has a batch.

        for x, y in join_uneven(batches, model):
            ...one forward and one backward of `model`, and the optimizer's step...

    A rank with no batch left adds zeros to the mean, which is still over all ranks. Before each
    step 8 bytes tell all ranks whether any rank has a batch. At the end every rank has the weights
    of a rank that took all the steps.
    """
    batches, rank, last = iter(batches), dist.get_rank(model.group), 0
    device = next(model.parameters()).device
    try:
        model.joining = True  # it refuses no_sync and SyncBatchNorm meanwhile
        while True:
            batch = next(batches, None)  # one at a time: perhaps they don't fit in memory
            # does any rank go on? If so, `last` and model.buffers_from are one of those that do
            raise NotImplementedError("exercise join_uneven: about 10 lines")
        broadcast_parameters(model.module, last, model.group)
    finally:  # also when the loop was left early
        model.joining, model.buffers_from = False, 0


# %%
join_uneven = check(join_uneven)

# %% [markdown]
# #### Derive: how many ranks does one batch feed?
# > difficulty 3/5 · importance 5/5 · 8 minutes
#
# The answer is a formula: put a lambda instead of `...`. A model has P parameters in bf16, 2 bytes each, and so have its gradients. A batch has `tokens` tokens, shared out over R ranks. A GPU computes `flops` FLOP/s (what it reaches, and not its peak) and sends `bandwidth` bytes/s. Backward takes 4 FLOPs for each parameter and token. A ring of many ranks sends each gradient twice. **On how many ranks, at most, does backward still hide the all-reduce?** (`lambda tokens, flops, bandwidth: ...`) The check tries your formula at 24 points that nobody chose.

# %%
check(largest_data_parallel=...)

# %%
from ranklab.data_parallel import largest_data_parallel

for card, bytes_per_second in (("a card of 400 Gbit/s for each GPU", 50e9),
                               ("one card of 100 Gbit/s for eight", 12.5e9 / 8)):
    print(f"a batch of 4 million tokens, 400 TFLOP/s, {card}: "
          f"{largest_data_parallel(4 * 2**20, 400e12, bytes_per_second):.0f} ranks")

# %% [markdown]
# <details><summary>The derivation</summary>
#
# Backward on one rank: `4 * P * (tokens / R) / flops` seconds. The all-reduce: `2 * 2 * P / bandwidth` seconds. They are equal at `R = tokens * bandwidth / flops`. P has cancelled out, because each parameter brings both its FLOPs and its bytes.
# </details>
#
# > **Take away.** Each rank needs `flops / bandwidth` tokens: `400e12 / 50e9` = 8,000 with a fast card, 256,000 with a slow one. A larger model does not help, and does not hurt.

# %% [markdown]
# ## 5. The real thing
#
# Compare torch's `DistributedDataParallel` with yours: the same CNN, the same batches, five steps on four ranks. After the
# first backward, torch sorts its buckets again by the order in which gradients became ready, and in the second step rank 0
# broadcasts that order. So we count bytes in the last step.

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
        indices = shard_sampler(batch, dist.get_rank(), dist.get_world_size(), epoch=step)
        x, y = images.train[indices].to(device()), images.train_labels[indices].to(device())
        optimizer.zero_grad()
        with Traffic() as traffic:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [p.detach().cpu() for p in model.parameters()]
    return losses, weights, dict(traffic.calls), traffic.sent_bytes, replicas_agree(model)


# %% [markdown]
# Each line has rank 0's five losses, and then what the last step sent. (The two broadcasts carry batch norm's six buffers,
# in one message for each type.)

# %%
runs = launch(train, OverlappedDataParallel, ranks=4)
ddp_runs = launch(train, of_torch, ranks=4)
for name, (losses, _, calls, sent, agree) in {"ours": runs[0], "torch": ddp_runs[0]}.items():
    print(f"{name:6} {[round(loss, 6) for loss in losses]}  {calls}  {sent:,} bytes")

# %%
largest = max((a - b).abs().max().item() for (_, a_s, *_), (_, b_s, *_) in zip(runs, ddp_runs)
              for a, b in zip(a_s, b_s))
print(f"largest difference of a weight after five steps, on any rank: {largest:.1e}")
assert runs[0][2:4] == ddp_runs[0][2:4] and all(run[-1] for run in runs + ddp_runs)

# %% [markdown]
# Your class of about 17 lines and torch's send the same messages and the same 60,264 bytes, and train the same weights up to rounding. (The ring cuts a bucket into chunks, and the order of additions depends on the chunk that a number is in.) torch's class does more. You can change what happens to a bucket (the comm hooks of lab 04), and it looks for unused parameters in the graph. Its gradients are views of its buckets only with `gradient_as_bucket_view=True`.
#
# Before DDP there was `nn.DataParallel`. **One** process drives all GPUs with threads. In each step it copies the model to
# every GPU and gathers all outputs on the first one, and all threads share one Python interpreter. It is still in torch, but
# you should not use it.

# %% [markdown]
# ## 6. Project
#
# **Train a CNN on real handwritten digits with your own functions, on 1, 2 and 4 ranks.** There are always 64 images in a
# step, and each run has three epochs and is repeated with three seeds. (The same code trains on MNIST and CIFAR-10, if you
# have their files.) If everything is right, the number of ranks changes only two things: the time, and the images that batch
# norm sees. On four ranks it sees 16 instead of 64.

# %%
from ranklab.projects import data_parallel as project

functions = {"replica": OverlappedDataParallel, "sampler": shard_sampler,
             "scale": scale_learning_rate, "agree": replicas_agree}
results = project.scale(**functions)
print(project.table(results))
assert project.ranges_overlap(results)

# %% [markdown]
# "agree" counts the epochs after which `replicas_agree` said yes: all of them. "differ by" is the largest difference
# between two ranks in a weight or statistic. The seed changes the accuracy more than the number of ranks does. But more
# ranks made it *slower*: for 64 images of 8 x 8, the messages cost more time than the ranks save. A larger model with a
# larger batch computes more for each byte:

# %%
wide_runs = project.scale(project.Config(width=32, batch=256, base_batch=64, epochs=2), seeds=(0,))
sizes = {"8 channels, 64 images": results, "32 channels, 256 images": wide_runs}
plots.speed_up({name: {R: project.best_seconds(runs) for R, runs in scaling.items()}
                for name, scaling in sizes.items()})

# %% [markdown]
# On two cores, two ranks can be faster than one, but four gain almost nothing over two.
#
# **What happens with four times the batch?** In the same number of epochs you take a quarter of the steps, so with the old
# learning rate the model does not get as far. If you multiply the rate by four from the first step on, it gets even worse,
# because the first steps throw the model to a place from which it does not recover. With the warm-up it comes close to the
# small batch. (From here on we use one seed, to save time. So a percent more or less means nothing, and neither do the last
# two columns.)

# %%
settings = {"seeds": (0,), **functions}
rates = project.run({"batch 16, lr 0.12": project.Config(batch=16, warmup=0)}, ranks=1, **settings)
rates |= project.run({"batch 64, lr 0.12": project.Config(base_batch=64),  # not scaled
                      "batch 64, lr 0.48": project.Config(warmup=0)}, ranks=4, **settings)
print(project.table(rates | {"the same, warmed up": results[4][:1]}))

# %% [markdown]
# **What is each piece good for?** Leave out one at a time. "worst" is the accuracy of the worst replica, but the one that
# you would save is rank 0's.

# %%
names = "broadcast", "average", "mean", "shard", "buffers"
ablations = {"nothing is left out": results[4][:1]} | project.run(
    {f"without {name}": project.Config(without=(name,)) for name in names}, ranks=4, **settings)
print(project.table(ablations))

# %%
plots.held_out_errors(ablations, "Most of these mistakes just look like a weaker model")

# %% [markdown]
# No run raised an error. Without `mean` the ranks apply the sum, and you notice it at once: 90% wrong is guessing. (With AdamW you might not notice, because it divides by the size of a gradient. Our own report for GPUs compared losses alone, and gradients that were twice too large passed. Now it compares norms as well.) Without `broadcast`, `average` or `shard` the model just looks a bit weak, and the worst replica is weaker than rank 0's. Without `average` and without `shard`, rank 0 ends with the very same numbers. In both cases it learns from its own images alone, so four ranks do the work of one. And without `buffers`, to be honest, you see no difference in three epochs of 1437 images.
#
# `replicas_agree` finds two of the five, `broadcast` and `average`. The other three keep the weights equal. (Without `buffers`
# ranks differ only in the statistics, and `replicas_agree` does not look at those.) So only tests like yours find them.
#
# **Your turn.** Change one thing in the run on four ranks. First write down what happens to the accuracy and to the seconds of
# an epoch, and why. Ideas: `"norm": "sync"` (batch norm over all ranks), `"norm": "none"`, `"warmup": 0`,
# `"without": ("epoch",)`.

# %%
change = {"batch": 256}
variant = project.run({f"{change}": project.Config(**change)}, ranks=4, **settings)
print(project.table({"4 ranks, 64 images": results[4][:1]} | variant))

# %% [markdown]
# ## 7. Measure
#
# Compare prediction and count for the CNN from part 4 on four ranks. The table shows the all-reduces of a step, and the
# bytes that all four ranks send together, 2(R-1) times the gradient. (We count all ranks because a bias of 10 numbers does
# not divide by 4, so one rank may send a few bytes more than another.) Counts are exact, so we assert them.

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
# ## 8. Bug of the lab
#
# A bug of the lab is a program that breaks the idea of its lab and still runs. A colleague says what was seen, but not why. You look, write down why before you open the list of causes, and fix the program in its own cell ([16_clinic](16_clinic.ipynb) has bugs that belong to no single lab, and tools that find them).
#
# Fixed means that the program gives the same numbers as one process, on any number of ranks that divides its data evenly, and in a group of only some ranks. The check tries other settings than the lab does. To look, print on each rank, compare the ranks, run the same on one rank, or count what is sent: `with Traffic() as traffic:`, then `traffic.table()`.

# %%
import argparse
import copy

import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ranklab.clinic.look import look
from ranklab.data_parallel import convert_sync_batch_norm, pack
from ranklab.models import GPT, GPTConfig

# %% [markdown]
# ### 8.1 Four ranks are no faster than one
# > difficulty 2/5 · importance 5/5 · 10 minutes · about 3 lines
#
# > One rank goes twice through the digits in 30 steps of 96 images. We gave the job four ranks, 24 images each, and now it takes 120 steps for the same two epochs. The replicas agree, the loss falls well, and no rank waits for another. But four ranks are no faster than one.

# %%
def no_faster(epochs=2, batch=96, lr=0.05, seed=0, group=None):
    """Train softmax regression on digits; `batch` images a step on all ranks, shuffled each epoch.

    -> {"loss" at the end, "weights", "seen": of each epoch and step, the numbers of the images}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    images = digits()
    x, y = images.train.flatten(1), images.train_labels
    torch.manual_seed(seed)
    data = TensorDataset(x, y, torch.arange(len(x)))
    loader = DataLoader(data, batch // R, shuffle=True)
    model = nn.Linear(64, 10).to(device())
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr), []
    for epoch in range(epochs):
        seen.append([])
        for images, labels, at in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device())), labels.to(device())).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
                p.grad /= R
            optimizer.step()
            seen[-1].append(at.tolist())
    loss = F.cross_entropy(model(x.to(device())), y.to(device())).item()
    return {"loss": loss, "weights": pack(model.parameters()).detach(), "seen": seen}


# %% [markdown]
# **Look.** How many steps an epoch takes on four ranks:

# %% tags=["nbval-check-output"]
len(launch(no_faster, ranks=4)[0]["seen"][0])

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. A rank's share of a step should be 96 images, not 24.
# 2. All ranks read the same images.
# 3. The gradients are all-reduced more often than once a step.
# 4. The ranks begin with different weights.
#
# </details>

# %%
check(clinic_no_faster_cause=...)

# %%
no_faster = check(no_faster)

# %% [markdown]
# Print a fingerprint of each rank's first batch once, and you find this in a second.

# %% [markdown]
# > **Spine**: this lab's part ends here. On it goes in [01_baseline](01_baseline.ipynb); the rest of this lab is extra.

# %% [markdown]
# ### 8.2 Accumulating does not help
# > difficulty 2/5 · importance 5/5 · 15 minutes · about 6 lines
#
# > Our network is slow, so we accumulate: eight micro-batches for each step. The losses are right to the last digit. But an epoch takes as long as it does with accumulate=1, and the network is busy all the time.

# %%
def train_large_batch(micro_batches=16, accumulate=8, batch=2, length=32, seed=0, group=None):
    """Train a small GPT on argparse's source, `micro_batches` of `batch` windows on each rank.

    A step's gradient is the mean over `accumulate` micro-batches of all ranks; the last step may
    have fewer. Returns the weights and each step's loss, a mean over the same micro-batches; the
    same on every rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    text = torch.tensor(list(inspect.getsource(argparse).encode())).to(device())
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_ctx=length, n_layer=1, n_embd=32)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for first in range(0, micro_batches, accumulate):
        numbers = range(first, min(first + accumulate, micro_batches))
        loss = torch.zeros((), device=device())
        for number in numbers:
            start = (number * ranks + rank) * batch * length
            window = text[start:start + batch * length + 1]
            x, y = window[:-1].view(batch, length), window[1:].view(batch, length)
            part = model(x, y) / len(numbers)
            part.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= ranks
            part = part.detach()
            dist.all_reduce(part, group=group)
            loss += part / ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"weights": dict(model.named_parameters()), "losses": losses}


# %% [markdown]
# **Look.** Nothing is wrong in what comes back. So count what it costs.

# %%
look(train_large_batch)

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Each parameter is sent by a call of its own, not in large buckets.
# 2. Gradients are sent after each micro-batch, not once in a step.
# 3. Gradients travel in float32; bfloat16 would halve them.
# 4. One rank is slower than the others, and they wait for it.
# 5. The model is too large for this network, whatever is accumulated.
#
# </details>

# %%
check(clinic_train_large_batch_cause=...)

# %%
train_large_batch = check(train_large_batch)

# %% [markdown]
# ### 8.3 A saved model that is worse than its log
# > difficulty 2/5 · importance 5/5 · 15 minutes · about 2 lines
#
# > Our log has the mean of the ranks' training losses, and it looks as it always did. But the model that rank 0 saves has a loss of 1.72 on held-out images. A model trained on one rank has 1.19, and if ranks 1, 2 or 3 saved theirs, those would have 1.31. We use the same seed everywhere, of course.

# %%
def saved_model(steps=20, lr=0.3, decay=0.9, seed=0, group=None):
    """Train an MLP on digits, and the running mean of its weights, which rank 0 saves.

    seed  of this rank's random numbers; the ranks may be given different ones. All begin with the
          weights that one of them draws by its seed
    -> {"start": the first weights, "weights": the last, "mean": of them, "loss": of the mean on
    held-out images, "examples": eight labels, for the log of rank 0}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(seed)
    images = digits()
    x, y = images.train.flatten(1).to(device()), images.train_labels.to(device())
    examples = y[torch.randperm(len(y))[:8]].tolist() if rank == 0 else []
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(device())
    mean = copy.deepcopy(model)
    start = pack(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        at = torch.arange(240)[rank::R] + 240 * (step % 5)
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= R
        optimizer.step()
        with torch.no_grad():
            for kept, p in zip(mean.parameters(), model.parameters()):
                kept.lerp_(p, 1 - decay)
    held = images.held_out.flatten(1).to(device())
    loss = F.cross_entropy(mean(held), images.held_out_labels.to(device())).item()
    return {"start": start, "weights": pack(model.parameters()).detach(), "loss": loss,
            "mean": pack(mean.parameters()).detach(), "examples": examples}


# %% [markdown]
# **Look.** The held-out loss of each rank's model:

# %% tags=["nbval-check-output"]
[f"{result['loss']:.2f}" for result in launch(saved_model, ranks=4)]

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Rank 0 trains on fewer images than the others.
# 2. Some gradients are not averaged over the ranks.
# 3. The ranks begin with different weights.
# 4. The running mean of rank 0 lacks the last steps.
#
# </details>

# %%
check(clinic_saved_model_cause=...)

# %%
saved_model = check(saved_model)

# %% [markdown]
# `replicas_agree(model)` before the first step costs 16 bytes. Suppose nobody sets a seed. Ranks started by torchrun then begin with different random numbers, because each process draws its own seed. Here you wouldn't notice: `launch` forks all its ranks from one process, so they happen to begin with the same ones.

# %% [markdown]
# ### Further bugs

# %% [markdown]
# #### Which score is right?
# > difficulty 3/5 · importance 4/5 · 15 minutes · about 1 line
#
# > After training, each rank counts how many of the same 360 held-out images it gets right: 315, 309, 310 and 311. Which one shall we publish? If we broadcast all model.parameters() from rank 0 before we count, nothing changes. And a single process that trains on the same images gets 322.

# %%
def two_scores(steps=20, lr=0.3, width=8, group=None):
    """Train a CNN on digits, 240 images a step; each rank has a shard, in the order of labels.

    The model is the one that a single process would train on the same 240 images.
    -> {"loss" on the 360 held-out images, "score": how many of them are right, "weights"}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    images = digits()
    x, y = images.train.to(device()), images.train_labels.to(device())
    shard = y.argsort(stable=True).chunk(R)[rank]
    torch.manual_seed(0)
    model = CNN(CNNConfig(width=width)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step in range(steps):
        at = shard[step % 5::5][:240 // R]
        optimizer.zero_grad()
        F.cross_entropy(model(x[at]), y[at]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= R
        optimizer.step()
    model.eval()
    labels = images.held_out_labels.to(device())
    with torch.no_grad():
        logits = model(images.held_out.to(device()))
    return {"loss": F.cross_entropy(logits, labels).item(),
            "score": (logits.argmax(1) == labels).sum().item(),
            "weights": pack(model.parameters()).detach()}


# %% [markdown]
# **Look.** Each rank's score:

# %% tags=["nbval-check-output"]
[result["score"] for result in launch(two_scores, ranks=4)]

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Each rank normalises by the statistics of its own images.
# 2. The model is still in training mode when they count.
# 3. The ranks do not count on the same images.
# 4. The ranks' weights have drifted apart.
#
# </details>

# %%
check(clinic_two_scores_cause=...)

# %%
two_scores = check(two_scores)

# %% [markdown]
# Unless you turn it off, DDP broadcasts rank 0's buffers before each forward. Then the ranks agree, but all of them evaluate with what rank 0 saw. For statistics of the whole batch you need SyncBatchNorm, or else a norm that doesn't look at the batch. torch's own SyncBatchNorm runs on GPUs only; this lab's version, `convert_sync_batch_norm`, runs here as well.

# %% [markdown]
# #### Worse together
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 2 lines
#
# > Four epochs on one rank end at a loss of 0.84. On four ranks, four epochs of the same images end at 1.35. Each gradient is right: we compared it with the gradient of one process on the same 128 images. Ten epochs get there. That is 90 steps instead of 144, with four times the machines.

# %%
def worse_together(epochs=4, batch=32, lr=0.03, group=None):
    """Train softmax regression on digits, `batch` images a step on each rank.

    The recipe (after Goyal et al. 2017): `lr` is for steps of 32 images, and a step of k times as
    many has k times the rate. In the first epoch the rate climbs from `lr` to that, evenly. At all
    times it is multiplied by the share of steps that are left.
    -> {"loss" at the end, "weights", "rates": the learning rate of each step}
    """
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    images = digits()
    x = images.train[:1152].flatten(1)[rank::R].to(device())
    y = images.train_labels[:1152][rank::R].to(device())
    model = nn.Linear(64, 10).to(device())
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer, rates = torch.optim.SGD(model.parameters(), lr), []
    times = batch / 32
    each = 1152 // batch
    scheduler = LambdaLR(optimizer, lambda step: (1 + (times - 1) * min(1, step / each))
                         * max(0, 1 - step / (epochs * each)))
    for epoch in range(epochs):
        for images, labels in zip(x.split(batch), y.split(batch)):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
                p.grad /= R
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    loss = F.cross_entropy(model(x), y)
    dist.all_reduce(loss.detach(), group=group)
    return {"loss": loss.item() / R, "weights": pack(model.parameters()).detach(), "rates": rates}


# %% [markdown]
# **Look.** The loss at the end, on one rank and on four:

# %%
[f"{launch(worse_together, ranks=ranks)[0]['loss']:.2f}" for ranks in (1, 4)]

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Each rank sees only a quarter of the images.
# 2. The gradients are averaged, and should be summed.
# 3. The learning rate does not follow the number of ranks.
# 4. The warm-up is too long for so few steps.
#
# </details>

# %%
check(clinic_worse_together_cause=...)

# %%
worse_together = check(worse_together)

# %% [markdown]
# Goyal et al. (arXiv 1706.02677): when the batch is multiplied by k, multiply the learning rate by k. Whatever counts steps is divided by k: warm-up, decay, and how often you evaluate and save.

# %% [markdown]
# ## 9. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 03` in a terminal asks these and more, with other numbers
# each time.

# %% tags=["nbval-check-output"]
questions("03_data_parallel")

# %% [markdown]
# ## 10. On real GPUs
#
# ```bash
# torchrun --nproc-per-node 8 -m ranklab.projects.data_parallel --data cifar10 --folder data
# sbatch labs/jobs/data_parallel.sbatch
# ```
#
# Now the backend is NCCL. Its all-reduces run on a stream of their own, at the same time as backward's kernels. This is real
# overlap; two cores only take turns. It is not free, because NCCL's kernels use some of the GPU's multiprocessors, and
# backward has fewer of them meanwhile.
#
# What can you expect? (We have not measured these numbers.) A ResNet-50 step takes about 100 ms on one A100, with batch 256
# and mixed precision. The all-reduce of 102 MB over NVLink takes about 1 ms, all of it hidden. If each node has one 100 Gbit/s
# Ethernet link, it takes about 16 ms, and that is hidden too. But at a batch of 32 the step takes only 13 ms, and most of the
# 16 ms show. This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 11. Take with you
#
# 1. Equal weights at the start and equal gradients in each step keep R copies equal: each piece of DDP protects one of the two.
# 2. Send large messages during backward, the last layer first: 100 ms of transfer in five buckets and 60 ms of backward leave 52 ms exposed.
# 3. Data parallelism gives speed and never memory: each rank still holds all 16 bytes for each parameter (lab 06 changes that).
#
# **What we left out**
#
# - **Gradient compression and reading traces**: lab 04, with torch's DDP.
# - **Sharding**: here each rank holds all of the model, its gradients and its optimizer state. Lab 06 changes that, and its
#   first two stages send no more bytes.
# - **Asynchronous training**, where no worker waits: parameter servers with stale gradients. It ended with worse accuracy
#   than synchronous training (Chen et al., arXiv 1604.00981).
# - **Local SGD**: average the weights every H steps instead of the gradients in every step.
# - **Ever larger batches**: beyond some batch size, more images no longer mean fewer steps (McCandlish et al. 2018 say how to
#   find it).
#
# In [04_ddp](04_ddp.ipynb) you do the same in production, and read the traces that tell you what is slow.
#
# On the spine it is [01_baseline](01_baseline.ipynb).
