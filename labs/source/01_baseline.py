# %% [markdown]
# # 01 Baseline: one device, understood
#
# > 145 minutes · difficulty 2/5 · **laptop**: everything, a real GPT on real text · **one GPU**: the project at 350M
# > to 1.5B parameters

# %% [markdown]
# ## 1. Story
#
# Your team wants to train a GPT with 1.5 billion parameters (GPT-2's size) on 30 billion tokens.
# You have one H100. It does 989 TFLOP/s in bf16 at best; well-tuned code gets about 40% of that. (The data sheet prints
# 1,979, with a star: that holds for sparse matrices only.) A common rule says that training costs 6 FLOPs for each
# parameter and token. How many days will it take?

# %%
from ranklab import answer, check, device, hint, launch, questions

check(days_on_one_gpu=...)

# %% [markdown]
# (Replace `...` by your number; `hint("days_on_one_gpu")` helps.)
#
# You can answer such questions before anything runs, and that is what this lab is about: **predict what a step
# computes and what it keeps, then count both, to the byte.** If you can't do that for one GPU, you can't judge eight.
#
# It builds on `launch` and `check` from lab 00, and on PyTorch's autograd.

# %% [markdown]
# ## 2. Picture
#
# A GPU is a pyramid of memories. Arithmetic happens at the top; the model lives in the middle; other GPUs are at the
# bottom. Each level is slower than the one above it, and at least as large.

# %%
from ranklab import hardware
from ranklab.plots import baseline as plots

plots.hierarchy(hardware.H100)

# %% [markdown]
# While an H100 reads one number from its main memory (HBM), its tensor cores could do hundreds of multiplications. So
# fast code keeps numbers near the top. Training on many GPUs uses the lower levels too: NVLink inside a node and the
# network between nodes. That is why the rest of this course is about sending less.

# %% [markdown]
# ## 3. Smallest working code
#
# A GPT, real text, a loop. The text is on your disk already: the source code of Python's own library, byte by byte.
# One file in ten is held out and never trained on.

# %%
import torch

from ranklab.data import batch_at, bigram_loss, held_out_batch, python_text
from ranklab.models.gpt import GPT, GPTConfig, count_parameters
from ranklab.targets import IGNORE

torch.set_num_threads(1)  # these matrices are small: a second thread costs more than it gives
text = python_text()
held_out = held_out_batch(text.held_out, batch=256, n_ctx=64)

# %%
def train(steps=100):
    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        inputs, targets = (x.to(device()) for x in batch_at(text.train, step, batch=12, n_ctx=64))
        loss = model(inputs, targets)  # nats per byte
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:3}  loss {loss.item():.3f}")
    with torch.no_grad():
        print(f"held-out text: {model(*(x.to(device()) for x in held_out)).item():.3f}")


launch(train, ranks=1);

# %% [markdown]
# A fresh model guesses nearly evenly among 256 bytes, and ln 256 = 5.5 nats. The loss of one batch jumps up and down;
# the number on held-out text is the one to trust. Is it good? A **bigram model** counts which
# byte follows which, and nothing else:

# %%
rival = bigram_loss(text.train, *held_out)
print(f"bigram model: {rival:.3f} nats per byte on held-out text")

# %% [markdown]
# A model that does not beat this number on held-out text has learned nothing that needs a transformer. After 100 steps
# our GPT does not beat it; in the project it will.

# %% [markdown]
# ## 4. Build it
#
# Letters, here and in the whole course: B batch, T tokens (called `seq` in code), C width (`config.n_embd`), H heads,
# V vocabulary, L layers.
#
# You will count what one block computes and keeps, so here is a block of our GPT. `up` and `down` are the two matrices of
# the MLP. The `x` that runs through all blocks, and to which each of them adds, is called the **residual stream**.

# %%
import inspect

from ranklab.models import gpt

print(inspect.getsource(gpt.MLP), inspect.getsource(gpt.Block), sep="\n")

# %% [markdown]
# ### 4.1 Count the work
# > difficulty 2/5 · importance 5/5 · 18 minutes · about 5 lines
#
# Nearly all the work of a transformer is matrix products. An (m, k) @ (k, n) product makes m n numbers, and each takes k
# multiplications and k additions: **2 m k n FLOPs**. Per token, a layer has:
#
# | product | size | times |
# |---|---|---|
# | q, k, v, out | C x C | 4 |
# | MLP up, down | C x 4C, 4C x C | 1 each |
# | q @ k, over all heads | C x T | 1 |
# | probability @ v, over all heads | T x C | 1 |
#
# and at the end of the model the head, C x V, once. Backward needs two products for each of these: one for the gradient
# of its input, one for the gradient of its weight. (The upper half of the causal T x T matrix is masked. Count it: torch's
# counter does, and so do most papers.)
#
# **Predict.** GPT-2 medium: 353.55 million parameters, C = 1024, 24 layers; a batch of 8 sequences of 1024 tokens. How
# many TFLOP does one training step take? Take the rule of the story; it leaves out attention's own products.

# %%
check(step_tflop=...)

# %%
def transformer_flops(config, batch, seq, backward=True):
    """The FLOPs of all matrix products in one step of GPT(config) on `batch` x `seq` tokens.

    backward=False: of the forward alone. Attention counts in full, also the masked half.
    """
    C, V, tokens = config.n_embd, config.vocab_size, batch * seq
    # the table, for all layers; then the head, and backward
    raise NotImplementedError("exercise 4.1: about 5 lines")


# %%
transformer_flops = check(transformer_flops)

# %% [markdown]
# The check compared you with torch's own `FlopCounterMode`, FLOP for FLOP. Now use it where no counter could run: how
# much of GPT-2 medium's work is attention, when the context grows?

# %% tags=["nbval-check-output"]
for seq in (256, 1024, 4096, 16384):
    medium = GPTConfig(vocab_size=50304, n_ctx=seq, n_layer=24, n_head=16, n_embd=1024)
    total = transformer_flops(medium, 1, seq)
    rule = 6 * count_parameters(medium) * seq
    print(f"context {seq:6}: {total / seq / 1e9:6.2f} GFLOP per token, the rule of 6 says "
          f"{rule / seq / 1e9:.2f}: {100 * rule / total:3.0f}% of it")

# %% [markdown]
# The rule is fine for short contexts. At GPT-2's own 1024 tokens it is 12% low, and at 16k tokens it misses more than two thirds of the work.
#
# Other models are counted in the same way. Grouped-query attention (GQA) has fewer heads for k and v: their two matrices
# shrink, q @ k and probability @ v do not. In a mixture of experts (MoE) each token visits only a few experts, so the rule
# takes the *active* parameters, not all of them.
#
# The count gives the one number for training speed. **Model FLOPs utilisation** (MFU) is the FLOPs that the *model* needs,
# divided by the FLOPs that the devices could have done in that time. What is computed twice to save memory is no work.
#
# **Predict.** GPT-2 medium does 160 000 tokens a second on one H100 (989.4 TFLOP/s), with 2.423 GFLOP for each token (as
# `transformer_flops` counts; the rule of 6 says 2.12). How many per cent MFU?

# %%
check(mfu_percent=...)

# %% [markdown]
# ### 4.2 What must stay in memory
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 4 lines
#
# Four things live as long as the run: weights, gradients, Adam's two moments (a mean and a mean square of each
# gradient), and, in mixed precision, float32 **master weights**. Why those? A bf16 number has 8 bits of precision.
# Adding 0.001 to 1.0 gives 1.0:

# %% tags=["nbval-check-output"]
one = torch.tensor(1.0, dtype=torch.bfloat16)
print(one + 0.001, " ", torch.tensor(1.0) + 0.001)

# %% [markdown]
# So the products are computed with bf16 weights, but the small steps are added up in float32. Three recipes:
#
# | recipe | weights, gradients | Adam's moments | master weights |
# |---|---|---|---|
# | fp32 | float32 | float32 | none |
# | mixed | bf16 | float32 | float32 |
# | bf16 | bf16 | bf16 | none |
#
# **Predict.** 7 billion parameters, recipe "mixed". How many GB, before the first activation?

# %%
check(adam_gb=...)

# %%
def model_state_bytes(n, recipe="mixed"):
    """The bytes that n parameters hold between two steps with Adam, by category, in a dict.

    The keys are "parameters", "gradients" and "optimizer"; master weights belong to the optimizer.
    """
    # the row of the table, in bytes for one parameter
    raise NotImplementedError("exercise 4.2: about 4 lines")


# %%
model_state_bytes = check(model_state_bytes)

# %% [markdown]
# Which model fits which GPU, without any activation?

# %% tags=["nbval-check-output"]
for name, n in (("350M", 354e6), ("1.5B", 1.5e9), ("7B", 7e9), ("70B", 70e9)):
    need = sum(model_state_bytes(n, "mixed").values())
    fits = ", ".join(gpu.name for gpu in hardware.GPUS if gpu.memory_bytes > need)
    print(f"{name:>5}: {need / 1e9:6.1f} GB fits {fits or 'no single GPU: labs 06 to 12'}")

# %% [markdown]
# (A card of 24 GB is not listed for 1.5B: nothing would be left for activations.)
#
# Did you notice? "mixed" and "fp32" both have 16 bytes a parameter. **Mixed precision saves time and activations, not
# model state.**

# %% [markdown]
# ### 4.3 What waits for backward
# > difficulty 2/5 · importance 5/5 · 8 minutes · no lines, one number
#
# The rest of the memory is activations: what forward keeps because backward will need it. There are only a few rules. A
# linear layer keeps its input. GELU keeps its input. A norm keeps its input and two numbers for each token (their mean and
# deviation). Attention keeps q, k, v and its output. An addition keeps nothing. A tensor that two of them keep exists once:
#
# | per token, in a block | numbers |
# |---|---|
# | two norms; each keeps its input, a mean and a deviation | 2 x (C + 2) |
# | input of q, k and v: one tensor, read three times | C |
# | q, k, v | 3 C |
# | attention's output, which is also the input of `out` | C |
# | flash attention: one float32 log-sum for each head | H, 4 bytes each |
# | plain attention instead: the probabilities | H x T |
# | input of `up` | C |
# | input of GELU | 4 C |
# | output of GELU, which is the input of `down` | 4 C |
#
# (Here the model is bf16 throughout, 2 bytes a number, which is a simplification. Under `autocast`, section 5, norms,
# residual stream and loss stay in float32, 4 bytes each.)
#
# **Predict.** GPT-2 medium (C = 1024, 24 layers), 8 sequences of 1024 tokens, bf16, flash attention. How many GB in
# all blocks? (Leave out what is smaller than C.)

# %%
check(activation_gb=...)

# %% [markdown]
# `activation_bytes` adds the table up, for all layers, and is equal to what autograd saves, byte by byte. (Under Further
# you can write it.) What it says about GPT-2 medium, in bf16:

# %%
from ranklab.baseline import activation_bytes, ends_bytes


def of_blocks(flash, recompute):
    shape = {"vocab_size": 50304, "n_ctx": 1024, "n_layer": 24, "n_head": 16, "n_embd": 1024}
    config = GPTConfig(**shape, flash=flash)
    ends = ends_bytes(config, 8, 1024, element=2)
    return [activation_bytes(config, 8, 1024, 2, recompute) - ends, ends]


plots.activations(
    {"plain attention": of_blocks(False, False), "flash": of_blocks(True, False),
     "flash, recomputed": of_blocks(True, True)},
    ["24 blocks", "embedding, head, loss"],
    title="Saved for backward: GPT-2 medium, 8 x 1024 tokens")

# %% [markdown]
# Plain attention pays for a T x T matrix in each head. **Flash attention** never writes it: it keeps a log-sum for
# each row, and computes the matrix again in backward, piece by piece, high up in the pyramid. The right bar is what
# exercise 4.5 will keep until backward starts. The peak is higher, because backward needs one whole block at a time.

# %% [markdown]
# ### 4.4 A big batch in small pieces
# > difficulty 2/5 · importance 5/5 · 14 minutes · about 6 lines
#
# Activations grow with the batch; model state does not. So compute the gradient of a big batch in pieces, its **micro-batches**:
# `backward()` **adds** to `.grad`, and frees what the piece had kept. This is **gradient accumulation**, and the
# whole difficulty is what to divide by. Every target that counts must have the same weight, in whichever piece it is.
# Targets with the value IGNORE (padding, or a prompt in instruction tuning) do not count at all.
#
# **Predict.** 9 rows of text in pieces of 4, 4 and 1. Somebody takes the mean of each piece, and then the mean of the
# three means. By what factor does the single last row weigh too much?

# %%
check(ragged_factor=...)

# %%
def accumulate_gradients(loss_sum, inputs, targets, micro_batch):
    """Each parameter's .grad has grown by the gradient of the mean loss over all targets, as if
    the batch had been one piece; returns that mean, detached.

    loss_sum(inputs, targets) is the sum of the losses of all targets that are not IGNORE.
    Pieces have `micro_batch` rows, the last may have fewer; each goes through loss_sum once, in any
    order. One piece in memory at a time.
    """
    count = (targets != IGNORE).sum()  # over the whole batch
    mean = 0.0
    # for each piece: what is its part of the mean?
    raise NotImplementedError("exercise 4.4: about 6 lines")


# %%
accumulate_gradients = check(accumulate_gradients)

# %% [markdown]
# The same gradient, for the same FLOPs, with the memory of one piece.

# %%
from ranklab.meter import SavedActivations

model = GPT(GPTConfig())
inputs, targets = batch_at(text.train, 0, batch=32, n_ctx=64)
for micro_batch in (32, 8, 2):
    model.zero_grad()
    with SavedActivations(model) as saved:
        accumulate_gradients(lambda x, y: model(x, y, "sum"), inputs, targets, micro_batch)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    print(f"pieces of {micro_batch:2}: peak {saved.peak_bytes / 1e6:5.2f} MB, "
          f"gradient norm {norm:.6f}")

# %% [markdown]
# ### 4.5 Compute again instead of keeping
# > difficulty 4/5 · importance 5/5 · 18 minutes · about 5 lines
#
# And when one sequence alone is too much? Keep only the *input* of a block. When backward arrives there, run the
# block again, this time with autograd on, and go backward through it. This is **activation checkpointing**.
#
# **Predict.** Every block is checkpointed. By how many per cent does the work of a step grow, at most?

# %%
check(recompute_percent=...)

# %% [markdown]
# An operation with a backward of your own is a `torch.autograd.Function`. Inside it autograd is off, so nothing is
# kept but what you save:

# %%
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)  # ctx carries things from forward to backward
        return x * x

    @staticmethod
    def backward(ctx, gradient):  # one for each output
        (x,) = ctx.saved_tensors
        return 2 * x * gradient  # one for each input; None for one that needs none


x = torch.tensor(3.0, requires_grad=True)
Square.apply(x).backward()
print(x.grad)

# %% [markdown]
# Forward is given below; you write backward. There are three traps. The inputs must be cut off from the graph that they
# came from. Dropout must drop *the same* numbers again (`random_replayed(state)` is a context for that). And the weights
# inside `function` are not inputs, but they need gradients too: `torch.autograd.backward(outputs, gradients)` fills the
# `.grad` of everything that `outputs` were made from. `torch.autograd.grad` returns only the gradients that you name, and
# you can't name weights that you don't see.

# %%
from ranklab.baseline.checkpointing import random_replayed, random_state


def checkpointed(function, *inputs):
    """function(*inputs), with all its gradients, but only `inputs` are kept for backward.

    Some of the inputs may need no gradient: a mask, whole numbers. function may return a tuple.
    It runs once in forward and once in backward, with the same random numbers.
    """

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.random = random_state()
            ctx.save_for_backward(*inputs)
            return function(*inputs)

        @staticmethod
        def backward(ctx, *gradients):
            # run function again, on inputs that are cut off; go backward through that
            raise NotImplementedError("exercise 4.5: about 5 lines")

    return Recompute.apply(*inputs)


# %%
checkpointed = check(checkpointed)

# %% [markdown]
# A GPT of six layers, one step with your function around each block, and one without. The curve is what waits for
# backward; left of the dotted line is forward:

# %%
from ranklab.baseline.checkpointing import checkpoint_blocks
from ranklab.baseline.memory import live_activations

deep = GPTConfig(n_layer=6)
batch = batch_at(text.train, 0, batch=8, n_ctx=64)
plots.live_bytes({"all kept": live_activations(GPT(deep), *batch),
                  "blocks recomputed": live_activations(
                      checkpoint_blocks(GPT(deep), checkpointed), *batch)})

# %% [markdown]
# A mountain becomes a comb: in backward each tooth is one block, computed again and used up. More layers make the
# mountain higher, but hardly the comb.

# %% [markdown]
# ### 4.6 The smallest peak
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 20 lines · open: no recipe
#
# Now all of it together: the gradient of a big batch in as little memory as you can. Rows, blocks, logits: which of them
# have to stand whole, and when? There is no recipe. Two things that cost people an hour: a tied head and embedding are one
# weight with two gradients, and autograd may hold the first until it has the second. And a name that still holds a
# tensor keeps it alive.
#
# What you may call: `model.token(inputs)` (B, T) -> (B, T, C); each of `model.blocks.values()` and `model.norm`, (B, T, C)
# -> (B, T, C); `model.loss(model.head, hidden, targets, "sum")`, the sum of the losses of what you pass; and your functions
# of 4.4 and 4.5.
#
# **Predict.** Vocabulary 50304, 1024 tokens, one row, float32. How many MB do the logits alone take?

# %%
check(logits_mb=...)

# %%
def frugal_gradients(model, inputs, targets):
    """Each parameter's .grad has grown by the gradient of the mean loss over all targets that are
    not IGNORE, as after model(inputs, targets).backward(); returns that mean, detached.

    model   a GPT without dropout; its head may be tied to its embedding. What is frozen has no
            gradient. Afterwards the model is as it was
    memory  at most twice what one row keeps for backward when each block keeps its input, and one
            of them all that it needs. Counted is all that lives at the peak beside parameters,
            gradients and buffers
    cost    at most 1.5 times the FLOPs of the plain step
    """
    raise NotImplementedError("exercise 4.6: about 20 lines")


# %%
frugal_gradients = check(frugal_gradients)

# %% [markdown]
# The same gradient in four ways, with six blocks. At the peak, beside parameters and gradients:

# %% tags=["nbval-check-output"]
from ranklab.meter import MemoryPeak


def peak(step, rows):
    model = GPT(deep)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with MemoryPeak(model) as memory:
        step(model, *(tensor[:rows] for tensor in batch))
    return (memory.peak_bytes - memory.points[0].total) / 1e3


steps = {
    "plain": lambda model, x, y: model(x, y).backward(),
    "pieces of one row": lambda model, x, y: accumulate_gradients(
        lambda *piece: model(*piece, "sum"), x, y, 1),
    "blocks recomputed": lambda model, x, y: checkpoint_blocks(
        model, checkpointed)(x, y).backward(),
    "yours": frugal_gradients}
for name, step in steps.items():
    print(f"{name:18} 1 row {peak(step, 1):6,.0f} kB, 4 rows {peak(step, 4):6,.0f} kB")

# %% [markdown]
# Yours hardly grows with the rows. It is a limit, not advice: small pieces keep a GPU less busy. In practice you go only as
# far in this direction as your memory asks for.

# %% [markdown]
# ### Further
#
# More that one device teaches, not in the 145 minutes; the exercises are checked, too. The lab runs without them.

# %% [markdown]
# #### `mfu`
# > difficulty 1/5 · importance 5/5 · 5 minutes · about 2 lines
#
# What you have predicted in 4.1, as a function.

# %%
def mfu(config, tokens_per_second, peak_flops, devices=1):
    """The fraction of the devices' peak FLOP/s that the model's own FLOPs make up.

    tokens_per_second: of all `devices` together, in sequences of config.n_ctx tokens.
    """
    raise NotImplementedError("exercise mfu: about 2 lines")


# %%
mfu = check(mfu)

# %% [markdown]
# And this machine? Its "peak" is the best matrix product that we can measure here.

# %%
here = hardware.present("cpu")
model = GPT(GPTConfig())
inputs, targets = batch_at(text.train, 0, batch=12, n_ctx=64)
seconds = hardware.best_seconds(lambda: model(inputs, targets).backward(), seconds=0.5)
used = mfu(GPTConfig(), 12 * 64 / seconds, here.fp32_flops)
print(f"{here.name}: {here.fp32_flops / 1e9:.0f} GFLOP/s at best; forward and backward: {used:.0%}")

# %% [markdown]
# Well below 100%, although nothing was sent anywhere: the matrices are small, and norms, GELU and softmax count as no
# work at all. A whole run is lower still.

# %% [markdown]
# #### `activation_bytes`
# > difficulty 3/5 · importance 4/5 · 18 minutes · about 7 lines
#
# The table of 4.3 as a formula, to the byte. `ends_bytes(config, batch, seq, element)` counts embedding, head and loss for you. All numbers have
# `element` bytes, except the log-sums.

# %%
def activation_bytes(config, batch, seq, element=4, recompute=False):
    """The bytes that autograd keeps for backward after GPT(config)(inputs, targets).

    `element` bytes a number. recompute=True: each block keeps only its input, C numbers a token.
    """
    C, H, tokens = config.n_embd, config.n_head, batch * seq
    # the table for a block, with flash or without; + ends_bytes(config, batch, seq, element)
    raise NotImplementedError("exercise activation_bytes: about 7 lines")


# %%
activation_bytes = check(activation_bytes)

# %% [markdown]
# **Roofline.** An operation waits either for arithmetic or for memory. Its *intensity* says for which: the FLOPs for
# each byte that it moves. At which intensity do both take equally long on an H100 (989.4 TFLOP/s in bf16, 3.35 TB/s)?

# %%
check(break_even_intensity=...)

# %%
from ranklab.baseline.roofline import block_operations, decode_operation

medium = GPTConfig(vocab_size=50304, n_ctx=1024, n_layer=24, n_head=16, n_embd=1024)
operations = block_operations(medium, batch=8, seq=1024) + [decode_operation(medium, batch=1)]
plots.roofline(operations, hardware.H100)

# %% [markdown]
# Left of the balance more FLOP/s would change nothing. That is why compilers *fuse* norms and additions into their
# neighbours, why flash attention is faster, and why generating text one token at a time uses a third of a per cent of the
# GPU (1 of 295).

# %% [markdown]
# #### `scale_loss`: sixteen bits and small gradients
# > difficulty 3/5 · importance 3/5 · 15 minutes · about 10 lines
#
# There are two 16-bit formats. bf16 has float32's range and little precision; fp16 has more precision and a small
# range. Small gradients vanish in fp16, large ones overflow:

# %% tags=["nbval-check-output"]
for x in (1e-8, 1e-3, 1.001, 1e5):
    x = torch.tensor(x)
    print(f"{x:10.4g}   bf16 {x.bfloat16().item():10.4g}   fp16 {x.half().item():10.4g}")

# %% [markdown]
# The cure for fp16: multiply the *loss* by a large scale, so that all gradients grow, and divide them by it before
# the step. Which scale? Try: when a gradient overflows, **skip** the step and **halve** the scale; after `interval`
# clean steps in a row, **double** it. (bf16 needs none of this, which is why most training changed to it.)
#
# A third format hides in float32 code. **TF32** has float32's range and fp16's precision, and runs on the tensor cores.
# `torch.set_float32_matmul_precision("high")` lets float32 products use it: several times faster on an A100 or H100, with about three correct digits.

# %%
from ranklab.baseline import LossScale


def scale_loss(loss, optimizer, state):
    """`optimizer` has stepped with the true gradients of `loss`, or skipped the step because the
    scaled ones overflowed; returns the next LossScale (halved, kept or doubled).

    `state` has .scale, .clean_steps, .interval; state._replace(scale=...) makes the next one. It
    holds all that is remembered between two steps.
    """
    optimizer.zero_grad()
    (loss * state.scale).backward()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in held if p.grad is not None]
    # an overflow, a clean step, or the last of `interval` clean ones?
    raise NotImplementedError("exercise scale_loss: about 10 lines")


# %%
scale_loss = check(scale_loss)

# %% [markdown]
# A run with two batches of large gradients. The scale climbs until something overflows, steps back, and climbs again.
# (2^16 itself is too much even for a gradient of 1: fp16 ends at 65504.)

# %%
w = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([w], lr=0.0)  # 0: only the scale is of interest here
state = LossScale(2.0**12, 0, interval=8)
scales, skipped, large = [], [], (20, 60)
for step in range(100):
    size = 300.0 if step in large else 1.0
    scales.append(state.scale)
    state = scale_loss((w.half() * size).float().sum(), optimizer, state)
    skipped += [step] if state.scale < scales[-1] else []
plots.scale_history(scales, skipped, large)

# %% [markdown]
# **Streams.** On a GPU, Python does not compute. It puts kernels into a queue, a *stream*, and goes on at once. Two
# consequences: a clock without `synchronize` measures how fast you can queue, and a `print(loss.item())` in each step
# makes Python wait, and then the GPU. Here a thread plays the GPU; names and rules are CUDA's.

# %%
import time

from ranklab.baseline.streams import Stream

stream = Stream()
start = time.perf_counter()
for _ in range(3):
    stream.launch(time.sleep, 0.02)  # a "kernel" of 20 ms
queued = time.perf_counter() - start
stream.synchronize()
done = time.perf_counter() - start
print(f"queued after {queued * 1e3:.1f} ms, done after {done * 1e3:.0f} ms")

# %% [markdown]
# Two streams run side by side, unless one waits for an **event** of the other. That is how lab 03 hides communication
# behind computing. Backward begins with the last layer, so layer 2's gradients travel while layer 1 computes:

# %%
other, spans = Stream(), {"stream 1": [], "stream 2": []}


def kernel(row, name, seconds):
    begin = time.perf_counter()
    time.sleep(seconds)
    spans[row].append((name, begin - start, time.perf_counter() - start))


start = time.perf_counter()
stream.launch(kernel, "stream 1", "layer 2", 0.03)
ready = stream.record()  # an event
stream.launch(kernel, "stream 1", "layer 1", 0.03)
other.wait_event(ready)
other.launch(kernel, "stream 2", "send layer 2", 0.03)
stream.synchronize(), other.synchronize()
plots.timeline(spans, title="Layer 2's gradients travel while layer 1 computes (emulated)")

# %% [markdown]
# **Fragmentation.** "Tried to allocate 40 MB; 60 MB are free." How can that fail? Memory is handed out in one piece:

# %% tags=["nbval-check-output"]
from ranklab.baseline.fragmentation import Arena

arena = Arena(100)
for name, size in (("a", 30), ("b", 10), ("c", 30), ("d", 10), ("e", 20)):
    arena.take(name, size)
arena.give_back("a"), arena.give_back("c")
try:
    arena.take("f", 40)
except MemoryError as error:
    print(error)
plots.arena({"memory": arena}, title="60 bytes are free, and 40 do not fit")

# %% [markdown]
# Batches whose lengths keep changing do this to a GPU. The cures: pad to a few fixed shapes, and
# `PYTORCH_ALLOC_CONF=expandable_segments:True`, which lets torch join pieces by remapping pages. To *see* it on a GPU, call
# `torch.cuda.memory._record_memory_history()`, run some steps, call `torch.cuda.memory._dump_snapshot("memory.pickle")`, and
# open the file at pytorch.org/memory_viz: it shows each piece, its size, and the line of code that asked for it.

# %% [markdown]
# ## 5. The real thing
#
# **torch.utils.checkpoint** is your `checkpointed`, made for production. Same gradients, same bytes (where an input needs a gradient: where none does, yours gives the weights none):

# %%
from torch.utils.checkpoint import checkpoint


def step_with(wrap):
    torch.manual_seed(0)
    model = checkpoint_blocks(GPT(GPTConfig(dropout=0.1)), wrap)
    with SavedActivations(model) as saved:
        loss = model(*batch)
    loss.backward()
    return saved.bytes, [p.grad for p in model.parameters()]


mine, mine_grads = step_with(checkpointed)
of_torch, torch_grads = step_with(lambda f, x: checkpoint(f, x, use_reentrant=False))
print(f"kept: {mine:,} bytes by yours, {of_torch:,} bytes by torch's")
assert mine == of_torch
assert all(torch.equal(a, b) for a, b in zip(mine_grads, torch_grads))

# %% [markdown]
# **torch.amp** is mixed precision in two lines. `autocast` casts the inputs of matrix products to 16 bits, and leaves
# weights, norms and losses in float32. (So with it the weights are float32, the gradients too, and there is no
# separate master copy: 4 + 4 + 8 = 16 bytes again. The 16-bit copies of the weights take 2 bytes more for each parameter: autocast keeps each from its first use to the end of the `with`, and the graph until backward.) `GradScaler` is `scale_loss` of Further,
# whose check compares the two step by step.

# %% tags=["nbval-check-output"]
model = GPT(GPTConfig())
with torch.autocast("cpu", dtype=torch.bfloat16):
    logits = model(batch[0])
print(f"weights {model.head.weight.dtype}, logits {logits.dtype}")

# %% [markdown]
# **torch.profiler** says where the time goes, by operation:

# %%
import os

os.environ["KINETO_LOG_LEVEL"] = "99"  # or the tracer prints two lines of its own
from torch.profiler import ProfilerActivity, profile

with profile(activities=[ProfilerActivity.CPU]) as profiler:
    model(*batch).backward()
events = sorted(profiler.key_averages(), key=lambda e: -e.self_cpu_time_total)[:6]
for event in events:
    print(f"{event.key:60.60} {event.count:4} calls {event.self_cpu_time_total / 1e3:8.2f} ms")

# %% [markdown]
# In a large model, matrix products (`addmm`, `mm`, `bmm`) and attention lead such a list. When something else does, you have found your first optimisation.
# `profiler.export_chrome_trace("trace.json")` opens in ui.perfetto.dev.

# %% [markdown]
# ## 6. Project
#
# **Train the baseline that every later lab is compared with**: a GPT on text, with its tokens per second (here
# a token is a byte), its MFU, its memory by category and its loss curve. It uses `ranklab.trainer`: AdamW, warm-up and
# cosine, clipping, accumulation, mixed precision, checkpoints. The same entry point trains 1.5 billion parameters on a
# GPU (section 9).

# %%
from ranklab.projects import baseline as project

mine = {"flops": transformer_flops, "states": model_state_bytes, "activations": activation_bytes,
        "accumulate": accumulate_gradients, "checkpointed": checkpointed,
        "frugal": frugal_gradients}
found = project.run(steps=700, eval_every=100, progress=False, **mine)
print(project.report(found))

# %%
plots.loss_curve(found["history"], found["bigram"])

# %% [markdown]
# At first the GPT learns what the bigram knows. Then it goes further, because it looks back more than one byte. It has
# read half a megabyte of Python so far, and this is how it writes:

# %%
print(found["sample"])
assert found["held_out"] < found["bigram"] - 0.3

# %% [markdown]
# Not a programmer yet. It had 4 x 10^11 FLOPs; GPT-2 had an estimated 10^21.
#
# **Your turn.** Change one thing below. First write down what you expect: which bytes change, by which factor, and does
# the loss? Ideas: `"micro_batch": 3`; `"recompute": True`; `"loss_chunks": 4`; all three. It stands at your
# own gradients: what will be at the peak?

# %%
change = {"frugally": True}
few = {"steps": 20, "eval_batch": 16, "progress": False}
for changes in ({}, change):
    tried = project.run(**(few | mine | changes))
    print(f"{changes or 'as it is'}: loss {tried['held_out']:.4f}, peak beside states "
          f"{tried['peak']:,} bytes")

# %% [markdown]
# The loss is the same to four digits. One row of twelve, and of that row the activations of one block: a peak that is
# nearly 20 times smaller, for about 30% more FLOPs.

# %% [markdown]
# ## 7. Measure
#
# Prediction beside count, for the run that you have just made:

# %% tags=["nbval-check-output"]
predicted, counted = found["flops"]["predicted"], found["flops"]["counted"]
print(f"FLOPs of a step: {predicted:,} predicted, {counted:,} counted")
assert predicted == counted

# %% [markdown]
# And the bytes? In the table of section 6 only the optimizer differs: Adam keeps a step counter of 4 bytes for each of
# its tensors. Everything else is equal, to the byte.

# %%
tensors = len(list(found["model"].parameters()))
for name, (predicted, counted) in found["memory"].items():
    assert counted - predicted == (4 * tensors if name == "optimizer state" else 0), name

# %% [markdown]
# The clock can show here that small matrices reach a small part of the peak. It can't show anything about a GPU. There
# the peak is ten thousand times higher, and the time goes into waiting: for memory, for Python and for other GPUs. So this
# course counts bytes and FLOPs exactly, prints times, and asserts none.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 01` in a terminal asks these and more, with other
# numbers each time.

# %% tags=["nbval-check-output"]
questions("01_baseline")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# python -m ranklab.projects.baseline --size 350m --device cuda --compile
# python -m ranklab.projects.baseline --size 1.5b --device cuda --compile --steps 200
# python -m ranklab.projects.baseline --size 350m --device cuda --compile --micro-batch 4 --recompute
# ```
#
# What changes: bf16 by autocast, AdamW in one fused kernel, flash attention, `torch.compile` (the first step takes a
# minute or two), a vocabulary padded to a multiple of 128, heads of 128, no wait for the GPU inside a step. The third
# line is for 24 GB.
#
# What to expect: llm-foundry's published table for the H100 (989 TFLOP/s dense, contexts up to 2048) has 35% to 40% MFU for
# 760M parameters and 41% to 43% for 1.3B. Small models reach less, because their matrices are small. We have not measured them yet. Below 30%, look first for a wait in the loop (`.item()`,
# `print`), then for small micro-batches, then for a context or vocabulary with an odd size.

# %% [markdown]
# ## 10. What we left out
#
# - **fp8** training, CUDA graphs, hand-written kernels: they make one device faster still.
# - **Selective recomputation**: keep what is expensive to compute (products), recompute what is cheap (GELU, norms).
#   `torch.compile` does some of it by itself.
# - **Offloading** optimizer state to the host: lab 06.
# - **Data loading**: our text fits in memory. Real loaders are a common bottleneck; lab 04 reads their traces.
# - A tokenizer: bytes are honest and slow. Real models see three to four bytes a token.
#
# Next: **02_collectives**. One device is understood; now they talk.
