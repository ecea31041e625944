"""Lab 02, fit_alpha_beta: mistakes that a good student would really make."""

from mutants import mutant

from ranklab.collectives import fit_alpha_beta

ROWS, ONES = "[1 / seconds, sizes / seconds]", "np.ones(len(sizes))"
SIZES = "len(set(sizes.tolist())) < 2"

WRONG = [
    mutant(fit_alpha_beta, ROWS, f"[{ONES}, sizes]", f"rows, {ONES}", "rows, seconds",
           says="Divide each row by its time"),
    mutant(fit_alpha_beta, ROWS, "[seconds**-0.5, sizes * seconds**-0.5]", ONES, "seconds**0.5",
           says="or by a root"),
    mutant(fit_alpha_beta, "float(alpha), float(beta)", "float(beta), float(alpha)",
           says="The two are swapped"),
    mutant(fit_alpha_beta, "float(beta)", "float(1 / beta)", says="That is the bandwidth"),
    mutant(fit_alpha_beta, "    rows =", "    sizes, first = np.unique(sizes, return_index=True)\n"
           "    seconds = seconds[first]\n    rows =", says="each of them counts"),
    mutant(fit_alpha_beta, SIZES, "len(set(sizes.tolist())) < len(sizes)", says="may come twice"),
    mutant(fit_alpha_beta, "np.asarray(sizes, float)", "np.sort(np.asarray(sizes, float))",
           says="do not sort one"),
    mutant(fit_alpha_beta, "    rows =", "    sizes /= seconds\n    rows =", ROWS,
           "[1 / seconds, sizes]", says="makes no copy"),
    mutant(fit_alpha_beta, f"if {SIZES}", "if False", says="Two unknowns need two"),
    mutant(fit_alpha_beta, "float(alpha), ", "", says="not a pair"),
]
