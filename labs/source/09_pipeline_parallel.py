# %% [markdown]
# # 09 Pipeline parallelism: split the depth
#
# > 130 minutes, 33 more with Further, 15 with its bug · difficulty 4/5 · **spine**: 4.1 to 4.3 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# In 2021 Megatron-LM trained a GPT with a trillion parameters on 3,072 A100s (arXiv 2104.04473; a benchmark of some steps, not a whole run). Each of its 128 layers has 7.9 billion parameters. At 16 bytes a parameter, with gradients and Adam, one *layer* is 126 GB.
#
# The eight GPUs of a node shared each layer, as in lab 08. Each node had two layers (not neighbours, and 4.6 says why), so **64 nodes stood in a row**. From node to node they sent only a layer's output: 105 MB for a sequence. FSDP would gather 15.7 GB for each layer, again and again.
#
# But while the first node computes, the second one waits. In such a row one node of 64 works at a time, and 98% of the GPUs are idle. Yet Megatron-LM reached 52% of the peak of *all* GPUs, because its nodes worked in a better order: a **schedule**.
#
# This lab builds on lab 00 (send, receive, deadlocks) and lab 01 (a batch in micro-batches). You write schedules as plain data, so you can print, check, draw and time them before any process exists. Then one executor runs all of them on real ranks.

# %%
import functools
import math
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status
from ranklab import pipeline_parallel as pp

begin("09_pipeline_parallel")

# %% [markdown]
# ## 2. Picture

# %%
from ranklab.plots import pipeline_parallel as plots

plots.layers_on_ranks([["embedding", "block 0", "block 1"], ["block 2", "block 3", "block 4"],
                       ["block 5", "block 6", "block 7"], ["block 8", "norm", "head"]])

# %% [markdown]
# A **stage** is a run of layers, and each rank has one. In forward, a stage sends its output to the next rank. In backward, it sends the gradient of its input to the previous rank. Weights, gradients and optimizer state stay where they are.
#
# **Predict.** One sequence of 4,096 tokens, width 12,288 (GPT-3's), bf16. How many MB is one message?

# %%
check(pp_message_mb=...)

# %% [markdown]
# ## 3. Smallest working code
#
# Here are four layers on two ranks, the naive way. Autograd stops at the end of a rank, so we carry the gradient over by hand:

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
# Now cut the batch into **pieces**: all forwards first, then all backwards, and the gradients add up. Two things are new: the two loops, and `/ pieces`, because each loss is a mean.

# %%
def in_pieces(pieces):
    rank, batch = dist.get_rank(), x.to(device())
    half, activations = layers[2 * rank : 2 * rank + 2].to(device()), []
    for piece in batch.chunk(pieces):
        if rank == 1:
            piece = torch.empty_like(piece)
            dist.recv(piece, 0)
        y = half(piece.requires_grad_(rank == 1))
        activations.append((piece, y))
        if rank == 0:
            dist.send(y.detach(), 1)
    for piece, y in activations:
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
reference = [p.grad for p in layers.parameters()]
layers.zero_grad()
for name, work in {"naive": naive, "1 piece": lambda: in_pieces(1),
                   "4 pieces": lambda: in_pieces(4)}.items():
    rank_0, rank_1 = launch(work, ranks=2)
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(reference, rank_0 + rank_1))
    print(f"{name:9} gradients equal one process: {same}")

# %% [markdown]
# Both are schedules. As text, a schedule has a line for each rank: `F2` is the forward of **micro-batch** 2 (lab 01's word for a piece of the batch), and `B2` is its backward. `pp.simulate` computes when each of them could run. Here a backward takes twice as long as a forward, and a quarter of the batch takes a quarter of the time:

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
# White is waiting time, the **bubble**. The naive way loses half of the time, and four pieces lose a fifth. Both keep the activations of the whole batch, because all forwards come first.

# %% [markdown]
# ## 4. Build it
#
# In code, a schedule is a tuple with one tuple of `Action(kind, stage, micro_batch)` for each rank, in the order in which that rank does them. The kinds are F and B, and later also I and W, the two halves of B. `pp.schedule_text` prints a schedule, `pp.parse_schedule` reads it, and `pp.problems(schedule, ranks, micro_batches)` says in sentences what is wrong with it.

# %%
from ranklab.pipeline_parallel import Action, check_counts, schedule_text, simulate

# %% [markdown]
# ### 4.1 GPipe
# > difficulty 1/5 · importance 4/5 · 6 minutes · about 5 lines
#
# *After this you can write the GPipe schedule of any pipeline, and read it from a picture.*
#
# All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965). Rank s has stage s.

# %%
def gpipe_schedule(stages, micro_batches):
    """Make a schedule in which each rank does all its forwards, then all its backwards.

    Both are in the order of the micro-batches, in which one process adds up gradients.
    Returns: a tuple with a tuple of Actions for each rank; rank s has stage s.
    Raises: ValueError if there is less than one stage or micro-batch.
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    raise NotImplementedError("exercise 4.1: about 5 lines")


# %%
gpipe_schedule = check(gpipe_schedule)

# %% [markdown]
# Here is your schedule, as text and over time. The curves below the lanes show how many micro-batches' activations each rank holds.

# %% tags=["nbval-check-output"]
print(schedule_text(gpipe_schedule(4, 3)))

# %%
plots.timeline(simulate(gpipe_schedule(4, 8)), "GPipe, 4 stages, 8 micro-batches")

# %% [markdown]
# Look at the lower curve: no backward begins before the last forward is over, so rank 0 holds all micro-batches at once.

# %% [markdown]
# ### 4.2 The bubble
# > difficulty 2/5 · importance 5/5 · 8 minutes · about 5 lines
#
# *After this you can compute the bubble of any schedule, from a simulation and by formula.*
#
# `simulate` gives a `Span(rank, action, start, end)` for each action, and so will a real run. The bubble is the share of the ranks' time in which they do nothing. Every rank's time runs from the first start on any rank to the last end on any rank, so the white corners count.
#
# At the end of a batch all ranks wait for each other. This is a **flush**. Papers on zero bubble count **without a flush**: a rank that is done goes on to the next batch. Then a rank's time runs from *its own* first start to *its own* last end, and the longest of these times counts for all.
#
# **Predict.** Look at the picture above, with 8 micro-batches. Count in units of one micro-batch's forward and backward: how long does each rank wait in all, and how long does it work? With 12 micro-batches, what is the bubble, in percent?

# %%
check(pp_bubble_percent=...)

# %%
def bubble_fraction(spans, flush=True):
    """Return the fraction of the ranks' time in which they are idle: 0.2 for a fifth.

    Every rank's time runs from the first start on any rank to the last end on any rank. Without a
    flush, a rank's time runs from its own first start to its own last end, and the longest of these
    counts for all ranks. The ranks are those in `spans`; their numbers may have gaps.
    """
    raise NotImplementedError("exercise 4.2: about 5 lines")


# %%
bubble_fraction = check(bubble_fraction)

# %% [markdown]
# With P stages and M micro-batches, each rank works for M units and waits for P - 1.
#
# > **Take away.** The bubble is **(P - 1) / (M + P - 1)**: with 8 stages 47% for 8 micro-batches, and 18% for 32.
#
# Each pair below is your function's value and the formula's:

# %% tags=["nbval-check-output"]
print("micro-batches" + "".join(f"{M:15}" for M in (1, 4, 8, 16, 64)))
for P in (2, 4, 8):
    row = [(bubble_fraction(simulate(gpipe_schedule(P, M))), (P - 1) / (M + P - 1))
           for M in (1, 4, 8, 16, 64)]
    assert all(math.isclose(a, b) for a, b in row)
    print(f"{P} stages     ", *(f"{a:6.1%} {b:6.1%} " for a, b in row))

# %% [markdown]
# GPipe's authors found the bubble small from M = 4P on. But each micro-batch in flight, between its forward and its backward, keeps its activations in memory.

# %% [markdown]
# ### 4.3 1F1B
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 7 lines
#
# *After this you can write 1F1B, and say how many micro-batches each stage holds.*
#
# Why do all forwards first? The last stage can do B0 right after F0. Stage s must wait until micro-batch 0 has gone through the P - 1 - s stages after it and come back, so it does that many forwards as a **warm-up**. Then it does *one forward and one backward* in turn, and at the end the backwards that are left (Narayanan et al. 2021, arXiv 2006.09503: PipeDream-Flush).
#
# **Predict.** 8 stages, 64 micro-batches. How many micro-batches' activations does rank 0 hold, at most?

# %%
check(pp_in_flight=...)

# %%
def one_f_one_b_schedule(stages, micro_batches):
    """Make a schedule of some forwards on each rank, then one forward and one backward in turn.

    Rank s never holds more than stages - s micro-batches. The bubble is as large as GPipe's.
    Forwards and backwards are each in the order of the micro-batches. There may be fewer
    micro-batches than stages.
    Returns: a tuple with a tuple of Actions for each rank; rank s has stage s.
    Raises: ValueError if there is less than one stage or micro-batch.
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    raise NotImplementedError("exercise 4.3: about 7 lines")


# %%
one_f_one_b_schedule = check(one_f_one_b_schedule)

# %% [markdown]
# Your schedule, for the same stages and micro-batches as GPipe's above:

# %%
plots.timeline(simulate(one_f_one_b_schedule(4, 8)), "1F1B, 4 stages, 8 micro-batches")

# %% [markdown]
# The bubble is exactly GPipe's, and nothing has changed but the order of the same 64 boxes. But rank 0 holds 4 micro-batches instead of 8, and **that number does not grow with M**. So you can take more micro-batches of the same size, and the bubble shrinks. Here are 8 stages with M = 64:

# %% tags=["nbval-check-output"]
for name, make in {"GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule}.items():
    schedule = make(8, 64)
    print(f"{name:6} bubble {bubble_fraction(simulate(schedule)):.1%}, held at most on each rank:",
          *pp.in_flight_activations(schedule))

# %% [markdown]
# > **Spine**: this lab's part ends here. On it goes in [12_hybrid](12_hybrid.ipynb); the rest of this lab is extra.

# %% [markdown]
# ### 4.4 Stages on one rank
# > difficulty 4/5 · importance 5/5 · 18 minutes · about 17 lines
#
# *After this you can run forward and backward stage by stage, in the order of any schedule.*
#
# Now a schedule runs, first with all stages on one rank, so without messages. `F1.0` is micro-batch 0 on stage 1:

# %% tags=["nbval-check-output"]
schedule = pp.interleaved_schedule(1, 2, 2)
print(schedule_text(schedule))

# %% [markdown]
# `ScheduleRunner` goes through this list and calls your `forward` and `backward`. They keep the tensors of stage s and micro-batch m in three places:
#
# | place | what lies there |
# |---|---|
# | `self.activations[s, m]` | (input, output) of the stage, until its backward pops it |
# | `self.activations_out[s, m]` | its output, until the next stage takes it |
# | `self.gradients_out[s, m]` | the gradient of its input, until the previous stage takes it |
#
# The library's executor prints which (s, m) are there after each action. Follow micro-batch 0:

# %%
from ranklab.pipeline_parallel import ScheduleRunner


class Followed(pp.StageExecutor):
    def done(self, action):
        places = self.activations, self.activations_out, self.gradients_out
        print(f"{action} ", *(f"{[*place]!s:16}" for place in places))


def follow():
    print("after activations      activations_out  gradients_out")
    stages = {0: lambda x, _: layers[:2](x), 1: lambda x, _: layers[2:](x).square().sum()}
    Followed(stages, 1, torch.empty_like).run(schedule, [(x, None)] * 2)


launch(follow, ranks=1);

# %% [markdown]
# F1.0 takes what F0.0 left in `activations_out`, and B0.0 what B1.0 left in `gradients_out`. `self.take_activations(s, m)` and `self.take_gradients(s, m)`, which are given, do that. Here s is the stage that takes: `take_activations(1, 0)` returns what F0.0 left. As in section 3, the autograd graph ends at both ends of a stage. An I calls `backward` as well; a W needs nothing from you.

# %%
class StageExecutor(ScheduleRunner):
    """Compute a rank's stages; losses and gradients equal those of one process.

    self.pieces[m] is (inputs, targets) of micro-batch m. self.stages[s](x, targets) returns the
    output of stage s. Stage self.last, perhaps on another rank, returns a loss, a sum over targets.
    Cost: a micro-batch's activations are kept from its forward to its backward; if gradients are
        disabled (torch.is_grad_enabled()), they are not kept at all.
    """

    def forward(self, action):
        """Compute the stage's output: keep it for the next stage, or add it to self.loss.

        Stage 0 takes the inputs, which need no gradient. Add a loss times self.weight, one over the
        number of the batch's targets, to self.loss; self.activations keeps the loss itself.
        """
        _, stage, m = action
        raise NotImplementedError("exercise 4.4, first part: about 9 lines")

    def backward(self, action):
        """Accumulate the gradients of the stage's weights; compute the gradient of its input.

        For a loss, backward begins with the gradient self.weight * self.scale (scale is 1, except
        for fp16).
        """
        _, stage, m = action
        raise NotImplementedError("exercise 4.4, second part: about 8 lines")


# %%
StageExecutor = check(StageExecutor)

# %% [markdown]
# ### 4.5 Messages between ranks
# > difficulty 3/5 · importance 5/5 · 12 minutes · about 6 lines
#
# *After this you can run any schedule on real ranks, with its messages in the right order.*
#
# On several ranks, `pp.with_messages` puts sends and receives into a schedule: `SF` sends an output forward, `RF` receives it, `SB` and `RB` do the same with gradients backward.

# %% tags=["nbval-check-output"]
for rank, entries in enumerate(pp.with_messages(one_f_one_b_schedule(3, 2))):
    print(f"rank {rank}:", *entries)

# %% [markdown]
# `SF0.1>1` sends the output of stage 0 for micro-batch 1 to rank 1. `RF1.1<0` is the other end of this message, the input of stage 1. Both only **start** a message (`isend`, `irecv`). `take_activations` and `take_gradients` wait for it, right before it is needed, because waiting at once would be lab 00's deadlock. An `SF` of stage s pops `activations_out[s, m]`, and an `SB` pops `gradients_out[s, m]`. Three more places:
#
# | place | what lies there |
# |---|---|
# | `self.activations_in[s, m]` | (handle, tensor) of an `RF`, the input of stage s |
# | `self.gradients_in[s, m]` | (handle, tensor) of an `RB`, the gradient of its output |
# | `self.sends` | a list of (handle, tensor) of all sends, for which the runner waits |

# %%
class PipelineExecutor(StageExecutor):
    """Run any schedule, with stages on several ranks.

    Cost: a message for each micro-batch between stages that are on different ranks, each way.
    """

    def send(self, message):
        """Start sending the stage's output (SF) or its input's gradient (SB); do not wait.

        The tensor must be contiguous.
        """
        kind, stage, m, peer = message  # peer: a rank of self.group, isend's group_dst
        raise NotImplementedError("exercise 4.5, first part: about 3 lines")

    def receive(self, message):
        """Start receiving the stage's input (RF) or its output's gradient (RB); do not wait.

        Receive into self.new_hidden(inputs), an empty tensor of the right shape.
        """
        kind, stage, m, peer = message  # peer: a rank of self.group, irecv's group_src
        raise NotImplementedError("exercise 4.5, second part: about 3 lines")


# %%
PipelineExecutor = check(PipelineExecutor)

# %% [markdown]
# Now a GPT on four ranks, with your schedules and your executor. `PipelineParallel` cuts the model, and is all that the training loop sees. Embedding and head are one matrix, so the first and the last rank have a copy each, and add up its gradients.

# %%
from ranklab.models import GPT, GPTConfig
from ranklab.pipeline_parallel import PipelineParallel
from ranklab.trainer import Parallel

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
reference = launch(train, ranks=1)[0]
for name, schedule in {"one process": None, "GPipe": gpipe_schedule,
                       "1F1B": one_f_one_b_schedule}.items():
    results = launch(train, schedule, ranks=4) if schedule else [reference]
    print(f"{name:12}", *(f"{loss:.4f}" for loss in results[0][0]),
          "  parameters on each rank:", *(numbers for _, numbers in results))
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(results[0][0], reference[0]))

# %% [markdown]
# How long did the ranks wait? With fewer cores than ranks they take turns, so we can't tell. But ranks that **sleep** really overlap (lab 02). So here the stages sleep, while the messages, the order and the waits are real:

# %%
from ranklab.pipeline_parallel import SleepingStage, WeightQueue

UNIT = 0.03  # seconds: F, I and W take one, B two; divided by the stages of a rank


def asleep(schedule):
    queue, place, actions = WeightQueue(), pp.places(schedule), schedule[dist.get_rank()]
    last, costs = max(place), [UNIT * len(schedule) / len(place)] * 3
    stages = {s: SleepingStage(*costs, queue, s == last) for s in {a.stage for a in actions}}
    executor = PipelineExecutor(stages, last, torch.empty_like, weight_queue=queue)
    x = torch.ones(1, device=device())
    dist.barrier()
    executor.run(schedule, [(x, x)] * (1 + max(action.micro_batch for action in actions)))
    return executor.spans


def measure(schedule):
    return [span for spans in launch(asleep, schedule, ranks=len(schedule)) for span in spans]


# %%
schedule = one_f_one_b_schedule(4, 8)
plots.several({"simulated": simulate(schedule, UNIT, 2 * UNIT), "measured": measure(schedule)},
              xlabel="seconds")

# %% [markdown]
# The order of the boxes is the same, and messages make the measured run a little longer.

# %% [markdown]
# ### 4.6 Interleaved
# > difficulty 4/5 · importance 4/5 · 15 minutes · about 10 lines
#
# *After this you can say what V virtual stages save in bubble, and cost in messages.*
#
# The bubble is the time in which the pipeline fills and drains, and thin stages fill it sooner. So give each rank V thin (or *virtual*) stages that are not neighbours: rank r of P has stages r, r + P, r + 2P, ... A micro-batch then goes round all ranks V times. Megatron's trillion parameters ran like this: node r had layers r and r + 64.
#
# Ranks work in **rounds** of P micro-batches: these P pass the rank's first stage, then its second one, and so on, and then the next P follow. In backward the last stage comes first. The warm-up is (V - 1) P forwards, plus 2 for each rank after this one, but never more than there are. Then comes one forward and one backward in turn (Narayanan et al. 2021, arXiv 2104.04473). Why 2 for each later rank, when 1F1B adds only 1? If messages took no time, 1 would give the same bubble and hold fewer activations. But if a message takes a tenth of a forward, P = 8, M = 32 and V = 4 lose 10.5% with 1, and 6.6% with 2.
#
# **Predict.** 8 ranks, 32 micro-batches, 4 stages on each rank. What is the bubble, in percent? (The forward of a thin stage takes a quarter of the time.)

# %%
check(pp_interleaved_percent=...)

# %%
def interleaved_schedule(ranks, micro_batches, virtual):
    """Make 1F1B over ranks * virtual stages, in rounds; rank r has stages r, r + ranks, ...

    In a round, `ranks` micro-batches pass a rank's first stage, then its second, and so on; in
    backward its last stage comes first. Each stage takes the micro-batches in order. Even if
    messages take time, ranks are idle only while the pipeline fills and drains, and hold no more
    activations than they must.
    virtual: stages on each rank.
    Returns: a tuple with a tuple of Actions for each rank.
    Raises: ValueError if micro_batches is not a multiple of ranks, because a round would have
        gaps; or if one of the three is below 1.
    """
    check_counts(ranks=ranks, micro_batches=micro_batches, virtual=virtual)
    if micro_batches % ranks:
        raise ValueError(f"micro_batches={micro_batches} must be a multiple of ranks={ranks} "
                         "for the interleaved schedule")
    raise NotImplementedError("exercise 4.6: about 10 lines")


# %%
interleaved_schedule = check(interleaved_schedule)

# %% [markdown]
# The same layers, cut into one, two and four stages a rank. The paler boxes are a rank's later stages:

# %%
timelines = {f"{V} stages a rank": simulate(interleaved_schedule(4, 8, V), 1 / V, 2 / V)
             for V in (2, 4)}
plots.several({"1F1B": simulate(one_f_one_b_schedule(4, 8))} | timelines)

# %% [markdown]
# > **Take away.** With V virtual stages the bubble is **(P - 1) / (V M + P - 1)**: for 8 ranks and 32 micro-batches 5% with V = 4, where it was 18%. The price is more memory, and (VP - 1) / (P - 1) times as many messages of the same size, somewhat more than V.

# %% [markdown]
# ### 4.7 Your own schedule
# > difficulty 5/5 · importance 4/5 · 25 minutes · about 12 lines · open: no recipe
#
# *After this you can fill the bubble with work on weights' gradients that no rank waits for.*
#
# The backward of a linear layer is two matrix products. The first, **I**, gives the gradient of its *input*, and the previous stage waits for that. The second, **W**, gives the gradient of its *weights*, and *no rank* waits for that until the optimizer steps. So once the two are separate, a rank can do a W whenever it would wait.
#
# Design a schedule of F, I and W, where each takes one unit of time. Memory is the limit: activations are kept until W is done, and no rank may hold more than rank 0 does in 1F1B.

# %%
def zero_bubble_schedule(stages, micro_batches):
    """Make a schedule of F, I and W with a bubble no larger than 1F1B's.

    Each of the three occurs exactly once for each stage and micro-batch. The check tries many P
    (stages) and M (micro-batches), M < P included. pp.problems must find nothing, and no rank may
    hold more than min(P, M) micro-batches (pp.in_flight_activations). For the bubbles, F, I and W
    take one unit each, and B takes two. The check prints your bubble next to the published ones.
    Returns: a tuple with a tuple of Actions for each rank; rank s has stage s.
    Raises: ValueError if there is less than one stage or micro-batch.
    """
    check_counts(stages=stages, micro_batches=micro_batches)
    raise NotImplementedError("exercise 4.7: about 12 lines")


# %%
zero_bubble_schedule = check(zero_bubble_schedule)

# %%
plots.timeline(simulate(zero_bubble_schedule(4, 8)), "Your schedule", ranks=range(4))

# %% [markdown]
# See how many of the white corners your pale boxes fill. Here is your score next to published schedules (ZB-H1 and ZB-V: Qi et al. 2023, arXiv 2401.10241; DualPipeV after DeepSeek-V3, arXiv 2412.19437). *Held* is in micro-batches, for all stages of a rank together:

# %% tags=["nbval-check-output"]
zoo = {"1F1B": one_f_one_b_schedule, "yours": zero_bubble_schedule,
       "ZB-H1": pp.zero_bubble_schedule, "ZB-V": pp.zb_v_schedule,
       "DualPipeV": pp.dualpipe_v}
print(f"{'4 ranks, 8 micro-batches':26} bubble  without a flush  held at most")
for name, make in zoo.items():
    schedule = make(4, 8)
    virtual = len(pp.places(schedule)) // 4
    spans = simulate(schedule, 1 / virtual, 2 / virtual, 1 / virtual, 1 / virtual)
    print(f"{name:25} {bubble_fraction(spans):7.1%} {bubble_fraction(spans, flush=False):16.1%}",
          f"{max(pp.in_flight_activations(schedule)) / virtual:13g}")

# %% [markdown]
# With ZB-H1 each rank waits 3 units instead of 9, a third as long. The price: *every* rank needs the memory of 1F1B's rank 0. Our own W once needed more: the gradients that it made carried a graph, which kept alive all that they came from. Schedule, losses and gradients were right, so only weighing the memory after a run showed it. The last two schedules have their stages in the shape of a **V**:

# %%
plots.several({name: simulate(zoo[name](4, 8), 0.5, 1, 0.5, 0.5) for name in ("ZB-V", "DualPipeV")})

# %% [markdown]
# - **ZB-V.** Rank r has stages r and 2P - 1 - r, so a micro-batch goes down all ranks and up again, and its loss is computed on rank 0. Memory is equal on all ranks. Without a flush there is no bubble, as long as F, I and W take equally long and M is at least 2P - 1. The usual reason for a flush is clipping, which needs the norm over all stages. The paper steps first, and undoes the step if the norm was too large.
# - **DualPipe** (DeepSeek-V3; here in its V form) puts a forward and a backward of *different* micro-batches side by side. On GPUs one computes while the other communicates, which hides the experts' all-to-all (lab 11). You cannot see that gain here.

# %% [markdown]
# ### Further
#
# Three more exercises, all checked, that are not part of the 130 minutes: stages of equal cost, memory, and PipeDream.

# %% [markdown]
# #### `split_stages`
# > difficulty 3/5 · importance 4/5 · 12 minutes · about 7 lines
#
# The slowest stage sets the pace of all. And layers are not equal: an embedding is a look-up, while a head with a large vocabulary costs as much as several blocks. Memory is uneven as well, because under 1F1B the first stage holds P micro-batches and the last one holds one. This is why Llama 3 405B has 126 layers instead of 128: its last stage has one less because of the head's work, and its first stage has one less because of memory (arXiv 2407.21783, 3.3.2).

# %%
def split_stages(costs, stages):
    """Split the layers into stages, in order, so that the largest sum of costs is smallest.

    Every stage has at least one layer, and every layer is in one stage. If several splits are
    equally good, any of them is right.
    costs: one for each layer, in any unit; the embedding and the head are layers as well.
    Returns: a list with a range of layers for each stage.
    Raises: ValueError if there are fewer layers than stages, or no stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"stages={stages} must be between 1 and the {len(costs)} layers")
    raise NotImplementedError("exercise split_stages: about 7 lines")


# %%
split_stages = check(split_stages)

# %% [markdown]
# Try it on a GPT of 14 blocks with a vocabulary of 32,000. `gpt_costs` counts the FLOPs of embedding, blocks and head:

# %% tags=["nbval-check-output"]
from ranklab.pipeline_parallel import GPTStage, gpt_costs

costs = gpt_costs(GPTConfig(vocab_size=32000, n_ctx=512, n_embd=512, n_layer=14))
even = [range(4 * stage, 4 * stage + 4) for stage in range(4)]
for name, split in {"even": even, "balanced": split_stages(costs, 4)}.items():
    stage_costs = [sum(costs[layer] for layer in stage) / costs[1] for stage in split]
    spans = simulate(one_f_one_b_schedule(4, 16), stage_costs, [2 * cost for cost in stage_costs])
    print(f"{name:9} layers {[len(stage) for stage in split]}  cost in blocks:",
          *(f"{cost:.1f}" for cost in stage_costs), f"  bubble {bubble_fraction(spans):.1%},",
          f"time {max(span.end for span in spans):.0f}")

# %% [markdown]
# #### `in_flight_activations`
# > difficulty 2/5 · importance 3/5 · 6 minutes · about 6 lines
#
# This is the peak of the memory curves in the pictures, as one number for each rank. You need no clock for it, because the order is enough.

# %%
def in_flight_activations(schedule):
    """Return, for each rank, the most activations that it holds at once.

    Each stage's activations of each micro-batch count as one. They are held from F until B is done,
    or until W is done if B is split into I and W.
    """
    raise NotImplementedError("exercise in_flight_activations: about 6 lines")


# %%
in_flight_activations = check(in_flight_activations)

# %% [markdown]
# #### `stale_weights`
# > difficulty 3/5 · importance 3/5 · 10 minutes · about 7 lines
#
# PipeDream (Harlap et al. 2018, arXiv 1806.03377) has no flush: each stage updates its weights after **each** backward, and goes on. So there is one warm-up for a whole epoch, and no bubble after it. But between the forward of a micro-batch and its backward, other micro-batches change the weights. So PipeDream keeps a **stash** of old weights, and B takes the ones that its F used. That makes one version for each micro-batch in flight.
#
# **Predict.** Four stages. How many versions of its weights does rank 0 hold, including the newest?

# %%
check(pp_versions=...)

# %%
def stale_weights(schedule, stash=True):
    """Return which version of its stage's weights each action uses; each B makes the next version.

    The first version is 0. With stash, B uses the weights that its own F used. Without it, B uses
    the newest ones. The schedule has only F and B; a rank may have several stages.
    Returns: {action: version}.
    """
    raise NotImplementedError("exercise stale_weights: about 7 lines")


# %%
stale_weights = check(stale_weights)

# %% [markdown]
# Here is your function on four stages and eight micro-batches. `1/4` means that the forward used version 1 of the weights, and the backward version 4:

# %% tags=["nbval-check-output"]
for stash in (True, False):
    versions = stale_weights(pp.pipedream_schedule(4, 8), stash)
    print("with a stash " if stash else "without one  ", *(f" F{m}/B{m}" for m in range(8)))
    for rank in range(4):
        pairs = (f"{versions['F', rank, m]}/{versions['B', rank, m]}" for m in range(8))
        print(f"  rank {rank}      ", *(f"{pair:>6}" for pair in pairs))

# %% [markdown]
# With a stash the gradient is right, but for a mix of old weights: rank 0's are up to three updates behind, and the last rank's are new. Without a stash, backward combines new weights with activations from old ones, and the result is the gradient of nothing. How much does it matter on real text, with an update after each micro-batch?

# %%
from ranklab.data import python_text
from ranklab.pipeline_parallel import PipeDreamExecutor

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
    stage = GPTStage(model, split_stages(gpt_costs(config), 4)[rank])
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
# With small steps the three are much the same. With larger ones the run without a stash may end in `nan` (with other seeds it does not), and the differences between the other two are noise. Large models are trained with a flush: 1F1B is PipeDream's order, made synchronous.

# %% [markdown]
# #### Derive: how many micro-batches?
# > difficulty 2/5 · importance 4/5 · 5 minutes
#
# The answer is a formula. 1F1B runs on `stages` ranks, with `virtual` stages on each. **How many micro-batches make the bubble the share `idle` of the whole time?** (`lambda stages, idle, virtual: ...`) Begin with the bubble of 4.2.

# %%
check(micro_batches_for=...)

# %%
from ranklab.pipeline_parallel import micro_batches_for

for stages_of_rank in (1, 4):
    print(f"16 ranks, {stages_of_rank} stages on each, 5% idle: "
          f"{micro_batches_for(16, 0.05, stages_of_rank):.0f} micro-batches")

# %% [markdown]
# <details><summary>The derivation</summary>
#
# `idle = (stages - 1) / (virtual * M + stages - 1)`. Take reciprocals: `virtual * M / (stages - 1) + 1 = 1 / idle`. So `M = (stages - 1) * (1 - idle) / (virtual * idle)`.
# </details>
#
# > **Take away.** For a bubble of 5%, each further stage needs 19 more micro-batches: 285 on 16 ranks, and 71 with four stages on each.

# %% [markdown]
# ## 5. The real thing
#
# torch's own tool is `torch.distributed.pipelining`: you make a `PipelineStage` for each stage, and choose a schedule by name. We cut the same GPT in the same places, and run two steps of SGD on four ranks with 8 micro-batches, with torch and with our executor:

# %% tags=["nbval-check-output"]
from ranklab.projects.pipeline_parallel import peers

for name in ("1f1b", "interleaved", "zb-v"):
    for tool, step in {"torch": peers.torch_pipelining, "ours": peers.ours}.items():
        losses, messages = peers.losses_by(step, name)
        print(f"{name:12} {tool:6} losses", *(f"{loss:.3f}" for loss in losses),
              "  messages that each rank sends in a step:", *messages)

# %% [markdown]
# Even the order of actions is the same. torch shows its own through a private function, which may change. Here is rank 0 of 4, with two stages a rank:

# %%
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

actions = [str(action) for action in get_schedule_ops("Interleaved1F1B", 4, 8, 2)[0] if action]
print("torch", *actions[:14])
print("yours", *interleaved_schedule(4, 8, 2)[0][:14])

# %% [markdown]
# torch writes the stage first: `4F0` is our `F4.0`. Weights that two stages share are left to the user, so here embedding and head are two matrices.

# %% [markdown]
# ## 6. Project
#
# **A GPT through a pipeline, with a bubble monitor.** Your schedule, executor and split train a GPT on the source of Python's library. Then the monitor measures each stage's busy time, compares the bubble with the formula, and names the slow stage. It also looks at an emulated step, in which each stage sleeps as long as its FLOPs say.

# %%
from ranklab.projects import pipeline_parallel as project

functions = {"schedule": one_f_one_b_schedule, "executor": PipelineExecutor, "split": split_stages}
print(project.report(project.run(steps=20, **functions)))

# %% [markdown]
# The stages cannot be equal, because blocks and the head cannot be cut. So the measured bubble is larger than the formula's, and the simulation with the real costs says by how much. Trust the emulated step, because in the real one the ranks share cores.
#
# **Your turn.** Change one thing. First write down what the monitor will say about the bubble, the activations, and the messages. Ideas: `micro_batches=16`; your `zero_bubble_schedule`; `functools.partial(interleaved_schedule, virtual=2)`; an even split, `lambda costs, stages: split_stages([1] * len(costs), stages)`; a stage that sleeps twice as long, `slow_stage=2`.

# %%
change = {"slow_stage": 2}
settings = {"steps": 4, "compare": False}
print(project.report(project.run(**(functions | settings | change))))

# %% [markdown]
# One slow stage makes *all* ranks wait.

# %% [markdown]
# ## 7. Measure
#
# How large is the bubble of 4 ranks and 8 micro-batches? There are three ways to find out: the paper's formula, the simulation, and real ranks with stages that sleep. The last one is a clock: on a busy machine sleepers wake late, and it shows a few points more.

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
# Next we count messages, bytes and activations, with your executor on the GPT of 4.5. A message has B T C numbers. Ranks 0 and 3 send one message more: the gradient of the matrix that both have.

# %%
from ranklab.meter import Traffic


class Watched(PipelineExecutor):
    """Its `peak` has the largest number of micro-batches that a rank kept at once."""

    peak = 0

    def forward(self, action):
        super().forward(action)
        Watched.peak = max(Watched.peak, len(self.activations))


def counted(make):
    torch.manual_seed(0)
    model = GPT(config).to(device())
    parallel = PipelineParallel(schedule=make, executor=Watched)
    parallel.apply(model)
    x, y = tokens.to(device())[:, :-1], tokens.to(device())[:, 1:]
    with Traffic() as traffic:
        parallel.forward_backward(lambda x, y: model(x, y, "sum"), x, y, 2)
    return traffic.calls["send"], traffic.sent_bytes, Watched.peak


# %% tags=["nbval-check-output"]
makes = {"GPipe": gpipe_schedule, "1F1B": one_f_one_b_schedule,
         "interleaved": functools.partial(interleaved_schedule, virtual=2)}
piece, matrix = 2 * 16 * config.n_embd * 4, 64 * config.n_embd * 4  # bytes
print(f"{'predicted/counted':18} messages of ranks 0-3  {'bytes of rank 0':>18}   kept on each")
for name, make in makes.items():
    schedule = make(4, 8)
    sent = [sum(entry.kind in ("SF", "SB") for entry in entries)
            for entries in pp.with_messages(schedule)]
    predicted = list(zip([n + (rank in (0, 3)) for rank, n in enumerate(sent)],
                         [n * piece + matrix * (rank in (0, 3)) for rank, n in enumerate(sent)],
                         in_flight_activations(schedule)))
    counts = launch(counted, make, ranks=4)
    assert counts == predicted
    messages, peaks = (" ".join(f"{p[i]}/{c[i]}" for p, c in zip(predicted, counts))
                       for i in (0, 2))
    sent_bytes = f"{predicted[0][1]:,}/{counts[0][1]:,}"
    print(f"{name:18} {messages:23} {sent_bytes:>17}   {peaks}")

# %% [markdown]
# ## 8. Bug of the lab
#
# A bug of the lab is a program that breaks the idea of its lab and still runs. A colleague says what was seen, but not why. Look, write down why before you open the list of causes, and fix the program in its own cell: then it has the numbers of one process, also on other numbers of ranks and in a group of some of them ([16_clinic](16_clinic.ipynb) has bugs that belong to no single lab, and tools that find them).

# %%
import os

from ranklab.data import batch_at, text_file
from ranklab.pipeline_parallel import keep_layers

# %% [markdown]
# ### 8.1 Good in training, bad in the file
# > difficulty 3/5 · importance 5/5 · 15 minutes · about 5 lines
#
# > In four stages the training loss goes down as it should. We save the stages, merge the files and evaluate. Embedding and head share one matrix, so the file has it once, from the first stage. On the rows that it was trained on, the merged model's loss is 1 higher than in the training log. A run on one rank has no such gap.

# %%
def staged_gpt(steps=20, lr=0.01, seed=0, group=None):
    """Train a GPT of four blocks, a stage on each rank; one matrix is both embedding and head.

    Returns {"losses": [of each step] on the last stage, else [], "weights": {name: this stage's}}.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    R, first, last = len(ranks), rank == 0, rank == len(ranks) - 1
    torch.manual_seed(seed)
    config = GPTConfig(n_ctx=16, n_embd=32, n_layer=4)
    model = keep_layers(GPT(config), range(6 * rank // R, 6 * (rank + 1) // R)).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    tokens, losses = text_file(os.__file__).train, []
    for step in range(steps):
        inputs, targets = (each.to(device()) for each in batch_at(tokens, step, 8, 16, seed))
        x = inputs if first else torch.empty(8, 16, config.n_embd, device=device())
        if not first:
            dist.recv(x, group=group, group_src=rank - 1)
            x.requires_grad_()
        y = model(x, targets if last else None)
        gradient = torch.empty_like(y)
        if not last:
            dist.send(y.detach(), group=group, group_dst=rank + 1)
            dist.recv(gradient, group=group, group_src=rank + 1)
        optimizer.zero_grad()
        y.backward(None if last else gradient)
        if not first:
            dist.send(x.grad, group=group, group_dst=rank - 1)
        optimizer.step()
        losses += [y.item()] if last else []
    return {"losses": losses, "weights": {n: w.detach() for n, w in model.named_parameters()}}


# %% [markdown]
# **Look.** Compare the stages' weights with one rank's, after 0 steps and after 1.

# %%
stages, [reference] = launch(staged_gpt, 1, ranks=4), launch(staged_gpt, 1, ranks=1)
for name, weight in {n: w for stage in stages for n, w in stage["weights"].items()}.items():
    right = reference["weights"].get(name, reference["weights"]["token.weight"])
    if not torch.allclose(weight, right, atol=1e-6):
        print(f"{name} is up to {(weight - right).abs().max():.2g} off one rank's")

# %% [markdown]
# **Why?** Write one sentence, or name one measurement that would decide it, before you open the list. Then enter the number of the cause, and **fix the program** in its own cell.
#
# <details><summary>Which of these is the cause?</summary>
#
# 1. Each end trains a copy of the shared matrix by what it sees itself.
# 2. The merged file lacks the blocks of some stage.
# 3. The middle stages get gradients that belong to other rows.
# 4. The two copies of the shared matrix differ from the start.
#
# </details>

# %%
check(clinic_staged_gpt_cause=...)

# %% [markdown]
# **Fixed.** With one to four stages, the weights must match one process.

# %%
staged_gpt = check(staged_gpt)

# %% [markdown]
# ## 9. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 09` in a terminal asks these and more, with other numbers each time.

# %%
questions("09_pipeline_parallel")

# %% [markdown]
# ## 10. On real GPUs
#
# ```bash
# python -m ranklab.projects.pipeline_parallel --schedule interleaved --virtual 2
# torchrun --nproc-per-node 4 -m ranklab.projects.pipeline_parallel --size gpt2-xl --schedule zb-h1
# sbatch labs/jobs/pipeline_parallel.sbatch
# ```
#
# What changes there:
#
# - **The order of messages matters.** On NCCL a message is a kernel that stays until the other end is there. The engine gives `init_process_group` a `device_id`, and then each `isend` and `irecv` of a group waits for *everything* that the rank has started in this group before (torch warns of it; pytorch 154132). `pp.with_messages` has one order on all ranks, so ranks never wait in a circle. But a receive whose sender is late holds back a send that is ready, and some of 4.5's overlap is lost. torch's warning names two ways out: separate groups for messages, or `dist.batch_isend_irecv`. torch's own pipelining starts a mix of sends and receives as one batch; if there are only sends, or only receives, it starts them one by one (2.13, `schedules.py`, `_batch_p2p`).
# - **Streams.** With NCCL `handle.wait()` makes the GPU's *stream* wait, not your program. `self.sends` keeps a tensor until it is delivered.
# - **Where the ranks are.** The messages are small compared with tensor parallelism's, so pipelines go over the *slow* links between nodes, and tensor parallelism stays inside a node (lab 12). Because with tp=8 all eight ranks of a stage have the same output, Megatron sends an eighth of it through each card, and gathers it over NVLink at the other end (arXiv 2104.04473, section 4.1).
# - **Shapes.** A receive must know its shape. Here every rank has the inputs, and reads it off them. If lengths differ and other ranks cannot know them, the shape travels first (Megatron's `variable_seq_lengths`).
# - **FSDP inside a stage** would gather weights for each micro-batch and reduce gradients M times. torch's `PipelineStage` reduces once, at the last backward, and does not reshard after the others.
# - **Sizes.** The bubble wants many micro-batches, the GPU wants large ones, and the batch is limited. Megatron-LM's trillion-parameter benchmark had 3,072 sequences in a batch and 6 pipelines, so 512 sequences for each. With micro-batches of one sequence, 1F1B would lose 63/575 = 11%. Interleaved (section 5.1 of the paper), with V = 2, it loses 63/1087 = 5.8%.
# - **The loss is on one rank**, the last stage's. To log it, or to stop on `nan`, the others need a message.
#
# What to expect (from papers, not measured by us): interleaving gave Megatron-LM 10% and more (arXiv 2104.04473), and zero bubble gave up to 23% over 1F1B with about the same memory (arXiv 2401.10241). This lab has not been run on several GPUs yet.

# %% [markdown]
# ## 11. Take with you
#
# 1. The bubble is (P-1)/(M+P-1): four stages idle 27% of the time with 8 micro-batches, and 4% with 64.
# 2. 1F1B keeps P micro-batches where GPipe keeps all M, so a large M fits; with V thin stages on each rank the bubble is about V times smaller.
# 3. No rank waits for W. ZB-H1 fills two thirds of the bubble with it, and pays with the activations kept until then.
#
# **What we left out**
#
# - **Recomputing activations** (lab 01) inside a stage: less memory for each micro-batch in flight, a third more compute.
# - **Schedules from a solver.** In the zero-bubble paper a program finds the order from measured times of F, I and W. Our schedules assume equal costs.
# - **Pipelines of tokens** (TeraPipe): pieces along the sequence instead of the batch.
# - **Models that are not a row of layers**: whatever skips a stage (skip connections, an encoder's output) must travel with the hidden state.
#
# Next: [10_context_parallel](10_context_parallel.ipynb), where the tokens of one sequence are split over ranks.
#
# On the spine it is [12_hybrid](12_hybrid.ipynb).
