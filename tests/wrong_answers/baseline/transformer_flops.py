"""Lab 01: products that are forgotten, or counted twice."""

from mutants import mutant

from ranklab.baseline import transformer_flops
from ranklab.models.gpt import count_parameters

FORWARD = "2 * tokens * (config.n_layer * (weights + attention) + C * V)"

WRONG = [mutant(transformer_flops, old, new, says=says) for old, new, says in (
    (FORWARD, FORWARD[4:], "multiply and an add are two"),
    ("(weights + attention)", "weights", "grow with the square"),
    ("2 * seq * C", "seq * C", "half of attention"),
    ("2 * seq * C", "2 * config.n_ctx * C", "not as config.n_ctx"),
    ("2 * seq * C", "2 * seq * C * config.n_head", "heads share C"),
    (" + C * V", "", "head is missing"),
    ("+ C * V", "+ 2 * C * V", "looking up an embedding"),
    ("attention) + C * V", "attention + C * V)", "not in each layer"),
    ("config.n_layer * ", "", "multiply by config.n_layer"),
    ("batch * seq", "seq", "multiply by the batch"),
    ("3 * forward if backward else forward", "3 * forward", "With backward=False"),
    ("3 * forward if backward else forward", "forward", "forward alone"),
    ("3 * forward", "2 * forward", "twice the forward"),
    ("return 3", "3", "it returned None"),
)]  # fmt: skip
WRONG += [mutant(transformer_flops, FORWARD, "2 * tokens * count_parameters(config)",
                 says="product by product", count_parameters=count_parameters)]
