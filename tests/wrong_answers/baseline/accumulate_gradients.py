"""Lab 01: a big batch in pieces, with a wrong weight for each or too much in memory."""

from mutants import mutant

from ranklab.baseline import accumulate_gradients

PIECES = "zip(inputs.split(micro_batch), targets.split(micro_batch))"
ADDS = "mean = mean + loss.detach()"

WRONG = [mutant(accumulate_gradients, *edits, says=says) for *edits, says in (
    ("loss_sum(x, y) / count", "loss_sum(x, y)", "return mean", "return mean / count",
     "gradients of the sum"),
    ("/ count", "/ len(x)", "divide by the rows of a piece"),
    ("/ count", "/ (y != IGNORE).sum()", "not of the piece"),
    ("/ count", "/ (y != IGNORE).sum() / -(-len(inputs) // micro_batch)",
     "short last piece too much weight"),
    ("(targets != IGNORE).sum()", "targets.numel()", "that are not IGNORE"),
    (PIECES, f"[p for p in {PIECES} if len(p[0]) == min(micro_batch, len(inputs))]",
     "last piece was left out"),
    (PIECES, PIECES.replace("split", "chunk"), r"chunk\(n\) makes n"),
    (PIECES, PIECES.replace("batch)", "batch, 1)"), "Cut between rows"),
    ("loss.backward()", "", "Call backward"),
    ("loss.backward()", "", ADDS, "mean = mean + loss",
     "return mean", "mean.backward()\n    return mean.detach()", "before the next forward"),
    (ADDS, "mean = mean + loss_sum(x, y).detach() / count", "through loss_sum once"),
    (ADDS, "mean = mean + loss", r"loss.detach\(\)"),
    ("return mean", "return mean * count", "the loss that it returned is"),
    ("return mean", "", "Return the mean loss"),
    ("return mean", "targets[targets == IGNORE] = 0\n    return mean",
     "inputs or targets have changed"),
)]  # fmt: skip
