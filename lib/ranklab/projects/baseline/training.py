"""Train a GPT on real text and account for its costs: the project of lab 01."""

import argparse
import functools
import math
import os
from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ranklab import data, hardware
from ranklab.baseline import (
    accumulate_gradients, activation_bytes, checkpoint_blocks, checkpointed, frugal_gradients,
    model_state_bytes, transformer_flops,
)
from ranklab.basics.options import number, option, positive
from ranklab.meter import SavedActivations, memory_of
from ranklab.meter.curve import MemoryPeak
from ranklab.meter.text import lined_up
from ranklab.models.gpt import GPT, GPTConfig, count_parameters
from ranklab.projects.authors import authors
from ranklab.projects.runner import OnText, Resumed
from ranklab.projects.training import large_gpt, median_speed, model_line
from ranklab.trainer import PRECISIONS
from ranklab.trainer.parallel import Parallel
from ranklab.trainer.text import TextTrainer, TrainConfig, text_for

PARTS = {"flops": transformer_flops, "states": model_state_bytes, "activations": activation_bytes,
         "accumulate": accumulate_gradients, "checkpointed": checkpointed,
         "frugal": frugal_gradients}  # fmt: skip
MODELS = {  # heads of 128 suit flash attention
    "laptop": GPTConfig(),
    "124m": large_gpt(n_layer=12, n_head=6, n_embd=768),
    "350m": large_gpt(n_layer=24, n_head=8, n_embd=1024),
    "774m": large_gpt(n_layer=36, n_head=10, n_embd=1280),
    "1.5b": large_gpt(n_layer=28, n_head=16, n_embd=2048),
}
TRAINING = {
    "laptop": TrainConfig(),
    "124m": TrainConfig(steps=100, batch=128, micro_batch=32, lr=6e-4, log_every=10),
    "350m": TrainConfig(steps=100, batch=128, micro_batch=32, lr=6e-4, log_every=10),
    "774m": TrainConfig(steps=100, batch=128, micro_batch=16, lr=4e-4, log_every=10),
    "1.5b": TrainConfig(steps=100, batch=128, micro_batch=16, lr=3e-4, log_every=10),
}


def precision_on(device):
    """Return the precision that suits the device."""
    return "bf16" if torch.device(device).type == "cuda" else "fp32"


def device(text):
    """Parse the name of a device that torch knows: the type of an option."""
    try:
        return str(torch.device(text))
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: cpu, cuda or cuda:1") from None


@dataclass(frozen=True)
class Options(Resumed, OnText):
    """The command's options besides TrainConfig's."""

    size: str = option("laptop", "of the GPT", MODELS)
    device: str = option("cpu", "cpu, cuda, cuda:1", kind=device)
    compile: bool = option(False, "torch.compile the model")
    recompute: bool = option(False, "checkpoint each block")
    loss_chunks: int = option(1, "logits in so many parts", kind=positive)
    threads: int = option(1, "of the CPU; more for large models", kind=number(least=1, most=1024))

    def __post_init__(self):
        super().__post_init__()
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: this is the baseline of one "
                             "device; lab 03 trains on many")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"--device {self.device}: this torch ({torch.__version__}) sees no "
                             "GPU")

    def settings(self):
        return replace(TRAINING[self.size], precision=precision_on(self.device))


def run(size="laptop", device="cpu", compile=False, recompute=False, loss_chunks=1, path=None,
        resume=False, progress=True, model_seed=0, frugally=False, **changes):
    """Train the model and account for its costs; return all numbers in a dict.

    path      a text file of your own
    frugally  compute gradients with the function `frugal`, in float32
    changes   a learner's functions for PARTS; and fields of TrainConfig: steps=50, ...
    """
    functions = {name: changes.pop(name) for name in PARTS if name in changes}
    parts = PARTS | functions
    config = replace(TRAINING[size], **{"precision": precision_on(device), **changes})
    if frugally and config.precision != "fp32":
        raise ValueError(f"frugally=True computes in float32, not in {config.precision}")
    text, shape = text_for(replace(MODELS[size], loss_chunks=loss_chunks), config, path)
    torch.manual_seed(model_seed)
    model, hardware_here = GPT(shape), hardware.present(device)
    if recompute:
        by_torch = functools.partial(checkpoint, use_reentrant=False)
        checkpoint_blocks(model, functions.get("checkpointed", by_torch))
    trainer = TextTrainer(model, text, config, device, compile, progress=progress,
                          parallel=OneDevice(parts, model if frugally else None),
                          peak_flops=hardware_here.peak_flops(PRECISIONS[config.precision]))
    if resume:
        trainer.resume()
    history = trainer.fit()
    loss = history.held_out.get(config.steps)  # None: nothing was left to train
    window = data.held_out_batch(text.held_out, config.eval_batch, shape.n_ctx)
    return {"text": text, "shape": shape, "config": config, "device": hardware_here,
            "model": model, "flops": flops_table(shape, config, parts["flops"]),
            "history": history, **speed(trainer),
            "held_out": trainer.evaluate() if loss is None else loss,
            "bigram": data.bigram_loss(text.train, *window, text.vocab_size),
            "memory": memory_table(trainer, recompute, parts["states"], parts["activations"]),
            "peak": peak_of_a_step(trainer), "authors": authors(parts),
            "sample": sample(trainer, text)}


class OneDevice(Parallel):
    """One process whose gradients are computed by the library's functions or a learner's.
    model  trained by parts["frugal"]; None: parts["accumulate"], which only gets the loss
    """

    def __init__(self, parts, model=None):
        self.accumulate, self.frugal, self.model = parts["accumulate"], parts["frugal"], model

    def forward_backward(self, loss_sum, inputs, targets, micro_batch, scale=1.0):
        if self.model:
            return self.frugal(self.model, inputs, targets)
        return self.accumulate(lambda x, y: loss_sum(x, y) * scale, inputs, targets,
                               micro_batch) / scale


def flops_table(shape, config, transformer_flops=transformer_flops):
    """Return {"predicted", "counted"}: FLOPs of one step; torch counts them on meta tensors."""
    plain = replace(shape, loss_chunks=1)  # chunks compute the head twice: not counted
    with torch.device("meta"):
        model, tokens = GPT(plain), torch.zeros(1, shape.n_ctx, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
    return {"predicted": transformer_flops(shape, config.batch, shape.n_ctx),
            "counted": config.batch * counter.get_total_flops()}


def speed(trainer):
    """Return the median tokens/s of all logged intervals, and the MFU that follows from it."""
    tokens_per_second = median_speed(trainer.history)
    return {"tokens_per_second": tokens_per_second,
            "mfu": trainer.flops_per_token * tokens_per_second / trainer.peak_flops}


def memory_table(trainer, recompute, model_state_bytes=model_state_bytes,
                 activation_bytes=activation_bytes):
    """Return {category: (predicted, counted)} in bytes, at this micro-batch, after training.

    Counted exactly on a CPU in float32. On a GPU the predicted sum is compared with the allocator's
    peak, which is higher: under autocast, saved casts of weights come on top, and the compiler
    recomputes what is cheap.
    """
    shape, config = trainer.model.config, trainer.config
    inputs, targets = data.batch_at(trainer.text.train, 0, config.micro_batch, shape.n_ctx)
    element = PRECISIONS[config.precision].itemsize
    states = model_state_bytes(count_parameters(shape), "fp32")  # autocast keeps all in float32
    activations = activation_bytes(shape, *inputs.shape, element, recompute)
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.device)
        return {"states": (sum(states.values()), None), "saved activations": (activations, None),
                "total": (sum(states.values()) + activations, peak)}
    with SavedActivations(trainer.model) as tensors, trainer.autocast():
        trainer.model(inputs, targets, "sum")
    memory = memory_of(trainer.model, trainer.optimizer)
    return {"parameters": (states["parameters"], memory.parameters),
            "gradients": (states["gradients"], memory.gradients),
            "optimizer state": (states["optimizer"], memory.optimizer_state),
            "saved activations": (activations, tensors.bytes)}


def peak_of_a_step(trainer):
    """Return the peak bytes of a forward and backward, without those that live between steps.

    None on a GPU, where allocations of compiled kernels are not observed.
    """
    if trainer.device.type == "cuda":
        return None
    with MemoryPeak(trainer.model, trainer.optimizer) as memory:
        trainer.parallel.forward_backward(trainer.loss_sum, *trainer.next_batch(),
                                          trainer.loop.micro_batch)
    return memory.peak_bytes - memory.points[0].total


def sample(trainer, text, n=200):
    """Return the model's continuation of "def "; None when the tokens are not bytes."""
    if text.vocab_size != 256:
        return None
    start = torch.tensor([list(b"\ndef ")], device=trainer.device)
    trainer.model.eval()
    with torch.random.fork_rng(), trainer.autocast():
        torch.manual_seed(1)
        written = trainer.model.generate(start, n, temperature=0.7)[0]
    trainer.model.train()
    return data.decode(written[written < 256])


def report(results):
    """Format the results of `run` as text."""
    shape, config, text = results["shape"], results["config"], results["text"]
    unit = "byte" if text.vocab_size == 256 else "token"
    peak = results["device"].peak_flops(PRECISIONS[config.precision])
    rows = [*results["memory"].items()]
    rows += [("peak beside states", (None, results["peak"]))] if results["peak"] else []
    return "\n".join([
        f"text      {text.name}: {len(text.train):,} {unit}s to train on, {len(text.held_out):,} "
        "held out, split by file",
        model_line(shape),
        f"training  {config.steps} steps of {config.batch} x {shape.n_ctx} tokens, "
        f"{config.precision}, on {results['device'].name}",
        "FLOPs     {predicted:.4g} a step predicted, {counted:.4g} counted".format(
            **results["flops"]),
        f"speed     {results['tokens_per_second']:,.0f} tokens/s, MFU {results['mfu']:.1%} of "
        + (f"{peak / 1e12:.3g} TFLOP/s" if peak > 1e13 else f"{peak / 1e9:.0f} GFLOP/s"),
        *(f"{name:9} {loss:.3f} nats per {unit} on {kind} text ({loss / math.log(2):.2f} bits)"
          for name, loss, kind in (("loss", results["held_out"], "held-out"),
                                   ("bigram", results["bigram"], "the same"))),
        results["authors"] + "\n",
        lined_up(("memory in bytes", "predicted", "counted"), [
            (name, *("-" if nbytes is None else nbytes for nbytes in pair))
            for name, pair in rows])])


def report_with_sample(results):
    """Return the report, with a sample that the model wrote."""
    lines = [report(results)]
    if results["sample"]:
        lines.append(f"\na sample:\n{results['sample']}")
    if results["held_out"] >= results["bigram"]:
        lines.append("It has not beaten the bigram model yet: give it more --steps.")
    return "\n".join(lines)
