"""Lab 02, crossover_bytes: mistakes that a good student would really make."""

from mutants import mutant

from ranklab.collectives import crossover_bytes

SIZE = "more_steps * alpha / (more_bytes * beta)"

WRONG = [
    mutant(crossover_bytes, SIZE, f"{SIZE} / 4", says="elements of 4 bytes"),
    mutant(crossover_bytes, SIZE, f"{SIZE} / R", says="the size of one chunk"),
    mutant(crossover_bytes, SIZE, f"{SIZE} * 8", says="these are bits"),
    mutant(crossover_bytes, SIZE, "more_steps * beta / (more_bytes * alpha)",
           says="alpha / beta, not beta / alpha"),
    mutant(crossover_bytes, "rounds if R == 2**rounds else rounds + 1", "rounds",
           says="one round more than"),
    mutant(crossover_bytes, "2 * (R - 1) - swaps", "swaps - 2 * (R - 1)",
           says="A size is positive"),
    mutant(crossover_bytes, "swaps - 2 * (R - 1) / R", "2 * (R - 1) / R - swaps",
           says="Is the sign right"),
    mutant(crossover_bytes, "else math.inf", "else 0", says="gives 0, not infinity"),
    mutant(crossover_bytes, " if more_bytes > 0 else math.inf", "", says="division by zero"),
]
