"""How much of a GPU a Llama under our FSDP takes: by a formula, and by a step that only pretends.

The step runs our FSDP on transformers' own Llama, at full size, in one process that poses as rank 0
of all ranks: its messages go nowhere, and its tensors have a shape and no memory.
"""

import dataclasses
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ranklab.engine import launch
from ranklab.fsdp import FullyShardedBlock, masked_loss
from ranklab.fsdp.hooks import sharded_modules
from ranklab.meter import Memory, MemoryPeak
from ranklab.projects.fsdp import llama
from ranklab.projects.fsdp.config import LLAMAS
from ranklab.projects.fsdp.tuner import PRECISIONS
from ranklab.projects.horovod.bert import offline_transformers

ROWS = ("parameters", "gradients", "optimizer_state", "gathered_parameters", "activations", "total")
SPARE = 2e9  # bytes of a GPU for CUDA, NCCL, and gaps between tensors


class Step(NamedTuple):
    """How a step is done; on each rank."""

    micro_batch: int = 1
    n_ctx: int = 1024
    pieces: int = 1  # micro-batches in a step
    precision: str = "bf16"
    recompute: bool = True
    offload: bool = False

    def __str__(self):
        many = f"{self.pieces} times " if self.pieces > 1 else ""
        return ", ".join([f"{many}{self.micro_batch} x {self.n_ctx} tokens on each", self.precision,
                          *(name for name in ("recompute", "offload") if getattr(self, name))])


def predicted_memory(config, ranks, **how):
    """The Memory of one GPU at the largest of all moments().
    config  what transformers.LlamaConfig takes, in a dict
    how     fields of Step
    """
    return max(moments(config, ranks, Step(**how)).values(), key=lambda memory: memory.total)


def moments(config, ranks, step):
    """{moment: Memory of one GPU}: where forward and backward may hold most.

    Rows, their gradients and Adam's moments are float32; with offload they are on the CPU. What is
    whole for a while counts as gathered, gradients as well; messages count as activations.
    """
    L, block, head, root = parameters_of(config)
    n, width = root + L * block, bytes_of(step)
    at_loss, waiting, into, inside, flowing = activations_of(config, step)
    down = config["hidden_size"] * config["intermediate_size"]  # the first gradient of a block

    def memory(whole, gradients, done, message, activations):
        """In numbers, but for the activations; the gradients of `done` blocks have arrived."""
        arrived = 0 if step.offload else n if step.pieces > 1 else done * block
        rows = 0 if step.offload else 4 * n / ranks
        return Memory(*map(int, (rows, 4 * arrived / ranks, 2 * rows, 0,
                                 width * (whole + gradients), 0, activations + 4 * message)))

    found = {"the loss is taken": memory(root, 0, 0, 0, L * waiting + at_loss)}
    for done in range(L):
        next_block = block + block / ranks if done < L - 1 else 0  # on its way: its rows are, too
        whole, left = root + block + next_block, (L - done - 1) * waiting + into
        # The block before is on its way out, in a message; its rows may be among those arrived.
        apart = (block + (step.offload or step.pieces > 1) * block / ranks) if done else 0
        found[f"block {L - done}'s backward runs"] = memory(
            whole, head + down, done, apart, left + inside + flowing)
        # A message is made of float32 copies, which are there as well.
        found[f"block {L - done}'s gradients leave"] = memory(
            whole, head + block, done, 2 * block, left)
    found["the root's gradients leave"] = memory(root, root, L, 2 * root, 0)
    return found


def bytes_of(step):
    """Of a number that is computed."""
    return 2 if step.precision == "bf16" else 4


def parameters_of(config):
    """(blocks, parameters of each, those of head and last norm, all that are in no block)."""
    C, F, V, heads = (config[name] for name in (
        "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"))
    kv = C // heads * config.get("num_key_value_heads", heads)
    block = 2 * C * C + 2 * C * kv + 3 * C * F + 2 * C  # q and o; k and v; the MLP; two norms
    root = V * C + C + (0 if config.get("tie_word_embeddings") else V * C)
    return config["num_hidden_layers"], block, V * C + C, root


def activations_of(config, step):
    """Bytes: (at the loss, of a block until its backward, of its input where it computes again,
    of all inside of it, of the gradients in its MLP).
    """
    C, F, V, heads = (config[name] for name in (
        "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"))
    kv = C // heads * config.get("num_key_value_heads", heads)
    width, tokens = bytes_of(step), step.micro_batch * step.n_ctx
    norm = (4 + 2 * width) * C  # of a token: its input in float32; normed; times the weight
    at_loss = norm + 3 * 4 * V  # log-probabilities, and two gradients, in float32
    inside = 2 * norm + 2 * width * (C + kv + 2 * F)  # q, k, v and the output; four of the MLP
    into, flowing = width * C * step.recompute, width * (C + 2 * F)
    return [tokens * size for size in (at_loss, into or inside, into, inside, flowing)]


def dry_run(config, ranks, **how):
    """The same Memory, counted in a step: what lives after the op after which most does.
    error  ModuleNotFoundError without transformers
    """
    return launch(_dry_run, config, ranks, Step(**how), ranks=1, timeout=600,
                  preload=llama.PRELOAD)[0]


def _dry_run(config, ranks, step):
    """This process poses as rank 0 of so many, of which no other exists; afterwards it has no
    group.
    """
    transformers = offline_transformers()
    sdpa = transformers.AttentionInterface()["sdpa"]
    # By another name it gets no (T, T) mask, which transformers makes for pretended tensors only.
    transformers.AttentionInterface.register("unmasked", sdpa)
    shape = transformers.LlamaConfig(**config, use_cache=False, attn_implementation="unmasked")
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks)
    with (mock.patch.multiple(dist, all_gather_single=Sent, reduce_scatter_single=Sent),
          FakeTensorMode(allow_non_fake_inputs=True)):
        peak = peak_of(transformers.LlamaForCausalLM(shape), step)
    dist.destroy_process_group()
    return peak


class Sent:
    """A message: it holds its tensors until somebody waits for it, as NCCL's do."""

    def __init__(self, output, mine, group, async_op):
        self.tensors = output, mine

    def wait(self):
        self.tensors = None


def peak_of(model, step):
    """The Memory of a GPU at the peak of a training step of `model`."""
    if step.recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for module in (*model.model.layers, model.train()):
        FullyShardedBlock(module, precision=PRECISIONS[step.precision])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(step.micro_batch, step.n_ctx, dtype=torch.long)

    def train(pieces):
        for _ in range(pieces):
            masked_loss(model(input_ids=tokens).logits, tokens, tokens.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    train(1)  # makes Adam's moments, and shows the order of the blocks
    blocks = sharded_modules(model)
    on_the_cpu = ("parameters", "gradients", "optimizer_state") if step.offload else ()
    with MemoryPeak(model, optimizer, gathered=lambda: [
            (block.gathered, [(p.whole, p.whole.grad) for p in block.parameters])
            for block in blocks],
            of=lambda memory: dataclasses.replace(memory, **dict.fromkeys(on_the_cpu, 0))) as found:
        train(min(step.pieces, 2))  # a third one would be as the second
    return found.peak


def dry_run_report(size, gpus, gpu_gb, shard_ranks=0, batch=0, **settings):
    """Both, as text; whether it fits, and what would.

    size      a name in LLAMAS
    settings  those of the project; what memory does not depend on is left out
    """
    config, ranks = LLAMAS[size], shard_ranks or gpus
    if gpus % ranks:
        raise ValueError(f"shard_ranks={ranks} must divide the {gpus} GPUs")
    step = Step(**{name: value for name, value in settings.items() if name in Step._fields})
    step = step._replace(pieces=max(1, -(-batch // (gpus * step.micro_batch))))
    found = moments(config, ranks, step)
    worst = max(found, key=lambda moment: found[moment].total)
    counted = dry_run(config, ranks, **step._asdict()) if llama.is_here() else None
    lines = [f"{ranks} GPUs share one copy: {step}", "",
             f"{'GB of a GPU':24}{'predicted':>10}{'counted':>10}"]
    for name in ROWS:
        both = [f"{getattr(memory, name) / 1e9:>10.3g}" if memory else f"{'-':>10}"
                for memory in (found[worst], counted)]
        lines.append(f"{name.replace('_', ' '):24}" + "".join(both))
    lines += ["", f"Most is there when {worst}."]
    if step.offload:
        rows = moments(config, 1, Step())["the loss is taken"]
        nbytes = (rows.parameters * 2 + rows.optimizer_state) * gpus / ranks
        lines.append(f"Rows, gradients and moments are in the CPUs' memory: {nbytes / 1e9:.0f} GB.")
    lines += [] if counted else [llama.NO_TRANSFORMERS]
    return "\n".join([*lines, *verdict(config, ranks, gpu_gb, step, counted or found[worst])])


def verdict(config, ranks, gpu_gb, step, memory):
    """Whether a Memory fits on a GPU; else what would. In lines."""
    room = gpu_gb * 1e9 - SPARE
    if memory.total <= room:
        return [f"It fits in {gpu_gb:g} GB, with 2 GB left for CUDA, NCCL and gaps."]
    ways = {name: (ranks, step._replace(**{name: value})) for name, value in (
        ("recompute", True), ("precision", "bf16"), ("micro_batch", 1), ("offload", True))}
    ways |= {f"{ranks * more} GPUs": (ranks * more, step) for more in (2, 4, 8, 16)}
    needs = {name: predicted_memory(config, R, **it._asdict()).total / 1e9
             for name, (R, it) in ways.items()}
    fits = [f"{name} ({n:.1f} GB)" for name, n in needs.items() if n * 1e9 <= room]
    return [f"It does not fit in {gpu_gb:g} GB, of which CUDA, NCCL and gaps want 2.",
            f"What fits: {', '.join(fits)}." if fits else "No single change makes it fit."]
