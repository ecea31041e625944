from mutants import mutant

from ranklab.ddp import scaling_efficiency as answer

SHARE = 'base / ranks if kind == "strong" else 1'
EACH = "perfect[ranks] * seconds[base] / seconds[ranks]"
WRONG = [
    mutant(answer, EACH, "seconds[base] / seconds[ranks]",
           says="the efficiency on .* ranks is the speed-up"),
    mutant(answer, "base = min(seconds)", "base = 1", says="take the fewest ranks there are"),
    mutant(answer, "base / ranks if", "1 / ranks if", says="not 1/R of it"),
    mutant(answer, SHARE, "base / ranks", says="is that of strong scaling"),
    mutant(answer, EACH, "seconds[ranks] / (perfect[ranks] * seconds[base])", says="Upside down"),
    mutant(answer, "base = min(seconds)", "base = next(iter(seconds))",
           says="The base is 8 here, but it is the fewest ranks"),
    mutant(answer, "base / ranks if", "1 / (ranks // base) if",
           says=r"\[2, 4, 5, 8\] ranks is 1 at element 2, not 0.8.*Strong: the same batch"),
    mutant(answer, EACH, f"min(1.0, {EACH})", says="More than 1 can be right"),
    mutant(answer, EACH, f"round({EACH}, 2)", says="Do not round: leave that to the line"),
    mutant(answer, "in sorted(seconds)", "in seconds", says="In the order of ranks"),
    mutant(answer, 'not in ("strong", "weak")', "is None", says="kind='string' raises no error"),
    mutant(answer, " or min(seconds.values()) <= 0", "",
           says=r"2: 0.0\} raises ZeroDivisionError, not ValueError"),
]
