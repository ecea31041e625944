"""The settings of the ZeRO project: its GPTs, the config, the options of its command."""

from dataclasses import dataclass, replace

from ranklab.basics.options import comma_list, existing_file, new_file, option
from ranklab.models.gpt import GPTConfig
from ranklab.projects.runner import Machine, OnRanks, OnText, Resumed
from ranklab.projects.training import large_gpt, must_divide
from ranklab.trainer.text import TrainConfig
from ranklab.zero.config import read_config

MODELS = {"laptop": GPTConfig(n_layer=4),
          "1.3b": large_gpt(n_layer=24, n_head=16, n_embd=2048)}  # heads of 128: flash attention


@dataclass(frozen=True)
class Config(TrainConfig):
    """The training settings, validated when created. The defaults suit a laptop."""

    steps: int = 100
    batch: int = 16
    micro_batch: int = option(16, "sequences in a forward and backward of one rank")
    eval_batch: int = 64
    log_every: int = 10
    engine: str = option("ours", "which ZeRO", ("ours", "deepspeed"))
    precision: str = option("fp32", "bf16: 16-bit parameters, and master weights in float32",
                            ("fp32", "bf16"))
    offload: str | None = option(None, "the optimizer's state: cpu, or (ours) a folder for files")
    compiled: bool = option(False, "DeepSpeed's own Adam: compiled in some minutes, once")
    recompute: bool = option(False, "activation checkpointing: each block computes twice")

    def has_master_weights(self, stage):
        """Return whether a model of 16-bit parameters is updated in float32.

        Plain data parallelism has no master weights: its weights stay in float32, and products
        are computed in bf16.
        """
        return self.precision == "bf16" and (stage > 0 or self.engine == "deepspeed")

    def check(self, stages, ranks):
        """Raise ValueError if a setting contradicts these stages or the number of ranks."""
        is_ours = self.engine == "ours"
        for is_wrong, sentence in (
                (is_ours and self.compiled, "--compiled is for --engine deepspeed"),
                (not is_ours and self.offload not in (None, "cpu"),
                 f"offload={self.offload!r}: with --engine deepspeed it is cpu"),
                (self.checkpoint and len(stages) > 1,
                 f"checkpoint={self.checkpoint!r} is that of one stage: name it"),
                (self.offload and 0 in stages,
                 f"offload={self.offload!r} needs stage 1, 2 or 3: name them")):
            if is_wrong:
                raise ValueError(sentence)
        # in stage 3 all ranks must call the model equally often
        must_divide(ranks, batch=self.batch, eval_batch=self.eval_batch)


SIZES = {
    "laptop": Config(),
    "1.3b": Config(batch=64, micro_batch=4, lr=2e-4, precision="bf16", recompute=True),
}
STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Command(OnRanks, Resumed, OnText, Machine):
    """The command's options besides Config's."""

    size: str = option("laptop", "of the GPT", SIZES)
    stage: tuple | None = option(None, "0, 1, 2 or 3, or some of them with commas (all)",
                                 kind=comma_list(int, STAGES))
    config: str | None = option(None, "a DeepSpeed config", kind=existing_file)
    write_config: str | None = option(None, "write one for that machine, and end", kind=new_file)
    local_rank: int | None = option(None, "given by the command deepspeed", kind=int,
                                    flag="local_rank")

    def settings(self):
        changes = read_config(self.config)[1] if self.config else {}
        return replace(SIZES[self.size], **changes)

    def stages(self):
        """Return the stages from the command line or the DeepSpeed config; else all."""
        return tuple(self.stage or ([read_config(self.config)[0]] if self.config else STAGES))
