"""The check of deepspeed_config: what DeepSpeed reads, key by key, for several goals."""

import json

from ranklab.checks.exercise import Mistake

# parameters, ranks, GB of each GPU, GB beside the states; stage, optimizer and parameters offloaded
GOALS = (
    (1.3e9, 4, 100, 0, 0, False, False), (1.3e9, 4, 13, 0, 1, False, False),
    (1.3e9, 4, 8, 0, 2, False, False), (1.3e9, 4, 13, 5, 2, False, False),
    (1.3e9, 4, 4, 0, 2, True, False), (1.3e9, 16, 1.5, 0, 3, False, False),
    (1.3e9, 4, 2, 0, 3, True, False), (1.3e9, 4, 0.1, 0, 3, True, True),
)
SIZES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def check_deepspeed_config(deepspeed_config):
    for parameters, ranks, gb, other_gb, *way in GOALS:
        where = f"{parameters:g} parameters on {ranks} GPUs of {gb} GB, {other_gb} GB taken"
        config = deepspeed_config(parameters, ranks, gb * 1e9, 256, 4, other_gb * 1e9, bucket=10**6)
        _compare_json(where, config)
        _compare_sizes(where, config, (256, 4, 256 // 4 // ranks))
        _compare_zero(where, config["zero_optimization"], *way)
    yield "the fastest way that fits, for eight goals: stage, and what is offloaded"
    yield "train batch = micro batch x accumulation steps x ranks; all of it is JSON"
    yield "buckets of the size that was asked for"
    for precision in ("bf16", "fp16", "fp32"):
        _compare_precision(precision, deepspeed_config(1e8, 2, 8e9, 8, 2, precision=precision,
                                                       lr=0.125))
    yield "the precision and the learning rate that were asked for; AdamW"
    for why, arguments in (("a batch of 100 on 3 ranks", (1e8, 3, 8e9, 100, 4)),
                           ("a batch smaller than one micro batch for each rank", (
                               1e8, 4, 8e9, 8, 4)),
                           ("a GPU that its activations fill", (1e9, 4, 8e9, 16, 4, 9e9))):
        _refuses(why, deepspeed_config, arguments)
    yield "a batch that does not divide, and a model that does not fit, are a ValueError"


def _compare_json(where, config):
    try:
        same = json.loads(json.dumps(config)) == config
    except TypeError as error:
        raise Mistake(f"{where}: {error}", "Only numbers, texts, lists and dicts.") from None
    if not same or not isinstance(config, dict):
        raise Mistake(f"{where}: it returned {str(config)[:60]}", "A dict that JSON gives back as "
                      "it is: its keys are texts.")
    missing = [key for key in (*SIZES, "zero_optimization", "optimizer") if key not in config]
    if missing:
        raise Mistake(f"{where}: there is no {missing[0]!r}", "DeepSpeed wants "
                      f"{', '.join(SIZES)}, optimizer and zero_optimization.")


def _compare_sizes(where, config, right):
    for key, wanted in zip(SIZES, right):
        if config[key] != wanted or not isinstance(config[key], int):
            raise Mistake(f"{where}: {key} is {config[key]!r}, not {wanted}", "train batch = micro "
                          "batch x accumulation steps x ranks, all of them whole numbers (//). "
                          "DeepSpeed refuses any other.")


def _compare_zero(where, zero, stage, optimizer, parameters):
    if zero.get("stage") != stage:
        raise Mistake(f"{where}: stage {zero.get('stage')}, not {stage}", "fastest_way(parameters, "
                      "ranks, gpu_bytes, other_bytes) says which; other_bytes count, too.")
    for key, wanted in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        got = (zero.get(key) or {"device": "none"}).get("device", "none")
        if got != ("cpu" if wanted else "none"):
            raise Mistake(f"{where}: {key} goes to {got!r}", f"This goal needs {key} on the CPU: "
                          f'{{"device": "cpu"}}.' if wanted else f"It fits without {key}, which "
                          "would cost time: leave it out.")
    keys = ["reduce_bucket_size", "allgather_bucket_size"]
    for key in keys + ["stage3_prefetch_bucket_size"] * (stage == 3):
        if zero.get(key) != 10**6:
            raise Mistake(f"{where}: {key} is {zero.get(key)}, not 1000000", "It is the `bucket` "
                          "that was asked for; DeepSpeed's own, 500 million numbers, is a "
                          "gigabyte of bf16 in each message.")


def _compare_precision(precision, config):
    for kind in ("bf16", "fp16"):
        enabled = config.get(kind, {}).get("enabled", False)
        if enabled != (kind == precision):
            raise Mistake(f"precision={precision!r}: {kind} is {'on' if enabled else 'off'}",
                          'config[precision] = {"enabled": True}; and nothing for "fp32", which '
                          "is DeepSpeed's own default.")
    kind = config["optimizer"].get("type")
    if kind != "AdamW":
        raise Mistake(f"the optimizer's type is {kind!r}, not 'AdamW'",
                      'The optimizer is {"type": "AdamW", "params": {...}}.')
    lr = config["optimizer"].get("params", {}).get("lr")
    if lr != 0.125:
        raise Mistake(f"lr=0.125: the optimizer's lr is {lr}", "optimizer.params.lr is the `lr` "
                      "that was asked for.")


def _refuses(why, deepspeed_config, arguments):
    try:
        got = deepspeed_config(*arguments)
    except ValueError:
        return
    raise Mistake(f"{why} gives {str(got)[:60]} ...", "Say what is wrong, before any GPU starts: "
                  "raise ValueError(...) unless micro_batch x ranks divides the batch. What "
                  "fastest_way() raises goes on to the caller.")
