"""What the baseline trains and how, and the options of its command."""

import argparse
import functools
import os
from dataclasses import dataclass, replace

import torch

from ranklab.basics.options import number, option, positive
from ranklab.models.gpt import GPTConfig
from ranklab.projects.runner import OnText, Resumed
from ranklab.trainer.text import TrainConfig

# GPT-2's 50257 padded to a multiple of 128: odd sizes leave tensor cores idle. The byte text uses
# 256 of them; the cost of a token is that of published runs. Heads of 128 suit flash attention.
LARGE = functools.partial(GPTConfig, vocab_size=50304, n_ctx=1024, rotary_base=10000.0)
MODELS = {
    "laptop": GPTConfig(),
    "124m": LARGE(n_layer=12, n_head=6, n_embd=768),
    "350m": LARGE(n_layer=24, n_head=8, n_embd=1024),
    "774m": LARGE(n_layer=36, n_head=10, n_embd=1280),
    "1.5b": LARGE(n_layer=28, n_head=16, n_embd=2048),
}
TRAINING = {
    "laptop": TrainConfig(),
    "124m": TrainConfig(steps=100, batch=128, micro_batch=32, lr=6e-4, log_every=10),
    "350m": TrainConfig(steps=100, batch=128, micro_batch=32, lr=6e-4, log_every=10),
    "774m": TrainConfig(steps=100, batch=128, micro_batch=16, lr=4e-4, log_every=10),
    "1.5b": TrainConfig(steps=100, batch=128, micro_batch=16, lr=3e-4, log_every=10),
}


def precision_on(device):
    return "bf16" if torch.device(device).type == "cuda" else "fp32"


def device(text):
    """A type: the name of a device that torch knows."""
    try:
        return str(torch.device(text))
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: cpu, cuda or cuda:1") from None


@dataclass(frozen=True)
class Options(Resumed, OnText):
    """What the command takes beside TrainConfig."""

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
