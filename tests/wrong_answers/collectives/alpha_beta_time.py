"""Lab 02, alpha_beta_time: mistakes that a good student would really make."""

from mutants import mutant

from ranklab.collectives import alpha_beta_time

RING = "(2 * (R - 1), nbytes / R)"

WRONG = [
    mutant(alpha_beta_time, "steps * (alpha + step_bytes * beta)",
           "alpha + steps * step_bytes * beta", says="alpha is paid once per step"),
    mutant(alpha_beta_time, RING, "(R - 1, nbytes / R)", says="the ring goes round twice"),
    mutant(alpha_beta_time, RING, "(2 * (R - 1), nbytes)", says="moves one chunk"),
    mutant(alpha_beta_time, RING, "(2 * (R - 1), nbytes // R)", says="not nbytes // ranks"),
    mutant(alpha_beta_time, "(2 * (R - 1), nbytes),", "(R - 1, nbytes),",
           says="R-1 tensors come in, then R-1 go out"),
    mutant(alpha_beta_time, "math.ceil", "", says="no fraction of a round"),
    mutant(alpha_beta_time, "math.ceil", "math.floor", says="round log2 R up"),
    mutant(alpha_beta_time, "rounds if R == 2**rounds else rounds + 1", "rounds",
           says="A round is missing"),
    mutant(alpha_beta_time, "step_bytes * beta)", "8 * step_bytes * beta)", says="you count bits"),
    mutant(alpha_beta_time, "if algorithm not in costs", "if False",
           says="Say in a sentence which names"),
    mutant(alpha_beta_time, "if algorithm not in costs", "if False", "costs[algorithm]",
           'costs.get(algorithm, costs["ring"])', says="ValueError for unknown names"),
]
