# %% [markdown]
# # 12 3D parallelism: all of it on one model
#
# > 140 minutes, 40 more with Further · difficulty 5/5 · **spine**: 4.1, 4.2, section 7 · **laptop**: everything, with real processes · **GPUs**: the same cells, on NCCL

# %% [markdown]
# ## 1. Story
#
# Take lab 09's GPT again: a trillion parameters on 3,072 A100s (Megatron-LM, arXiv 2104.04473). Its weights, gradients and Adam state take about 16 TB. You know three ways to share them, and each of them fails alone:
#
# - **Sharded data parallelism** (ZeRO-3, labs 06 and 07) gathers every layer twice. With one sequence per GPU there is little work to hide that behind. The paper ran DeepSpeed's ZeRO-3 of 2021 that way, with 530 billion parameters on 2,240 GPUs, and reached 48 TFLOP/s per GPU; the three kinds together reached 159 (its table 2).
# - **Tensor parallelism** (lab 08) is fast inside a node of 8 GPUs. Across nodes, every layer waits for the slow network several times.
# - **Pipeline parallelism** (lab 09) stops at 128 GPUs, because the model has 128 layers.
#
# So they used all three, pipeline 64 x data 6 x tensor 8, and reached 52% of peak. Others did the same:
#
# | | GPUs | pipeline | data | tensor | of peak |
# |---|---|---|---|---|---|
# | Megatron-LM 1T (arXiv 2104.04473) | 3,072 A100 | 64, interleaved | 6 | 8 | 52% |
# | BLOOM 176B (arXiv 2211.05100) | 384 A100 | 12 | 8, ZeRO-1 | 4 | 50% |
# | GLM-130B (arXiv 2210.02414) | 768 A100 | 8 | 24 | 4 | 33% |
# | Llama 3 405B (arXiv 2407.21783) | 8,192 H100 | 16, interleaved | 64, FSDP | 8 | 43% |
# | the same, with half the batch for each pipeline | 16,384 H100 | 16, interleaved | 128, FSDP | 8 | 41% |
#
# In the last column, Megatron-LM and BLOOM count recomputed work as work, but GLM and Llama do not. Llama 3's FSDP shards the optimizer state and the gradients, but keeps the weights whole after their forward (its section 3.3.2), so it is close to ZeRO-2.
#
# This lab uses what you wrote in labs 01, 03 and 06 to 09. The new thing is how the parts fit together.

# %%
import dataclasses
import functools
import tempfile

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ranklab import (
    answer, begin, catch_up, check, device, hint, launch, passed_answers, questions, status,
)
from ranklab.hybrid import Hybrid, Layout, parse_layout
from ranklab.mesh import Mesh

begin("12_hybrid")

# %% [markdown]
# ## 2. Picture
#
# Here are eight ranks on two nodes of four, arranged in a **mesh** with three axes. Each panel shows one axis, and which ranks talk along it. A box is a node, and dashed lines cross between the nodes.

# %%
from ranklab.plots import hybrid as plots
from ranklab.plots.mesh import who_talks_to_whom

who_talks_to_whom(Mesh({"pipeline": 2, "data": 2, "tensor": 2}), per_node=4)

# %% [markdown]
# | along | what travels | how often | can a rank compute meanwhile? |
# |---|---|---|---|
# | pipeline | activations | once each way for each micro-batch, between two stages | yes, the next micro-batch |
# | data | gradients (ZeRO-1: and parameters; FSDP: each layer) | once a step (FSDP: each micro-batch) | yes, the rest of the backward |
# | tensor | activations | 4 times in each layer and micro-batch | hardly, because the next product needs them (lab 08) |
#
# How many bytes is that? The figure below shows what our formulas say for 100 billion parameters on 64 GPUs and a batch of 1,024 sequences of 2,048 tokens. The tensor bar is so long for two reasons: the course's trainer sends the gradients of activations in float32, and a recomputed block repeats the all-reduces of its forward.

# %%
from ranklab.hybrid import layout_traffic
from ranklab.projects.hybrid import JOBS

job = JOBS["100b"]
layout = Layout(pp=4, dp=2, tp=8, sequence_parallel=True, zero=1, recompute=True)
plots.along_axes(layout_traffic(job, layout), layout.mesh, 8,
                 "of 100 billion parameters")

# %% [markdown]
# Tensor parallelism sends by far the most, so tensor ranks must be **neighbours** inside a node. In a mesh the last axis varies fastest, so ranks with consecutive numbers are neighbours along the last axis. That is why tensor comes last.
#
# **Predict.** A mesh has 64 ranks: pipeline 4 x data 2 x tensor 8, in this order. Rank 21 is in the second stage. To which rank does it send its output?

# %%
check(mesh_next_rank=...)

# %% [markdown]
# ## 3. Smallest working code
#
# Start eight ranks. `divmod` turns a rank into coordinates. Each axis gets its groups, and then the ranks sum their numbers along each axis:

# %% tags=["nbval-check-output"]
def place_of(rank):
    rest, tensor = divmod(rank, 2)
    pipeline, data = divmod(rest, 2)
    return pipeline, data, tensor


def three_sums():
    rank, sums = dist.get_rank(), []
    for axis, stride in enumerate((4, 2, 1)):  # between neighbours along the axis
        for first in range(8):
            if place_of(first)[axis] == 0:
                group = dist.new_group([first, first + stride])  # all ranks make all groups
                if rank in (first, first + stride):
                    own_group = group
        x = torch.tensor(rank, device=device())
        dist.all_reduce(x, group=own_group)
        sums.append(x.item())
    return sums


print("rank  pipeline, data, tensor  sums along each")
for rank, sums in enumerate(launch(three_sums, ranks=8)):
    print(f"{rank:4}  {place_of(rank)!s:22}  {sums}")

# %% [markdown]
# Why does every rank make all groups, even those it isn't in? By default all ranks of the job must call `new_group` together. If one rank skips a group, or makes the groups in another order, the ranks wait for each other or talk to the wrong peers. With `use_local_synchronization=True` only the members of a group call it, but overlapping groups must still be made in the same order (its docstring in torch 2.13).

# %% [markdown]
# ## 4. Build it

# %% [markdown]
# ### 4.1 The mesh
# > difficulty 2/5 · importance 5/5 · 12 minutes · about 10 lines
#
# *After this you can place any rank on a mesh, and make the groups of its axes.*
#
# The given `Mesh` computes the place of each rank, which is only arithmetic. You make the process groups.
#
# | given | |
# |---|---|
# | `mesh.axes`, `mesh.size` | {name: size}, and the number of ranks |
# | `mesh.all_along(names)` | all groups of ranks that differ along these axes only, as tuples: `[(0, 1), (2, 3), ...]` |
# | `mesh.ranks_along(names)` | the group among them that contains this rank |
# | `mesh.groups` | filled by you: {tuple of axes, in the order of `mesh.axes`: this rank's process group} |
#
# `joined` asks for groups that span several axes. For example, `[("pipeline", "data")]` makes one group for each place along tensor, with all ranks at that place. The trainer sums the loss over such a group.

# %%
def build_mesh(axes, joined=()):
    """Make the Mesh of all ranks of this job, with a process group for each axis.

    Collective: every rank calls it with the same arguments, and makes all groups in the same order.
    Afterwards mesh.group(names) is this rank's group.
    joined: tuples of axes that also get a joint group: [("data", "tensor")], with the names in any
        order.
    Raises: ValueError if the product of the sizes is not the number of ranks; the message gives
        both numbers.
    """
    raise NotImplementedError("exercise 4.1: about 10 lines")


# %%
build_mesh = check(build_mesh)

# %% [markdown]
# Here is your mesh on eight real ranks. Below it are three orders of the axes for 64 ranks, with the axes that then stay inside a node of 8:

# %% tags=["nbval-check-output"]
mesh = launch(build_mesh, {"pipeline": 2, "data": 2, "tensor": 2}, ranks=8)[0]
print(mesh)
for order in ("pipeline data tensor", "data pipeline tensor", "tensor data pipeline"):
    mesh_64 = Mesh({axis: {"pipeline": 4, "data": 2, "tensor": 8}[axis] for axis in order.split()})
    print(f"{order:22} inside a node of 8: {', '.join(mesh_64.axes_inside(8))}")

# %% [markdown]
# With tensor outermost, every tensor message crosses nodes. That leaves pipeline or data for the outermost place. Pipeline messages are small; data messages are large, but rare, and they can hide behind backward. Both choices are in use: Megatron-LM puts pipeline outermost, and Llama 3 puts data there.
#
# torch's own mesh is `init_device_mesh("cuda", (4, 2, 8), mesh_dim_names=("pipeline", "data", "tensor"))`, and `mesh["tensor"].get_group()` is one of its groups. DTensor, FSDP2 and section 5 take such a mesh. The number of groups matters at scale: Llama 3 on 16,384 GPUs has 1,024 + 128 + 2,048 = 3,200 of them. If each rank has told torch which GPU it uses, DeviceMesh makes all groups of an axis in one call, `split_group`. Otherwise it calls `new_group` for each, as you do (`device_mesh.py` of torch 2.13).

# %% [markdown]
# ### 4.2 In the right order
# > difficulty 4/5 · importance 5/5 · 15 minutes · about 8 lines
#
# *After this you can apply six kinds of parallelism to one model in an order that works.*
#
# You get six calls from earlier labs, and each one changes a model in place. In a wrong order they fail at once, or they need memory for the whole model on each rank, or the run trains wrongly without any error. To find a right order, look at what each call holds on to and what it leaves behind:
#
# | given, in alphabetical order | holds on to | leaves |
# |---|---|---|
# | `checkpoint_blocks(model, checkpoint)`, lab 01 | blocks | each block runs as `checkpoint(block, x)`; use torch's `checkpoint` with `use_reentrant=False` |
# | `hybrid.data.apply(model)`, labs 03, 06, 07 | each parameter and its values | gradients that will be averaged, or sharded parameters |
# | `hybrid.materialize(model)`, lab 07 | parameters on `meta`: shapes without memory | the same parameters on the device, with initial values |
# | `hybrid.pipeline.keep_stages(model)`, lab 09 | nothing | this rank's layers; the other layers are gone |
# | `hybrid.pipeline.make_stages(model)`, lab 09 | the layers as they are at that moment | a model that runs stage by stage |
# | `parallel_gpt(model, TPConfig(group, sequence_parallel))`, lab 08 | layers | parallel layers in their place, with new, smaller parameters |
#
# The model arrives on the `meta` device, because no rank could hold all of it. More than one order is right.
#
# Micro-batches do two jobs here: gradients **accumulate** over them (lab 01), and they fill the **pipeline** (lab 09).
#
# **Predict.** A step has 1,024 sequences. There are 8 data ranks, and a micro-batch has 2 sequences. How many micro-batches go through each pipeline?

# %%
check(mesh_micro_batches=...)

# %% [markdown]
# > **Take away.** Batch = data ranks x micro-batch x M. With 1,024 sequences, micro-batches of 2 and four stages, 8 data ranks leave M = 64 and a bubble of 3/67 = 4%; 64 data ranks leave M = 8 and 3/11 = 27%.

# %%
from ranklab.baseline import checkpoint_blocks
from ranklab.tensor_parallel import TPConfig, parallel_gpt


def parallelize(model, hybrid):
    """Reduce `model`, a GPT, to this rank's part, which trains with the other ranks; return it.

    `model` is changed in place. Every step has the same result as on one process. No rank ever
    allocates more than its own layers, and its own part of their matrices. (If data ranks shard
    parameters, they first have all of that part, and shard it at the end.) With layout.recompute,
    and only then, blocks repeat their forward in backward. With layout.sequence_parallel a rank has
    only its own tokens between regions (lab 08).
    hybrid: has .layout, .pipeline, .tensor (with .group), .data and .materialize.
    """
    raise NotImplementedError("exercise 4.2: about 8 lines")


# %%
parallelize = check(parallelize)

# %% [markdown]
# Now your function runs in the course's training loop. The data is the source code of Python's standard library. `Hybrid` connects the loop with the mesh. From here on layouts have a short form: `2x8x4` means dp x tp x pp, so data 2, tensor 8, pipeline 4. `sp` adds sequence parallelism, `zero` adds ZeRO-1, and `full` adds the full sharding of lab 07.

# %%
from ranklab.data import python_text
from ranklab.models import GPT, GPTConfig
from ranklab.trainer import TextTrainer, TrainConfig

text = python_text()
text = dataclasses.replace(text, train=text.train[:200_000], held_out=text.held_out[:20_000])
config = GPTConfig(vocab_size=256, n_ctx=16, n_embd=32, n_head=8, n_layer=6)
settings = TrainConfig(steps=4, batch=16, micro_batch=2, log_every=1, warmup=2, clip=0.3,
                       eval_batch=32)


def new_trainer(layout, apply_by=parallelize, settings=settings, **options):
    torch.manual_seed(0)
    with torch.device("meta" if layout else "cpu"):
        model = GPT(config)
    parallel = layout and Hybrid(layout.new_mesh(build_mesh), layout, apply_by, **options)
    return TextTrainer(model, text, settings, device(), progress=False, parallel=parallel)


# %%
def train(*layouts):
    """For each layout: the losses of all steps, the held-out one, and the parameters here."""
    results = []
    for layout in layouts:
        trainer = new_trainer(layout)
        history = trainer.fit()
        size = sum(p.numel() for p in trainer.model.parameters())
        results.append(([*history.loss, *history.held_out.values()], size))
    return results


# %%
ways = ("2x2x2", "2x2x2,sp,zero,recompute")
results = [*launch(train, None, ranks=1)[0], *launch(train, *map(parse_layout, ways), ranks=8)[0]]
reference = results[0][0]
print(f"{'':24} loss of four steps         held-out  parameters on rank 0")
for name, (losses, size) in zip(("one process", *ways), results):
    print(f"{name:24}", *(f"{loss:.4f}" for loss in losses[:4]), f"{losses[4]:9.4f} {size:12,}")
    assert all(abs(a - b) < 1e-4 for a, b in zip(losses, reference))

# %% [markdown]
# What does a wrong order cost? Try two of them. Both make one call too early, before your function runs. *Memory before*: each rank makes the whole model and then drops most of it. *Data before*: the buckets hold on to whole matrices. Their gradients travel in each step although nothing uses these matrices any more, and the gradients of the parts that replaced them are never averaged.

# %%
def memory_before(model, hybrid):
    hybrid.materialize(model)
    hybrid.peak = sum(p.numel() for p in model.parameters())  # numbers that have memory
    return parallelize(model, hybrid)


def data_before(model, hybrid):
    hybrid.pipeline.keep_stages(model)
    hybrid.materialize(model)
    hybrid.peak = sum(p.numel() for p in model.parameters())
    hybrid.data.apply(model)
    hybrid.pipeline.keep_stages = hybrid.data.apply = lambda model: model  # not a second time
    return parallelize(model, hybrid)


# %%
from ranklab.meter import Traffic


def tried():
    """[(losses, numbers that had memory, bytes sent along data in a step)] of each order."""
    results = []
    for order in (parallelize, memory_before, data_before):
        trainer = new_trainer(Layout(2, 2, 2), order)
        size = sum(p.numel() for p in trainer.model.parameters())
        with Traffic() as traffic:
            trainer.step()
        losses = [trainer.parallel.total(trainer.step()).item() for _ in range(3)]
        nbytes = traffic.by_axis(trainer.parallel.mesh)["data"]
        results.append((losses, getattr(trainer.parallel, "peak", size), nbytes))
    return results


print(f"{'':15}loss of steps 2 to 4  numbers in memory  sent along data")
for name, (losses, peak, nbytes) in zip(("yours", "memory before", "data before"),
                                        launch(tried, ranks=8)[0]):
    print(f"{name:14}", *(f"{loss:.4f}" for loss in losses), f"{peak:17,} {nbytes:14,} B")

# %% [markdown]
# The last order raises no error, although it sends twice the bytes for nothing and the data ranks drift apart.
#
# **Order of the data.** A run that resumes in another layout must see the same rows. So a batch depends on the seed and the step number alone, and data rank r of R takes every R-th row, starting at row r. Below you see the last characters of the first rows of step 0, and which data rank gets each row:

# %%
from ranklab.data import batch_at, decode

rows = batch_at(text.train, 0, settings.batch, config.n_ctx, settings.seed)[0]
print(f"row {'':19} dp 1  dp 2  dp 4")
for number, row in enumerate(rows[:5]):
    print(f"{number:3}  {decode(row[-14:])!r:18}", *(f"{number % dp:4} " for dp in (1, 2, 4)))

# %% [markdown]
# ### 4.3 Tied embeddings: one matrix on two ranks
# > difficulty 3/5 · importance 4/5 · 12 minutes · about 8 lines
#
# *After this you can keep two copies of a tied matrix equal on two pipeline stages.*
#
# The embedding is on the first stage and the head is on the last, but both are one matrix (tied, as in lab 03). So each of the two stages has a copy, and computes a part of the gradient. Both stages need the sum, and it must be equal to the last bit, because otherwise the copies drift apart. `other` is a rank *of the group*: torch's send and receive take it as `group_dst=`, `group_src=` or `group_peer=`.
#
# **Predict.** The vocabulary is 50,304, the width 10,240, tensor 8, and gradients are in bf16. How many MB does a rank of the first stage send for the tied matrix in a step?

# %%
check(mesh_tied_mb=...)

# %%
def tied_embedding_sync(copies, other, group=None):
    """Replace each copy's gradient with its sum over this rank and the rank `other`.

    Both ranks call it after all backwards of a step, and get the same bits. The sum has the dtype
    of the gradients, which may have any strides.
    copies: parameters that the rank `other` of the group holds as well, in the same order; empty on
        a rank that has neither the embedding nor the head, where `other` is ignored.
    Cost: each of the two ranks sends the other one message for each copy, its own gradient; `other`
        is its rank in the group. A rank without copies sends nothing, and waits for no other rank.
    """
    raise NotImplementedError("exercise 4.3: about 8 lines")


# %%
tied_embedding_sync = check(tied_embedding_sync)

# %% [markdown]
# Two stages train, first with your function and then with an empty one. Neither run crashes, so look at how far apart the two copies are after each step:

# %%
def without(copies, other, group=None):
    """Nothing is sent."""


def apart(sync):
    """[loss, largest difference of the copies] of each step."""
    trainer, results = new_trainer(Layout(pp=2), sync=sync), []
    for _ in range(4):
        loss = trainer.parallel.total(trainer.step()).item()
        weight = trainer.parallel.pipeline.copies[0].detach().flatten()
        first, last = trainer.parallel.pipeline.gather(weight)
        results.append((loss, (first - last).abs().max().item()))
    return results


# %%
for name, sync in {"yours": tied_embedding_sync, "without": without}.items():
    for label, numbers in zip(("loss", "apart"), zip(*launch(apart, sync, ranks=2)[0])):
        print(f"{name:8} {label:6}", *(f"{number:.4f}" for number in numbers))
print(f"{'one process    ':15}", *(f"{loss:.4f}" for loss in reference[:4]))

# %% [markdown]
# ### 4.4 The gradient norm over the mesh
# > difficulty 3/5 · importance 4/5 · 10 minutes · about 6 lines
#
# *After this you can compute one gradient norm when some gradients are sharded and others copied.*
#
# Clipping needs the norm of *all* gradients, and no rank has all of them. But some gradients are on several ranks: data ranks hold the same gradients, tensor ranks hold the same gradients of the norm layers, and a tied matrix is on two stages. Every number must count **once**. `Hybrid` tells you for each gradient how many ranks hold it.
#
# **Predict.** There are 2 x 2 x 2 ranks, without ZeRO. Each rank adds up the squares of all its gradients, and one all-reduce sums these over all 8 ranks. Leave norm layers and the tied matrix aside. By which factor is the norm too large?

# %%
check(mesh_norm_factor=...)

# %%
def mesh_grad_norm(held, group=None):
    """Return the norm of the whole model's gradients, each number counted once, on all ranks.

    A NaN or inf on one rank shows in the result on all ranks. Gradients may be bf16, and are not
    modified. Squares are summed in float64, in which squares of float32 numbers neither overflow
    nor underflow.
    held: [(gradient, number of ranks in the group that hold these numbers)]; may be empty.
    Returns: a float32 tensor of 0 dims.
    Cost: one all-reduce of 8 bytes.
    """
    raise NotImplementedError("exercise 4.4: about 6 lines")


# %%
mesh_grad_norm = check(mesh_grad_norm)

# %% [markdown]
# Compare your norm with the naive norm, in the first step of three layouts:

# %%
def norms(*ways):
    """For each layout [the norm by mesh_grad_norm, and as if one rank had each gradient]"""
    results = []

    def both(held):
        norm = mesh_grad_norm(held)
        naive = mesh_grad_norm([(gradient, 1) for gradient, _ in held])
        results.append([norm.item(), naive.item()])
        return norm

    for words in ways:
        new_trainer(parse_layout(words), norm_of=both).step()
    return results


# %%
ways = ("2x2x2", "2x2x2,zero")
results = [*launch(norms, "1x1x1", ranks=1)[0], *launch(norms, *ways, ranks=8)[0]]
for words, (norm, naive) in zip(("1x1x1", *ways), results):
    print(f"{words:11} yours {norm:.4f}   naive {naive:.4f}, {naive / norm:.3f} times")

# %% [markdown]
# In the second line the factor is larger than the square root of 2, mostly because the tied matrix counts four times: it is on two stages, and each stage has two data ranks. With ZeRO-1 each data rank has its own share of the gradients, so only the norm layers and the tied matrix count twice. The naive norm depends on the layout, so the same `clip` would train differently in another layout.

# %% [markdown]
# ### 4.5 A checkpoint in another layout
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 20 lines
#
# *After this you can load a checkpoint into a layout other than the one that saved it.*
#
# Tomorrow you get other GPUs, and the run must go on in another layout. Every rank has saved its own parts, each as a **box** cut out of a whole tensor: a name, an offset (where the box begins), and its numbers. A rank that loads copies from each saved box whatever overlaps its own boxes:

# %%
old_boxes = [(0, (0, 0), (6, 4)), (1, (0, 4), (6, 4)), (2, (6, 0), (6, 4)), (3, (6, 4), (6, 4))]
new_boxes = [(rank, (4 * rank, 0), (4, 8)) for rank in range(3)]
plots.boxes_of({"saved by 4 ranks": old_boxes, "wanted by 3": new_boxes}, (12, 8),
               "Each new box overlaps several old ones")

# %% [markdown]
# Rank 1 of the three needs a piece of all four boxes.
#
# **Predict.** A model of 100 billion parameters saves its float32 weights and Adam's two moments. 64 ranks write equal parts. How many GB does each rank write?

# %%
check(mesh_checkpoint_gb=...)

# %% [markdown]
# | given: a `Piece` of this rank | |
# |---|---|
# | `.name`, `.kind` | `"blocks.0.mlp.up.weight"`, `"exp_avg"` |
# | `.shape` | of the whole tensor; `()` for Adam's count of steps |
# | `.offset` | where the piece begins in the whole, one number for each dim |
# | `.tensor` | its numbers, a view of the trained parameter or state: fill it, do not replace it |
#
# You may write a helper of your own where the dots are.

# %%
### BEGIN SOLUTION
from ranklab.checkpoint import overlap


### END SOLUTION
def reshard_checkpoint(pieces, saved):
    """Fill each of this rank's pieces from boxes that were saved in any layout.

    Nothing is sent. Tensors may have any number of dims, even none. A piece keeps its dtype, and
    boxes may have a different one.
    pieces: Pieces: `tensor` is filled in place; `offset` is where it begins in the whole tensor.
    saved: for each piece, in the same order, [(offset, tensor)]: boxes of the same whole tensor
        that overlap the piece but not each other; a box may be larger or smaller than the piece.
        Not modified.
    Raises: ValueError if some numbers of a piece are in none of its boxes; then no piece has
        changed. The message gives the piece's name, how many numbers it has, and how many of them
        the boxes have.
    """
    raise NotImplementedError("exercise 4.5: about 20 lines, with a helper")


# %%
reshard_checkpoint = check(reshard_checkpoint)

# %% [markdown]
# Eight ranks train three steps in 2 x 2 x 2 with ZeRO-1, and save. Your function loads the files in three other layouts. Then we put the pieces together again, and compare them bit by bit with what was saved:

# %%
def pieces_of(trainer):
    state = trainer.parallel.state(trainer.model, trainer.optimizer)
    return [piece._replace(tensor=piece.tensor.cpu().clone()) for piece in state]


def save(layout, folder):
    trainer = new_trainer(layout, settings=dataclasses.replace(settings, checkpoint=folder))
    trainer.fit(until=3)
    return pieces_of(trainer)


def load(layout, folder):
    trainer = new_trainer(layout, settings=dataclasses.replace(settings, checkpoint=folder))
    trainer.resume(reshard_checkpoint)
    return pieces_of(trainer)


def together(ranks):
    """{(name, kind): the whole tensor} from the pieces of all ranks."""
    whole = {}
    for name, kind, shape, offset, tensor in (piece for pieces in ranks for piece in pieces):
        target = whole.setdefault((name, kind), torch.full(shape, torch.nan))
        target[tuple(slice(a, a + n) for a, n in zip(offset, tensor.shape))] = tensor
    return whole


# %% tags=["nbval-check-output"]
folder = tempfile.TemporaryDirectory()
pieces = {"2x2x2,zero": launch(save, parse_layout("2x2x2,zero"), folder.name, ranks=8)}
whole = together(pieces["2x2x2,zero"])
print(f"2x2x2,zero   saved {len(whole)} tensors")
for words in ("1x4x1,sp", "4x1x1,full", "1x1x1"):
    layout = parse_layout(words)
    pieces[words] = launch(load, layout, folder.name, ranks=layout.ranks)
    tensors = together(pieces[words])
    same = whole.keys() == tensors.keys() and all(torch.equal(whole[k], tensors[k]) for k in whole)
    print(f"{words:12} loaded {len(tensors)}, bit-equal: {same}")
folder.cleanup()

# %% [markdown]
# The next figure shows Adam's first moment for one matrix: the boxes in which it was saved, and the boxes of two layouts that loaded it. The numbers are ranks. In the first layout, ZeRO-1 gave this matrix to the second data rank:

# %%
def boxes(ranks, name, kind):
    return [(rank, piece.offset, piece.tensor.shape) for rank, pieces in enumerate(ranks)
            for piece in pieces if (piece.name, piece.kind) == (name, kind)]


name = "blocks.0.mlp.down.weight"
plots.boxes_of({words: boxes(pieces[words], name, "exp_avg") for words in list(pieces)[:3]},
               whole[name, "exp_avg"].shape,
               f"exp_avg of {name}: one matrix, cut anew for each layout")

# %% [markdown]
# The loaded state is equal bit for bit. From then on the new layout adds numbers in another order, so the following losses agree only to about six digits.

# %% [markdown]
# ### 4.6 Which layout?
# > difficulty 4/5 · importance 5/5 · 25 minutes · about 30 lines · open: no recipe
#
# *After this you can find a fast layout for a given job and cluster, by formulas alone.*
#
# Write a search that works for any `Job`, any number of GPUs and any `Machine`. You may write helpers of your own where the dots are. Lab 13's planner tells you what a layout costs, by formulas for the course's own trainer:
#
# | given | |
# |---|---|
# | `model_of(job.config)`, `plan_of(job, layout)` | `model` and `plan`: the job and the layout in the planner's own classes; the plan contains the job's batch and micro-batch |
# | `memory_per_gpu(model, plan, machine).total` | bytes on a GPU: the peak of the first rank, plus the memory of CUDA and NCCL |
# | `step_time(model, plan, machine)` | seconds of a step: `.total`, and its parts `.products`, `.attention`, `.other`, `.recompute`, `.tensor`, `.weights` (zero=3), `.pipeline`, `.bubble`, `.data`, `.optimizer`, `.rest` |
# | `Layout(dp, tp, pp, sequence_parallel, virtual, schedule, zero, recompute, outermost)` | `zero` is 0, 1 or 3; `outermost` is `"pipeline"` or `"data"`; with `virtual` above 1 the schedule `"1f1b"` is interleaved |
# | `Job(config, batch, micro_batch)` | `batch` in sequences, over all ranks; `dataclasses.replace(job, micro_batch=2)` is the job with another micro-batch |
# | `machine.memory_bytes`, `machine.node` | memory of a GPU; how many GPUs NVLink joins |

# %%
from ranklab.hybrid import Job, layout_memory
from ranklab.planner import (
    choose_layout as library_choice, find_node, memory_per_gpu, model_of, plan_of, step_time,
)

# %%
### BEGIN SOLUTION
from dataclasses import replace
from ranklab.hybrid import legal
from ranklab.planner.choose import refusal


### END SOLUTION
def choose_layout(job, gpus, machine):
    """Return (Layout, micro_batch): the fastest of all that are legal and fit.

    seconds  step_time(model, plan, machine).total, with model_of(job.config), and plan_of(job,
             layout) of a job with this micro_batch. The check accepts a choice that is at most 1%
             slower than the best, and at most 20,000 calls of step_time
    legal    - dp * tp * pp is gpus
             - tp divides the heads and machine.node, so that it stays inside a node
             - with sequence_parallel, tp divides n_ctx
             - dp * micro_batch divides the batch
             - virtual is 1, 2 or 4; above 1, pp is 2 or more, and the number of micro-batches of
               a pipeline is a multiple of pp
             - each of the pp * virtual stages has a block: n_layer is at least pp * virtual
             - the schedule is 1F1B; zero, recompute and outermost are free
    fits     memory_per_gpu(model, plan, machine).total is at most machine.memory_bytes
    Raises: ValueError if no layout fits; its message gives the GB that the smallest one needs.
    """
    raise NotImplementedError("exercise 4.6: about 30 lines")


# %%
choose_layout = check(choose_layout)

# %% [markdown]
# Compare your choice with the library's, for 10 billion parameters on three clusters: eight nodes with a fast network, eight nodes with a slow network, and two racks of four nodes with a slow link between the racks. For each cluster you see the seconds of a step, and where the seconds of your choice go:

# %% tags=["nbval-check-output"]
job = dataclasses.replace(JOBS["10b"], batch=256)
a100 = find_node("a100-dgx")
machines = {"fast": a100, "slow": dataclasses.replace(a100, network=3e9),
            "racks": dataclasses.replace(a100, island=32, far=1e9)}
for name, machine in machines.items():
    for owner, choose in {"library": library_choice, "yours": choose_layout}.items():
        layout, size = choose(job, 64, machine)
        plan = plan_of(dataclasses.replace(job, micro_batch=size), layout)
        step = step_time(model_of(job.config), plan, machine)
        print(f"{name:6} {owner:8}{step.total:6.2f} s   {layout}, micro-batches of {size}")
    parts = [f"{part} {seconds:.2f}" for part, seconds in vars(step).items() if seconds > 0.01]
    print(" " * 6, *parts)

# %% [markdown]
# On the fast network few stages are best, with four virtual stages on each rank, so the bubble is small. On the slow network tensor 2 x data 4 fill a node, so only pipeline stages talk across nodes, but the bubble grows to about a fifth of the step. With two racks, tensor 2 x data 16 fill a rack, and only the pipeline crosses the slow link; virtual stages would cross it more often. The size of a micro-batch is also a trade-off: 2 sequences make larger matrix products, closer to the GPU's best rate, while 1 sequence gives twice the micro-batches and half the bubble.
#
# All of this is a model, not a measurement. Lab 13 compares the planner with published runs of other tools, but no published run used the course's trainer. For our trainer the planner assumes that no message hides behind computing, that no kernel is fused, and that weights travel in bf16, although ours are float32.

# %% [markdown]
# ### Further
#
# #### `transfer_weights`
# > difficulty 4/5 · importance 4/5 · 30 minutes · about 35 lines
#
# In reinforcement learning some GPUs train a model, and others generate text with it, in another layout. After each update the generators need the new weights, and a file would take too long. The plain way gathers whole tensors on one trainer and broadcasts them. vLLM's NCCL backend works so, and a trainer that shards must put full parameters together first (vllm-project/vllm#51520, after the RFC #46439). But two maps of boxes say which numbers a trainer and a generator share, and only those have to travel.
#
# **Predict.** 70 billion parameters in bf16 are 140 GB. 32 GPUs train, tensor 8 x FSDP 4, and 8 other GPUs generate, tensor 8. A broadcast brings 140 GB to each generator. How many GB does a generator receive if nothing travels in vain?

# %%
check(mesh_transfer_gb=...)

# %% [markdown]
# | given | |
# |---|---|
# | a `Piece`, as in 4.5 | in the map its `.tensor` is on `meta`: shape and type, no numbers |
# | `overlap(piece, offset, tensor)` | what a Piece and a box share, as (view of the piece, view of the box), empty if they share nothing; also on `meta` |
# | `dist.P2POp(dist.isend, x, group=group, group_peer=r)`, `dist.batch_isend_irecv(ops)` | a message to rank r of the group (or from it, `dist.irecv`), and all of them at once |
#
# **Your target:** weights equal to the bit, no number that a generator receives twice, and replicas that send equal parts. You may write helpers of your own where the dots are.

# %%
from ranklab.checkpoint import overlap


### BEGIN SOLUTION
from ranklab.hybrid import routes


### END SOLUTION
def transfer_weights(pieces, held, wanted, group=None):
    """Fill the generators' pieces with the trainers' weights, each number sent directly.

    Collective: all ranks of the group call it, trainers and generators.
    pieces: this rank's Pieces. A trainer's are read, a generator's are filled in place.
    held, wanted: the map, the same on all ranks: for each rank of the group a list of its Pieces,
        whose tensors are on `meta`: shapes and dtypes only. held[r] is empty for a generator, and
        wanted[r] for a trainer; on rank r, pieces[i] is held[r][i] or wanted[r][i].
        Boxes of two trainers are equal (replicas), or share no numbers.
    Numbers travel in the generator's dtype; the trainer's may be wider.
    Replicas share the sending: each of the k holders of a box sends a k-th of the part that a
        generator needs, rounded up to rows.
    Raises: ValueError on every rank, before anything is sent, if a generator needs numbers that no
        trainer holds; the message names the piece.
    Cost: a generator receives each number of its pieces once, a trainer receives nothing.
    """
    rank = dist.get_rank(group)
    raise NotImplementedError("exercise transfer_weights: about 35 lines, with a helper")


# %%
transfer_weights = check(transfer_weights)

# %% [markdown]
# Ranks 0 to 3 hold the GPT of 4.2 in tensor 2 x FSDP 2, and ranks 4 and 5 generate in tensor 2. The library's `broadcast_weights` sends whole tensors along a chain of generators, so that nobody sends one twice. What each rank must send and receive follows from the map. Look at ranks 0 and 4:

# %%
from ranklab.hybrid import broadcast_bytes, broadcast_weights, transfer_bytes


def weights_of(layout):
    return [piece for piece in pieces_of(new_trainer(layout)) if piece.kind == "weight"]


def on_meta(ranks):
    return [[piece._replace(tensor=piece.tensor.to("meta")) for piece in pieces]
            for pieces in ranks]


def refit(way, ranks, held, wanted):
    """This rank's pieces afterwards, what it sent and received, and to whom."""
    originals = ranks[dist.get_rank()]
    pieces = [piece._replace(tensor=piece.tensor.to(device())) for piece in originals]
    with Traffic() as traffic:
        way(pieces, held, wanted)
    return ([piece._replace(tensor=piece.tensor.cpu()) for piece in pieces],
            (traffic.sent_bytes, traffic.received_bytes), traffic.bytes_to)


# %% tags=["nbval-check-output"]
trainers = launch(weights_of, parse_layout("2x2x1,full"), ranks=4)
generators = [[piece._replace(tensor=torch.full_like(piece.tensor, torch.nan)) for piece in pieces]
              for pieces in launch(weights_of, parse_layout("1x2x1"), ranks=2)]
held, wanted = on_meta(trainers) + [[], []], [[], [], [], []] + on_meta(generators)
matrices, right = {}, together(trainers)
for name, way, formula in (("whole tensors", broadcast_weights, broadcast_bytes),
                           ("shard to shard", transfer_weights, transfer_bytes)):
    results = launch(refit, way, trainers + generators, held, wanted, ranks=6)
    matrices[name] = [row for _, _, row in results]
    tensors = together([pieces for pieces, _, _ in results[4:]])
    print(f"{name}: equal to the bit:", all(torch.equal(right[key], tensors[key]) for key in right))
    for rank, (predicted, (_, counted, _)) in enumerate(zip(formula(held, wanted), results)):
        print(f"  rank {rank} predicted to send {predicted[0]:7,} and receive {predicted[1]:7,} "
              f"bytes, counted {counted[0]:7,} and {counted[1]:7,}")

# %%
from ranklab.plots.collectives import traffic_matrices

traffic_matrices(matrices)

# %% [markdown]
# Trainers 0 and 2 hold the rows of rank 4's half, trainers 1 and 3 those of rank 5's. The 416 bytes are norm layers: two trainers hold each row of them, and share the sending. Rank 4 now receives half of what it received by broadcast, and the busiest sender sends a quarter.
#
# In SkyRL a 235B model, about 470 GB, went from two nodes to two others in 64.7 s by NCCL broadcast, and in 3.5 s where each inference worker pulls the slices that it needs (NovaSky-AI/SkyRL#2090). There the transport is another one, too, RDMA through NIXL, so not all of the 18 times is due to fewer bytes. NCCL M2N does the same between two meshes in one call, and vLLM's #51520 builds on it. Three things are left out here: names and layouts that differ between trainer and engine (fused QKV), weights in 8 bits, and a generation that goes on meanwhile.

# %% [markdown]
# #### Derive: how many of the GPUs are tensor ranks?
# > difficulty 4/5 · importance 5/5 · 10 minutes
#
# The answer is a formula. `gpus` GPUs train a model of width `width` with a global batch of `tokens` tokens: tp tensor ranks, and the other axis shards what is left (FSDP). For each layer a GPU sends in a step: its 12 `width`^2 / tp parameters three times, 2 bytes each (two gathers and a reduce-scatter), and four all-reduces of x, each twice `width` numbers of 2 bytes for each of the `tokens` * tp / `gpus` tokens that its tensor ranks share. **Which tp makes the sum of these bytes smallest?** (`lambda width, gpus, tokens: ...`)

# %%
import math

check(cheapest_tensor_parallel=...)

# %%
from ranklab.hybrid import cheapest_tensor_parallel

for gpus, width, global_batch in ((1024, 8192, 4 * 2**20), (16384, 16384, 16 * 2**20)):
    print(f"{gpus:,} GPUs, width {width:,}, {global_batch / 2**20:.0f} million tokens: "
          f"tp = {cheapest_tensor_parallel(width, gpus, global_batch):.1f}")

# %% [markdown]
# <details><summary>The derivation</summary>
#
# Weights: `3 * 2 * 12 * width**2 / tp`. Activations: `4 * 2 * 2 * width * tokens * tp / gpus`. A sum of `a / tp` and `b * tp` is smallest where its terms are equal: `72 * width**2 / tp = 16 * width * tokens * tp / gpus`. So `tp = sqrt(4.5 * width * gpus / tokens)`.
# </details>
#
# > **Take away.** tp grows with the root of `gpus / tokens`: four times the GPUs for one batch want twice the tensor ranks. The second line has the numbers of Llama 3 405B (16,384 GPUs, width 16,384, 16 million tokens a batch): 8.5. Its team took 8, a whole node. The formula knows only one kind of link, so it is partly luck that it comes so near.

# %% [markdown]
# ## 5. The real thing
#
# Now train the same GPT on the same mesh and batches with torch's own tools: DTensor for tensor, `fully_shard` or `replicate` for data, and `torch.distributed.pipelining`. After that DeepSpeed does the same with its `PipelineModule`, and ZeRO-1 over the data ranks. You see the first three losses:

# %%
from ranklab.peers.torch_hybrid import TorchHybrid


def by_torch(words):
    torch.manual_seed(0)
    trainer = TextTrainer(GPT(config), text, settings, device(), progress=False,
                          parallel=TorchHybrid(parse_layout(words)))
    return [trainer.parallel.total(trainer.step()).item() for _ in range(3)]


losses = launch(by_torch, "1x2x2,sp", ranks=4)[0]
print("one process       ", *(f"{loss:.4f}" for loss in reference[:3]))
print("torch  1x2x2,sp   ", *(f"{loss:.4f}" for loss in losses))

# %%
from ranklab.peers.deepspeed_pipeline import train_with_deepspeed


def by_deepspeed(words):
    torch.manual_seed(0)
    return train_with_deepspeed(GPT(config), text, settings, parse_layout(words), 3)


losses = launch(by_deepspeed, "2x1x2,zero", ranks=4)[0]
print("DeepSpeed  2x1x2,zero ", *(f"{loss:.4f}" for loss in losses))

# %% [markdown]
# torch leaves the tied matrix to its user, so in that run `tied_embedding_sync` sums its gradients. And here is the layout that you chose, as options for Megatron-LM:

# %%
from ranklab.peers.megatron import megatron_command

layout, size = choose_layout(job, 64, a100)
new_job = dataclasses.replace(job, micro_batch=size)
print(megatron_command(layout, new_job))

# %% [markdown]
# **Whose memory?** The first line above has two numbers. You chose by the second one, the memory of the course's trainer (`layout_memory`): float32 weights and gradients, and autocast's bf16 copies of the matrices for each micro-batch that waits for its backward. Megatron-LM keeps bf16 weights, and float32 gradients, master weights and moments. That is 18 bytes a parameter, or 6 + 12/d with the distributed optimizer on d data ranks (Megatron Core's guide). The first number is `memory_per_gpu` for `plan_of(job, layout, "megatron")`, and lab 13 compares such numbers with published runs. So your search refused some layouts that would fit in Megatron-LM.

# %% [markdown]
# ## 6. Project
#
# **Train, stop, go on elsewhere** (half a minute). A GPT trains on real text in 2 x 2 x 2, with your functions. It stops halfway, goes on in another layout, and ends with the same held-out loss as one process.

# %%
from ranklab.projects import hybrid as project

functions = {"build_mesh": build_mesh, "parallelize": parallelize, "mesh_grad_norm": mesh_grad_norm,
             "tied_embedding_sync": tied_embedding_sync}
with tempfile.TemporaryDirectory() as folder:
    run = functools.partial(project.run, checkpoint=folder, steps=12, parts=functions,
                            reshard=reshard_checkpoint)
    run(layout=parse_layout("2x2x2,zero"), until=6)
    print(project.report(run(layout=parse_layout("1x2x2,sp"), resume=True)))

# %% [markdown]
# **The dry run** (half a minute). Does a large model fit, and what will it send? One process plays rank 0. It runs the same code on tensors without memory, in a process group that has no other ranks. Try it with 10 billion parameters on 8 GPUs:

# %%
print(project.dry_run_report("10b"))

# %% [markdown]
# **Your turn.** Change one thing in the layout. First write down what will happen to the memory, to the bytes along each axis and to the time. Ideas: `"zero": 0`, `"recompute": False`, `"tp": 4, "dp": 4`, `"outermost": "data"`.

# %%
big, layout = JOBS["100b"], parse_layout("2x8x4,sp,zero,recompute")
change = {"recompute": False}
for name, variant in {"as it is": layout, "changed": dataclasses.replace(layout, **change)}.items():
    memory, traffic = layout_memory(big, variant), layout_traffic(big, variant)
    step = step_time(model_of(big.config), plan_of(big, variant), a100)
    print(f"{name:9} {memory.total / 1e9:6.1f} GB, {step.total:5.1f} s, sent:",
          ", ".join(f"{axis} {nbytes / 1e9:.1f} GB" for axis, nbytes in traffic.items()))

# %% [markdown]
# ## 7. Measure
#
# How many bytes does rank 0 send along each axis in a step? The table compares the formula with a count. The count along data is 8 bytes higher, because the number of targets also travels. Equal numbers show that you understand the code, not that it is good. Our formula and our count once agreed on full sharding in a pipeline, and both gathered embedding, last norm and head twice for each micro-batch, where once is enough.

# %%
from ranklab.hybrid import counted_step


def counted(words):
    trainer = new_trainer(parse_layout(words))
    _, traffic = counted_step(trainer)
    return traffic.by_axis(trainer.parallel.mesh)


# %% tags=["nbval-check-output"]
small = Job(config, settings.batch, settings.micro_batch, "fp32")
words = "2x2x2,sp,zero"
predicted, counts = layout_traffic(small, parse_layout(words)), launch(counted, words, ranks=8)[0]
print(f"{words:15}{'predicted':>12}{'counted':>12}")
for axis, nbytes in predicted.items():
    print(f"{axis:15}{nbytes:12,}{counts[axis]:12,}")

# %% [markdown]
# **One GPT, six layouts, your parts.** Now everything that you have written trains one model. `passed_answers` takes your answers from the cells in which they passed, in this lab and in labs 03, 06, 08 and 09, and checks each of them once more (a quarter of a minute). The library's stand in for those that have not.

# %%
from ranklab.hybrid import PARTS

parts = passed_answers(PARTS)

# %% [markdown]
# One model, one batch, four ranks. Before you run the cell, guess: in which layout does a rank hold the fewest bytes, and in which does it send the fewest?

# %%
from ranklab.projects.hybrid import compare

words = ("4x1x1", "4x1x1,zero", "4x1x1,full", "1x4x1", "1x2x2,sp", "1x1x4")
rows = compare.compare([parse_layout(form) for form in words], progress=False, parts=parts)
plots.compared(rows)

# %%
print(compare.table(rows))

# %% [markdown]
# One model, taken apart in six ways, and the loss is the same in every line: that is the proof. Only the costs differ: one process and 4 x 1 x 1 hold everything, ZeRO-1 divides Adam's state, and each of the others divides all of it. Full sharding and tensor send the most, and pipeline sends the least. (`ranklab compare --own` does the same in a terminal, with other layouts and more ranks if you like.) Embedding and head are a large part of such a tiny model. The seconds say nothing about GPUs, because these ranks share cores.

# %% [markdown]
# > **Spine**: this lab's part ends here. On it goes in [16_clinic](16_clinic.ipynb); the rest of this lab is extra.

# %% [markdown]
# ## 8. Interview questions
#
# Say your answer aloud before you unfold it. `ranklab drill --lab 12` in a terminal asks these and more, with other numbers each time.

# %%
questions("12_hybrid")

# %% [markdown]
# ## 9. On real GPUs
#
# ```bash
# torchrun --nproc-per-node 8 -m ranklab.projects.hybrid --layout 2x2x2,zero,sp
# python -m ranklab.projects.hybrid --size 100b --dry-run
# SIZE=10b sbatch --nodes=1 labs/jobs/hybrid.sbatch
# ```
#
# The job file has three sizes: 10 billion parameters on 8 GPUs, 100 billion on 64, and 130 billion (GLM-130B's shape) on 128.
#
# What changes there:
#
# - **Ranks and nodes.** torchrun puts neighbouring ranks on one node, and so does Slurm by default. That is why tensor is the last axis. `Layout.new_mesh` refuses tensor ranks on several hosts. If NVLink joins several hosts, say so: for an NVL72, with 4 GPUs in each of 18 hosts, pass `--per-node 72`.
# - **Several groups at once.** Each group is an NCCL communicator. Say rank 0 starts a data all-reduce and then a tensor all-reduce, while its peers start them the other way round. Rank 0's data kernel may fill its GPU while it waits for the peers. The peers' tensor kernels wait for rank 0's tensor kernel, which finds no room. This is the classic deadlock of 3D training, and gloo does not show it. NCCL's guide ("Using multiple NCCL communicators concurrently") and the warning in `new_group` ask for one order on all ranks. `NCCL_LAUNCH_ORDER_IMPLICIT=1` (NCCL 2.26) keeps the order of a rank's own calls, but it is off by default.
# - **Communicators have buffers**, which no formula above counts. Our engine tells torch each rank's device, so the buffers are made together with the group. Otherwise they are made at the group's first message.
# - **One slow link slows one axis.** If tensor messages take ten times as long, look at NVLink. If data messages do, look at the network. `python -m ranklab.projects.collectives` measures both.
# - **bf16.** All three sizes multiply in bf16. Weights, gradients and Adam's state stay in float32.
#
# Expect 33 to 52% of peak for the layouts of section 1. These numbers are from the papers, because this lab has not run on several GPUs yet.

# %% [markdown]
# ## 10. Take with you
#
# 1. Tensor inside a node, pipeline over slow links, data over the rest: 130 billion parameters on 128 GPUs may be data 4, tensor 8 and pipeline 4, with a bubble of 1%.
# 2. Each number counts once: in the loss, in the norm, in the checkpoint. Most mistakes here raise no error, so **equal to one process** is the test.
# 3. A checkpoint knows tensors, not ranks: what 2 x 2 x 2 has saved, 8 x 1 x 1 loads.
#
# **What we left out**
#
# - **Context and expert parallelism** are further axes of this mesh: `cp=2` and `ep=2` in a layout (labs 10 and 11). Llama 3's long context took tensor 8 x context 16 x pipeline 16 x data 8 (arXiv 2407.21783).
# - **Overlap across axes.** Our `Hybrid` sends gradients when the pipeline is empty. Megatron-LM can start earlier and hide some of them behind the last backwards (`--overlap-grad-reduce`).
# - **Gradients in bf16 or FP8**, only while they travel, would at least halve the bytes. We sum them in float32, over micro-batches and over data ranks, as Llama 3 does (its section 3.3.2), because a long sum in bf16 loses its small terms.
# - **Failures.** On thousands of GPUs, something fails every few hours. Lab 14 is about that.
#
# Next: [13_planner](13_planner.ipynb): from a layout to days, dollars and megawatts.
#
# On the spine it is [16_clinic](16_clinic.ipynb).
