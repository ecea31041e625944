"""What the ZeRO project trains and how: the GPTs, the config, the options of its command."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ranklab.models.gpt import GPTConfig
from ranklab.options import comma_list, existing_file, new_file, option
from ranklab.projects.runner import Machine, OnRanks, OnText, Resumed
from ranklab.text_trainer import TrainConfig

# GPT-2's 1.3B, with its 50257 tokens padded to a multiple of 128. The byte text uses 256 of them;
# the cost of a token is that of published runs. Heads of 128 suit flash attention.
MODELS = {
    "laptop": GPTConfig(n_layer=4),
    "1.3b": GPTConfig(vocab_size=50304, n_ctx=1024, n_layer=24, n_head=16, n_embd=2048,
                      rotary_base=10000.0),
}  # fmt: skip


@dataclass(frozen=True)
class Config(TrainConfig):
    """How to train; checked when it is made. The defaults suit a laptop."""

    steps: int = 100
    batch: int = 16
    micro_batch: int = option(16, "sequences in a forward and backward of one rank")
    eval_batch: int = 64
    log_every: int = 10
    engine: str = option("ours", "which ZeRO", ("ours", "deepspeed"))
    precision: str = option("fp32", "bf16: 16-bit parameters, and master weights in float32",
                            ("fp32", "bf16"))
    offload: str | None = option(None, "the optimizer's state: cpu, or (ours) a folder for files")
    offload_parameters: bool = option(False, "DeepSpeed's stage 3: to the CPU's memory, too")
    compiled: bool = option(False, "DeepSpeed's own Adam: compiled in some minutes, once")
    recompute: bool = option(False, "activation checkpointing: each block computes twice")

    def __post_init__(self):
        super().__post_init__()
        if self.engine == "ours" and (self.offload_parameters or self.compiled):
            raise ValueError("--offload-parameters and --compiled are for --engine deepspeed")
        if self.engine == "deepspeed" and self.offload not in (None, "cpu"):
            raise ValueError(f"offload={self.offload!r}: with --engine deepspeed it is cpu")


SIZES = {
    "laptop": Config(),
    "1.3b": Config(batch=64, micro_batch=4, lr=2e-4, precision="bf16", recompute=True),
}
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Options(OnRanks, Resumed, OnText, Machine):
    """What the command takes beside Config."""

    size: str = option("laptop", "of the GPT", SIZES)
    stage: tuple | None = option(None, "0, 1, 2 or 3, or some of them with commas (all)",
                                 kind=comma_list(int, STAGES))
    engine: str = "ours"  # also of Config, which says more of it
    config: str | None = option(None, "a DeepSpeed config", kind=existing_file)
    write_config: str | None = option(None, "write one for that machine, and end", kind=new_file)
    local_rank: int | None = option(None, "given by the command deepspeed", kind=int,
                                    flag="local_rank")

    def settings(self):
        given = read_config(self.config)[1] if self.config else {}
        return replace(SIZES[self.size], engine=self.engine, **given)

    def stages(self):
        """Those of the command line, or that of the DeepSpeed config; else all."""
        return tuple(self.stage or ([read_config(self.config)[0]] if self.config else STAGES))


def read_config(path):
    """(the stage, {field of Config: value}) that the DeepSpeed config in this file asks for.

    error  ValueError: something that this project has no name for
    """
    try:
        given = json.loads(Path(path).read_text())
        zero = dict(given.get("zero_optimization", {}))
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no DeepSpeed config: {error}") from None
    optimizer = {"type": "AdamW", "params": {}} | given.get("optimizer", {})
    if given.get("fp16", {}).get("enabled"):
        raise ValueError(f"{path}: fp16 is not for this project: take bf16")
    if optimizer["type"] != "AdamW":
        raise ValueError(f"{path}: optimizer.type={optimizer['type']!r} must be 'AdamW'")
    found = {"batch": given.get("train_batch_size"),
             "micro_batch": given.get("train_micro_batch_size_per_gpu"),
             "clip": given.get("gradient_clipping"),
             "precision": "bf16" if given.get("bf16", {}).get("enabled") else "fp32",
             "offload": "cpu" if zero.get("offload_optimizer") else None,
             "offload_parameters": bool(zero.get("offload_param"))}
    found |= {name: optimizer["params"].get(name) for name in ("lr", "betas", "weight_decay")}
    found["betas"] = found["betas"] and tuple(found["betas"])
    return zero.get("stage", 0), {name: value for name, value in found.items() if value is not None}
