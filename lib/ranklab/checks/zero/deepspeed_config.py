"""The check of deepspeed_config: what DeepSpeed reads, key by key, for several goals."""

import json

from ranklab.checks.beside import expect
from ranklab.checks.zero.formulas import refuses_all

# ranks, GB of each GPU, GB beside the states, precision; stage, optimizer and parameters offloaded
GOALS = (
    (4, 100, 0, "bf16", 0, False, False), (4, 13, 0, "fp16", 1, False, False),
    (4, 8, 0, "fp32", 2, False, False), (4, 13, 5, "bf16", 2, False, False),
    (4, 6, 0, "bf16", 3, False, False), (16, 1.5, 0, "fp32", 3, False, False),
    (4, 4, 0, "fp16", 2, True, False), (4, 2, 0, "bf16", 3, True, False),
    (4, 0.1, 0, "fp16", 3, True, True),
)
REFUSED = {  # each with its arguments
    "a batch of 100 on 3 ranks": (1e8, 3, 8e9, 100, 4),
    "a batch smaller than one micro batch for each rank": (1e8, 4, 8e9, 8, 4),
    "a GPU that its activations fill": (1e9, 4, 8e9, 16, 4, 9e9),
}
DIVIDES = ("Say what is wrong, before any GPU starts: raise ValueError(...) unless micro_batch x "
           "ranks divides the batch. What fastest_way() raises goes on to the caller.")
MISSING = {"device": "none", "enabled": False}  # what DeepSpeed takes where a key is not there
SIZES = ("train batch = micro batch x accumulation steps x ranks, all of them whole numbers (//). "
         "DeepSpeed refuses any other.")
STAGE = "fastest_way(parameters, ranks, gpu_bytes, other_bytes) says which; other_bytes count, too."
BUCKET = ("It is the `bucket` that was asked for; DeepSpeed's own bucket, 500 million numbers, is "
          "a gigabyte of bf16 in each message.")
PRECISION = ('config[precision] = {"enabled": True}; and nothing for "fp32", which is DeepSpeed\'s '
             "own default.")


def check_deepspeed_config(deepspeed_config):
    for ranks, gb, other_gb, precision, *way in GOALS:
        config = deepspeed_config(1.3e9, ranks, gb * 1e9, 256, 4, other_gb * 1e9, lr=0.125,
                                  precision=precision, bucket=10**6)
        _compare(f"1.3 billion parameters on {ranks} GPUs of {gb} GB, {other_gb} GB taken, "
                 f"{precision}", config, _wanted(ranks, precision, *way))
    yield "the fastest way that fits, for nine goals: stage, and what is offloaded"
    yield "train batch = micro batch x accumulation steps x ranks; all of it is JSON"
    yield "buckets of the size that was asked for"
    yield "the precision and the learning rate that were asked for; AdamW"
    refuses_all(deepspeed_config, REFUSED, DIVIDES)
    yield "a batch that does not divide, and a model that does not fit, are a ValueError"


def _wanted(ranks, precision, stage, *offloaded):
    """{key: (value, hint)} for a batch of 256 in micro batches of 4."""
    wanted = {"train_batch_size": (256, SIZES), "train_micro_batch_size_per_gpu": (4, SIZES),
              "gradient_accumulation_steps": (64 // ranks, SIZES),
              "zero_optimization.stage": (stage, STAGE)}
    for key, is_away in zip(("offload_optimizer", "offload_param"), offloaded):
        wanted[f"zero_optimization.{key}.device"] = (
            ("cpu", f'This goal needs it on the CPU: "{key}": {{"device": "cpu"}}.') if is_away else
            ("none", f"It fits without {key}, which would cost time: leave it out."))
    for kind in ["reduce", "allgather"] + ["stage3_prefetch"] * (stage == 3):
        wanted[f"zero_optimization.{kind}_bucket_size"] = (10**6, BUCKET)
    for kind in ("bf16", "fp16"):
        wanted[f"{kind}.enabled"] = (kind == precision, PRECISION)
    return wanted | {"optimizer.type": ("AdamW", 'It is {"type": "AdamW", "params": {...}}.'),
                     "optimizer.params.lr": (0.125, "It is the `lr` that was asked for.")}


def _compare(where, config, wanted):
    is_json = isinstance(config, dict) and json.loads(json.dumps(config, default=str)) == config
    expect(is_json, f"{where}: it returned {str(config)[:60]}", "Return a dict that JSON gives "
           "back unchanged: its keys are strings, and it holds only numbers, strings, lists and "
           "dicts.")
    for path, (right, hint) in wanted.items():
        got = config
        for key in path.split("."):
            got = (got or {}).get(key, MISSING.get(key))
        expect(got == right and type(got) is type(right),
               f"{where}: {path} is {got!r}, not {right!r}", hint)
