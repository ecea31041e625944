"""Lab 01: tensors that are forgotten, counted twice, or in the wrong width."""

from mutants import mutant

from ranklab.baseline import activation_bytes

CORE = "4 * H if config.flash else H * seq * element"
ENDS = "ends_bytes(config, batch, seq, element)"

WRONG = [mutant(activation_bytes, old, new, says=says) for old, new, says in (
    ("(1 + 3 + 1)", "(1 + 3 + 2)", "attention output is one tensor"),
    ("(1 + 3 + 1)", "(3 + 3 + 1)", "read the same input"),
    ("(1 + 3 + 1)", "(1 + 1)", "keeps q, k and v"),
    ("(1 + 4 + 4)", "(1 + 4)", "GELU keeps its input"),
    ("(C + 2)", "2", "norms keeps its own input"),
    ("(C + 2)", "C", "mean and a deviation"),
    ("(C + 2)", "(C + 1)", "There are two norms"),
    ("2 * (C + 2)", "(C + 2)", "a block has two norms"),
    (CORE, f"H * seq * element + ({CORE[:21]} else 0)", r"and no \(T, T\) matrix"),
    ("4 * H if", "0 if", "one float32 log-sum"),
    ("4 * H if", "element * H if", "log-sums are float32"),
    ("4 * H if", "8 if", "line by line"),
    ("if config.flash", "if not config.flash", "branches swapped"),
    (CORE, "4 * H", r"keeps a \(T, T\) matrix"),
    ("else H", "else 2 * H", "softmax needs its output only"),
    ("else H * seq", "else H * config.n_ctx", "as long as this batch"),
    (" * config.n_layer", "", "multiply by config.n_layer"),
    ("tokens * config", "config", r"multiply by batch \* seq"),
    ("tokens * config", "seq * config", "multiply by the batch"),
    (f" + {ENDS}", "", "add ends_bytes"),
    (ENDS, "ends_bytes(config, batch, seq)", "give ends_bytes your `element`"),
    (ENDS, f"config.n_layer * {ENDS}", "after multiplying by the layers"),
    (ENDS, f"(0 if recompute else {ENDS})", "are not checkpointed"),
    ("C * element if recompute else ", "", "keeps one tensor, its input"),
)]  # fmt: skip
