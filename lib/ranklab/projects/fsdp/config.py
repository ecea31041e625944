"""What the FSDP project trains and how."""

from dataclasses import dataclass
from pathlib import Path

from ranklab.basics.options import existing_file, new_folder, option
from ranklab.projects.runner import OnRanks, Resumed
from ranklab.trainer.text import TrainConfig

# What transformers.LlamaConfig takes, where no folder of weights says it.
LLAMAS = {
    "laptop": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176,
               "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.1},
    "7b": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096},
}  # fmt: skip


@dataclass(frozen=True)
class Config(TrainConfig):
    """How to fine-tune; checked when it is made. The defaults suit a laptop."""

    model: str | None = option(None, "a Hugging Face folder with safetensors, e.g. Llama-2-7b")
    data: str | None = option(None, "a file in Alpaca's form: instruction, input, output",
                              kind=existing_file)
    save: str | None = option(None, "write the tuned model to this folder, for from_pretrained",
                              kind=new_folder)
    engine: str = option("ours", "fsdp2: torch's fully_shard", ("ours", "fsdp2"))
    pretrain: int = option(40, "steps on plain text first, where there is no --model", least=0)
    steps: int = 120
    batch: int = option(32, "examples in a step, over all ranks")
    micro_batch: int = option(16, "examples in a forward and backward of one rank")
    eval_batch: int = option(192, "held-out examples")
    log_every: int = 10
    n_ctx: int = option(96, "tokens; what an example has beyond them is cut off", least=2)
    lr: float = 3e-3
    weight_decay: float = 0.0
    precision: str = option("fp32", "bf16: what is computed; gradients travel, and rows are "
                            "stepped, in float32", ("fp32", "bf16"))  # fmt: skip
    recompute: bool = option(False, "activation checkpointing: each layer computes twice")
    offload: bool = option(False, "rows, gradients and optimizer to the CPU's memory")
    most_bytes: int = option(0, "of float32 parameters that are whole; 0: as decoder layers need",
                             least=0)  # fmt: skip
    shard_ranks: int = option(0, "ranks that share one copy of the model; 0: all", least=0)

    def __post_init__(self):
        super().__post_init__()
        if self.engine == "fsdp2" and self.shard_ranks:
            raise ValueError("--shard-ranks is for --engine ours")
        if self.model and not Path(self.model, "config.json").exists():
            raise ValueError(f"{self.model} is no folder of a model: it has no config.json")


SIZES = {
    "laptop": Config(),
    "7b": Config(steps=1000, batch=64, micro_batch=1, n_ctx=1024, lr=2e-5, warmup=30,
                 final_lr=0.0, pretrain=0, precision="bf16", recompute=True, offload=True),
}  # fmt: skip


@dataclass(frozen=True)
class Command(OnRanks, Resumed):
    """What the command takes beside Config."""

    size: str = option("laptop", "how to train, and what", SIZES)

    def settings(self):
        return SIZES[self.size]
