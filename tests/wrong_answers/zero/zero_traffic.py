"""Lab 06: what goes wrong when one computes what a stage sends."""

from mutants import mutant

from ranklab.zero import zero_traffic

SHARE = "share = (ranks - 1) / ranks"

WRONG = [
    mutant(zero_traffic, SHARE, "share = 1", says="A rank has its own R-th part already"),
    mutant(zero_traffic, SHARE, "share = ranks - 1", says="That is all ranks together"),
    mutant(zero_traffic, "return 2 * share", "return share", says="the reduce-scatter alone"),
    mutant(zero_traffic, "stage < 3", "stage < 4", says="Stage 3 sends more than an all-reduce"),
    mutant(zero_traffic, "stage < 3", "stage < 2", says="Only stage 3"),
    mutant(zero_traffic, "(3 * nbytes - resident_bytes)", "3 * nbytes", says="not twice"),
    mutant(zero_traffic, "3 * nbytes - resident_bytes", "3 * nbytes - 2 * resident_bytes",
           says="take resident_bytes off once"),
    mutant(zero_traffic, "(3 * nbytes - resident_bytes)", "1.5 * nbytes",
           says="which sends 2"),
    mutant(zero_traffic, "if stage not in range(4)", "if False", says="raise ValueError"),
]
