"""Lab 06: what goes wrong in a DeepSpeed config."""

from mutants import mutant

from ranklab.zero import deepspeed_config

STEPS = "batch // (micro_batch * ranks)"
WAY = "strategy = fastest_way(parameters, ranks, gpu_bytes, other_bytes)"

WRONG = [
    mutant(deepspeed_config, STEPS, "batch // micro_batch",
           says="micro batch x accumulation steps x ranks"),
    mutant(deepspeed_config, WAY, WAY.replace(", other_bytes", ""), says="other_bytes count"),
    mutant(deepspeed_config, "if strategy.offload_optimizer:", "if strategy.stage >= 2:",
           says="It fits without offload_optimizer"),
    mutant(deepspeed_config, 'zero["offload_param"]', 'zero["offload_params"]',
           says="This goal needs it on the CPU"),
    mutant(deepspeed_config, '"reduce_bucket_size": bucket, ', "",
           says="reduce_bucket_size is None"),
    mutant(deepspeed_config, 'precision != "fp32"', "True", "config[precision]", 'config["bf16"]',
           says="nothing for \"fp32\"|fp16"),
    mutant(deepspeed_config, '"lr": lr', '"lr": 3e-4', says="the `lr` that was asked for"),
    mutant(deepspeed_config, "if batch % (micro_batch * ranks)", "if batch % micro_batch",
           says="unless micro_batch x ranks divides"),
    mutant(deepspeed_config, '"stage": strategy.stage', '"stage": strategy',
           says="Return a dict that JSON gives back"),
]
