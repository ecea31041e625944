"""The check of deepspeed_config: the keys that DeepSpeed reads, one by one, for several goals."""

import json
from typing import NamedTuple

from ranklab.checks.prover import Must, Proof, Slip, Stage, Told
from ranklab.zero import deepspeed_config

PARAMETERS, BATCH, MICRO_BATCH = 1.3e9, 256, 4


class Goal(NamedTuple):
    """GPUs, GB of each, GB of that not for the states; the fastest way that fits: a stage, whether
    optimizer and parameters are offloaded.
    """

    ranks: int
    gb: float
    other_gb: float
    precision: str
    way: tuple

    def __str__(self):
        return (f"1.3 billion parameters on {self.ranks} GPUs of {self.gb} GB, {self.other_gb} GB "
                f"taken, {self.precision}")


GOALS = (
    Goal(4, 100, 0, "bf16", (0, False, False)), Goal(4, 13, 0, "fp16", (1, False, False)),
    Goal(4, 8, 0, "fp32", (2, False, False)), Goal(4, 13, 5, "bf16", (2, False, False)),
    Goal(4, 6, 0, "bf16", (3, False, False)), Goal(16, 1.5, 0, "fp32", (3, False, False)),
    Goal(4, 4, 0, "fp16", (2, True, False)), Goal(4, 2, 0, "bf16", (3, True, False)),
    Goal(4, 0.1, 0, "fp16", (3, True, True)),
)
WAYS = {goal[:3]: goal.way for goal in GOALS}
JSON, AT_TOP = "that JSON gives it back unchanged", "keys that belong in zero_optimization"
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BUCKETS = tuple(f"zero_optimization.{kind}_bucket_size"
                for kind in ("reduce", "allgather", "stage3_prefetch"))
BUCKET = 10**9  # so large that buckets beside other_bytes would change the way
CHOSEN = "bf16.enabled", "fp16.enabled", "optimizer.type", "optimizer.params.lr"
PINNED = tuple(f"zero_optimization.offload_{state}.pin_memory" for state in ("optimizer", "param"))
READ = ("zero_optimization.stage", "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device", *SIZES, *BUCKETS, *CHOSEN, *PINNED)
# What DeepSpeed takes where a key is not there.
MISSING = {"device": "none", "enabled": False, "pin_memory": False}


def _see_config(fn, goal):
    config = fn(PARAMETERS, goal.ranks, goal.gb * 1e9, BATCH, MICRO_BATCH, goal.other_gb * 1e9,
                lr=0.125, precision=goal.precision, bucket=BUCKET)
    is_json = isinstance(config, dict) and json.loads(json.dumps(config, default=str)) == config
    inside = {path.split(".")[1] for path in READ if "zero" in path}
    needs = {BUCKETS[2]: goal.way[0] == 3} | dict(zip(PINNED, goal.way[1:]))
    at_top = inside & {*(config if is_json else ())}
    yield {JSON: Must(is_json, True), AT_TOP: Must(sorted(at_top), [])} | {
        path: Told(_as_text(config, path), "{}, not {}".format) for path in READ
        if needs.get(path, True)}


def _as_text(config, path):
    """Return the value that DeepSpeed reads at this path as JSON: true is not 1, 8 is not 8.0."""
    for key in path.split("."):
        config = (config if isinstance(config, dict) else {}).get(key, MISSING.get(key))
    return json.dumps(config, default=str)


def by_hand(parameters, ranks, gpu_bytes, batch, micro_batch, other_bytes=0, precision="bf16",
            lr=3e-4, bucket=50_000_000):
    stage, *offloaded = WAYS[ranks, gpu_bytes / 1e9, other_bytes / 1e9]
    device = {True: {"device": "cpu", "pin_memory": True}, False: {"device": "none"}}
    return {
        "train_batch_size": batch, "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": {4: 16, 16: 4}[ranks],
        "bf16": {"enabled": precision == "bf16"}, "fp16": {"enabled": precision == "fp16"},
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "zero_optimization": {
            "stage": stage, "offload_optimizer": device[offloaded[0]],
            "offload_param": device[offloaded[1]], "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket, "stage3_prefetch_bucket_size": bucket}}


class Refused(NamedTuple):
    what: str
    arguments: tuple

    def __str__(self):
        return self.what


REFUSED = (
    Refused("a batch of 100 on 3 ranks", (1e8, 3, 8e9, 100, 4)),
    Refused("a batch smaller than one micro batch for each rank", (1e8, 4, 8e9, 8, 4)),
    Refused("a batch of 6 on 3 ranks in micro batches of 4", (1e8, 3, 8e9, 6, 4)),
    Refused("a GPU that its activations fill", (1e9, 4, 8e9, 16, 4, 9e9)),
)


def _see_refused(fn, case):
    yield {"what it returns": fn(*case.arguments)}


def refused(*_):
    raise ValueError


STEPS = "batch // (micro_batch * ranks)"
WAY = "strategy = fastest_way(parameters, ranks, gpu_bytes, other_bytes)"
REDUCE, GATHER = '"reduce_bucket_size": bucket, ', '"allgather_bucket_size": bucket'
PREFETCH = '"stage3_prefetch_bucket_size": bucket'
OPTIMIZER, PARAMS = 'zero["offload_optimizer"] = {"device": "cpu"', 'zero["offload_param"]'
IF_OPTIMIZER, IF_PARAMS = "if strategy.offload_optimizer:", "if strategy.offload_parameters:"
PRECISION, ENABLED = 'precision != "fp32"', 'config[precision] = {"enabled": True}'
ADAMW, MICRO = '"type": "AdamW"', '"train_micro_batch_size_per_gpu": micro_batch'
DIVIDES = "if batch % (micro_batch * ranks)"
PRODUCT = "train batch = micro batch x accumulation steps x ranks. DeepSpeed rejects anything else."
CONFIG = Proof(
    deepspeed_config,
    Stage({"the fastest way that fits, for nine goals: stage, and what is offloaded": (),
           "train batch = micro batch x accumulation steps x ranks; all of it is JSON": SIZES,
           "buckets of the size that was asked for": BUCKETS,
           "the precision and the learning rate that were asked for; AdamW": CHOSEN,
           "what is off the GPU lies in pinned memory": PINNED},
          _see_config, GOALS, oracle=by_hand),
    Stage("a batch that does not divide, and a model that does not fit, are a ValueError",
          _see_refused, REFUSED, oracle=refused, note=("Raise a ValueError that says what is "
                                                       "wrong, before any GPU starts.")),
    mistakes=(
        Slip(PRODUCT, (STEPS, "batch // micro_batch"), (STEPS, "batch // ranks"), (STEPS, "batch"),
             ('"train_batch_size": batch', '"train_batch_size": micro_batch * ranks'),
             ('"train_batch_size": batch', '"train_batch_size": batch * ranks')),
        Slip("The three sizes are whole numbers: divide with //.",
             (STEPS, STEPS.replace("//", "/"))),
        Slip("DeepSpeed's micro-batch size is per GPU.",
             (MICRO, f"{MICRO} * ranks"),
             (MICRO, MICRO.replace(": micro_batch", ": batch // ranks"))),
        Slip("other_bytes count as well: fastest_way(parameters, ranks, gpu_bytes, other_bytes).",
             (WAY, WAY.replace(", other_bytes", ""))),
        Slip("other_bytes already includes the buckets: pass it on unchanged.",
             *((WAY, WAY.replace("other_bytes)", f"other_bytes + {each} * bucket)"))
               for each in (2, 4, 8))),
        Slip("fastest_way() needs the number of ranks, because they share the states.",
             (WAY, WAY.replace("ranks", "1"))),
        Slip("Use strategy.stage, the stage of the fastest strategy that fits.",
             ('"stage": strategy.stage', '"stage": 3'), ('"stage": strategy.stage', '"stage": 2'),
             ('"stage": strategy.stage', '"stage": max(1, strategy.stage)')),
        Slip("Offload the optimizer only if strategy.offload_optimizer says so: offloading costs "
             "time.", (IF_OPTIMIZER, "if strategy.stage >= 2:"), (IF_OPTIMIZER, "if True:"),
             (IF_OPTIMIZER, "if strategy.stage == 3:")),
        Slip('If strategy.offload_optimizer is True, zero_optimization needs "offload_optimizer": '
             '{"device": "cpu", "pin_memory": True}.', (IF_OPTIMIZER, "if False:"),
             (OPTIMIZER, OPTIMIZER.replace("offload_", ""))),
        Slip("The parameters' key is \"offload_param\": {\"device\": \"cpu\", \"pin_memory\": "
             "True}.",
             (PARAMS, 'zero["offload_params"]'), (PARAMS, 'zero["offload_parameters"]')),
        Slip("Offload parameters only if strategy.offload_parameters says so: offloading costs "
             "time.", (IF_PARAMS, IF_OPTIMIZER), (IF_PARAMS, "if strategy.stage == 3:")),
        Slip("Offload to the CPU's memory: the device is \"cpu\".",
             ('zero["offload_optimizer"] = {"device": "cpu"',
              'zero["offload_optimizer"] = {"device": "nvme"')),
        Slip("Offloaded states belong in pinned memory, which the GPU can read and write while it "
             'computes: {"device": "cpu", "pin_memory": True}.',
             (f'{OPTIMIZER}, "pin_memory": True', OPTIMIZER),
             (f'{PARAMS} = {{"device": "cpu", "pin_memory": True',
              f'{PARAMS} = {{"device": "cpu"')),
        Slip("The offload settings belong in zero_optimization, not at the top level.",
             ("    if precision", "    for key in {'offload_optimizer', 'offload_param'} & {*zero}:"
              "\n        config[key] = zero.pop(key)\n    if precision")),
        Slip("The stage belongs in zero_optimization, not at the top level.",
             ('zero = {"stage": strategy.stage, ', "zero = {", '"zero_optimization": zero',
              '"stage": strategy.stage, "zero_optimization": zero')),
        Slip("Return a dict that survives a JSON round trip: string keys, and only numbers, "
             "strings, lists and dicts as values.",
             ('"stage": strategy.stage', '"stage": strategy'),
             ("return config", "return json.dumps(config)")),
        Slip("DeepSpeed's default reduce bucket, 500 million numbers, makes each message a "
             "gigabyte in bf16: set reduce_bucket_size to `bucket`.", (REDUCE, "")),
        Slip("DeepSpeed's default allgather bucket, 500 million numbers, makes each message a "
             "gigabyte in bf16: set allgather_bucket_size to `bucket`.", (REDUCE + GATHER, REDUCE)),
        Slip("Stage 3 gathers parameters ahead of time: set stage3_prefetch_bucket_size to "
             "`bucket`.", (f"{PREFETCH},\n", "\n")),
        Slip("`bucket` counts numbers, not bytes, and so do DeepSpeed's bucket sizes.",
             (REDUCE + GATHER, REDUCE.replace(", ", " * 2, ") + GATHER + " * 2",
              PREFETCH, PREFETCH + " * 2")),
        Slip("Use the requested bucket size: `bucket`.",
             (REDUCE + GATHER, (REDUCE + GATHER).replace(": bucket", ": 50_000_000"),
              PREFETCH, PREFETCH.replace(": bucket", ": 50_000_000"))),
        Slip("\"fp32\" is DeepSpeed's default, and has no key. Every other precision is enabled "
             'under its own name: config[precision] = {"enabled": True}.',
             (PRECISION, "True", "config[precision]", 'config["bf16"]'),
             ("config[precision]", 'config["bf16"]')),
        Slip('Set config[precision] = {"enabled": True} to enable the precision.',
             (ENABLED, "config[precision] = {}"), (ENABLED, "config[precision] = True"),
             (ENABLED, "pass"), (ENABLED, 'config["precision"] = precision')),
        Slip("Use the requested learning rate: `lr`.", ('"lr": lr', '"lr": 3e-4')),
        Slip("The learning rate belongs in the optimizer's \"params\".",
             (f'{ADAMW}, "params": {{"lr": lr, ', f'{ADAMW}, "lr": lr, "params": {{')),
        Slip('The optimizer is {"type": "AdamW", "params": {...}}.',
             (ADAMW, '"type": "Adam"'), (ADAMW, '"name": "AdamW"')),
        Slip("micro_batch x ranks must divide the batch: otherwise raise ValueError(...).",
             (DIVIDES, "if batch % micro_batch"), (DIVIDES, "if batch % ranks"),
             (DIVIDES, "if False"), (DIVIDES, "if batch % micro_batch or batch % ranks"),
             (DIVIDES, "if batch < micro_batch * ranks")),
        Slip("If nothing fits, fastest_way() raises a ValueError: let it reach the caller.",
             (f"    {WAY}", f"    try:\n        {WAY}\n    except ValueError:\n"
              "        strategy = STRATEGIES[-1]")),
    ), hints=(
        "fastest_way() knows what fits. How must the three batch sizes be related?",
        "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks. "
        "zero_optimization holds the stage, the bucket sizes and what is offloaded.",
        'if strategy.offload_optimizer: zero["offload_optimizer"] = {"device": "cpu", '
        '"pin_memory": True}; config[precision] = {"enabled": True} unless it is "fp32"',
    ))
