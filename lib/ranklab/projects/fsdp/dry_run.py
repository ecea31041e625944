"""How much of a GPU a Llama under our FSDP takes: by the formula, and by a step that only pretends.

The step runs our FSDP on transformers' own Llama, at full size.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from ranklab.engine import launch
from ranklab.fsdp import FullyShardedBlock, masked_loss
from ranklab.fsdp.hooks import sharded_modules
from ranklab.fsdp.memory import Step, moments, predicted_memory
from ranklab.meter import MemoryPeak, posing, without_memory
from ranklab.projects.dry_run import table
from ranklab.projects.fsdp.config import LLAMAS
from ranklab.projects.fsdp.llama import NO_TRANSFORMERS, PRELOAD
from ranklab.projects.fsdp.tuner import PRECISIONS
from ranklab.projects.hugging_face import is_here, offline_transformers

ROWS = ("parameters", "gradients", "optimizer_state", "gathered_parameters", "activations", "total")
MESSAGES = (dist.all_gather_single, dist.reduce_scatter_single)
SPARE = 2e9  # bytes of a GPU for CUDA, NCCL, and gaps between tensors


def dry_run(config, ranks, **how):
    """The Memory that predicted_memory says, counted in a step: what lives after the op after which
    most does.
    error  ModuleNotFoundError without transformers
    """
    return launch(counted, config, ranks, Step(**how), ranks=1, timeout=600, preload=PRELOAD)[0]


def counted(config, ranks, step):
    """The same, in this process."""
    transformers = offline_transformers()
    sdpa = transformers.AttentionInterface()["sdpa"]
    # By another name it gets no (T, T) mask, which transformers makes for pretended tensors only.
    transformers.AttentionInterface.register("unmasked", sdpa)
    shape = transformers.LlamaConfig(**config, use_cache=False, attn_implementation="unmasked")
    with posing(ranks), without_memory():
        return peak_of(transformers.LlamaForCausalLM(shape), step)


class HeldMessages(TorchFunctionMode):
    """Inside, a message holds its tensors until somebody waits for it, as NCCL's do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return Message(result, args[:2]) if function in MESSAGES else result


class Message:
    """A work of torch.distributed, with the tensors that it sends and fills."""

    def __init__(self, work, tensors):
        self.work, self.tensors = work, tensors

    def wait(self):
        self.work.wait()
        self.tensors = None


class HoldingBlock(FullyShardedBlock):
    """FullyShardedBlock under NCCL, whatever the backend."""

    def begin_unshard(self):
        with HeldMessages():
            super().begin_unshard()

    def reduce_gradients(self):
        with HeldMessages():
            super().reduce_gradients()


def peak_of(model, step):
    """The Memory of a GPU at the peak of a training step of `model`."""
    if step.recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    for module in (*model.model.layers, model.train()):
        HoldingBlock(module, precision=PRECISIONS[step.precision])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for rows in model.parameters():
        rows.grad = torch.zeros_like(rows)
    optimizer.step()  # makes Adam's moments
    optimizer.zero_grad()
    tokens = torch.zeros(step.micro_batch, step.n_ctx, dtype=torch.long)
    blocks = sharded_modules(model)
    on_the_cpu = ("parameters", "gradients", "optimizer_state") if step.offload else ()
    with MemoryPeak(model, optimizer, gathered=lambda: [
            (block.gathered, [(p.whole, p.whole.grad) for p in block.parameters])
            for block in blocks],
            of=lambda memory: dataclasses.replace(memory, **dict.fromkeys(on_the_cpu, 0))) as found:
        for _ in range(min(step.pieces, 2)):  # a third one would be as the second
            masked_loss(model(input_ids=tokens).logits, tokens, tokens.numel()).backward()
        optimizer.step()
    return found.peak


def dry_run_report(size, gpus, gpu_gb, shard_ranks=0, batch=0, **config):
    """Both, as text; whether it fits, and what would.

    size    a name in LLAMAS
    config  of the project; what memory does not depend on is left out
    """
    shape, ranks = LLAMAS[size], shard_ranks or gpus
    if gpus % ranks:
        raise ValueError(f"shard_ranks={ranks} must divide the {gpus} GPUs")
    step = Step(**{name: value for name, value in config.items() if name in Step._fields})
    step = step._replace(pieces=max(1, -(-batch // (gpus * step.micro_batch))))
    said = moments(shape, ranks, step)
    worst = max(said, key=lambda moment: said[moment].total)
    found = dry_run(shape, ranks, **step._asdict()) if is_here() else None
    lines = [f"{ranks} GPUs share one copy: {step}", "",
             table("GB of a GPU", [(name, getattr(said[worst], name), getattr(found, name, None))
                                   for name in ROWS]),
             "", f"Most is there when {worst}."]
    if step.offload:
        rows = moments(shape, 1, Step())["the loss is taken"]
        nbytes = (rows.parameters * 2 + rows.optimizer_state) * gpus / ranks
        lines.append(f"Rows, gradients and moments are in the CPUs' memory: {nbytes / 1e9:.0f} GB.")
    lines += [] if found else [NO_TRANSFORMERS]
    return "\n".join([*lines, *verdict(shape, ranks, gpu_gb, step, found or said[worst])])


def verdict(shape, ranks, gpu_gb, step, memory):
    """Whether a Memory fits on a GPU; else what would. In lines."""
    budget = gpu_gb * 1e9 - SPARE
    if memory.total <= budget:
        return [f"It fits in {gpu_gb:g} GB, with 2 GB left for CUDA, NCCL and gaps."]
    ways = {name: (ranks, step._replace(**{name: value})) for name, value in (
        ("recompute", True), ("precision", "bf16"), ("micro_batch", 1), ("offload", True))}
    ways |= {f"{ranks * more} GPUs": (ranks * more, step) for more in (2, 4, 8, 16)}
    needs = {name: predicted_memory(shape, R, **changed._asdict()).total / 1e9
             for name, (R, changed) in ways.items()}
    fits = [f"{name} ({n:.1f} GB)" for name, n in needs.items() if n * 1e9 <= budget]
    return [f"It does not fit in {gpu_gb:g} GB, of which CUDA, NCCL and gaps want 2.",
            f"What fits: {', '.join(fits)}." if fits else "No single change makes it fit."]
