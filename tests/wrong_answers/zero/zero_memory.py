"""Lab 06: what goes wrong when one computes what a stage holds."""

from mutants import mutant

from ranklab.zero import zero_memory

SHARD = "shard = math.ceil(parameters / ranks)"

WRONG = [
    mutant(zero_memory, SHARD, "shard = parameters // ranks", says="round up"),
    mutant(zero_memory, SHARD, "shard = math.floor(parameters / ranks + 0.5)", says="round up",
           called="rounds_half_up"),
    mutant(zero_memory, SHARD, "shard = parameters / ranks", says="A number is whole"),
    mutant(zero_memory, "stage >= 1", "stage >= 2",
           says="From stage 1 on each rank holds 1/R of the optimizer state"),
    mutant(zero_memory, "stage >= 2", "stage >= 1", says="Stage 1 keeps the gradients whole"),
    mutant(zero_memory, "parameter_bytes=2", "parameter_bytes=4", says="By default this is mixed"),
    mutant(zero_memory, "optimizer_bytes=12", "optimizer_bytes=8",
           says="float32 master weights too"),
    mutant(zero_memory, "gradient_bytes * (shard", "parameter_bytes * (shard",
           says="5 bytes for each"),
    mutant(zero_memory, "return States(", "return sum((", "else parameters))", "else parameters)))",
           says=r"Return States\(parameters"),
    mutant(zero_memory, "if stage not in range(4)", "if False", says=r"raise ValueError"),
]
