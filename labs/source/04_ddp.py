# %% [markdown]
# # 04 DDP: production data parallelism
#
# > 135 minutes, 40 more with Further, 25 with its bug · difficulty 3/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL; 4 GPUs for ResNet-50 at full size

# %% [markdown]
# ## 1. Story
#
# A team moves its training from one GPU to four, with the same batch. A step took 0.80 s; now it takes 0.25. The loss falls, and everybody is happy.
# But the team now pays for four GPUs.
#
# What **efficiency** did they get, in percent? That is the speed-up they got, divided by the speed-up they paid for.

# %%
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status


begin("04_ddp")
check(efficiency_percent=...)

# %% [markdown]
# In lab 03 you built DDP yourself. From here on you use torch's, as people do in production, and two questions matter: **how much time is lost, and
# to what?** You will learn to read both answers from a trace of all ranks. Where the time goes to communication, you will make the gradients smaller,
# and see what that costs in loss.

# %% [markdown]
# ## 2. Picture

# %%
from ranklab.plots import ddp as plots

plots.production_step()

# %% [markdown]
# This is one training step on two ranks, and any part of it can be too slow. The **loader** must have the next batch ready in time. Then come forward
# and backward. Backward fills the buckets: "back 1" fills bucket 1, and "sum 1" is the all-reduce of bucket 1. What still travels when backward is
# over is **exposed**: the rank can only wait for it.

# %% [markdown]
# ## 3. Smallest working code
#
# With torch, DDP is one line. The rest of your script stays the same.

# %%
def ddp_step():
    torch.manual_seed(dist.get_rank())  # different on purpose: DDP broadcasts rank 0's weights
    model = nn.Linear(4, 2).to(device())
    model = DistributedDataParallel(model)
    x = torch.full((8, 4), 1.0 + dist.get_rank(), device=device())
    model(x).square().mean().backward()
    return [p.grad.flatten().tolist() for p in model.parameters()]


gradients = launch(ddp_step, ranks=4)
print("rank 0:", gradients[0])
print("all ranks have the same gradient:", all(gradient == gradients[0] for gradient in gradients))

# %% [markdown]
# ## 4. Build it
#
# ### 4.1 What did the extra ranks bring?
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 3 lines
#
# *After this you can tell strong from weak scaling, and compute the efficiency of both.*
#
# You can measure scaling in two ways. In **strong scaling** the total batch stays the same and the ranks share it, so a step should get shorter. In
# **weak scaling** each rank keeps its batch, so a step should take as long as before. Either way, the efficiency is the share of the perfect speed-up
# that you got.

# %%
def scaling_efficiency(seconds, kind):
    """Return {ranks: efficiency} for {ranks: seconds per step}, in increasing order of ranks.

    The smallest number of ranks is the baseline, with efficiency 1.

    kind   "strong": the same total batch, so R ranks should take 1/R of the time;
           "weak": the same batch per rank, so any number of ranks should take the same time
    """
    if kind not in ("strong", "weak"):
        raise ValueError(f"kind={kind!r} is neither 'strong' nor 'weak'")
    if not seconds or min(seconds) < 1 or min(seconds.values()) <= 0:
        raise ValueError(f"ranks and seconds must be positive, and there at all: {seconds}")
    # the perfect time, over the measured one
    raise NotImplementedError("exercise 4.1: about 3 lines")


# %%
scaling_efficiency = check(scaling_efficiency)

# %% [markdown]
# ### 4.2 Exposed communication
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 7 lines
#
# *After this you can compute from a trace how much communication nothing hides.*
#
# Bytes that travel while the rank computes cost little. What makes a step longer is **exposed** communication: the time in which bytes travel and the
# rank computes nothing. Count this first, but remember that it isn't the whole cost: as you saw in lab 03, a hidden transfer still slows computing by
# some percent.
#
# `Timeline` records what a rank does as a list of events. `event.kind` is "compute", "communication", "loader" or "wait". `event.start` and
# `event.end` are in seconds, on one clock for all ranks. Events can overlap, because gloo has its own threads and NCCL has streams. Here is the step
# from part 3:

# %%
from ranklab.meter import Timeline


def profiled():
    ddp_step()  # connections are opened
    with Timeline() as timeline:
        ddp_step()
    return timeline.events


events = launch(profiled, ranks=2)[0]
by_length = sorted(events, key=lambda event: event.start - event.end)
longest = [[event for event in by_length if event.kind == kind][:3]
           for kind in ("compute", "communication", "wait")]
for event in sorted(sum(longest, []), key=lambda event: event.start):
    print(f"{event.kind:14} {1e3 * (event.start - events[0].start):7.2f} to "
          f"{1e3 * (event.end - events[0].start):7.2f} ms   {event.lane:10} {event.name}")

# %% [markdown]
# **Predict.** Forward and backward take 300 ms. The all-reduces take 160 ms in all: they run one after the other without gaps, and the first one
# starts 80 ms before backward ends. How long is a step? (The optimizer takes no time.)

# %%
check(exposed_step_ms=...)

# %%
def exposed_communication(events, kind="communication"):
    """Return the seconds in which a rank communicates and does not compute, on any of its lanes.

    With kind="loader": seconds in which it loads data and does not compute. Events may overlap or
    be nested; no moment counts twice.
    """
    edges = sorted((time, change, event.kind) for event in events
                   for time, change in ((event.start, 1), (event.end, -1)))
    running, exposed, last_time = {kind: 0, "compute": 0}, 0.0, 0.0
    # Walk along the edges; other kinds are not counted. (Do not call the loop's variable `kind`.)
    raise NotImplementedError("exercise 4.2: about 7 lines")


# %%
exposed_communication = check(exposed_communication)

# %% [markdown]
# ### 4.3 Diagnose
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 13 lines
#
# *After this you can tell from a trace why a job is slow: the network, the loader or a rank.*
#
# Here are four jobs. One is healthy, and three are slow, each for a different reason. DDP, the ranks, the loader and the traces are real. Only the
# large layers and the slow link are emulated: they sleep, so that two ranks on two cores don't get in each other's way.

# %%
from ranklab.ddp import situations, steps_of

recordings = situations.record()
jobs = {f"job {letter}": [timeline.events for timeline in timelines]
        for letter, timelines in zip("DCBA", recordings.values())}
plots.situations(dict(sorted(jobs.items())))

# %% [markdown]
# In which job does a rank wait for its data? In which one for another rank, and in which one for the network? ("Waits" in the picture: the main
# thread is blocked until a transfer is done.)
#
# There is a trap: **communication looks long in two of them**. When one rank is late, all *others* wait for it in their all-reduce, so their traces
# look as if the network were slow. So ask the rank that communicates *least*. If even that rank waits for the network, the network is slow.

# %%
def diagnose(timelines):
    """Find why ranks are slow, given the events of rank 0, rank 1, ...; return (verdict, shares).

    shares: each a fraction of a step:
        "loader-bound"         loading while nothing is computed: the mean over ranks
        "communication-bound"  exposed communication of the rank that has the least of it
        "straggler"            computing and loading of the busiest rank, minus the mean of the
                               other ranks; 0.0 with a single rank. Computing: the sum of
                               e.end - e.start, since a Timeline has already merged nested ops
    verdict: the name of the largest share; "healthy" if that share is below a quarter.
    """
    steps = [steps_of(events) for events in timelines]
    if not steps or not all(steps):
        raise ValueError(f"steps found on each rank: {[len(rank_steps) for rank_steps in steps]}; "
                         "a diagnosis needs one or more everywhere")

    def medians(measure):  # of each rank the median over its steps
        return [median(measure(step) for step in rank_steps) for rank_steps in steps]

    duration = max(medians(lambda step: max(e.end for e in step) - min(e.start for e in step)))
    # the `medians` of each rank, by your exposed_communication -> three shares -> the verdict
    raise NotImplementedError("exercise 4.3: about 13 lines")


# %%
diagnose = check(diagnose)

# %%
for name, timelines in sorted(jobs.items()):
    verdict, shares = diagnose(timelines)
    print(f"{name}: {verdict:20}", {kind: f"{share:.0%}" for kind, share in shares.items()})

# %% [markdown]
# You can also put all ranks into one file and look at it in [Perfetto](https://ui.perfetto.dev), in your browser. The file stays on your machine.

# %%
from pathlib import Path

from ranklab.meter import merged_trace

trace = Path("../build/straggler.json")  # a folder that git ignores
trace.parent.mkdir(exist_ok=True)
merged_trace(recordings["straggler"], trace)
print(f"{trace}: {trace.stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# On GPUs you have three more tools.
#
# - **`nvidia-smi dmon -s u`** prints the utilisation once a second: the share of the time in which *some* kernel ran. A kernel of NCCL that only
#   waits for another rank counts too, so a high number proves nothing. A low number or a sawtooth proves that the GPU stalls, often because of the
#   loader. Power (`-s p`) says more.
# - **`NCCL_DEBUG=INFO`**: read the lines about channels, near the start of the log. `via NET/IB` is InfiniBand or RoCE; `via NET/Socket` is TCP. `via P2P` is GPU to GPU; `via SHM` goes through the host's memory.
#   `via NET/IB/0/GDRDMA` goes from GPU memory straight to the adapter; without `GDRDMA` it goes through the host.
# - **NVTX and Nsight Systems**: `with torch.cuda.nvtx.range("forward"):` names a phase. Call `torch.cuda.profiler.start()` after ten steps and
#   `stop()` a few steps later. Then
#   `nsys profile -t cuda,nvtx,osrt --capture-range=cudaProfilerApi --capture-range-end=stop -o step torchrun --nproc-per-node 4 train.py` records
#   only those steps. A range shows when Python *asked* for the work. The row of kernels shows when the GPU did it.

# %% [markdown]
# ### 4.4 Half the bytes
# > difficulty 2/5 · importance 4/5 · 10 minutes · about 3 lines
#
# *After this you can write a comm hook for DDP that sends half the bytes.*
#
# If the network is slow, make the gradients smaller. DDP lets you replace its all-reduce with a **comm hook** of your own. DDP calls the hook as soon
# as the gradients of a bucket are there, and the hook returns a *future*: an object that will hold the mean over ranks later, while backward goes on.
# You get a future from an all-reduce with `async_op=True`: its handle has `get_future()`. Then `future.then(f)` gives you the next future. It calls
# `f` with the finished one, whose `value()` is a list of one tensor, and holds what `f` returns.
#
# The trap is float16's range, because you can fall off both ends. Its largest number is 65504, so divide *before* the cast and the sum, not after.
# Its smallest is 6e-8, and anything below half of that becomes 0. Dividing first makes this end worse: on 4 ranks you lose all gradients below
# 1.2e-7. Loss scaling (lab 01) keeps gradients away from the lower end. bfloat16 has neither problem.
#
# **Predict.** ResNet-50, 25.6 million parameters, 4 ranks, float16. How many megabytes does each rank send in a step?

# %%
check(fp16_megabytes=...)

# %%
def compress_fp16_hook(group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket's gradients over ranks, sent as float16 in one all-reduce.

    DDP has several buckets, and may pass the next one while this one is being sent.
    Returns: a future whose value is the bucket's buffer, which by then holds the means.
    """
    buffer = bucket.buffer()  # the flat gradient, float32
    # future.then(f): f gets the finished future, whose value() is a list of one tensor
    raise NotImplementedError("exercise 4.4: about 3 lines")


# %%
compress_fp16_hook = check(compress_fp16_hook)

# %% [markdown]
# (The second argument must be *called* `bucket`, because torch looks for that name when you register the hook. torch has a `bf16_compress_hook` too,
# but it runs on GPUs only. bfloat16 has float32's range, but three bits less precision than float16.)
#
# **How many ranks can add 16 bits?** A ring adds one rank after the other, and rounds the partial sum at every hop (NCCL issue 1026). In bfloat16 a
# sum of ones stops at 256, because 256 + 1 is rounded to 256. Real gradients are not all equal, so they lose less, but the error grows with the
# number of ranks. One user reported that bf16 sums trained well on 96 GPUs, while on 384 training was unstable until they summed in float32 (PyTorch
# issue 106395, with FSDP). So on hundreds of ranks sum in float32, as DDP does without a hook.
#
# ### 4.5 One percent of the entries
# > difficulty 3/5 · importance 3/5 · 12 minutes · about 5 lines
#
# *After this you can send 1% of a gradient and lose none of it, by error feedback.*
#
# Most entries of a gradient are almost zero. So send only the k largest, together with their places. And the others? Keep them and add them to the
# next gradient. This is called **error feedback**. Without it, small but steady gradients would never get through.
#
# **Predict.** ResNet-50 on 4 ranks, 1% of the entries. A value takes 4 bytes, and so does its place. An all-gather gives every rank the picks of all
# ranks. How many megabytes does each rank send?

# %%
check(top_k_megabytes=...)

# %% [markdown]
# **Predict.** The more ranks, the more bytes each rank sends in an all-gather, while in an all-reduce the bytes barely grow. At how many ranks does
# top-k 1% send as much as the plain all-reduce?

# %%
check(top_k_break_even=...)

# %%
def top_k_compress(gradient, error, k):
    """Split gradient + error into its k largest entries and the rest; inputs stay unchanged.

    Nothing is lost: the values at their indices plus the new error are gradient + error.
    Returns: (values, indices, error): the k entries of largest absolute value, their indices in the
        flattened tensor, and all other entries, to be added in the next step. The error has the
        gradient's shape, even if it is not contiguous. k may exceed the number of entries.
    """
    # add, choose, keep the others
    raise NotImplementedError("exercise 4.5: about 5 lines")


# %%
top_k_compress = check(top_k_compress)

# %% [markdown]
# ### 4.6 The same bytes, a lower loss
# > difficulty 4/5 · importance 4/5 · 30 minutes · about 20 lines · open: no recipe
#
# *After this you can design a gradient compression for a given number of bytes, and judge it by its loss.*
#
# Deep Gradient Compression (Lin et al. 2018) sends 0.1% of the entries. In our top-k each of them takes 8 bytes, which is a lot for one number.
# Write a hook that sends no more bytes than top-k 0.1%, but trains the model of section 6 to a lower loss.
#
# | given | |
# |---|---|
# | `bucket.buffer()`, `bucket.parameters()` | the flat gradient, and the parameters in its order |
# | `top_k_bytes(parameters, 0.001)` | the budget: bytes to each other rank |
# | `finished(buffer)` | a future that already holds `buffer`, for a hook that waits for its collectives itself |
# | `dist.all_gather_single(gathered, mine, group=group)` | `gathered` is R times as long as `mine` |
# | `x.view(torch.uint8)` | the bytes of `x`: gloo can't send 16-bit integers, but it can send bytes |

# %%
from ranklab.ddp import TopK, compress_to_budget as library_hook
from ranklab.ddp import finished, top_k_bytes


# %%
def compress_to_budget(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket's gradients over ranks, approximately and in place, within a byte budget.

    In each step a rank sends at most (R-1) * top_k_bytes(bucket.parameters(), 0.001) bytes. All
    ranks get the same result, to the last bit.
    state   a dict for each model, in which you may keep anything. At first it is empty, or holds
            the group: state.get("group")
    budget  all bytes count, in every step including the first: indices, values, scales. An
            all-gather sends (R-1) times what a rank has, an all-reduce 2 (R-1)/R of it. Start your
            collectives in the hook itself, because collectives started elsewhere are not counted
    result  what is not sent, including rounding errors, is sent later. If a gradient stays the
            same, the mean of 60 results differs from the ranks' mean by at most 60% of its norm; in
            a bucket of one number, the mean of 8 results by at most 0.1%. If zeros follow a
            gradient, the sum of 60 results differs by at most 0.5% (55 numbers, 164 zeros), or 10%
            (four numbers, 69,996 zeros). Zeros stay zeros. If one rank has a NaN, all ranks get a
            NaN or an infinity in this step, and later steps may do anything. 100,000 stays finite.
            A bucket has one number or millions, and DDP makes new buckets in its second step. The
            check always uses the same numbers
    score   the training run of section 6, seed 0, 50 steps on 2 ranks: the held-out loss must be
            0.03 below the loss of top-k 0.1%
    """
    raise NotImplementedError("exercise 4.6: about 20 lines")


# %%
compress_to_budget = check(compress_to_budget)

# %% [markdown]
# Now send the same gradient of 10,000 numbers again and again. How much of it has come through after 10, 50 and 250 steps with top-k 0.1%, with the
# library's hook, and with yours?

# %% tags=["nbval-check-output"]
def come_through(state, hook, steps=(10, 50, 250)):
    model = DistributedDataParallel(nn.Linear(10_000, 1, bias=False).to(device()))
    model.register_comm_hook(state, hook)
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(device()) ** 3
    total, shares = torch.zeros_like(x), []
    for step in range(1, 1 + max(steps)):
        model.zero_grad()
        model(x).backward()  # the gradient of the weight is x
        total += model.module.weight.grad[0]
        if step in steps:
            shares.append(1 - ((total / step - x).norm() / x.norm()).item())
    return shares


for name, state, hook in (("top-k 0.1%", TopK(0.001), TopK.hook), ("library", {}, library_hook),
                          ("yours", {}, compress_to_budget)):
    shares = launch(come_through, state, hook, ranks=2)[0]
    print(f"{name:11}", *(f"{share:6.0%}" for share in shares))

# %% [markdown]
# ### Further
#
# Two more exercises, also checked. They aren't part of the 135 minutes, and the lab runs without them.

# %% [markdown]
# #### `power_sgd`
# > difficulty 4/5 · importance 3/5 · 15 minutes · about 8 lines
#
# With top-k every rank picks *different* entries, so they can't be summed on the way. Thin matrices can. The gradient of a weight is a matrix M (n x
# m), and we approximate it by P Q^T, where P and Q have only r columns. One step of **power iteration** finds them. First P = M Q, summed over ranks
# and made orthonormal, so that P P^T projects onto its columns. Then Q = M^T P, averaged over ranks. Each step starts from the Q of the last one (a
# **warm start**): gradients change slowly, so the iteration simply goes on from step to step. Error feedback works as before.
#
# **Predict.** A weight of 4096 x 1024, rank 4. How many times fewer numbers travel?

# %%
check(thin_times=...)

# %%
def power_sgd(matrix, q, error, group=None):
    """Approximate the mean over ranks of matrix + error by a matrix of the rank r of `q`.

    Inputs stay unchanged. `q` must be the same on every rank.
    Returns: (approximation, q, error): q is the starting point for the next step; error is this
        rank's matrix + error, minus the approximation.
    Shape: (n, m), (m, r), (n, m) -> (n, m), (m, r), (n, m); for a batch (b, n, m), ...
    Cost: two all-reduces, for any number of matrices.
    """
    target = matrix + error
    # p (n, r), then q (m, r); torch.linalg.qr(p).Q is orthonormal
    raise NotImplementedError("exercise power_sgd: about 8 lines")


# %%
power_sgd = check(power_sgd)

# %% [markdown]
# Watch the warm start at work. We approximate one fixed matrix again and again, each time from the last Q, without error feedback. The first number
# is the best that any matrix of rank 2 can do.

# %% tags=["nbval-check-output"]
def approach(steps=8, rank=2):
    generator = torch.Generator().manual_seed(0)
    decay = torch.diag(0.7 ** torch.arange(16.0))
    matrix = torch.randn(32, 16, generator=generator) @ decay
    q, error = torch.randn(16, rank, generator=generator), torch.zeros_like(matrix)
    errors = []
    for _ in range(steps):
        approximation, q, _ = power_sgd(matrix.to(device()), q.to(device()), error.to(device()))
        errors.append(((approximation.cpu() - matrix).norm() / matrix.norm()).item())
    best = (torch.linalg.svdvals(matrix)[rank:].norm() / matrix.norm()).item()
    return errors, best


errors, best = launch(approach, ranks=2)[0]
print(f"best possible {best:.3f};", "steps:", *(f"{error:.3f}" for error in errors))

# %% [markdown]
# #### `DiLoCo`
# > difficulty 3/5 · importance 4/5 · 25 minutes · about 20 lines
#
# Compression sends less in each step. You can also send less **often**: every rank takes H steps alone, with an optimizer of its own, and only then do
# the ranks communicate. Local SGD averages their parameters. DiLoCo (Douillard et al. 2023) treats the mean of how far the ranks have moved as a
# gradient, and passes it to an **outer optimizer**, SGD with Nesterov momentum. In the paper eight workers, with AdamW inside, communicate 500 times
# less than synchronous training and learn as well.
#
# **Predict.** Eight sites train a model of 1 billion parameters in float32. A step computes for 1 s. Each site has a link of 1 Gbit/s, and a ring goes
# through all of them. How large must H be, so that a tenth of the time is communication?

# %%
check(local_steps=...)

# %% [markdown]
# **Your target:** all parameters right after each step, one all-reduce every H steps, and inner states that never leave their rank.

# %%
class DiLoCo:
    """Step the inner optimizer alone; every `every` steps take one outer step with all ranks.

    inner: this rank's optimizer, over parameters of one dtype that are equal on all ranks at first.
        Its state stays on its rank, and outer steps leave it alone.
    every: H, the local steps between two outer steps.
    Outer step: `delta` is the outer parameters (those of the last outer step) minus this rank's,
        averaged over ranks. It is the gradient of SGD with Nesterov momentum:
        velocity = momentum * velocity + delta; outer -= lr * (delta + momentum * velocity).
        Then every rank continues from the outer parameters.
    Raises: ValueError if `every` is less than 1.
    Cost: one all-reduce of the parameters' bytes every H steps: DDP's bytes / H. On every rank two
        more numbers for each parameter: the outer parameters and the velocity.
    """

    def __init__(self, inner, every, lr=0.7, momentum=0.9, group=None):
        # inner.param_groups is a list of dicts, whose "params" are the parameters
        raise NotImplementedError("exercise DiLoCo: about 20 lines")

    @torch.no_grad()
    def step(self):
        """Take one inner step, and the outer step if it is due."""


# %%
DiLoCo = check(DiLoCo)

# %% [markdown]
# With H = 1, SGD inside, and an outer rate of 1 without momentum, the mean of p - rate * gradient is p - rate * (mean gradient): that is DDP. Without
# momentum and with a larger H it is torch's `PostLocalSGDOptimizer`, which averages parameters. (Its `warmup_steps` only shift the first average to
# step H.) Are the weights equal? Not to the last bit, because delta is the difference of two rounded parameters.

# %%
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from ranklab.meter import Traffic


def train_alone(make, in_ddp, steps=8):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device())
    model = DistributedDataParallel(layers) if in_ddp else layers
    inner = torch.optim.SGD(layers.parameters(), 0.1)
    trainer, sent = make(inner), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        inner.zero_grad()
        with Traffic() as traffic:
            model(torch.randn(16, 64, generator=generator).to(device())).square().mean().backward()
            trainer.step()
        sent.append(traffic.sent_bytes)
    return [p.detach().cpu() for p in layers.parameters()], sent


def averaged(inner):
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(4, warmup_steps=3))


pairs = {"H = 1 and DDP": (lambda inner: DiLoCo(inner, 1, 1.0, 0.0), lambda inner: inner, True),
         "H = 4 and torch's averages": (lambda inner: DiLoCo(inner, 4, 1.0, 0.0), averaged, False)}
for name, (trainer, peer, in_ddp) in pairs.items():
    (weights, sent), (peer_weights, _) = (launch(train_alone, make, ddp, ranks=4)[0]
                                          for make, ddp in ((trainer, False), (peer, in_ddp)))
    distance = max((a - b).abs().max().item() for a, b in zip(weights, peer_weights))
    print(f"{name}: at most {distance:.1e} apart; bytes sent in each step {sent}")
    assert distance < 1e-5

# %% [markdown]
# What does it do to the loss? The GPT of section 6 learns with AdamW on each rank, for 96 steps on the same batches:

# %%
from ranklab.ddp import compare_trainers

trainers = {"DDP": None, "DiLoCo, H = 4": lambda inner: DiLoCo(inner, 4),
            "DiLoCo, H = 16": lambda inner: DiLoCo(inner, 16),
            "averages, H = 16": lambda inner: DiLoCo(inner, 16, 1.0, 0.0)}
plots.loss_by_bytes(compare_trainers(trainers), "a GPT of one layer, 2 ranks, 96 steps")

# %% [markdown]
# Look at the right end of each line: all have seen the same batches. H = 4 is the worst, though it communicates most. A momentum of 0.9 makes the outer
# steps up to 10 times as long, and with H = 4 they come too often for this small run: it overshoots. (0.7 and 0.9 are also OpenDiLoCo's defaults, with
# H = 500.) So the outer rate and momentum have to suit H, as a learning rate has to suit the batch.
#
# torchft (not installed here) has DiLoCo for runs in which groups of ranks may fail. It can also cut the model into fragments and send them at different
# times, while inner steps continue, so that not all bytes travel at once. Two of its fixes are worth remembering: the sign of delta
# (meta-pytorch/torchft#233), and outer parameters that a recovering rank did not load (#238). A checkpoint needs the outer parameters and the velocity,
# and the inner states of *all* ranks, because they differ.

# %% [markdown]
# ## 5. The real thing
#
# torch comes with such hooks: `fp16_compress_hook`, and PowerSGD with its `PowerSGDState`. Here your fp16 hook and torch's run in torch's DDP, with
# the same model and the same batches:

# %%
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from ranklab.meter import Traffic


def train(hook, steps=4):
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    model = DistributedDataParallel(nn.Sequential(*layers).to(device()))
    if hook:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(steps):
        optimizer.zero_grad()
        with Traffic() as traffic:
            model(x.to(device())).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()], traffic.sent_bytes


# %%
runs = {name: launch(train, hook, ranks=4)[0] for name, hook in
        (("float32", None), ("ours", compress_fp16_hook), ("torch's", fp16_compress_hook))}
for name, (weights, sent) in runs.items():
    distance = max((a - b).abs().max().item() for a, b in zip(weights, runs["float32"][0]))
    print(f"{name:8} {sent:6} bytes a step; after four steps at most {distance:.1e} from float32")
for a, b in zip(runs["ours"][0], runs["torch's"][0]):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)

# %% [markdown]
# Both send the same bytes, and the weights are as close as float16 allows. They aren't equal to the last bit, because torch casts first and divides
# afterwards. That has a price that this cell doesn't show: if *one* of four ranks has a gradient of 100,000, torch's hook makes it infinite, and
# yours makes it 25,000.
#
# ## 6. Project
#
# **What does compression cost?** With each hook a GPT learns real text, from the same weights and on the same batches. `compare_hooks` returns the
# bytes of a step and the held-out loss. The hooks run your functions: `TopK` and `PowerSGD` cut a bucket into its parameters, and keep an error for
# each.

# %%
from ranklab.ddp import PowerSGD, compare_hooks

hooks = {"float32": None, "fp16": lambda: (None, compress_fp16_hook)}
for feedback, name in ((True, ""), (False, ", no feedback")):
    hooks[f"top-k 1%{name}"] = lambda f=feedback: (
        TopK(0.01, error_feedback=f, compress=top_k_compress), TopK.hook)
    for rank in (1, 4):
        hooks[f"PowerSGD {rank}{name}"] = lambda r=rank, f=feedback: (
            PowerSGD(r, error_feedback=f, approximate=power_sgd), PowerSGD.hook)
hooks["top-k 0.1%"] = lambda: (TopK(0.001, compress=top_k_compress), TopK.hook)
hooks["budget of 0.1%"] = lambda: ({}, compress_to_budget)


# %%
def show(rows):
    print(f"{'gradients as':24}{'bytes sent a step':>20}{'less':>9}{'held-out loss':>16}")
    for row in rows:
        print(f"{row.name:24}{row.sent:20,}{rows[0].sent / row.sent:8.1f}x{row.loss:16.3f}")


rows = compare_hooks(hooks)
show(rows)

# %%
plots.loss_against_bytes(rows)

# %% [markdown]
# A hollow point is the same compression without error feedback. How much of this is noise? Seeds differ by 0.06 here. Within that, a gradient of which each rank sends one entry in a hundred trains as well as a whole one, for a fiftieth of the bytes. Over three seeds feedback wins by 0.08 to 0.18; only for PowerSGD 4 is the gain, 0.02 to 0.05, within the noise. All of this is plain SGD. With AdamW we found top-k to be worse *with* feedback, because AdamW divides by the size of recent gradients, and a late gradient doesn't match that size.
#
# The table does *not* show time. A QR factorisation and a top-k take computing time, and only a slow network pays it back.

# %% [markdown]
# **Your turn.** Change one thing. Before you run it, write down which row will change most, in bytes and in loss. You could take `"ranks": 3` (an
# all-gather grows with the ranks, an all-reduce barely does), `"steps": 200`, `"seed": 1`, or other names.

# %%
change = {"ranks": 3}
names = ["float32", "top-k 0.1%", "budget of 0.1%"]
show(compare_hooks({name: hooks[name] for name in names}, **change))

# %% [markdown]
# **ResNet-50, from a laptop to several nodes.** On your laptop ResNet-50 has an eighth of its channels. It learns handwritten digits on two ranks,
# from real JPEGs in ImageNet's folder layout, and its gradients go through your `compress_fp16_hook`. On a cluster, the same project with
# `--size full --data FOLDER` trains the full model on ImageNet, with DistributedSampler, loader processes, mixed precision, compile, warm-up and
# cosine.

# %%
import os
import tempfile

from ranklab.data import write_digits
from ranklab.projects import ddp as project

digits = {"data": write_digits(tempfile.mkdtemp()), "epochs": 4, "lr": 0.8, "smallest_crop": 0.5,
          "flip": False, "compress": True, "half": compress_fp16_hook}
print(project.report(project.run(ranks=2, timeout=120, **digits)))

# %% [markdown]
# Now stop a run in the middle of an epoch, as a cluster does with SIGTERM, and resume it from its checkpoint. Does it end like a run that was never
# stopped? Yes, to the last bit:

# %% tags=["nbval-check-output"]
settings = {"model": "resnet18", "images": 512, "held_out": 128, "epochs": 2, "timeout": 60}
path = os.path.join(tempfile.mkdtemp(), "run")
whole = project.run(ranks=2, **settings)
project.run(ranks=2, until=11, checkpoint=path, **settings)
rest = project.run(ranks=2, resume=True, checkpoint=path, **settings)
print(rest["top1"] == whole["top1"], rest["history"].loss[-1] == whole["history"].loss[-1])

# %% [markdown]
# This works because each random crop depends on (seed, epoch, image) only, and the sampler starts where the epoch stopped. On three ranks or more
# the last bits may differ, because DDP rearranges its buckets in its second step, so the first step after a restart adds in a different order.
#
# What do more ranks bring? Your `scaling_efficiency` computes the last column:

# %%
rows = project.scaling(project.LAPTOP, ranks=4, steps=3, efficiency=scaling_efficiency)
print(project.scaling_report(rows))

# %%
plots.scaling(rows)

# %% [markdown]
# ## 7. Measure
#
# How many bytes does a rank send in a step, for a layer of 512 x 512 on four ranks? The table puts the prediction next to the count. Counts are
# exact, so the cell asserts that they are equal.

# %% tags=["nbval-check-output"]
def sent_with(make):
    model = DistributedDataParallel(nn.Linear(512, 512, bias=False).to(device()))
    if make:
        model.register_comm_hook(*make())
    x = torch.randn(8, 512, device=device())
    for _ in range(3):  # in the second DDP rebuilds its buckets, and broadcasts their order
        with Traffic() as traffic:
            model(x).square().mean().backward()
    return traffic.sent_bytes


n = 512 * 512
rows = (("float32", None, 2 * 3 / 4 * 4 * n),
        ("float16", lambda: (None, compress_fp16_hook), 2 * 3 / 4 * 2 * n),
        ("top-k 1%", lambda: (TopK(0.01), TopK.hook), 3 * int(0.01 * n) * 8),
        ("PowerSGD, rank 4", lambda: (PowerSGD(4), PowerSGD.hook), 2 * 3 / 4 * 4 * 4 * 1024))
for name, make, predicted in rows:
    counted = launch(sent_with, make, ranks=4)[0]
    print(f"{name:18} predicted {predicted:12,.0f}   counted {counted:12,}")
    assert counted == predicted

# %% [markdown]
# ## 8. Bug of the lab
#
# A bug of the lab is a program that breaks the idea of its lab and still runs. A colleague says what was seen, but not why. Look, write down why before you open the list of causes, and fix the program in its own cell: then it gives the same numbers as one process, on other numbers of ranks as well, and in a group of only some ranks ([16_clinic](16_clinic.ipynb) has bugs that belong to no single lab, and tools that find them).

# %%
import argparse
import inspect
import re

from ranklab.clinic.look import look
from ranklab.models import GPT, GPTConfig

# %% [markdown]
# ### 8.1 It is always rank 3
# > difficulty 4/5 · importance 4/5 · 25 minutes · about 4 lines
#
# > Losses and weights are right. But four GPUs are not even twice as fast as one. Three of them wait in all_reduce for a good part of each step, and rank 3 never does. We have replaced its card, twice.

# %%
def train_on_functions(steps=2, batch=32, micro=2, longest=1024, seed=0, group=None):
    """Train a small GPT on argparse's functions, `batch` in a step, and try it on the last 24.

    `micro` functions of about one length are worked through together, so that little is padded.
    Each is cut to its first `longest` bytes. A step's gradient is the mean over the tokens of all
    ranks. Returns the weights, the steps' losses and the held-out loss, means over tokens as well;
    the same on every rank.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    functions = re.split(r"\n(?=(?:    )?def )", inspect.getsource(argparse))
    functions = [torch.tensor(list(function.encode()[:longest])) for function in functions]
    torch.manual_seed(seed)
    model = GPT(GPTConfig(n_ctx=longest, n_layer=1, n_head=1, n_embd=16)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def piles_of(texts):
        texts = sorted(texts, key=len)
        return [torch.nn.utils.rnn.pad_sequence(texts[i:i + micro], True, -100).to(device())
                for i in range(0, len(texts), micro)]

    def loss_of(pile):
        loss = model(pile[:, :-1].clamp(min=0), pile[:, 1:], "sum")
        return torch.stack([loss, (pile[:, 1:] >= 0).sum()])

    losses = []
    for step in range(steps):
        piles, seen = piles_of(functions[batch * step:batch * step + batch]), 0
        for pile in piles[len(piles) * rank // ranks:len(piles) * (rank + 1) // ranks]:
            both = loss_of(pile)
            both[0].backward()
            seen += both.detach()
        dist.all_reduce(seen, group=group)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= seen[1]
        optimizer.step()
        optimizer.zero_grad()
        losses.append((seen[0] / seen[1]).item())
    piles = piles_of(functions[-24:])
    with torch.no_grad():
        seen = sum(map(loss_of, piles[len(piles) * rank // ranks:len(piles) * (rank + 1) // ranks]))
    dist.all_reduce(seen, group=group)
    return {"weights": dict(model.named_parameters()), "losses": losses,
            "held_out": (seen[0] / seen[1]).item()}


# %% [markdown]
# **Look.** A step takes the same time on all ranks, so the time of a step doesn't show which rank the others wait for. Look at what each rank does before the first all-reduce.

# %%
look(train_on_functions)

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. It has more functions than the other ranks.
# 2. It waits for its data.
# 3. Its card, or its core, is slower than the others.
# 4. Its functions are longer than those of the other ranks.
# 5. Its link to the others is slow.
#
# </details>

# %%
check(clinic_train_on_functions_cause=...)

# %% [markdown]
# **Fixed.** No rank has more than 1.25 times its fair share of the work, in training and in evaluation. Count the work in tokens, padding included, or in FLOPs: it is enough that one of the two is fair. (Why not in seconds? Our own detector did that, and called a healthy rank slow on a busy machine: 12 ms of processor time, where the others had 7 and 8.)

# %%
train_on_functions = check(train_on_functions)

# %% [markdown]
# ## 9. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 04` in a terminal asks these and more, with new numbers each time.

# %% tags=["nbval-check-output"]
questions("04_ddp")

# %% [markdown]
# ## 10. On real GPUs
#
# ```bash
# labs/jobs/torchrun.sh ddp --size full --data imagenet --compile --checkpoint run
# torchrun --nproc-per-node 4 -m ranklab.projects.ddp --size full --scaling --figure scaling.svg
# sbatch labs/jobs/ddp.sbatch
# ```
#
# What changes? The backend is NCCL, and its kernels run on their own stream, so `Timeline` reads kernels and streams instead of threads. Loader
# processes read and decode JPEGs: one core of ours decodes and crops about 450 images of 500 x 375 pixels a second, while an A100 trains on 2,500. So
# a GPU needs six such cores or more, unless you store smaller images or decode on the GPU (DALI). Mixed precision halves activations, but not
# gradients: DDP still sends float32, unless a hook changes that.
#
# What to expect, not measured by us: NVIDIA's ResNet-50 v1.5 for PyTorch (DeepLearningExamples, DGX A100 80 GB, mixed precision) reports 2,470
# images/s on one GPU and 16,621 on eight, which is an efficiency of 84%. With TF32 it is 97%, because computing takes 2.6 times as long for the
# same bytes and images. This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 11. Take with you
#
# 1. 80% efficiency on 64 GPUs pays for 13 that do nothing. Say whether it is strong or weak scaling, and from how many ranks you count.
# 2. A late rank looks like a slow network to all others: where seven ranks show 100 ms of all-reduce and the eighth 10, the transfer takes 10.
# 3. 16 bits halve the bytes and cost almost nothing. Top-k at 1% saves nothing from 100 ranks on, because picks can't be summed; PowerSGD's matrices can.
#
# **What we left out**
#
# - **Elastic training**: ranks that come and go, and restart after a failure. That is lab 14.
# - **Local SGD and its hooks** (`post_localSGD`): average weights now and then, instead of gradients in every step.
# - **1-bit Adam, signSGD, quantised all-reduce**: other ways to trade precision for bytes.
# - **`join` for uneven data, and batch norm over ranks**: you built both in lab 03. torch has them as `Join` and `SyncBatchNorm` (which needs a GPU).
# - **DDP with `torch.compile`**: the project has `--compile`. Its graphs end where the buckets end, so that overlap survives.
#
# Next: [05_horovod](05_horovod.ipynb), the library that made the all-reduce popular. It has the same idea, but it doesn't fill its buckets in a fixed order: it fuses
# whatever is ready.
