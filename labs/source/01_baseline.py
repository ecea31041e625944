# %% [markdown]
# # 01 Baseline: one device, understood
#
# > 145 minutes, 38 more with Further · difficulty 2/5 · **spine**: 4.1 to 4.3 · **laptop**: everything, a real GPT on real text · **one GPU**: the project at 350M
# > to 1.5B parameters

# %% [markdown]
# ## 1. Story
#
# Your team wants to train a GPT with 1.5 billion parameters (GPT-2's size) on 30 billion tokens. You have one H100. At
# best it does 989 TFLOP/s in bf16, and well-tuned code gets about 40% of that. A common rule says that training costs
# 6 FLOPs for each parameter and token. How many days will it take?
#
# (The data sheet of the H100 prints 1,979 TFLOP/s, with an asterisk. That number holds for sparse matrices only.)

# %%
from ranklab import answer, begin, catch_up, check, device, hint, launch, questions, status


begin("01_baseline")
check(days_on_one_gpu=...)

# %% [markdown]
# (Replace `...` with your number; `hint("days_on_one_gpu")` helps.)
#
# You can answer such questions before you run anything. In this lab you **predict what a training step computes and what
# it keeps in memory, and then count both, to the byte.** If you can't do that for one GPU, you can't judge eight.
#
# You need `launch` and `check` from lab 00, and PyTorch's autograd.

# %% [markdown]
# ## 2. Picture
#
# A GPU is a pyramid of memories. Arithmetic happens at the top, the model lives in the middle, and the other GPUs are at
# the bottom. As you go down, each level is slower than the one above it, and at least as large.

# %%
from ranklab import hardware
from ranklab.plots import baseline as plots

plots.hierarchy(hardware.H100)

# %% [markdown]
# While an H100 reads one number from its main memory (HBM), its tensor cores could do hundreds of multiplications. So
# fast code keeps numbers near the top. When you train on many GPUs, numbers also have to cross the lowest and slowest
# levels: NVLink inside a node, and the network between nodes. So the rest of this course is about sending less.

# %% [markdown]
# ## 3. Smallest working code
#
# We train a GPT on real text in a plain loop. The text is already on your disk: the source code of Python's own library,
# byte by byte. We hold out one file in ten and never train on it.

# %%
import torch

from ranklab.data import IGNORE
from ranklab.data import batch_at, bigram_loss, held_out_batch, python_text
from ranklab.models import GPT, GPTConfig, count_parameters

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
# A fresh model guesses nearly evenly among 256 bytes, and the loss of such a guess is ln 256 = 5.5. (With the natural
# logarithm, the unit of the loss is called a *nat*.) The loss of one batch jumps up and down, so trust the number on held-out
# text. But is that number good? To find out, we need a rival. A **bigram model** counts which byte follows which, and nothing
# else:

# %%
rival = bigram_loss(text.train, *held_out)
print(f"bigram model: {rival:.3f} nats per byte on held-out text")

# %% [markdown]
# If a model doesn't beat this number on held-out text, you did not need a transformer. After 100 steps our GPT does not
# beat it yet. In the project it will.

# %% [markdown]
# ## 4. Build it
#
# The whole course uses these letters: B batch, T tokens (called `seq` in code), C width (`config.n_embd`), H heads,
# V vocabulary, L layers.
#
# You will count what one block computes and keeps, so here is a block of our GPT. `up` and `down` are the two matrices of
# the MLP. One `x` runs through all blocks, and each block adds something to it. This `x` is called the **residual stream**.

# %%
import inspect

from ranklab.models import MLP, Block

print(inspect.getsource(MLP), inspect.getsource(Block), sep="\n")

# %% [markdown]
# ### 4.1 Count the work
# > difficulty 2/5 · importance 5/5 · 18 minutes · about 5 lines
#
# *After this you can count the FLOPs of a training step from a model's sizes.*
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
# At the end of the model comes the head, C x V, once. For each of these products, backward needs two: one for the gradient
# of the input, one for the gradient of the weight. (The causal mask throws away the upper half of the T x T matrix. Count
# it anyway, as torch's counter and most papers do.)
#
# **Predict.** GPT-2 medium has 353.55 million parameters, C = 1024 and 24 layers. The batch is 8 sequences of 1024 tokens.
# How many TFLOP does one training step take? Use the rule from the story, 6 FLOPs for each parameter and token. It leaves
# out the last two rows of the table.

# %%
check(step_tflop=...)

# %%
def transformer_flops(config, batch, seq, backward=True):
    """Count the FLOPs of all matrix products in one step of GPT(config) on `batch` x `seq` tokens.

    Attention counts in full, including its masked half.
    backward: False: count the forward pass only.
    """
    C, V, tokens = config.n_embd, config.vocab_size, batch * seq
    # the table, for all layers; then the head, and backward
    raise NotImplementedError("exercise 4.1: about 5 lines")


# %%
transformer_flops = check(transformer_flops)

# %% [markdown]
# The check compared your count with torch's own `FlopCounterMode`, FLOP for FLOP. Now use it for a model that is too large
# to run here. How much of GPT-2 medium's work does the rule of 6 see as the context grows?

# %% tags=["nbval-check-output"]
for seq in (256, 1024, 4096, 16384):
    medium = GPTConfig(vocab_size=50304, n_ctx=seq, n_layer=24, n_head=16, n_embd=1024)
    total = transformer_flops(medium, 1, seq)
    rule = 6 * count_parameters(medium) * seq
    print(f"context {seq:6}: {total / seq / 1e9:6.2f} GFLOP per token, the rule of 6 says "
          f"{rule / seq / 1e9:.2f}: {100 * rule / total:3.0f}% of it")

# %% [markdown]
# The rule is fine for short contexts. At GPT-2's own 1024 tokens it is 12% low, and at 16k tokens it misses more than two
# thirds of the work.
#
# You count other models in the same way. Grouped-query attention (GQA) has fewer heads for k and v, so their two matrices
# shrink, but q @ k and probability @ v do not. In a mixture of experts (MoE) each token uses only a few experts, so the
# rule counts the *active* parameters, not all of them.
#
# How well do you use the hardware? People answer with one number. **Model FLOPs utilisation** (MFU) is the FLOPs that the
# *model* needs, divided by the FLOPs that the devices could have done in that time. If you compute something twice to save
# memory, the second time does not count.
#
# **Predict.** GPT-2 medium does 160 000 tokens a second on one H100 (989.4 TFLOP/s). `transformer_flops` counts 2.423 GFLOP
# for each token (the rule of 6 says 2.12). What is the MFU, in percent?

# %%
check(mfu_percent=...)

# %% [markdown]
# ### 4.2 What must stay in memory
# > difficulty 1/5 · importance 5/5 · 8 minutes · about 4 lines
#
# *After this you can say how many bytes a parameter takes in training, and what each is for.*
#
# Four things live as long as the run: the weights, the gradients, Adam's two moments (a mean and a mean square of each
# gradient), and, in mixed precision, a float32 copy of the weights, the **master weights**. Why do you need the copy? A
# bf16 number has only 8 bits of precision, so 1.0 plus 0.001 is still 1.0:

# %% tags=["nbval-check-output"]
one = torch.tensor(1.0, dtype=torch.bfloat16)
print(one + 0.001, " ", torch.tensor(1.0) + 0.001)

# %% [markdown]
# So mixed precision multiplies with bf16 weights, but adds up the small steps in float32. These are three common recipes:
#
# | recipe | weights, gradients | Adam's moments | master weights |
# |---|---|---|---|
# | fp32 | float32 | float32 | none |
# | mixed | bf16 | float32 | float32 |
# | bf16 | bf16 | bf16 | none |
#
# **Predict.** A model has 7 billion parameters, and you take the recipe "mixed". How many GB do you need before the first
# activation?

# %%
check(adam_gb=...)

# %%
def model_state_bytes(n, recipe="mixed"):
    """Count the bytes of n parameters' state between two steps with Adam, in a dict by category.

    The keys are "parameters", "gradients" and "optimizer"; master weights count as "optimizer".
    """
    # the row of the table, in bytes for one parameter
    raise NotImplementedError("exercise 4.2: about 4 lines")


# %%
model_state_bytes = check(model_state_bytes)

# %% [markdown]
# Which model fits on which GPU, if we forget activations for a moment?

# %% tags=["nbval-check-output"]
for name, n in (("350M", 354e6), ("1.5B", 1.5e9), ("7B", 7e9), ("70B", 70e9)):
    need = sum(model_state_bytes(n, "mixed").values())
    fits = ", ".join(gpu.name for gpu in hardware.GPUS if gpu.memory_bytes > need)
    print(f"{name:>5}: {need / 1e9:6.1f} GB fits {fits or 'no single GPU: labs 06 to 12'}")

# %% [markdown]
# (The cards with 24 GB are not listed for 1.5B, because nothing would be left for activations.)
#
# Did you notice that "mixed" and "fp32" both need 16 bytes for each parameter? **Mixed precision saves time and activations,
# not model state.**

# %% [markdown]
# ### 4.3 What waits for backward
# > difficulty 2/5 · importance 5/5 · 8 minutes · no lines, one number
#
# *After this you can say how many bytes of activations a batch keeps until its backward.*
#
# The rest of the memory goes to activations: what forward keeps because backward will need it. The rules are few. A linear
# layer and a GELU keep their input. A norm keeps its input and two numbers for each token, a mean and a deviation.
# Attention keeps q, k, v and its output. An addition keeps nothing. If two operations keep the same tensor, it is stored
# only once. So a block keeps:
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
# To keep it simple, we let all numbers be bf16, 2 bytes each. (`autocast` in section 5 is more selective: it leaves norms,
# residual stream and loss in float32.)
#
# **Predict.** GPT-2 medium (C = 1024, 24 layers) runs on 8 sequences of 1024 tokens, in bf16, with flash attention. How
# many GB do all blocks keep? Leave out the rows that are smaller than C.

# %%
check(activation_gb=...)

# %% [markdown]
# `activation_bytes` adds up the table for all layers. It equals what autograd saves, to the byte. (You can write it
# yourself under Further.) For GPT-2 medium in bf16 it says:

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
    "GPT-2 medium, 8 x 1024 tokens")

# %% [markdown]
# Plain attention pays for a T x T matrix in each head. **Flash attention** never writes this matrix. It keeps a log-sum for
# each row, and in backward it computes the matrix again, piece by piece, high up in the pyramid. The right bar shows what
# your function from 4.5 will keep until backward starts. The peak is higher, because backward needs one whole block at a
# time.

# %% [markdown]
# > **Spine**: this lab's part ends here. On it goes in [06_zero](06_zero.ipynb); the rest of this lab is extra.

# %% [markdown]
# ### 4.4 A big batch in small pieces
# > difficulty 2/5 · importance 5/5 · 14 minutes · about 6 lines
#
# *After this you can train with a batch that does not fit, and get the same gradient.*
#
# Activations grow with the batch; model state does not. So if a batch is too big, cut it into pieces, the
# **micro-batches**. After each piece, `backward()` **adds** to `.grad` and frees what the piece has kept. This is **gradient
# accumulation**. The only difficulty is what to divide by, because every target that counts must have the same weight,
# whatever piece it is in. Targets with the value IGNORE (padding, or a prompt in instruction tuning) do not count at all.
#
# **Predict.** 9 rows of text come in pieces of 4, 4 and 1. Somebody takes the mean of each piece, and then the mean of the
# three means. By what factor does the single last row weigh too much?

# %%
check(ragged_factor=...)

# %%
def accumulate_gradients(loss_sum, inputs, targets, micro_batch):
    """Add the gradient of the mean loss over all targets to .grad, one micro-batch at a time.

    The gradient is the same as for the whole batch at once.
    loss_sum: (inputs, targets) -> the sum of the losses of all targets that are not IGNORE.
    micro_batch: rows in a micro-batch; the last may have fewer. Each goes through loss_sum once, in
        any order.
    Returns: the mean loss, detached.
    Memory: the activations of one micro-batch at a time.
    """
    count = (targets != IGNORE).sum()  # over the whole batch
    mean = 0.0
    # for each piece: what is its part of the mean?
    raise NotImplementedError("exercise 4.4: about 6 lines")


# %%
accumulate_gradients = check(accumulate_gradients)

# %% [markdown]
# You get the same gradient for the same FLOPs, with the memory of one piece: pieces of 2 rows need about a sixteenth of the memory of all 32, and the norm of the gradient is the same to six digits.

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
# *After this you can trade a second forward for most of the activations' memory.*
#
# And if a single sequence is already too much? Then keep only the *input* of each block. When backward comes to the block,
# run the block again, this time with autograd on, and go backward through it. This is **activation checkpointing**.
#
# **Predict.** You checkpoint every block. By how many percent does the work of a step grow at most?

# %%
check(recompute_percent=...)

# %% [markdown]
# To give an operation a backward of your own, write a `torch.autograd.Function`. Autograd is off inside it, so it keeps
# only what you save:

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
# Forward is given below, and you write backward. There are three traps. First, cut the inputs off from the graph that they
# came from. Second, dropout must drop *the same* numbers again; the context `random_replayed(state)` does that. Third, the
# weights inside `function` are not among the inputs, but they need gradients too.
# `torch.autograd.backward(outputs, gradients)` fills the `.grad` of everything that `outputs` were made from. `torch.autograd.grad` would return only the
# gradients that you name, and you can't name weights that you don't see.

# %%
from ranklab.baseline import random_replayed, random_state


def checkpointed(function, *inputs):
    """Compute function(*inputs), with all its gradients, but keep only `inputs` for backward.

    Some of the inputs may need no gradient: a mask, integers. function may return a tuple.
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
# Here is one step of a GPT with six layers, with your function around each block and without. The curves show the
# activations that wait for backward. Forward is left of the dotted line:

# %%
from ranklab.baseline import checkpoint_blocks, live_activations

deep = GPTConfig(n_layer=6)
batch = batch_at(text.train, 0, batch=8, n_ctx=64)
plots.live_bytes({"all kept": live_activations(GPT(deep), *batch),
                  "blocks recomputed": live_activations(
                      checkpoint_blocks(GPT(deep), checkpointed), *batch)})

# %% [markdown]
# The mountain becomes a comb. In backward each tooth is one block that is computed again and used up. With more layers
# the mountain grows, but the comb stays almost as it is.

# %% [markdown]
# ### 4.6 The smallest peak
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 20 lines · open: no recipe
#
# *After this you can find which tensor makes the peak of a training step, and remove it.*
#
# Now put it all together: compute the gradient of a big batch in as little memory as you can. Do you need all rows at once?
# All blocks? All logits? There is no recipe. Two things have cost people an hour. A tied head and embedding are one weight
# with two gradients, and autograd may hold the first until it has the second. And a variable that still names a tensor
# keeps it alive.
#
# You may call `model.token(inputs)`, (B, T) -> (B, T, C); each of `model.blocks.values()` and `model.norm`, (B, T, C) ->
# (B, T, C); `model.loss(model.head, hidden, targets, "sum")`, the sum of the losses of what you pass; and your functions
# from 4.4 and 4.5.
#
# **Predict.** The vocabulary has 50304 entries. How many MB do the logits of one row of 1024 tokens take, in float32?

# %%
check(logits_mb=...)

# %%
def frugal_gradients(model, inputs, targets):
    """Add the gradient of the mean loss to .grad, as model(inputs, targets).backward() does.

    The mean is over all targets that are not IGNORE.
    model: a GPT without dropout; its head may be tied to its embedding. Frozen weights get no
        gradient. The model is left as it was.
    Returns: the mean loss, detached.
    Memory: the peak is at most twice this bound: what one row keeps for backward if each block
        keeps only its input, plus what a single block keeps. The peak counts all tensors except
        parameters, gradients and buffers.
    Cost: at most 1.5 times the FLOPs of the plain step.
    """
    raise NotImplementedError("exercise 4.6: about 20 lines")


# %%
frugal_gradients = check(frugal_gradients)

# %% [markdown]
# Here are four ways to the same gradient, with six blocks. The numbers are the memory at the peak, without parameters and
# gradients:

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
# Your peak stays almost the same with more rows. But don't always train like this: small pieces keep a GPU less busy. In
# practice, go in this direction only as far as your memory forces you to.

# %% [markdown]
# ### Further
#
# One device can teach you more than fits into the 145 minutes. The exercises here have checks too, and the lab runs without
# them.

# %% [markdown]
# #### `mfu`
# > difficulty 1/5 · importance 5/5 · 5 minutes · about 2 lines
#
# Turn your prediction from 4.1 into a function.

# %%
def mfu(config, tokens_per_second, peak_flops, devices=1):
    """Return the model FLOPs per second as a fraction of the devices' peak FLOP/s.

    tokens_per_second: total over all `devices`, in sequences of config.n_ctx tokens.
    """
    raise NotImplementedError("exercise mfu: about 2 lines")


# %%
mfu = check(mfu)

# %% [markdown]
# What is the MFU of your own machine? As its peak we take the fastest matrix product that we can measure here.

# %%
cpu = hardware.present("cpu")
model = GPT(GPTConfig())
inputs, targets = batch_at(text.train, 0, batch=12, n_ctx=64)
seconds = hardware.best_seconds(lambda: model(inputs, targets).backward(), seconds=0.5)
share = mfu(GPTConfig(), 12 * 64 / seconds, cpu.fp32_flops)
print(f"{cpu.name}: {cpu.fp32_flops / 1e9:.0f} GFLOP/s at best; forward and backward: {share:.0%}")

# %% [markdown]
# This is well below 100%, although no message was sent. The matrices are small, and the time spent in norms, GELU and
# softmax counts as no work at all. A whole run gets even less.

# %% [markdown]
# #### `activation_bytes`
# > difficulty 3/5 · importance 4/5 · 18 minutes · about 7 lines
#
# Write the table in 4.3 as a formula that is right to the byte. `ends_bytes(config, batch, seq, element)` counts embedding,
# head and loss for you. All numbers have `element` bytes, except the log-sums.

# %%
def activation_bytes(config, batch, seq, element=4, recompute=False):
    """Count the bytes that autograd keeps for backward after GPT(config)(inputs, targets).

    element: bytes per number.
    recompute: True: each block keeps only its input, C numbers per token.
    """
    C, H, tokens = config.n_embd, config.n_head, batch * seq
    # the table for a block, with flash or without; + ends_bytes(config, batch, seq, element)
    raise NotImplementedError("exercise activation_bytes: about 7 lines")


# %%
activation_bytes = check(activation_bytes)

# %% [markdown]
# **Roofline.** An operation waits either for arithmetic or for memory. Its *intensity*, the FLOPs for each byte that it
# moves, tells you which of the two. At the *balance* both take equally long. What is the balance of an H100 (989.4 TFLOP/s
# in bf16, 3.35 TB/s)?

# %%
check(break_even_intensity=...)

# %%
from ranklab.baseline import block_operations, decode_operation

medium = GPTConfig(vocab_size=50304, n_ctx=1024, n_layer=24, n_head=16, n_embd=1024)
operations = block_operations(medium, batch=8, seq=1024) + [decode_operation(medium, batch=1)]
plots.roofline(operations, hardware.H100)

# %% [markdown]
# Operations left of the balance wait for memory, so more FLOP/s would not help them. That is why compilers *fuse* norms and
# additions into their neighbours, and why flash attention is faster. It is also why a GPU that generates text one token at
# a time uses a third of a percent of its peak (1 of 295).

# %% [markdown]
# #### `scale_loss`: sixteen bits and small gradients
# > difficulty 3/5 · importance 3/5 · 15 minutes · about 10 lines
#
# There are two 16-bit formats. bf16 has float32's range and little precision. fp16 has more precision and a small range, so
# small gradients vanish in it and large ones overflow:

# %% tags=["nbval-check-output"]
for x in (1e-8, 1e-3, 1.001, 1e5):
    x = torch.tensor(x)
    print(f"{x:10.4g}   bf16 {x.bfloat16().item():10.4g}   fp16 {x.half().item():10.4g}")

# %% [markdown]
# The cure for fp16 is to multiply the *loss* by a large scale, so that all gradients grow, and to divide the gradients by it
# before the step. How large a scale? You find it by trying: if a gradient overflows, **skip** the step and **halve** the
# scale; after `interval` clean steps in a row, **double** it. (bf16 needs none of this, which is why most training has
# switched to it.)
#
# A third format hides in float32 code. **TF32** has float32's range and fp16's precision, and runs on the tensor cores. If
# you call `torch.set_float32_matmul_precision("high")`, float32 products use it. They are then several times faster on an
# A100 or H100, and have about three correct digits.

# %%
from ranklab.baseline import LossScale


def scale_loss(loss, optimizer, state):
    """Step `optimizer` with the true gradients of `loss`, or skip the step if scaled ones overflow.

    state: has .scale, .clean_steps, .interval; state._replace(scale=...) makes the next one.
        Nothing else is kept between two steps.
    Returns: the next LossScale (halved, kept or doubled).
    """
    optimizer.zero_grad()
    (loss * state.scale).backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    # an overflow, a clean step, or the last of `interval` clean ones?
    raise NotImplementedError("exercise scale_loss: about 10 lines")


# %%
scale_loss = check(scale_loss)

# %% [markdown]
# In this run two batches have large gradients. The scale climbs until a gradient overflows, halves, and climbs again.
# (A scale of 2^16 is too much even for a gradient of 1, because fp16 ends at 65504.)

# %%
w = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([w], lr=0.0)  # 0: only the scale is of interest here
state = LossScale(2.0**12, 0, interval=8)
scales, skips, large = [], [], (20, 60)
for step in range(100):
    size = 300.0 if step in large else 1.0
    scales.append(state.scale)
    state = scale_loss((w.half() * size).float().sum(), optimizer, state)
    skips += [step] if state.scale < scales[-1] else []
plots.scale_history(scales, skips, large)

# %% [markdown]
# **Streams.** With a GPU, Python does not compute: it puts kernels into a queue, a *stream*, and goes on at once. This has
# two consequences. If you stop the clock without `synchronize`, you measure how fast you can queue. And a
# `print(loss.item())` in each step makes Python wait for the GPU, and then the GPU waits for Python. In this cell a thread
# plays the GPU, with CUDA's names and rules.

# %%
import time

from ranklab.baseline import Stream

stream = Stream()
start = time.perf_counter()
for _ in range(3):
    stream.launch(time.sleep, 0.02)  # a "kernel" of 20 ms
launch_time = time.perf_counter() - start
stream.synchronize()
total_time = time.perf_counter() - start
print(f"queued after {launch_time * 1e3:.1f} ms, done after {total_time * 1e3:.0f} ms")

# %% [markdown]
# Two streams run side by side, unless one waits for an **event** of the other. This is how lab 03 hides communication
# behind computation. Backward begins with the last layer, so the gradients of layer 2 travel while layer 1 computes:

# %%
comm_stream, spans = Stream(), {"stream 1": [], "stream 2": []}


def kernel(row, name, seconds):
    begin = time.perf_counter()
    time.sleep(seconds)
    spans[row].append((name, begin - start, time.perf_counter() - start))


start = time.perf_counter()
stream.launch(kernel, "stream 1", "layer 2", 0.03)
ready = stream.record()  # an event
stream.launch(kernel, "stream 1", "layer 1", 0.03)
comm_stream.wait_event(ready)
comm_stream.launch(kernel, "stream 2", "send layer 2", 0.03)
stream.synchronize(), comm_stream.synchronize()
plots.timeline(spans, title="Layer 2's gradients travel while layer 1 computes (emulated)")

# %% [markdown]
# **Fragmentation.** "Tried to allocate 40 MB; 60 MB are free." How can that fail? A tensor needs its memory in one piece:

# %% tags=["nbval-check-output"]
from ranklab.baseline import Arena

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
# Batches whose lengths keep changing do this to a GPU. There are two cures. Pad to a few fixed shapes, or set
# `PYTORCH_ALLOC_CONF=expandable_segments:True`, which lets torch join pieces by remapping pages. To *see* the pieces on a
# GPU, call `torch.cuda.memory._record_memory_history()`, run some steps, and call
# `torch.cuda.memory._dump_snapshot("memory.pickle")`. Open the file at pytorch.org/memory_viz, and you see each piece, its
# size, and the line of code that asked for it.

# %% [markdown]
# ## 5. The real thing
#
# **torch.utils.checkpoint** is your `checkpointed`, made for production. It gives the same gradients and keeps the same
# bytes. (There is one difference: if no input needs a gradient, yours gives the weights none.)

# %%
from torch.utils.checkpoint import checkpoint


def step_with(wrap):
    torch.manual_seed(0)
    model = checkpoint_blocks(GPT(GPTConfig(dropout=0.1)), wrap)
    with SavedActivations(model) as saved:
        loss = model(*batch)
    loss.backward()
    return saved.bytes, [p.grad for p in model.parameters()]


nbytes, grads = step_with(checkpointed)
torch_nbytes, torch_grads = step_with(lambda f, x: checkpoint(f, x, use_reentrant=False))
print(f"kept: {nbytes:,} bytes by yours, {torch_nbytes:,} bytes by torch's")
assert nbytes == torch_nbytes
assert all(torch.equal(a, b) for a, b in zip(grads, torch_grads))

# %% [markdown]
# **torch.amp** is mixed precision in two lines. `autocast` casts the inputs of matrix products to 16 bits, and leaves
# weights, norms and losses in float32. So the weights are float32, the gradients too, and there is no separate master copy:
# 4 + 4 + 8 = 16 bytes again. On top of that come 2 bytes for the 16-bit copy of each weight. `autocast` keeps it from its
# first use to the end of the `with`, and the graph keeps it until backward. `GradScaler` is your `scale_loss` from Further,
# and the check there compares the two step by step.

# %% tags=["nbval-check-output"]
model = GPT(GPTConfig())
with torch.autocast("cpu", dtype=torch.bfloat16):
    logits = model(batch[0])
print(f"weights {model.head.weight.dtype}, logits {logits.dtype}")

# %% [markdown]
# **torch.profiler** tells you where the time goes, operation by operation:

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
# In a large model, matrix products (`addmm`, `mm`, `bmm`) and attention lead this list. If something else does, you have
# found your first optimisation. `profiler.export_chrome_trace("trace.json")` writes a file that ui.perfetto.dev opens.

# %% [markdown]
# ## 6. Project
#
# **Train the baseline that we compare every later lab with.** It is a GPT on text. The report shows its tokens per second
# (here a token is a byte), its MFU, its memory by category and its loss. The loop is `ranklab.trainer`, with AdamW, warm-up
# and cosine, clipping, accumulation, mixed precision and checkpoints. The same program trains 1.5 billion parameters on a
# GPU (section 9).

# %%
from ranklab.projects import baseline as project

functions = {"flops": transformer_flops, "states": model_state_bytes,
             "activations": activation_bytes, "accumulate": accumulate_gradients,
             "checkpointed": checkpointed, "frugal": frugal_gradients}
results = project.run(steps=700, eval_every=100, progress=False, **functions)
print(project.report(results))

# %%
plots.loss_curve(results["history"], results["bigram"])

# %% [markdown]
# First the GPT learns what the bigram model knows. Then it goes further, because it looks back more than one byte. So far
# it has read half a megabyte of Python, and it writes like this:

# %%
print(results["sample"])
assert results["held_out"] < results["bigram"] - 0.3

# %% [markdown]
# It is not a programmer yet. It had 4 x 10^11 FLOPs; GPT-2 had an estimated 10^21.
#
# **Your turn.** Change one thing below. First write down what you expect: which bytes change, by which factor, and does
# the loss change? The cell now uses your `frugal_gradients`: what will be in memory at the peak? Other ideas are
# `"micro_batch": 3`, `"recompute": True`, `"loss_chunks": 4`, or all three.

# %%
change = {"frugally": True}
settings = {"steps": 20, "eval_batch": 16, "progress": False}
for changes in ({}, change):
    result = project.run(**(settings | functions | changes))
    print(f"{changes or 'as it is'}: loss {result['held_out']:.4f}, peak beside states "
          f"{result['peak']:,} bytes")

# %% [markdown]
# The loss is the same to four digits. With `frugally`, only one row of twelve is in memory, and of that row only the
# activations of one block. So the peak is nearly 20 times smaller, for about 30% more FLOPs.

# %% [markdown]
# ## 7. Measure
#
# Compare prediction and count for the long run of section 6:

# %% tags=["nbval-check-output"]
predicted, counted = results["flops"]["predicted"], results["flops"]["counted"]
print(f"FLOPs of a step: {predicted:,} predicted, {counted:,} counted")
assert predicted == counted

# %% [markdown]
# What about the bytes? In the table in section 6 only the optimizer differs, because Adam keeps a step counter of 4 bytes
# for each of its tensors. Everything else is equal, to the byte.

# %%
tensors = len(list(results["model"].parameters()))
for name, (predicted, counted) in results["memory"].items():
    assert counted - predicted == (4 * tensors if name == "optimizer state" else 0), name

# %% [markdown]
# Here the clock can show that small matrices reach a small part of the peak. It can't tell you anything about a GPU, where
# the peak is ten thousand times higher and the time goes into waiting: for memory, for Python and for other GPUs. So this
# course counts bytes and FLOPs exactly, prints times, and asserts no time.

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
# The third line is for a card with 24 GB. On a GPU the project uses bf16 by autocast, AdamW in one fused kernel, flash
# attention and `torch.compile` (the first step takes a minute or two). The vocabulary is padded to a multiple of 128, heads
# have 128 numbers, and Python does not wait for the GPU inside a step.
#
# What speed can you expect? llm-foundry's published table for the H100 (989 TFLOP/s dense, contexts up to 2048) has 35% to 40% MFU for 760M parameters and 41% to 43% for 1.3B. Small models reach less, because their matrices are small. We have not measured this project yet. About lab 12's trainer we were wrong: with 0.35 billion parameters a step took 2.8 times as long on an H200 as our planner said (7% MFU), because the GPU waited for Python. If you get less than 30%, look first for a wait in the loop (`.item()`, `print`), then for small micro-batches, then for a context or vocabulary with an odd size.

# %% [markdown]
# ## 10. Take with you
#
# 1. Training takes 6 FLOPs for each parameter and token: 8 billion parameters and 15 trillion tokens are 7.2e23 FLOPs, and attention adds to that.
# 2. Adam in mixed precision keeps 16 bytes for each parameter, so 80 GB are full at 5 billion, before the first activation.
# 3. Checkpointing runs each forward twice: 8 FLOPs instead of 6, a third more work for a small part of the activations.
#
# **What we left out**
#
# - **fp8** training, CUDA graphs, hand-written kernels: they make one device even faster.
# - **Selective recomputation**: keep what is expensive to compute (products), and recompute what is cheap (GELU, norms).
#   `torch.compile` does some of this by itself.
# - **Offloading** optimizer state to the host: lab 06.
# - **Data loading**: our text fits in memory. Real loaders are a common bottleneck; lab 04 reads their traces.
# - **A tokenizer**: bytes are simple but slow. Real models see three to four bytes in a token.
#
# Now you understand one device. In [02_collectives](02_collectives.ipynb) several of them talk to each other.
#
# On the spine it is [06_zero](06_zero.ipynb).
