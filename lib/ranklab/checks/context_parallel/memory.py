"""The check of attention_memory."""

from functools import partial

from ranklab.checks.beside import refused
from ranklab.checks.trial import explain
from ranklab.engine.report import count_ranks

# tokens, n_head, n_kv_head, head_size, ranks, element
SHAPES = ((4096, 32, 8, 128, 2, 2), (1536, 12, 4, 64, 3, 4), (1024, 8, 8, 96, 1, 2),
          (4096, 32, 8, 128, 4, 1), (512, 8, 2, 64, 2, 8))


def check_attention_memory(attention_memory):
    for tokens, H, KV, D, R, e in SHAPES:
        mine = tokens // R
        q, lse, key = H * D * mine * e, 4 * H * mine, KV * D * mine * e
        right = 2 * q + 2 * key + lse
        got = attention_memory(tokens, H, KV, D, R, e)
        where = f"{tokens:,} tokens, {H} heads of {D}, {KV} of k, {count_ranks(R)}, {e} bytes"
        explain(where, got, right, {
            "that of all ranks together": (R * right, "Each rank has 1/R of the tokens."),
            "without q or the result": (right - q, "q, k, v, the result and lse are kept."),
            "without lse": (right - lse, "lse is a float32 for each query and head: the scores are "
                            "computed again from it."),
            "without lse, and without q or the result": (right - q - lse, "q, k, v, the result and "
                                                         "lse are kept."),
            "as if k and v had q's heads": (4 * q + lse, "k and v have n_kv_head heads."),
            "with an lse of `element` bytes": (right - lse + e * H * mine, "lse is float32."),
            "with one lse for all heads": (right - lse + 4 * mine, "Each head has a softmax of its "
                                           "own."),
            "with all keys on each rank": (2 * q + 2 * key * R + lse, "Blocks of other ranks are "
                                           "passed on, and not kept: backward gets them again."),
            "with one of k and v": (right - key, "Both k and v are kept."),
            "with scores": (right + H * mine * tokens * e, "Scores are not kept without "
                            "keeps_scores: that is the point of lse."),
        }, "q, k, v, the result and lse: add them up for tokens / ranks.")
    yield "q, k, v, the result and lse, for 1/R of the tokens"
    for tokens, H, KV, D, _, e in SHAPES:
        qkv, scores = (H + 2 * KV) * D * tokens * e, H * tokens * tokens * e
        got = attention_memory(tokens, H, KV, D, 1, e, keeps_scores=True)
        explain(f"{tokens:,} tokens, keeps_scores", got, qkv + scores, {
            "without the heads": (qkv + tokens * tokens * e, "Each head has a matrix of its own."),
            "half of the matrix": (qkv + scores // 2, "Plain attention keeps the zeros above the "
                                   "diagonal, too."),
            "with the result and lse": (qkv + scores + H * tokens * (D * e + 4), "Where "
                                        "probabilities are kept, neither is needed."),
            "with the result": (qkv + scores + H * tokens * D * e, "Where probabilities are kept, "
                                "the result is not needed."),
            "scores alone": (scores, "q, k and v are kept, too."),
            "with twice the probabilities": (qkv + 2 * scores, "One matrix (T, T) a head is kept, "
                                             "with `element` bytes for a number."),
            "without scores": (qkv + H * tokens * (D * e + 4), "keeps_scores=True: one matrix "
                               "(T, T) a head."),
        }, "q, k, v, and a matrix (T, T) of probabilities for each head.")
    yield "with keeps_scores q, k, v and the probabilities"
    refused("10 tokens on 4 ranks", partial(attention_memory, 10, 4, 4, 8, 4))()
    refused("keeps_scores on 2 ranks", partial(attention_memory, 8, 4, 4, 8, 2, 2, True))()
    yield "ranks that do not divide the tokens, or keep scores, are a ValueError"
