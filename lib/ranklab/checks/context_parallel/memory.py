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
    Stage("ranks that do not divide the tokens, or keep scores, are a ValueError", _see_refusal,
          UNEVEN, note="Refuse it with a sentence that says what is wrong."),
    mistakes=(
        Slip("Each rank has 1/R of the tokens.", ("tokens // ranks", "tokens")),
        Slip("q or the result is missing: q, k, v, the result and lse are kept.",
             (REST, "n_head * share * 4"), ("(n_head + 2 * n_kv_head)", "2 * n_kv_head")),
        Slip("lse is missing, a float32 for each query and head: from it the scores are computed "
             "again.", ("(head_size * element + 4)", "head_size * element")),
        Slip("lse is missing, and q or the result. All five are kept.",
             (f"return qkv + {REST}", "return qkv")),
        Slip("k and v have n_kv_head heads, not n_head.", ("2 * n_kv_head", "2 * n_head")),
        Slip("q and the result have n_head heads, and so has lse.",
             ("(n_head + 2 * n_kv_head)", "3 * n_kv_head", REST, REST.replace("n_h", "n_kv_h"))),
        Slip("lse is float32: 4 bytes, whatever `element` is.",
             ("element + 4)", "element + element)")),
        Slip("There is one lse for all heads. Each head has a softmax of its own.",
             (f"qkv + {REST}", "qkv + n_head * share * head_size * element + 4 * share")),
        Slip("lse is one number for each query and head, not one for each number of the result.",
             ("element + 4)", "element + 4 * head_size)")),
        Slip("All ranks' keys are counted. Blocks of other ranks are passed on, and not kept: "
             "backward gets them again.", ("2 * n_kv_head)", "2 * n_kv_head * ranks)")),
        Slip("Both k and v are kept.", ("2 * n_kv_head", "n_kv_head")),
        Slip("Scores are not kept without keeps_scores: that is the point of lse.",
             (f"qkv + {REST}", f"qkv + {REST} + n_head * share * tokens * element")),
        Slip("Those are numbers, not bytes: a number has `element` bytes, and one of lse has 4.",
             (QKV, QKV.replace(" * element", ""), "element + 4)", "1 + 1)",
              "tokens * tokens * element", "tokens * tokens")),
        Slip("`element` says how many bytes a number has: 2 is its default alone.",
             ("    share =", "    element = 2\n    share =")),
        Slip("Every head has a matrix of probabilities of its own.",
             (SCORES, "tokens * tokens * element")),
        Slip("Plain attention keeps the zeros above the diagonal, too.",
             (SCORES, f"{SCORES} // 2")),
        Slip("Where probabilities are kept, the result and lse are not needed.",
             (f"qkv + {SCORES}", f"qkv + {REST} + {SCORES}")),
        Slip("Where probabilities are kept, the result is not needed.",
             (f"qkv + {SCORES}", f"qkv + n_head * share * head_size * element + {SCORES}")),
        Slip("Where probabilities are kept, lse is not needed.",
             (f"qkv + {SCORES}", f"qkv + {SCORES} + 4 * n_head * share")),
        Slip("q, k and v are kept beside the probabilities.", (f"qkv + {SCORES}", SCORES)),
        Slip("One matrix (T, T) a head is kept, not scores and probabilities.",
             (SCORES, f"2 * {SCORES}")),
        Slip("The probabilities have `element` bytes for a number, too.",
             (SCORES, "n_head * tokens * tokens * 4")),
        Slip("With keeps_scores it is plain attention: a matrix (T, T) of probabilities a head is "
             "kept.", ("    if keeps_scores:\n", "    if False:\n")),
        Slip("Ranks that do not divide the tokens are a ValueError.", ("tokens % ranks", "False")),
        Slip("keeps_scores on several ranks is a ValueError.",
             ("keeps_scores and ranks > 1", "False")),
    ), hints=(
        "Which tensors does backward need, and for how many tokens does a rank have them?",
        "q and the result have n_head heads, k and v n_kv_head. lse is a float32 for each query "
        "and head. If the probabilities are kept, the result and lse are not needed.",
        "qkv = (n_head + 2 * n_kv_head) * head_size * tokens // ranks * element; then "
        "n_head * tokens // ranks * (head_size * element + 4), or n_head * tokens**2 * element",
    ))
