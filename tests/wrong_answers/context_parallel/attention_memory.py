"""Lab 10: what attention keeps, counted wrongly."""

from mutants import mutant

from ranklab.context_parallel import attention_memory

WRONG = [mutant(attention_memory, *edits, says=says) for *edits, says in (
    ("share = tokens // ranks", "share = tokens", "that of all ranks together"),
    ("share * (head_size * element + 4)", "share * 4", "without q or the result"),
    ("(head_size * element + 4)", "head_size * element", "without lse"),
    ("2 * n_kv_head", "2 * n_head", "as if k and v had q's heads"),
    ("element + 4)", "element + element)", "lse is float32"),
    ("return qkv + n_head * share * (head_size * element + 4)",
     "return qkv + n_head * share * head_size * element + 4 * share", "one lse for all heads"),
    ("2 * n_kv_head", "n_kv_head", "Both k and v are kept"),
    ("n_head * tokens * tokens * element", "tokens * tokens * element", "a matrix of its own"),
    ("n_head * tokens * tokens * element", "n_head * tokens * tokens * element // 2",
     "zeros above the diagonal"),
    ("n_head * tokens * tokens * element", "2 * n_head * tokens * tokens * element",
     "twice the probabilities"),
    ("tokens % ranks", "False", "no ValueError"),
    ("keeps_scores and ranks > 1", "False", "keeps_scores on 2 ranks: no ValueError"),
)]
