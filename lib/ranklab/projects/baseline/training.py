"""A GPT is trained on real text, and its costs are accounted for: the project of lab 01."""

import dataclasses
import functools
import math

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ranklab import data, hardware
from ranklab.baseline import (accumulate_gradients, activation_bytes, checkpoint_blocks,
                              checkpointed, frugal_gradients, model_state_bytes,
                              transformer_flops)  # fmt: skip
from ranklab.meter import SavedActivations, memory_of
from ranklab.meter.curve import MemoryPeak
from ranklab.models.gpt import GPT, count_parameters
from ranklab.projects.authors import authors
from ranklab.projects.baseline.config import MODELS, TRAINING, precision_on
from ranklab.projects.training import median_speed
from ranklab.trainer import PRECISIONS
from ranklab.trainer.parallel import Parallel
from ranklab.trainer.text import TextTrainer, text_for

PARTS = {"flops": transformer_flops, "states": model_state_bytes, "activations": activation_bytes,
         "accumulate": accumulate_gradients, "checkpointed": checkpointed,
         "frugal": frugal_gradients}  # fmt: skip


def run(size="laptop", device="cpu", compile=False, recompute=False, loss_chunks=1, path=None,
        resume=False, progress=True, model_seed=0, frugally=False, **changes):
    """The model is trained and its costs are accounted for; returns all numbers in a dict.
    changes   functions: a learner's own of PARTS; all others are of TrainConfig: steps=50, ...
    frugally  gradients are those of the function `frugal`, in float32; path: a text of your own
    """
    given = {name: changes.pop(name) for name in PARTS if name in changes}
    parts = PARTS | given
    config = dataclasses.replace(TRAINING[size], **{"precision": precision_on(device), **changes})
    if frugally and config.precision != "fp32":
        raise ValueError(f"frugally=True computes in float32, not in {config.precision}")
    text, shape = text_for(dataclasses.replace(MODELS[size], loss_chunks=loss_chunks), config, path)
    torch.manual_seed(model_seed)
    model = GPT(shape)
    if recompute:
        by_torch = functools.partial(checkpoint, use_reentrant=False)
        checkpoint_blocks(model, given.get("checkpointed", by_torch))
    here = hardware.present(device)
    trainer = TextTrainer(model, text, config, device, compile, progress=progress,
                          parallel=OneDevice(parts, model if frugally else None),
                          peak_flops=here.peak_flops(PRECISIONS[config.precision]))  # fmt: skip
    if resume:
        trainer.resume()
    found = {"text": text, "shape": shape, "config": config, "device": here, "model": model,
             "flops": flops_table(shape, config, parts["flops"]), "history": trainer.fit(),
             **speed(trainer)}  # fmt: skip
    at_the_end = found["history"].held_out.get(config.steps)  # None: nothing was left to train
    found["held_out"] = trainer.evaluate() if at_the_end is None else at_the_end
    window = data.held_out_batch(text.held_out, config.eval_batch, shape.n_ctx)
    found["bigram"] = data.bigram_loss(text.train, *window, text.vocab_size)
    found["memory"] = memory_table(trainer, recompute, parts["states"], parts["activations"])
    found["peak"] = peak_of_a_step(trainer)
    found["authors"] = authors(parts)
    found["sample"] = sample(trainer, text)
    return found


class OneDevice(Parallel):
    """One process whose gradients are made by functions that may be a learner's.
    model  trained by parts["frugal"]; None: parts["accumulate"] has the loss alone
    """

    def __init__(self, parts, model=None):
        self.accumulate, self.frugal, self.model = parts["accumulate"], parts["frugal"], model

    def forward_backward(self, loss_sum, inputs, targets, micro_batch, scale=1.0):
        if self.model:
            return self.frugal(self.model, inputs, targets)
        return self.accumulate(lambda x, y: loss_sum(x, y) * scale, inputs, targets,
                               micro_batch) / scale


def flops_table(shape, config, transformer_flops=transformer_flops):
    """{"predicted", "counted"}: FLOPs of one step; counted by torch on tensors without data."""
    plain = dataclasses.replace(shape, loss_chunks=1)  # chunks compute the head twice: not counted
    with torch.device("meta"):
        model, tokens = GPT(plain), torch.zeros(1, shape.n_ctx, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
    return {"predicted": transformer_flops(shape, config.batch, shape.n_ctx),
            "counted": config.batch * counter.get_total_flops()}  # fmt: skip


def speed(trainer):
    """The middle tokens/s of all logged stretches, and the MFU that it means."""
    tokens_per_second = median_speed(trainer.history)
    used = trainer.flops_per_token * tokens_per_second / trainer.peak_flops
    return {"tokens_per_second": tokens_per_second, "mfu": used}


def memory_table(trainer, recompute, model_state_bytes=model_state_bytes,
                 activation_bytes=activation_bytes):
    """{category: (predicted, counted)} in bytes, at this micro-batch, after training.
    Counted exactly on a CPU in float32. On a GPU the allocator's peak stands beside the sum: under
    autocast, saved casts of weights come on top, and the compiler recomputes what is cheap.
    """
    shape, config = trainer.model.config, trainer.config
    inputs, targets = data.batch_at(trainer.text.train, 0, config.micro_batch, shape.n_ctx)
    element = PRECISIONS[config.precision].itemsize
    states = model_state_bytes(count_parameters(shape), "fp32")  # autocast keeps all in float32
    kept = activation_bytes(shape, *inputs.shape, element, recompute)
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.device)
        return {"states": (sum(states.values()), None), "saved activations": (kept, None),
                "total": (sum(states.values()) + kept, peak)}  # fmt: skip
    with SavedActivations(trainer.model) as saved, trainer.autocast():
        trainer.model(inputs, targets, "sum")
    memory = memory_of(trainer.model, trainer.optimizer)
    return {"parameters": (states["parameters"], memory.parameters),
            "gradients": (states["gradients"], memory.gradients),
            "optimizer state": (states["optimizer"], memory.optimizer_state),
            "saved activations": (kept, saved.bytes)}  # fmt: skip


def peak_of_a_step(trainer):
    """The most bytes that live in a forward and backward beside what lives between two steps; None
    on a GPU, where compiled kernels are not seen.
    """
    if trainer.device.type == "cuda":
        return None
    with MemoryPeak(trainer.model, trainer.optimizer) as memory:
        trainer.parallel.forward_backward(trainer.loss_sum, *trainer.next_batch(),
                                          trainer.loop.micro_batch)
    return memory.peak_bytes - memory.points[0].total


def sample(trainer, text, n=200):
    """What the model writes after "def "; None when the tokens are not bytes."""
    if text.vocab_size != 256:
        return None
    start = torch.tensor([list(b"\ndef ")], device=trainer.device)
    trainer.model.eval()
    with torch.random.fork_rng(), trainer.autocast():
        torch.manual_seed(1)
        written = trainer.model.generate(start, n, temperature=0.7)[0]
    trainer.model.train()
    return data.decode(written[written < 256])


def report(found):
    """What `run` found, as text."""
    shape, config, text = found["shape"], found["config"], found["text"]
    unit = "byte" if text.vocab_size == 256 else "token"
    peak = found["device"].peak_flops(PRECISIONS[config.precision])
    lines = [
        f"text      {text.name}: {len(text.train):,} {unit}s to train on, {len(text.held_out):,} "
        "held out, split by file",
        f"model     {count_parameters(shape):,} parameters: {shape.n_layer} layers, "
        f"{shape.n_head} heads, width {shape.n_embd}, {shape.n_ctx} tokens, V={shape.vocab_size}",
        f"training  {config.steps} steps of {config.batch} x {shape.n_ctx} tokens, "
        f"{config.precision}, on {found['device'].name}",
        f"FLOPs     {found['flops']['predicted']:.4g} a step predicted, "
        f"{found['flops']['counted']:.4g} counted",
        f"speed     {found['tokens_per_second']:,.0f} tokens/s, MFU {found['mfu']:.1%} of "
        + (f"{peak / 1e12:.3g} TFLOP/s" if peak > 1e13 else f"{peak / 1e9:.0f} GFLOP/s"),
        f"loss      {found['held_out']:.3f} nats per {unit} on held-out text "
        f"({found['held_out'] / math.log(2):.2f} bits)",
        f"bigram    {found['bigram']:.3f} nats per {unit} on the same text "
        f"({found['bigram'] / math.log(2):.2f} bits)",
        found["authors"],
        f"\n{'memory in bytes':20} {'predicted':>16} {'counted':>16}",
    ]
    for name, (predicted, counted) in found["memory"].items():
        seen = "-" if counted is None else f"{counted:,}"
        lines.append(f"{name:20} {predicted:16,} {seen:>16}")
    if found["peak"]:
        lines.append(f"{'peak beside states':20} {'-':>16} {found['peak']:16,}")
    return "\n".join(lines)


def report_with_sample(found):
    """And what the model writes."""
    lines = [report(found), f"\na sample:\n{found['sample']}" if found["sample"] else ""]
    if found["held_out"] >= found["bigram"]:
        lines.append("It has not beaten the bigram model yet: give it more --steps.")
    return "\n".join(filter(None, lines))
