"""Lab 01: FLOPs of something else, over the peak of something else."""

from mutants import mutant

from ranklab.baseline import mfu
from ranklab.models.gpt import count_parameters

PER_TOKEN = "transformer_flops(config, 1, config.n_ctx) / config.n_ctx"

WRONG = [mutant(mfu, old, new, says=says, count_parameters=count_parameters)
         for old, new, says in (
    ("return ", "return 100 * ", "not per cent"),
    ("return ", "return 4 / 3 * ", "count it once"),
    ("(peak_flops * devices)", "peak_flops", "all devices together"),
    ("(peak_flops * devices)", "peak_flops * devices", "multiplies by devices"),
    ("n_ctx) /", "n_ctx, backward=False) /", "three forwards"),
    (" / config.n_ctx", "", "per token, not per sequence"),
    (PER_TOKEN, "6 * count_parameters(config)", "leaves attention out"),
)]  # fmt: skip
