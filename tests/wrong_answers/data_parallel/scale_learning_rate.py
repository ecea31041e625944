"""Wrong answers to scale_learning_rate."""

from mutants import mutant

from ranklab.data_parallel import scale_learning_rate

WRONG = [
    mutant(scale_learning_rate, "batch / base_batch", "base_batch / batch", says="do not divide"),
    mutant(scale_learning_rate, " ** powers[rule]", "", says="takes the square root"),
    mutant(scale_learning_rate, "(batch / base_batch)", "max(1, batch / base_batch)",
           says="A smaller batch gets a smaller rate"),
    mutant(scale_learning_rate, "(batch / base_batch)",
           "(batch // base_batch or batch / base_batch)",
           says="at batch 384 the rate is 0.1, not 0.15"),
    mutant(scale_learning_rate, "return lr + (scaled - lr)", "return scaled",
           says="does not begin at 0 but at lr"),
    mutant(scale_learning_rate, "step >= warmup", "not warmup", says="it must not grow further"),
    mutant(scale_learning_rate, "step >= warmup", "not warmup",
           "lr + (scaled - lr) * step / warmup", "min(scaled, lr + (scaled - lr) * step / warmup)",
           says=r"min\(\) takes the end at once"),
    mutant(scale_learning_rate, "* step / warmup", "* (step + 1) / warmup",
           says="from step 0 on"),
    mutant(scale_learning_rate, "step is None", "not warmup",
           says="return the scaled rate when step is None"),
    mutant(scale_learning_rate, "step >= warmup", "step > warmup",
           says="the scaled rate from the first step on"),
    mutant(scale_learning_rate, "rule not in powers", "False", "powers[rule]",
           "powers.get(rule, 1)", says="rule='cubic' gives"),
]
