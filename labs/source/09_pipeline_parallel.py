# %% [markdown]
# # 09 Pipeline parallelism: split the depth
#
# > 130 minutes · difficulty 4/5 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# Megatron-LM trained a GPT with a trillion parameters on 3,072 A100s (2021, arXiv 2104.04473; a benchmark of some steps, not a whole run). Each of its 128 layers has 7.9 billion parameters. With gradients and Adam, 16 bytes a parameter, one *layer* is 126 GB.
#
# Eight GPUs of a node shared each layer, as in lab 08. Each node had two of the layers (not neighbours: 4.5 says why), so **64 nodes stood in a row**. Only what a layer hands to the next one travels between nodes: 105 MB for a sequence. FSDP would gather 15.7 GB for each layer, again and again.
#
# But while the first node computes, the second one waits. In such a row one node of 64 works at a time, and 98% of the GPUs stand still. Yet they reached 52% of the peak of *all* GPUs, by working in a better order: a **schedule**.
#
# This lab builds on lab 00 (send, receive, deadlocks) and lab 01 (a batch in micro-batches). You write schedules as plain data: printed, checked, drawn and timed before any process exists. Then one executor runs all of them on real ranks.

# %%
import functools
import math
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from ranklab import answer, check, device, hint, launch, questions
from ranklab import pipeline_parallel as pp

# %% [markdown]
# ## 2. Picture

# %%
from ranklab.plots import pipeline_parallel as plots

plots.layers_on_ranks([["embedding", "block 0", "block 1"], ["block 2", "block 3", "block 4"],
                       ["block 5", "block 6", "block 7"], ["block 8", "norm", "head"]])

# %% [markdown]
# A **stage** is a row of layers, and each rank has one. Forward, a stage sends its output to the next rank. Backward, it sends the gradient of its input to the rank before. Weights, gradients and optimizer state stay where they are.
#
# **Predict.** One sequence of 4,096 tokens, width 12,288 (GPT-3's), bf16. How many MB has one message?

# %%
check(pp_message_mb=...)

# %% [markdown]
# ## 3. Smallest working code
#
# Four layers on two ranks, the naive way. Autograd ends where a rank ends, so the gradient is carried over by hand:

# %%
torch.manual_seed(0)
layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
x = torch.randn(8, 4)


def naive():
    rank, batch = dist.get_rank(), x.to(device())
    half = layers[2 * rank : 2 * rank + 2].to(device())
    if rank == 0:
        y = half(batch)
        dist.send(y.detach(), 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, 1)
        y.backward(gradient)
    else:
        hidden = torch.empty_like(batch)
        dist.recv(hidden, 0)
        half(hidden.requires_grad_()).square().mean().backward()
        dist.send(hidden.grad, 0)
    return [p.grad for p in half.parameters()]


# %% [markdown]
# Now the same with **more pieces**. All forwards, then all backwards; gradients add up. New are the two loops, and `/ pieces`, because each loss is a mean:

# %%
def in_pieces(pieces):
    rank, batch = dist.get_rank(), x.to(device())
    half, kept = layers[2 * rank : 2 * rank + 2].to(device()), []
    for piece in batch.chunk(pieces):
        if rank == 1:
            piece = torch.empty_like(piece)
            dist.recv(piece, 0)
        y = half(piece.requires_grad_(rank == 1))
        kept.append((piece, y))
        if rank == 0:
            dist.send(y.detach(), 1)
    for piece, y in kept:
        if rank == 0:
            gradient = torch.empty_like(y)
            dist.recv(gradient, 1)
            y.backward(gradient)
        else:
            (y.square().mean() / pieces).backward()
            dist.send(piece.grad, 0)
    return [p.grad for p in half.parameters()]


# %% tags=["nbval-check-output"]
layers(x).square().mean().backward()
one = [p.grad for p in layers.parameters()]
layers.zero_grad()
for name, work in {"naive": naive, "1 piece": lambda: in_pieces(1),
                   "4 pieces": lambda: in_pieces(4)}.items():
    rank_0, rank_1 = launch(work, ranks=2)
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, rank_0 + rank_1))
    print(f"{name:9} gradients equal one process: {same}")

# %% [markdown]
# Both are schedules. As text, a line for each rank: `F2` is the forward of **micro-batch** 2 (lab 01's word for a piece of the batch), `B2` its backward. `pp.simulate` computes when each could run; here a backward takes twice as long as a forward, and a quarter of the batch a quarter of the time:

# %%
naive_text = """F0 B0
                F0 B0"""
pieces_text = """F0 F1 F2 F3 B0 B1 B2 B3
                 F0 F1 F2 F3 B0 B1 B2 B3"""
plots.several({
    "naive": pp.simulate(pp.parse_schedule(naive_text), forward=4, backward=8),
    "four pieces": pp.simulate(pp.parse_schedule(pieces_text), forward=1, backward=2),
})

# %% [markdown]
# White is waiting: the **bubble**. Half of the time is lost naively, a fifth with four pieces. Memory is that of the whole batch in both, because all forwards come first.

# %% [markdown]
# ## 4. Build it
#
# A schedule is a tuple with one tuple of `Action(kind, stage, micro_batch)` for each rank, in the order in which that rank does them. Kinds are F and B; later I and W, the two halves of B. `pp.schedule_text` prints a schedule, `pp.parse_schedule` reads it, and `pp.problems(schedule, ranks, micro_batches)` says in sentences what is wrong with it.

# %%
from ranklab.pipeline_parallel import Action, schedule_text, simulate
from ranklab.pipeline_parallel.actions import check_counts

# %% [markdown]
# ### 4.1 GPipe
# > difficulty 1/5 · importance 4/5 · 6 minutes · about 5 lines
#
# All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965). Rank s has stage s.

# %%
def gpipe_schedule(stages, micro_batches):
    """A schedule in which each rank does all its forwards, and then all its backwards.

    A tuple with a tuple of Actions for each rank; rank s has stage s. Forwards and backwards are
    both in order of micro-batches: one process adds gradients up in this order, too.
    error  ValueError for less than one stage or micro-batch
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    raise NotImplementedError("exercise 4.1: about 5 lines")


# %%
gpipe_schedule = check(gpipe_schedule)

# %% [markdown]
# Yours, as text and over time. Below the lanes: how many micro-batches' activations a rank holds.

# %% tags=["nbval-check-output"]
print(schedule_text(gpipe_schedule(4, 3)))

# %%
plots.timeline(simulate(gpipe_schedule(4, 8)), "GPipe, 4 stages, 8 micro-batches")

# %% [markdown]
# ### 4.2 The bubble
# > difficulty 2/5 · importance 5/5 · 8 minutes · about 5 lines
#
# `simulate` gives a `Span(rank, action, start, end)` for each action, and so will a real run. The bubble is the part of all ranks' time in which they do nothing, from the first start of all to the last end of all. The white corners count.
#
# At the end of a batch all ranks wait for each other: that is a **flush**. Papers on zero bubble count **without a flush**: a rank that is done goes on to the next batch. Then a rank's time is that from *its own* first start to *its own* last end, and the longest of these counts for all.
#
# **Predict.** Look at the picture above, of 8 micro-batches: how long does each rank wait in all, in forwards and backwards of one micro-batch? How long does it work? With 12 micro-batches, how many percent is the bubble?

# %%
check(pp_bubble_percent=...)

# %%
def bubble_fraction(spans, flush=True):
    """The part of the ranks' time in which they do nothing: 0.2 for a fifth.

    A rank's time is that from the first start to the last end of all ranks. Without a flush it is
    that from its own first start to its own last end, of the rank where that is longest, for all.
    Ranks are those of the spans; their numbers may have gaps.
    """
    raise NotImplementedError("exercise 4.2: about 5 lines")


# %%
bubble_fraction = check(bubble_fraction)

# %% [markdown]
# P stages and M micro-batches: a rank works M times, and waits P - 1 times. So the bubble is **(P - 1) / (M + P - 1)**. By your function, and by this formula:

# %% tags=["nbval-check-output"]
print("micro-batches" + "".join(f"{M:15}" for M in (1, 4, 8, 16, 64)))
for P in (2, 4, 8):
    row = [(bubble_fraction(simulate(gpipe_schedule(P, M))), (P - 1) / (M + P - 1))
           for M in (1, 4, 8, 16, 64)]
    assert all(math.isclose(a, b) for a, b in row)
    print(f"{P} stages     ", *(f"{a:6.1%} {b:6.1%} " for a, b in row))

# %% [markdown]
# GPipe's authors found the bubble small from M = 4P on. But every micro-batch in flight keeps its activations in memory.

# %% [markdown]
# ### 4.3 1F1B
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 7 lines
#
# Why do all forwards first? The last stage can do B0 right after F0. Stage s must wait until micro-batch 0 has been at the end and back, through the P - 1 - s stages after it: so it does that many forwards as a **warm-up**. Then it does *one forward and one backward* in turn, and at the end the backwards that are left (Narayanan et al. 2021, arXiv 2006.09503: PipeDream-Flush).
#
# **Predict.** 8 stages, 64 micro-batches. The activations of how many micro-batches does rank 0 hold at most?

# %%
check(pp_in_flight=...)

# %%
def one_f_one_b_schedule(stages, micro_batches):
    """A schedule in which each rank does, after some forwards, one forward and one backward in
    turn. Rank s never holds more than stages - s micro-batches.

    A tuple with a tuple of Actions for each rank; rank s has stage s. Forwards and backwards are
    both in order of micro-batches; there may be fewer micro-batches than stages.
    error  ValueError for less than one stage or micro-batch
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    raise NotImplementedError("exercise 4.3: about 7 lines")


# %%
one_f_one_b_schedule = check(one_f_one_b_schedule)

# %% [markdown]
# Yours, of the same shape as GPipe's above:

# %%
plots.timeline(simulate(one_f_one_b_schedule(4, 8)), "1F1B, 4 stages, 8 micro-batches")

# %% [markdown]
# The bubble is that of GPipe to the last digit. But rank 0 holds 4 instead of 8, and **that does not grow with M**. So take more micro-batches of the same size, and the bubble shrinks. Yours at M = 64:

# %% tags=["nbval-check-output"]
for name, make in {"GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule}.items():
    schedule = make(8, 64)
    print(f"{name:6} bubble {bubble_fraction(simulate(schedule)):.1%}, held at most on each rank:",
          *pp.in_flight_activations(schedule))

# %% [markdown]
# ### 4.4 The executor
# > difficulty 5/5 · importance 5/5 · 30 minutes · about 22 lines
#
# Now real ranks. `pp.with_messages` puts the sends and receives into a schedule: `SF` sends an output forward, `RF` receives it, `SB` and `RB` do the same with gradients backward.

# %% tags=["nbval-check-output"]
for rank, entries in enumerate(pp.with_messages(one_f_one_b_schedule(3, 2))):
    print(f"rank {rank}:", *entries)

# %% [markdown]
# Here each action names its stage, too: `F1.0` is micro-batch 0 on stage 1. `SF0.1>1`: the output of stage 0 for micro-batch 1 goes to rank 1. `RF1.1<0` is the other end: the input of stage 1. Both only **start** a message (`isend`, `irecv`). The rank waits right before the action that needs it. Waiting at once would be lab 00's deadlock.
#
# `ScheduleRunner` goes through this list and calls your four methods. Follow micro-batch m through stage s: what a rank has of it lies in one of four places.
#
# | place | what lies there |
# |---|---|
# | `self.there["F", s, m]`, or with `"B"` | the input of stage s, or the gradient of its output. A stage puts in what its *neighbour* needs, on whichever rank that is. What is used or sent is popped |
# | `self.kept[s, m]` | (input, output) of stage s, until its backward pops it |
# | `self.leaving` | a list of (handle, tensor) of all sends; the runner waits for them |
# | `self.arriving["F", s, m]`, or with `"B"` | (handle, tensor) of a receive |
#
# `self.take("F", s, m)`, or with `"B"`, is given: it waits for what arrives, or pops what is there. A message names the stage of the rank that sends or receives it: so after `SF` of stage s, `send` takes `there["F", s + 1, m]`, after `SB` `there["B", s - 1, m]`. A W needs nothing from you. The graph of autograd ends at both ends of a stage, as in section 3.

# %%
from ranklab.pipeline_parallel.executor import ScheduleRunner

# %%
class PipelineExecutor(ScheduleRunner):
    """Runs any schedule: the losses and gradients are those of one process.

    self.pieces[m] is (inputs, targets) of a micro-batch. self.stages[s](x, targets) is the output
    of stage s; that of stage self.last is a loss, a sum over targets.
    cost   a message for each micro-batch between stages that are on different ranks, each way;
           a micro-batch's activations are kept from its forward to its backward, and without
           gradients (torch.is_grad_enabled()) not at all
    """

    def forward(self, action):
        """The stage's output is there for the next one; a loss is added to self.loss.

        Stage 0 takes the inputs, which need no gradient. A loss counts self.weight times, which is
        one over the number of targets of the batch.
        """
        _, stage, m = action
        raise NotImplementedError("exercise 4.4, first part: about 9 lines")

    def backward(self, action):
        """Gradients of the stage's weights are added up, and that of its input is there.

        At a loss it begins with self.weight * self.scale (scale is 1 but for fp16). Autograd runs
        inside `with self.later(action):`, which leaves an I's weight gradients for its W; for a
        B it changes nothing.
        """
        _, stage, m = action
        raise NotImplementedError("exercise 4.4, second part: about 9 lines")

    def send(self, message):
        """SF: the stage's output, SB: its input's gradient, is on its way, contiguous; no wait."""
        kind, stage, m, peer = message  # peer: a rank of self.group, isend's group_dst
        raise NotImplementedError("exercise 4.4, third part: about 2 lines")

    def receive(self, message):
        """RF: the stage's input, RB: its output's gradient, is on its way; no wait.

        Its shape is that of self.new_hidden(inputs), an empty tensor.
        """
        kind, stage, m, peer = message  # peer: a rank of self.group, irecv's group_src
        raise NotImplementedError("exercise 4.4, fourth part: about 3 lines")


# %%
PipelineExecutor = check(PipelineExecutor)

# %% [markdown]
# A GPT on four ranks, by your schedules and your executor. `PipelineParallel`, which the training loop sees, cuts the model. Embedding and head are one matrix: the first and the last rank have a copy each, and add up its gradients.

# %%
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.parallel import Parallel
from ranklab.pipeline_parallel.training import PipelineParallel

config = GPTConfig(vocab_size=64, n_ctx=16, n_embd=32, n_layer=6)
tokens = torch.randint(64, (16, 17), generator=torch.Generator().manual_seed(1))


def train(schedule=None):
    torch.manual_seed(0)
    model = GPT(config).to(device())
    parallel = PipelineParallel(schedule=schedule, executor=PipelineExecutor) if schedule \
        else Parallel()
    parallel.apply(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.3), []
    x, y = tokens.to(device())[:, :-1], tokens.to(device())[:, 1:]
    for _ in range(4):
        optimizer.zero_grad()
        share = parallel.forward_backward(lambda x, y: model(x, y, "sum"), x, y, micro_batch=2)
        losses.append(parallel.total(share).item())
        optimizer.step()
    return losses, sum(p.numel() for p in model.parameters())


# %% tags=["nbval-check-output"]
one = launch(train, ranks=1)[0]
for name, schedule in {"one process": None, "GPipe": gpipe_schedule,
                       "1F1B": one_f_one_b_schedule}.items():
    found = launch(train, schedule, ranks=4) if schedule else [one]
    print(f"{name:12}", *(f"{loss:.4f}" for loss in found[0][0]),
          "  parameters on each rank:", *(numbers for _, numbers in found))
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found[0][0], one[0]))

# %% [markdown]
# How long did the ranks wait? With fewer cores than ranks they take turns. But ranks that **sleep** overlap truly (lab 02). So here stages sleep; messages, order and waits are real:

# %%
from ranklab.pipeline_parallel.deferred import WeightQueue
from ranklab.pipeline_parallel.emulated import SleepingStage

UNIT = 0.03  # seconds: F, I and W take one, B two; divided by the stages of a rank


def asleep(schedule):
    queue, place, mine = WeightQueue(), pp.places(schedule), schedule[dist.get_rank()]
    last, costs = max(place), [UNIT * len(schedule) / len(place)] * 3
    stages = {s: SleepingStage(*costs, queue, s == last) for s in {a.stage for a in mine}}
    executor = PipelineExecutor(stages, last, torch.empty_like, weight_queue=queue)
    x = torch.ones(1, device=device())
    dist.barrier()
    executor.run(schedule, [(x, x)] * (1 + max(action.micro_batch for action in mine)))
    return executor.spans


def measure(schedule):
    return [span for of_rank in launch(asleep, schedule, ranks=len(schedule)) for span in of_rank]


# %%
schedule = one_f_one_b_schedule(4, 8)
plots.several({"simulated": simulate(schedule, UNIT, 2 * UNIT), "measured": measure(schedule)},
              "1F1B, simulated and measured", xlabel="seconds")

# %% [markdown]
# ### 4.5 Interleaved
# > difficulty 4/5 · importance 4/5 · 15 minutes · about 10 lines
#
# The bubble is the time in which the pipeline fills and drains. Thin stages fill it sooner. So give each rank V thin (or *virtual*) stages, not neighbours: rank r of P has stages r, r + P, r + 2P, ... A micro-batch goes round V times. Megatron's trillion ran so: node r had layers r and r + 64.
#
# Ranks work in **rounds** of P micro-batches: these P pass the rank's first stage, then its second one, and so on; then come the next P. Backward it is the last stage first. The warm-up is (V - 1) P forwards, and 2 for each rank after this one, but never more than there are; then one forward and one backward in turn (Narayanan et al. 2021, arXiv 2104.04473). Why 2, where 1F1B has 1? If messages took no time, 1 would give the same bubble and hold less. If a message takes a tenth of a forward, P = 8, M = 32 and V = 4 lose 10.5% by 1 and 6.6% by 2.
#
# **Predict.** 8 ranks, 32 micro-batches, 4 stages on each rank. How many percent is the bubble? (A forward of a thin stage takes a quarter.)

# %%
check(pp_interleaved_percent=...)

# %%
def interleaved_schedule(ranks, micro_batches, virtual):
    """A schedule of ranks * virtual stages, 1F1B in rounds; rank r has stages r, r + ranks, ...

    A round is `ranks` micro-batches: they pass the rank's first stage, then its second, and so on;
    backward it is the last stage first. `virtual` is the number of stages on each rank. A tuple
    with a tuple of Actions for each rank; each stage takes the micro-batches in their order.
    Where messages take time, ranks are idle at the ends alone, and hold no more than they must.
    error  ValueError where micro_batches is not a multiple of ranks: a round would have holes; or
           where one of the three is below 1
    """
    check_counts(ranks=ranks, micro_batches=micro_batches, virtual=virtual)
    if micro_batches % ranks:
        raise ValueError(f"micro_batches={micro_batches} must be a multiple of ranks={ranks} "
                         "for the interleaved schedule")
    raise NotImplementedError("exercise 4.5: about 10 lines")


# %%
interleaved_schedule = check(interleaved_schedule)

# %% [markdown]
# The same layers as one, two and four stages a rank; paler boxes are a rank's later stages:

# %%
drawn = {f"{V} stages a rank": simulate(interleaved_schedule(4, 8, V), 1 / V, 2 / V)
         for V in (2, 4)}
plots.several({"1F1B": simulate(one_f_one_b_schedule(4, 8))} | drawn)

# %% [markdown]
# The bubble is (P - 1) / (VM + P - 1). The price is (VP - 1) / (P - 1) times the messages, somewhat more than V, of the same size; and more memory.

# %% [markdown]
# ### 4.6 Your own schedule
# > difficulty 5/5 · importance 4/5 · 25 minutes · about 12 lines · open: no recipe
#
# A linear layer's backward is two products. One gives the gradient of its **input**, for which the stage before waits: I. The other gives the gradient of its **weights**, for which *no rank* waits until the optimizer steps: W. Apart, a W can be done whenever a rank would wait.
#
# Design a schedule with F, I and W, each of which takes one unit of time. Memory limits you: activations are kept until W is done, and no rank may hold more than 1F1B's rank 0 does.

# %%
def zero_bubble_schedule(stages, micro_batches):
    """A schedule of F, I and W, each exactly once for each stage and micro-batch, whose
    bubble is not larger than that of 1F1B.

    A tuple with a tuple of Actions for each rank; rank s has stage s. The check takes many P and M,
    also M < P. It wants pp.problems to find nothing, no rank to hold more than min(P, M)
    micro-batches (pp.in_flight_activations), and compares bubbles where F, I and W take one unit
    each, and B two. It prints yours beside the published ones.
    error  ValueError for less than one stage or micro-batch
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    raise NotImplementedError("exercise 4.6: about 12 lines")


# %%
zero_bubble_schedule = check(zero_bubble_schedule)

# %%
plots.timeline(simulate(zero_bubble_schedule(4, 8)), "Your schedule", ranks=range(4))

# %% [markdown]
# Your score, beside published schedules (ZB-H1 and ZB-V: Qi et al. 2023, arXiv 2401.10241; DualPipeV after DeepSeek-V3, arXiv 2412.19437). *Held* is in micro-batches, of all stages of the rank together:

# %% tags=["nbval-check-output"]
zoo = {"1F1B": one_f_one_b_schedule, "yours": zero_bubble_schedule,
       "ZB-H1": pp.zero_bubble_schedule, "ZB-V": pp.zb_v_schedule,
       "DualPipeV": pp.dualpipe_v}
print(f"{'4 ranks, 8 micro-batches':26} bubble  without a flush  held at most")
for name, make in zoo.items():
    schedule = make(4, 8)
    each = len(pp.places(schedule)) // 4
    spans = simulate(schedule, 1 / each, 2 / each, 1 / each, 1 / each)
    print(f"{name:25} {bubble_fraction(spans):7.1%} {bubble_fraction(spans, flush=False):16.1%}",
          f"{max(pp.in_flight_activations(schedule)) / each:13g}")

# %% [markdown]
# With ZB-H1 each rank waits a third as long, 3 units and not 9, with the memory of 1F1B's rank 0 on *every* rank. The two others have stages in the shape of a **V**:

# %%
plots.several({name: simulate(zoo[name](4, 8), 0.5, 1, 0.5, 0.5) for name in ("ZB-V", "DualPipeV")})

# %% [markdown]
# - **ZB-V.** Rank r has stages r and 2P - 1 - r: a micro-batch goes down all ranks and up again, and its loss is computed on rank 0. Memory is equal on all ranks, and without a flush there is no bubble, where F, I and W take equally long and M is at least 2P - 1. The usual flush comes from clipping, which needs the norm over all stages. The paper steps first, and undoes the step where the norm was too large.
# - **DualPipe** (DeepSeek-V3; here its V form) puts a forward and a backward of *different* micro-batches side by side. On GPUs one computes while the other communicates, which hides the experts' all-to-all (lab 11, planned). That gain cannot be seen here.

# %% [markdown]
# ### Further
#
# Three more, all checked, not in the 130 minutes: stages of equal cost, memory, and PipeDream.

# %% [markdown]
# #### `split_stages`
# > difficulty 3/5 · importance 4/5 · 12 minutes · about 7 lines
#
# The slowest stage sets the pace of all. And layers are not equal: an embedding is a look-up, and a head with a large vocabulary costs as much as several blocks. Memory is unequal, too: under 1F1B the first stage holds P micro-batches, the last one holds one. So Llama 3 405B has 126 layers and not 128: its last stage has one less because of the head's work, and its first one because of memory (arXiv 2407.21783, 3.3.2).

# %%
def split_stages(costs, stages):
    """[range of layers] for each stage, in order, so that the largest sum of costs is smallest.

    Every stage has at least one layer, and every layer is in one stage. Where several splits are
    equally good, any of them is right.
    costs  of each layer, in any unit: of an embedding and a head, too
    error  ValueError for fewer layers than stages, or no stage
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"stages={stages} must be between 1 and the {len(costs)} layers")
    raise NotImplementedError("exercise split_stages: about 7 lines")


# %%
split_stages = check(split_stages)

# %% [markdown]
# A GPT of 14 blocks with a vocabulary of 32,000. `gpt_costs` counts the FLOPs of embedding, blocks and head:

# %% tags=["nbval-check-output"]
from ranklab.pipeline_parallel.stages import gpt_costs, stage_of

costs = gpt_costs(GPTConfig(vocab_size=32000, n_ctx=512, n_embd=512, n_layer=14))
even = [range(4 * stage, 4 * stage + 4) for stage in range(4)]
for name, split in {"even": even, "balanced": split_stages(costs, 4)}.items():
    of_stage = [sum(costs[layer] for layer in stage) / costs[1] for stage in split]
    spans = simulate(one_f_one_b_schedule(4, 16), of_stage, [2 * cost for cost in of_stage])
    print(f"{name:9} layers {[len(stage) for stage in split]}  cost in blocks:",
          *(f"{cost:.1f}" for cost in of_stage), f"  bubble {bubble_fraction(spans):.1%},",
          f"time {max(span.end for span in spans):.0f}")

# %% [markdown]
# #### `in_flight_activations`
# > difficulty 2/5 · importance 3/5 · 6 minutes · about 6 lines
#
# The memory line of the pictures, as one number for each rank. It needs no clock: the order is enough.

# %%
def in_flight_activations(schedule):
    """For each rank the most activations that it holds at once, in those of one stage and
    micro-batch: from its F on until its B is done, or its W, where B is in two halves.
    """
    raise NotImplementedError("exercise in_flight_activations: about 6 lines")


# %%
in_flight_activations = check(in_flight_activations)

# %% [markdown]
# #### `stale_weights`
# > difficulty 3/5 · importance 3/5 · 10 minutes · about 7 lines
#
# PipeDream (Harlap et al. 2018, arXiv 1806.03377) has no flush: each stage updates its weights after **each** backward, and goes on. There is one warm-up for a whole epoch, and no bubble after it. But between the forward of a micro-batch and its backward, others have changed the weights. PipeDream keeps a **stash**: B takes the weights that its F used, so there is a version for each micro-batch in flight.
#
# **Predict.** Four stages. How many versions of its weights does rank 0 hold, the newest one counted?

# %%
check(pp_versions=...)

# %%
def stale_weights(schedule, stash=True):
    """{action: how often its stage's weights were updated before the ones that it uses}, with an
    update after each B.

    With stash, B uses the weights that its own F used. Without, B uses the newest ones. There are
    F and B only; a rank may have several stages.
    """
    raise NotImplementedError("exercise stale_weights: about 7 lines")


# %%
stale_weights = check(stale_weights)

# %% [markdown]
# Four stages, eight micro-batches, by your function. `1/4`: the forward used version 1 of the weights, the backward version 4:

# %% tags=["nbval-check-output"]
for stash in (True, False):
    used = stale_weights(pp.pipedream_schedule(4, 8), stash)
    print("with a stash " if stash else "without one  ", *(f" F{m}/B{m}" for m in range(8)))
    for rank in range(4):
        versions = (f"{used['F', rank, m]}/{used['B', rank, m]}" for m in range(8))
        print(f"  rank {rank}      ", *(f"{both:>6}" for both in versions))

# %% [markdown]
# With a stash a gradient is right, but for a mix of old weights: rank 0's are up to three updates behind, the last rank's none. Without one, backward meets activations of other weights, and the result is the gradient of nothing. On real text, with an update after each micro-batch:

# %%
from ranklab.data import python_text
from ranklab.pipeline_parallel.pipedream import PipeDreamExecutor

text = torch.from_numpy(python_text().train[:200_000].astype("int64"))
starts = torch.randint(len(text) - 33, (40, 4, 1), generator=torch.Generator().manual_seed(0))
windows = text[starts + torch.arange(33)]  # (40 micro-batches, B, T + 1)


class Recorded(PipeDreamExecutor):
    """Its `losses` has that of each micro-batch, on the last rank."""

    losses = ()

    def forward(self, action):
        before = self.loss.clone()
        super().forward(action)
        self.losses += ((self.loss - before).item(),)


# %%
def pipedream(lr, kind):
    torch.manual_seed(0)
    config, rank = GPTConfig(n_ctx=32, n_embd=32, n_layer=6), dist.get_rank()
    model = GPT(config).to(device())
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # not tied over ranks
    stage = stage_of(model, split_stages(gpt_costs(config), 4)[rank])
    optimizer = torch.optim.SGD(stage.parameters(), lr)
    executor = Recorded({rank: stage}, lambda stage: optimizer.step(), 3,
                        lambda x: torch.empty(*x.shape, 32, device=x.device), stash=kind != "none")
    pieces = [(w[:, :-1], w[:, 1:]) for w in windows.to(device())]
    for run in [[piece] for piece in pieces] if kind == "flush" else [pieces]:
        executor.run(pp.pipedream_schedule(4, len(run)), run, weight=1 / run[0][1].numel())
    return executor.losses


# %%
print(f"{'mean loss of micro-batches':38}    1-8   9-16  17-24  25-32  33-40")
for lr in (0.03, 0.1):
    for kind, name in {"flush": "a flush after each, no staleness", "stash": "PipeDream's stash",
                       "none": "without a stash"}.items():
        losses = torch.tensor(launch(pipedream, lr, kind, ranks=4)[3])
        print(f"lr={lr:<5} {name:32}", *(f"{loss:6.3f}" for loss in losses.view(5, 8).mean(1)))

# %% [markdown]
# With small steps the three are alike. With larger ones the run without a stash may end in `nan`; with other seeds it does not. Between the other two, differences are noise. Large models are trained with a flush. 1F1B is PipeDream's order, made synchronous.

# %% [markdown]
# ## 5. The real thing
#
# torch's own is `torch.distributed.pipelining`: a `PipelineStage` for each stage, and a schedule by name. The same GPT, cut in the same places, two steps of SGD on four ranks with 8 micro-batches; by torch, and by our executor:

# %% tags=["nbval-check-output"]
from ranklab.projects.pipeline_parallel import peers

for name in ("1f1b", "interleaved", "zb-v"):
    for tool, step in {"torch": peers.torch_pipelining, "ours": peers.ours}.items():
        losses, messages = peers.losses_by(step, name)
        print(f"{name:12} {tool:6} losses", *(f"{loss:.5f}" for loss in losses),
              "  messages that each rank sends in a step:", *messages)

# %% [markdown]
# The orders are the same, too. torch shows its own by a private function, which may change. Rank 0 of 4, with two stages a rank:

# %%
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

theirs = [str(action) for action in get_schedule_ops("Interleaved1F1B", 4, 8, 2)[0] if action]
print("torch", *theirs[:14])
print("yours", *interleaved_schedule(4, 8, 2)[0][:14])

# %% [markdown]
# torch writes the stage first: `4F0` is our `F4.0`. It leaves weights that two stages share to the user; so here embedding and head are two matrices.

# %% [markdown]
# ## 6. Project
#
# **A GPT through a pipeline, with a bubble monitor.** Your schedule, executor and split train it on the source of Python's library. Then the monitor compares each stage's busy time and the bubble with the formula, and names the slow stage. It looks at an emulated step as well, in which each stage sleeps as long as its FLOPs say.

# %%
from ranklab.projects import pipeline_parallel as project

mine = {"schedule": one_f_one_b_schedule, "executor": PipelineExecutor, "split": split_stages}
print(project.report(project.run(steps=20, **mine)))

# %% [markdown]
# Stages cannot be equal, because blocks and the head cannot be cut. So the measured bubble is larger than the formula's. The simulation with the real costs says how much. Believe the emulated step: in the real one ranks share cores.
#
# **Your turn.** Change one thing. First write down what the monitor will say: the bubble, what is kept, how many messages. Ideas: `micro_batches=16`; your `zero_bubble_schedule`; `functools.partial(interleaved_schedule, virtual=2)`; an even split, `lambda costs, stages: split_stages([1] * len(costs), stages)`; a stage that sleeps twice as long, `slow_stage=2`.

# %%
change = {"slow_stage": 2}
few = {"steps": 4, "compare": False}
print(project.report(project.run(**(mine | few | change))))

# %% [markdown]
# One slow stage makes *all* ranks wait.

# %% [markdown]
# ## 7. Measure
#
# Three ways to the same bubble: the paper's formula, the simulation, and real ranks with stages that sleep. 4 ranks, 8 micro-batches. The third is a clock: on a busy machine sleepers wake late, and it is a few points higher.

# %%
schedules = {
    "GPipe": (gpipe_schedule(4, 8), pp.flush_bubble(4, 8)),
    "1F1B": (one_f_one_b_schedule(4, 8), pp.flush_bubble(4, 8)),
    "interleaved, V=2": (interleaved_schedule(4, 8, 2), pp.flush_bubble(4, 8, V=2)),
    "ZB-H1": (pp.zero_bubble_schedule(4, 8), pp.zb_h1_bubble(4, 8)),
}
print(f"{'':18} formula  simulated  measured")
for name, (schedule, formula) in schedules.items():
    simulated, measured = bubble_fraction(simulate(schedule)), bubble_fraction(measure(schedule))
    print(f"{name:18} {formula:7.1%} {simulated:10.1%} {measured:9.1%}")

# %% [markdown]
# Messages, bytes and activations are counted, with your executor on the GPT of 4.4. A message has B T C numbers. Ranks 0 and 3 send one more: the gradient of the matrix that both have.

# %%
from ranklab.meter import Traffic


class Watched(PipelineExecutor):
    """Its `most` has the largest number of micro-batches that a rank kept at once."""

    most = 0

    def forward(self, action):
        super().forward(action)
        Watched.most = max(Watched.most, len(self.kept))


def counted(make):
    torch.manual_seed(0)
    model = GPT(config).to(device())
    parallel = PipelineParallel(schedule=make, executor=Watched)
    parallel.apply(model)
    x, y = tokens.to(device())[:, :-1], tokens.to(device())[:, 1:]
    with Traffic() as traffic:
        parallel.forward_backward(lambda x, y: model(x, y, "sum"), x, y, 2)
    return traffic.calls["send"], traffic.sent_bytes, Watched.most


# %% tags=["nbval-check-output"]
makes = {"GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule,
         "interleaved": functools.partial(interleaved_schedule, virtual=2)}
piece, tied = 2 * 16 * config.n_embd * 4, 64 * config.n_embd * 4  # bytes
print(f"{'predicted/counted':18} messages of ranks 0-3  {'bytes of rank 0':>18}   kept on each")
for name, make in makes.items():
    schedule = make(4, 8)
    sent = [sum(entry.kind in ("SF", "SB") for entry in entries)
            for entries in pp.with_messages(schedule)]
    predicted = list(zip([n + (rank in (0, 3)) for rank, n in enumerate(sent)],
                         [n * piece + tied * (rank in (0, 3)) for rank, n in enumerate(sent)],
                         in_flight_activations(schedule)))
    found = launch(counted, make, ranks=4)
    assert found == predicted
    messages, kept = (" ".join(f"{p[i]}/{c[i]}" for p, c in zip(predicted, found)) for i in (0, 2))
    sent_bytes = f"{predicted[0][1]:,}/{found[0][1]:,}"
    print(f"{name:18} {messages:23} {sent_bytes:>17}   {kept}")

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 09` in a terminal asks these and more, with other numbers each time.

# %%
questions("09_pipeline_parallel")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# python -m ranklab.projects.pipeline_parallel --schedule interleaved --virtual 2
# torchrun --nproc-per-node 4 -m ranklab.projects.pipeline_parallel --size gpt2-xl --schedule zb-h1
# sbatch labs/jobs/pipeline_parallel.sbatch
# ```
#
# What changes there:
#
# - **The order of messages counts.** On NCCL a message is a kernel that stays until the other end is there. The engine gives `init_process_group` a `device_id`. Then each `isend` and `irecv` of a group waits for *all* that the rank has started before in this group (torch warns of it; pytorch 154132). `pp.with_messages` has one order on all ranks, so no ranks wait in a circle. But a receive whose sender is late holds back a send that is ready, and some of 4.4's overlap is lost. Torch's warning names two ways out: groups of their own for messages, or `dist.batch_isend_irecv`. In torch's pipelining sends and receives together go as one batch; only sends, or only receives, start one by one (2.13, `schedules.py`, `_batch_p2p`).
# - **Streams.** With NCCL `handle.wait()` makes the GPU's *stream* wait, not your program. `self.leaving` keeps a tensor until it has left.
# - **Where the ranks are.** Messages are small beside tensor parallelism's, so pipelines go over the *slow* links, between nodes. Tensor parallelism stays inside a node (lab 12). With tp=8 all ranks of a stage have the same output. Megatron sends an eighth of it through each card, and gathers it over NVLink at the other end (arXiv 2104.04473, section 4.1).
# - **Shapes.** A receive must know its shape. Here every rank has the inputs and sees it there. Where lengths differ and other ranks cannot know them, the shape travels first: Megatron's `variable_seq_lengths`.
# - **FSDP inside a stage** would gather weights for each micro-batch and reduce gradients M times. torch's `PipelineStage` reduces once, at the last backward, and does not reshard after the others.
# - **Sizes.** The bubble wants many micro-batches, the GPU wants large ones, and the batch is limited. Megatron-LM's trillion had 3,072 sequences in a batch and 6 pipelines, 512 for each. In micro-batches of one, 1F1B would lose 63/575 = 11%. Interleaved (section 5.1 of the paper), with V = 2, it is 63/1087 = 5.8%.
# - **The loss is on one rank**, the last stage's. Logging it, or stopping on `nan`, needs a message.
#
# What to expect, from papers and not measured by us: interleaving gave Megatron-LM 10% and more (arXiv 2104.04473), zero bubble up to 23% over 1F1B with about its memory (arXiv 2401.10241). This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 10. What we left out
#
# - **Recomputing activations** (lab 01) inside a stage: less memory for each micro-batch in flight, a third more compute.
# - **Schedules from a solver.** The zero-bubble paper lets a program find the order from measured times of F, I and W. Ours are for equal costs.
# - **Pipelines of tokens** (TeraPipe): pieces along the sequence instead of the batch.
# - **A model that is no row of layers**: what jumps over a stage (skip connections, an encoder's output) must travel with the hidden state.
#
# Next: **10_context_parallel**: the tokens of one sequence over ranks.
