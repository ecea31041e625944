# %% [markdown]
# # 04 DDP: production data parallelism
#
# > 135 minutes · difficulty 3/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL; 4 GPUs for ResNet-50 at full size

# %% [markdown]
# ## 1. Story
#
# A team moves its training from one GPU to four, with the same batch. A step took 0.80 s; now it takes 0.25. The loss falls, and everybody
# is pleased. The bill is for four GPUs.
#
# What is the **efficiency**, in percent: the speed-up that they got, divided by the one that they paid for?

# %%
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranklab import answer, check, device, hint, launch, questions

check(efficiency_percent=...)

# %% [markdown]
# In lab 03 you built DDP. Here you use torch's, as in production. Two questions matter then: **how much time is lost, and to what?** You will read
# the answers from a trace of all ranks. When the answer is "to communication", you will make the gradients smaller, and see what that costs in loss.

# %% [markdown]
# ## 2. Picture

# %%
from ranklab.plots import ddp as plots

plots.production_step()

# %% [markdown]
# This is one step of a job, on two of its ranks. Each part of it can be too slow: the **loader**, which must have the next batch ready; forward; backward,
# which fills the buckets ("back 1" fills bucket 1, "sum 1" is its all-reduce); and the **exposed** part of the all-reduces, which is left when backward is over.

# %% [markdown]
# ## 3. Smallest working code
#
# torch's DDP is one line. The rest of the script stays as it was.

# %%
def ddp_step():
    torch.manual_seed(dist.get_rank())  # different on purpose: DDP broadcasts rank 0's weights
    model = nn.Linear(4, 2).to(device())
    model = DistributedDataParallel(model)
    x = torch.full((8, 4), 1.0 + dist.get_rank(), device=device())
    model(x).square().mean().backward()
    return [p.grad.flatten().tolist() for p in model.parameters()]


seen = launch(ddp_step, ranks=4)
print("rank 0:", seen[0])
print("all ranks have the same gradient:", all(each == seen[0] for each in seen))

# %% [markdown]
# ## 4. Build it
#
# ### 4.1 What did the added ranks bring?
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 3 lines
#
# There are two experiments. **Strong scaling**: the total batch stays, the ranks share it, and the step should get shorter. **Weak scaling**: the batch of
# each *rank* stays, and the step should take as long as before. The efficiency is the share of the perfect speed-up that you got.

# %%
def scaling_efficiency(seconds, kind):
    """{ranks: efficiency} from {ranks: seconds per step}, in the order of ranks. The smallest
    number of ranks is the base: its efficiency is 1.

    kind   "strong": the same total batch, so R ranks should take 1/R of the time;
           "weak": the same batch on each rank, so any number should take the same time
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
# Bytes that travel while the rank computes cost little. What is **exposed** makes the step longer: communication with no computing beside it. (It is the first thing to count, but not the
# whole cost. A hidden transfer slows computing by some percent, as lab 03 says.)
#
# `Timeline` records what a rank did, as a list of events: `event.kind` is "compute", "communication", "loader" or "wait", and `event.start` and `event.end` are seconds on a clock that all
# ranks share. Events overlap: gloo has threads of its own, NCCL has streams. Here is the step of part 3:

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
# **Predict.** Forward and backward take 300 ms. The all-reduces of the buckets take 160 ms, one after the other without gaps, and the first begins 80 ms before backward ends. How long is a step? (The optimizer takes no time.)

# %%
check(exposed_step_ms=...)

# %%
def exposed_communication(events, kind="communication"):
    """Seconds in which a rank communicates and computes nothing, on any of its lanes.

    With kind="loader": seconds in which it loads and computes nothing. Events may overlap, or lie
    inside each other; no moment counts twice.
    """
    edges = sorted((time, change, event.kind) for event in events
                   for time, change in ((event.start, 1), (event.end, -1)))
    running, exposed, before = {kind: 0, "compute": 0}, 0.0, 0.0
    # Walk along the edges; other kinds are not counted. (Do not call the loop's variable `kind`.)
    raise NotImplementedError("exercise 4.2: about 7 lines")


# %%
exposed_communication = check(exposed_communication)

# %% [markdown]
# ### 4.3 Diagnose
# > difficulty 3/5 · importance 5/5 · 20 minutes · about 13 lines
#
# Here are four jobs. Three are slow, each for a different reason; one is healthy. DDP, ranks, loader and traces are real. The large layers and the slow link are emulated by sleeping, so that two ranks on two cores
# do not disturb each other.

# %%
from ranklab.ddp import situations, steps_of

recorded = situations.record()
jobs = {f"job {letter}": [timeline.events for timeline in of_ranks]
        for letter, of_ranks in zip("DCBA", recorded.values())}
plots.situations(dict(sorted(jobs.items())))

# %% [markdown]
# In which job does a rank wait for its data, in which for another rank, in which for the network? ("Waits": the main thread stands still until a transfer is done.)
#
# The trap is that **communication looks long in two of them**. When one rank is late, the *others* wait for it in their all-reduce: in their traces the
# network seems to be slow. So ask the rank that communicates *least*. If even that rank waits for the network, the network is slow.

# %%
def diagnose(timelines):
    """(verdict, shares) from the events of rank 0, of rank 1, ...: why these ranks are slow.

    shares   each a share of a step:
             "loader-bound"         loading while nothing is computed: the mean over ranks
             "communication-bound"  exposed communication, of the rank that has least of it
             "straggler"            computing and loading of the busiest rank, minus the mean of
                                    the other ranks; 0.0 with a single rank. Computing: the sum
                                    of e.end - e.start, since a Timeline has joined nested ops
    verdict  the name of the largest share; "healthy" where that share is below a quarter
    """
    steps = [steps_of(events) for events in timelines]
    if not steps or not all(steps):
        raise ValueError(f"steps found on each rank: {[len(of_rank) for of_rank in steps]}; "
                         "a diagnosis needs one or more everywhere")

    def usual(measure):  # of each rank the median over its steps
        return [median(measure(step) for step in of_rank) for of_rank in steps]

    duration = max(usual(lambda step: max(e.end for e in step) - min(e.start for e in step)))
    # what each rank `usual`ly does, by your exposed_communication -> three shares -> the verdict
    raise NotImplementedError("exercise 4.3: about 13 lines")


# %%
diagnose = check(diagnose)

# %%
for name, of_ranks in sorted(jobs.items()):
    verdict, shares = diagnose(of_ranks)
    print(f"{name}: {verdict:20}", {kind: f"{share:.0%}" for kind, share in shares.items()})

# %% [markdown]
# You can also look at all ranks in one file: open it in [Perfetto](https://ui.perfetto.dev) in your browser (the file stays on your machine).

# %%
from pathlib import Path

from ranklab.meter import merged_trace

trace = Path("../build/straggler.json")  # a folder that git ignores
trace.parent.mkdir(exist_ok=True)
merged_trace(recorded["straggler"], trace)
print(f"{trace}: {trace.stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# On GPUs there are three more things to look at.
#
# - **`nvidia-smi dmon -s u`** prints utilisation each second: the share of the last sample in which *some* kernel ran. An NCCL kernel that
#   only waits for another rank counts as 100%. A low number or a sawtooth proves a stall, often the loader. A high number proves nothing. Power (`-s p`) says more.
# - **`NCCL_DEBUG=INFO`**: read the lines about channels, near the start of the log. `via NET/IB` is InfiniBand or RoCE; `via NET/Socket` is TCP. `via P2P` is GPU to GPU; `via SHM` goes through the host's memory.
#   `via NET/IB/0/GDRDMA` goes from GPU memory straight to the adapter; without `GDRDMA` it goes through the host.
# - **NVTX and Nsight Systems**: `with torch.cuda.nvtx.range("forward"):` names a phase. Call `torch.cuda.profiler.start()` after ten steps and `stop()` a few steps later. Then `nsys profile -t cuda,nvtx,osrt
#   --capture-range=cudaProfilerApi --capture-range-end=stop -o step torchrun --nproc-per-node 4 train.py` records only those steps. Ranges show when Python *asked* for work; the row of kernels shows when the GPU did it.

# %% [markdown]
# ### 4.4 Half the bytes
# > difficulty 2/5 · importance 4/5 · 10 minutes · about 3 lines
#
# If the network is slow, make the gradients smaller. DDP lets you replace what happens to a bucket: a **comm hook** gets the bucket as soon as its gradients are there, and returns a
# *future* that will hold the mean over ranks. Backward goes on meanwhile. The handle of an all-reduce with `async_op=True` has one, `get_future()`; `future.then(f)`
# is the next: `f` gets the finished future, whose `value()` is a list of one tensor, and returns the new value.
#
# The trap is float16 itself, and it has two ends. The largest number is 65504: divide *before* the cast and the sum, not after. But the smallest is 6e-8, and whatever is below half of that becomes 0.
# Dividing first makes this end worse: on 4 ranks all gradients below 1.2e-7 are lost. Loss scaling (lab 01) keeps gradients away from the lower end; bfloat16 has neither end.
#
# **Predict.** ResNet-50, 25.6 million parameters, 4 ranks, float16. How many megabytes does each rank send in a step?

# %%
check(fp16_megabytes=...)

# %%
def compress_fp16_hook(group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The bucket will hold the mean over ranks of its gradients, which travel as float16, in one
    all-reduce. DDP has several buckets, and may hand over the next one while this one travels."""
    buffer = bucket.buffer()  # the flat gradient, float32
    # future.then(f): f gets the finished future, whose value() is a list of one tensor
    raise NotImplementedError("exercise 4.4: about 3 lines")


# %%
compress_fp16_hook = check(compress_fp16_hook)

# %% [markdown]
# (The second argument must be *called* `bucket`: torch looks for that name when you register the hook. torch's own `bf16_compress_hook` runs on GPUs only. bfloat16 has float32's range, and three bits less precision than float16.)
#
# **How many ranks can add 16 bits?** A ring adds one rank after the other, and rounds the partial sum at every hop (NCCL issue 1026). In bfloat16 a sum of ones stops at 256, since 256 + 1 is rounded to 256. Real gradients are not all equal and lose
# less, but the error grows with the ranks. Somebody trained well with bf16 sums on 96 GPUs; on 384 training became unstable until the sums were in float32 (PyTorch issue 106395, with FSDP).
# So on hundreds of ranks sum in float32, as DDP does without a hook.
#
# ### 4.5 One percent of the entries
# > difficulty 3/5 · importance 3/5 · 12 minutes · about 5 lines
#
# Most entries of a gradient are almost zero. Send the k largest, with their places. And the others? Keep them, and add them to the next gradient: **error feedback**. Otherwise small but steady gradients never get
# through.
#
# **Predict.** ResNet-50 on 4 ranks, 1% of the entries. A value has 4 bytes, and so has a place. Every rank gets the picks of all ranks, by an all-gather. How many megabytes does each rank send?

# %%
check(top_k_megabytes=...)

# %% [markdown]
# **Predict.** The bytes of an all-gather grow with the ranks, those of an all-reduce hardly do. With how many ranks does top-k 1% send as much as the plain all-reduce?

# %%
check(top_k_break_even=...)

# %%
def top_k_compress(gradient, error, k):
    """(values, indices, error): the k entries of gradient + error that are largest in size, their
    places in the flattened tensor, and all other entries, for the next step. Inputs unchanged.

    Nothing is lost: the values at their places plus the new error are gradient + error. The error
    has the gradient's shape: any, also one that is not contiguous. k may be more than there are.
    """
    # add, choose, keep the others
    raise NotImplementedError("exercise 4.5: about 5 lines")


# %%
top_k_compress = check(top_k_compress)

# %% [markdown]
# ### 4.6 The same bytes, a lower loss
# > difficulty 4/5 · importance 4/5 · 30 minutes · about 20 lines · open: no recipe
#
# Deep Gradient Compression (Lin et al. 2018) sends 0.1% of the entries, and 8 bytes for each. That is a lot for one entry. Write a hook that sends no more bytes than top-k 0.1%, and trains the model of section 6 to a lower loss.
#
# | given | |
# |---|---|
# | `bucket.buffer()`, `bucket.parameters()` | the flat gradient, and the parameters in its order |
# | `top_k_bytes(parameters, 0.001)` | the budget: bytes to each other rank |
# | `finished(buffer)` | a future that holds `buffer` already, for a hook that waits for its collectives |
# | `dist.all_gather_single(gathered, mine, group=group)` | `gathered` is R times as long as `mine` |
# | `x.view(torch.uint8)` | the bytes of `x`. gloo sends no 16-bit integers, but bytes |

# %%
from ranklab.ddp import TopK, compress_to_budget as library_hook
from ranklab.ddp import finished, top_k_bytes


# %%
def compress_to_budget(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The bucket will hold about the mean over ranks of its gradients, the same on all ranks to the
    last bit. In a step a rank sends at most (R-1) * top_k_bytes(bucket.parameters(), 0.001) bytes.

    state   a dict for each model: keep in it what you like. At first it is empty, or holds the
            "group": state.get("group")
    budget  all bytes count, in each step, also the first: places, values, scales. An all-gather
            sends (R-1) times what a rank has, an all-reduce 2 (R-1)/R of it. Start collectives in
            the hook itself: there they are counted
    result  what is not sent, also by rounding, is sent later. Of a gradient that stays, the mean of
            60 results is at most 60% of its length away from the ranks' mean; in a bucket of one
            number, that of 8 results at most 0.1%. If zeros follow a gradient, the sum of 60
            results is at most 0.5% away (55 numbers, 164 zeros), or 10% (four, 69,996 zeros). Zeros
            stay zeros. A NaN of one rank makes something NaN or infinite on all, in this step; what
            comes after is free. 100,000 stays finite. A bucket has one number or millions, and DDP
            makes new buckets in its second step. The check's numbers are always the same
    score   the training of section 6, seed 0, 50 steps on 2 ranks: the held-out loss must be 0.03
            below that of top-k 0.1%
    """
    raise NotImplementedError("exercise 4.6: about 20 lines")


# %%
compress_to_budget = check(compress_to_budget)

# %% [markdown]
# One gradient of 10,000 numbers, again and again. How much of it has come through after 10, 50 and 250 steps, by top-k 0.1%, by the library's hook, and by yours?

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


for which, state, hook in (("top-k 0.1%", TopK(0.001), TopK.hook), ("library", {}, library_hook),
                           ("yours", {}, compress_to_budget)):
    shares = launch(come_through, state, hook, ranks=2)[0]
    print(f"{which:11}", *(f"{share:6.0%}" for share in shares))

# %% [markdown]
# ### Further
#
# One more, checked as well, not in the 135 minutes. The lab runs without it.

# %% [markdown]
# #### `power_sgd`
# > difficulty 4/5 · importance 3/5 · 15 minutes · about 8 lines
#
# In top-k every rank picks *other* entries, so picks can't be summed on the way. Thin matrices can. The gradient of a weight is a matrix M (n x m). Approximate it by P Q^T, where P and Q have only r columns. One
# step of **power iteration** finds them: P = M Q, summed over ranks and made orthonormal (so that P P^T projects onto its columns); then Q = M^T P, averaged over ranks. Start from the last step's Q (**warm start**): gradients change slowly, so
# the iteration goes on from step to step. Error feedback works as before.
#
# **Predict.** A weight of 4096 x 1024, rank 4. How many times fewer numbers travel?

# %%
check(thin_times=...)

# %%
def power_sgd(matrix, q, error, group=None):
    """(approximation, q, error): the mean over ranks of matrix + error, to the rank r of `q`; the
    q to begin with in the next step; and this rank's matrix + error, minus the approximation.
    Inputs unchanged. `q` must be the same on every rank.

    shape  (n, m), (m, r), (n, m); several matrices at once in front: (b, n, m), ...
    cost   two all-reduces, however many matrices
    """
    wanted = matrix + error
    # p (n, r), then q (m, r); torch.linalg.qr(p).Q is orthonormal
    raise NotImplementedError("exercise power_sgd: about 8 lines")


# %%
power_sgd = check(power_sgd)

# %% [markdown]
# Watch the warm start: one fixed matrix is approximated again and again, each time from the last Q, without error feedback. The first number is the best that rank 2 can do.

# %% tags=["nbval-check-output"]
def approach(steps=8, rank=2):
    generator = torch.Generator().manual_seed(0)
    decay = torch.diag(0.7 ** torch.arange(16.0))
    matrix = torch.randn(32, 16, generator=generator) @ decay
    q, none = torch.randn(16, rank, generator=generator), torch.zeros_like(matrix)
    errors = []
    for _ in range(steps):
        near, q, _ = power_sgd(matrix.to(device()), q.to(device()), none.to(device()))
        errors.append(((near.cpu() - matrix).norm() / matrix.norm()).item())
    best = (torch.linalg.svdvals(matrix)[rank:].norm() / matrix.norm()).item()
    return errors, best


errors, best = launch(approach, ranks=2)[0]
print(f"best possible {best:.3f};", "steps:", *(f"{error:.3f}" for error in errors))

# %% [markdown]
# ## 5. The real thing
#
# torch has hooks of its own: `fp16_compress_hook`, and a `PowerSGDState`. Here are your hook and torch's, with the same model and the same batches, in torch's DDP:

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
seen = {name: launch(train, hook, ranks=4)[0] for name, hook in
        (("float32", None), ("ours", compress_fp16_hook), ("torch's", fp16_compress_hook))}
for name, (weights, sent) in seen.items():
    apart = max((a - b).abs().max().item() for a, b in zip(weights, seen["float32"][0]))
    print(f"{name:8} {sent:6} bytes a step; after four steps at most {apart:.1e} from float32")
for a, b in zip(seen["ours"][0], seen["torch's"][0]):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)

# %% [markdown]
# They send the same bytes, and the weights are as close as float16 allows. They are not equal to the last bit: torch casts first and divides then. So a gradient of 100,000 on *one* of four ranks (not in this cell) is
# infinite in torch's hook, and 25,000 in yours.
#
# ## 6. Project
#
# **What does compression cost?** A GPT learns real text with each hook, from the same weights and on the same batches: `compare_hooks` returns the bytes of a step and the held-out loss. The hooks run your functions. `TopK` and `PowerSGD`
# cut a bucket into its parameters, and keep an error for each.

# %%
from ranklab.ddp import PowerSGD
from ranklab.ddp.quality import compare_hooks

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
# Each hollow point is the same compression without error feedback. (Seeds differ by 0.06 here. Over three seeds feedback wins by 0.08 to 0.18; only for rank 4 the gain, 0.02 to 0.05, is within the noise. This is plain SGD. With AdamW we found top-k worse *with* feedback: AdamW divides by recent
# sizes, and late gradients have other sizes.) The table does *not* show time. A QR factorisation and a top-k cost
# computing time, and only a slow network pays it back.

# %% [markdown]
# **Your turn.** Change one thing. First write down which row changes most, in bytes and in loss. Ideas: `"ranks": 3` (an all-gather grows with the ranks, an all-reduce hardly); `"steps": 200`; `"seed": 1`; other names.

# %%
change = {"ranks": 3}
names = ["float32", "top-k 0.1%", "budget of 0.1%"]
show(compare_hooks({name: hooks[name] for name in names}, **change))

# %% [markdown]
# **ResNet-50, from a laptop to several nodes.** Here it has an eighth of the channels, and learns real JPEGs of handwritten digits in ImageNet's layout, on two ranks. Gradients travel through your `compress_fp16_hook`. The same project with `--size full --data FOLDER`
# trains the full model on ImageNet, with DistributedSampler, loader processes, mixed precision, compile, warm-up and cosine.

# %%
import os
import tempfile

from ranklab.data.image_folder import write_digits
from ranklab.projects import ddp as project

digits = {"data": write_digits(tempfile.mkdtemp()), "epochs": 4, "lr": 0.8, "smallest_crop": 0.5,
          "flip": False, "compress": True, "half": compress_fp16_hook}
print(project.report(project.run(ranks=2, timeout=120, **digits)))

# %% [markdown]
# A run is stopped in the middle of an epoch (on a cluster by SIGTERM), and goes on from its checkpoint. Does it end like the run that was never stopped? Yes, to the last bit:

# %% tags=["nbval-check-output"]
quick = {"model": "resnet18", "images": 512, "held_out": 128, "epochs": 2, "timeout": 60}
path = os.path.join(tempfile.mkdtemp(), "run")
whole = project.run(ranks=2, **quick)
project.run(ranks=2, until=11, checkpoint=path, **quick)
rest = project.run(ranks=2, resume=True, checkpoint=path, **quick)
print(rest["top1"] == whole["top1"], rest["history"].loss[-1] == whole["history"].loss[-1])

# %% [markdown]
# Random crops follow from (seed, epoch, image), and the sampler begins where the epoch was left. On three ranks or more the last bits may differ: DDP sorts its buckets anew in its second step, so the first step after a restart adds in another order.
#
# What do more ranks bring? The efficiency is computed by your `scaling_efficiency`:

# %%
rows = project.scaling(project.LAPTOP, ranks=4, steps=3, efficiency=scaling_efficiency)
print(project.scaling_report(rows))

# %%
plots.scaling(rows)

# %% [markdown]
# ## 7. Measure
#
# How many bytes does a rank send in a step, for a layer of 512 x 512 on four ranks? Here are predictions and counts. Counts are exact, so they are asserted.

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
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 04` in a terminal asks these and more, with new numbers each time.

# %% tags=["nbval-check-output"]
questions("04_ddp")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# labs/jobs/torchrun.sh ddp --size full --data imagenet --compile --checkpoint run
# torchrun --nproc-per-node 4 -m ranklab.projects.ddp --size full --scaling --figure scaling.svg
# sbatch labs/jobs/ddp.sbatch
# ```
#
# What changes: the backend is NCCL, and its kernels run on a stream of their own; `Timeline` reads kernels and streams instead of threads. Loader processes read and decode JPEGs: a core of ours decodes and crops
# about 450 of 500 x 375 pixels a second, and an A100 trains on 2,500. So a GPU needs six such cores or more; or store smaller images, or decode on the GPU (DALI). Mixed precision halves
# activations, not gradients: DDP still sends float32, unless a hook does otherwise.
#
# What to expect, not measured by us: NVIDIA's ResNet-50 v1.5 for PyTorch (DeepLearningExamples, DGX A100 80 GB, mixed precision) reports 2,470 images/s on one GPU and 16,621 on eight: an efficiency of 84%. With TF32 it is 97%: computing takes
# 2.6 times longer, for the same bytes and images. This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 10. What we left out
#
# - **Elastic training**: ranks that come and go, and restart after a failure. That is lab 14 (planned).
# - **Local SGD and its hooks** (`post_localSGD`): average weights now and then, instead of gradients in every step.
# - **1-bit Adam, signSGD, quantised all-reduce**: fewer bytes for less precision, as here, with other methods.
# - **`join` and uneven data, batch norm over ranks**: you built both in lab 03; torch has `Join` and `SyncBatchNorm` (which wants a GPU).
# - **DDP with `torch.compile`**: the project has `--compile`; graphs end where buckets end, so that overlap survives.
#
# Next: **05_horovod**, the library that made the all-reduce popular. It has the same idea, but no buckets made in advance.
