"""attention_memory: the bytes that attention keeps, compared with the bytes of real tensors."""

from typing import NamedTuple

import torch

from ranklab.checks.prover import Proof, Slip, Stage, must_refuse
from ranklab.context_parallel import attention_memory
from ranklab.engine.report import count_ranks

TYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Case(NamedTuple):
    tokens: int
    n_head: int
    n_kv_head: int
    head_size: int
    ranks: int
    element: int
    keeps_scores: bool = False

    def __str__(self):
        return (f"{self.tokens:,} tokens, {self.n_head} heads of {self.head_size}, "
                f"{self.n_kv_head} of k, {count_ranks(self.ranks)}, element={self.element}"
                + ", keeps_scores" * self.keeps_scores)


SHAPES = (Case(4096, 32, 8, 128, 2, 2), Case(1536, 12, 4, 64, 3, 4), Case(1024, 8, 8, 96, 1, 2),
          Case(4096, 32, 8, 128, 4, 1), Case(512, 8, 2, 64, 2, 8))
WITH_SCORES = tuple(case._replace(ranks=1, keeps_scores=True) for case in SHAPES)
UNEVEN = Case(10, 4, 4, 8, 4, 2), Case(8, 4, 4, 8, 2, 2, keeps_scores=True)


def _see(fn, case):
    yield {"the number of bytes": _call(fn, case)}


def _see_refusal(fn, case):
    yield {"what it raises": must_refuse(_call, fn, case)}


def _call(fn, case):
    *shape, keeps_scores = case
    return fn(*shape, **{"keeps_scores": True} if keeps_scores else {})


def of_tensors(tokens, n_head, n_kv_head, head_size, ranks=1, element=2, keeps_scores=False):
    """Add up the bytes of the tensors themselves, on the meta device."""
    def nbytes(*shape, dtype=TYPES[element]):
        return torch.empty(*shape, dtype=dtype, device="meta").nbytes

    share = tokens // ranks
    q, k = nbytes(n_head, share, head_size), nbytes(n_kv_head, share, head_size)
    if keeps_scores:
        return q + k + k + nbytes(n_head, share, share)
    return q + k + k + q + nbytes(n_head, share, dtype=torch.float32)


QKV = "(n_head + 2 * n_kv_head) * head_size * share * element"
REST = "n_head * share * (head_size * element + 4)"
SCORES = "n_head * tokens * tokens * element"
MEMORY = Proof(
    attention_memory,
    Stage("q, k, v, the result and lse, for 1/R of the tokens", _see, SHAPES, oracle=of_tensors,
          note="q, k, v, the result and lse: add them up for tokens / ranks."),
    Stage("with keeps_scores q, k, v and the probabilities", _see, WITH_SCORES, oracle=of_tensors,
          note="q, k, v, and a matrix (T, T) of probabilities for each head."),
    Stage("ranks that do not divide the tokens, or several ranks with keeps_scores, are a "
          "ValueError", _see_refusal,
          UNEVEN, note="Raise a ValueError with a message that says what is wrong."),
    mistakes=(
        Slip("Each rank has 1/R of the tokens.", ("tokens // ranks", "tokens")),
        Slip("q or the result is missing: keep all of q, k, v, the result and lse.",
             (REST, "n_head * share * 4"), ("(n_head + 2 * n_kv_head)", "2 * n_kv_head")),
        Slip("lse is missing, one float32 per query and head: backward needs it to recompute the "
             "probabilities.", ("(head_size * element + 4)", "head_size * element")),
        Slip("lse is missing, and so is q or the result. All five tensors are kept.",
             (f"return qkv + {REST}", "return qkv")),
        Slip("k and v have n_kv_head heads, not n_head.", ("2 * n_kv_head", "2 * n_head")),
        Slip("q, the result and lse all have n_head heads.",
             ("(n_head + 2 * n_kv_head)", "3 * n_kv_head", REST, REST.replace("n_h", "n_kv_h"))),
        Slip("lse is float32: 4 bytes each, whatever `element` is.",
             ("element + 4)", "element + element)")),
        Slip("All heads share one lse here. Each head has its own softmax, and so its own lse.",
             (f"qkv + {REST}", "qkv + n_head * share * head_size * element + 4 * share")),
        Slip("lse is one number per query and head, not one per element of the result.",
             ("element + 4)", "element + 4 * head_size)")),
        Slip("All ranks' keys are counted. Blocks from other ranks are passed on, not kept: "
             "backward receives them again.", ("2 * n_kv_head)", "2 * n_kv_head * ranks)")),
        Slip("Both k and v are kept.", ("2 * n_kv_head", "n_kv_head")),
        Slip("Without keeps_scores, no scores are kept: that is the point of lse.",
             (f"qkv + {REST}", f"qkv + {REST} + n_head * share * tokens * element")),
        Slip("This counts numbers, not bytes: each number has `element` bytes, except in lse, "
             "where it has 4.",
             (QKV, QKV.replace(" * element", ""), "element + 4)", "1 + 1)",
              "tokens * tokens * element", "tokens * tokens")),
        Slip("`element` is the number of bytes per number: 2 is only its default.",
             ("    share =", "    element = 2\n    share =")),
        Slip("Every head has its own matrix of probabilities.",
             (SCORES, "tokens * tokens * element")),
        Slip("Plain attention also keeps the zeros above the diagonal.",
             (SCORES, f"{SCORES} // 2")),
        Slip("When the probabilities are kept, the result and lse are not needed.",
             (f"qkv + {SCORES}", f"qkv + {REST} + {SCORES}")),
        Slip("When the probabilities are kept, the result is not needed.",
             (f"qkv + {SCORES}", f"qkv + n_head * share * head_size * element + {SCORES}")),
        Slip("When the probabilities are kept, lse is not needed.",
             (f"qkv + {SCORES}", f"qkv + {SCORES} + 4 * n_head * share")),
        Slip("q, k and v are kept as well as the probabilities.", (f"qkv + {SCORES}", SCORES)),
        Slip("Only one (T, T) matrix per head is kept, not both scores and probabilities.",
             (SCORES, f"2 * {SCORES}")),
        Slip("Each probability has `element` bytes, not always 4.",
             (SCORES, "n_head * tokens * tokens * 4")),
        Slip("keeps_scores means plain attention: a (T, T) matrix of probabilities is kept for "
             "each head.", ("    if keeps_scores:\n", "    if False:\n")),
        Slip("Raise ValueError if the number of ranks does not divide the tokens.",
             ("tokens % ranks", "False")),
        Slip("Raise ValueError for keeps_scores on several ranks.",
             ("keeps_scores and ranks > 1", "False")),
    ), hints=(
        "Which tensors does backward need, and for how many tokens does a rank have them?",
        "q and the result have n_head heads; k and v have n_kv_head. lse is one float32 per query "
        "and head. If the probabilities are kept, the result and lse are not needed.",
        "qkv = (n_head + 2 * n_kv_head) * head_size * tokens // ranks * element; then "
        "n_head * tokens // ranks * (head_size * element + 4), or n_head * tokens**2 * element",
    ))
