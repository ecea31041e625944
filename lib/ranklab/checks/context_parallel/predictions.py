"""The numbers that a learner of lab 10 predicts before running anything."""

from ranklab.checks.exercise import Prediction
from ranklab.context_parallel.tiled import logits_memory
from ranklab.formulas.context_parallel import attention_memory, ring_bytes, ulysses_bytes

LLAMA = dict(n_head=32, n_kv_head=8, head_size=128)  # Llama 3 8B
LONG = 131072
SCORES = LLAMA["n_head"] * LONG**2 * 2
KEPT = attention_memory(LONG, **LLAMA, ranks=8)
RING = ring_bytes(LONG, 8, 128, 8, backward=False)
ULYSSES = ulysses_bytes(LONG, **LLAMA, ranks=8, backward=False)
LOGITS = logits_memory(LONG, 128256) / 2  # without their gradient

PREDICTIONS = (
    Prediction(
        "cp_scores_tb", solution="32 * 131072**2 * 2 / 1e12", unit="TB",
        answer=lambda: SCORES / 1e12,
        hint="Each head has a score for each pair of tokens. How many pairs, how many heads?",
        mistakes={SCORES / 32e12: "that is one head", SCORES / 2e12:
                  ("plain attention also computes the scores above the diagonal, and bf16 has 2 "
                   "bytes"),
                  2 * SCORES / 1e12: "bf16 has 2 bytes, not 4", SCORES / 1e9: "those are GB",
                  SCORES / 2**40: "those are TiB; TB are 10^12 bytes here"},
        why="32 heads, 1.7e10 pairs, 2 bytes: for one layer of one sequence.",
    ),
    Prediction(
        "cp_last_rank", solution="(2 * 4 - 1) / 4", unit="times the mean", tolerance=0,
        hint="How many blocks of keys do the last rank's queries see? And the first rank's?",
        answer=lambda: 7 / 4,
        mistakes={7.0: "that is compared with the first rank, not with the mean",
                  4.0: ("that is compared with the first rank, and a block on the diagonal counts "
                        "as half"),
                  1.6: "that counts blocks on the diagonal as whole ones",
                  1.0: "late tokens see more keys than early ones"},
        why=("In half blocks, the ranks have 1, 3, 5 and 7, or 4 on average. All wait for the last "
             "rank."),
    ),
    Prediction(
        "cp_ring_mb", solution="7 * 2 * 8 * 128 * 131072 / 8 * 2 / 1e6", unit="MB",
        answer=lambda: RING / 1e6,
        hint=("What does a block hold, for how many tokens, and how many times does a rank send "
              "one?"),
        mistakes={RING * 8 / 7e6: ("a block needs only 7 hops to visit 8 ranks: it does not return "
                                   "to the first"),
                  RING / 2e6: "k and v are both sent", RING / 7e6: "that is one hop",
                  4 * RING / 1e6: "k and v have 8 heads, not 32",
                  8 * RING / 1e6: "a block has 1/8 of the tokens",
                  RING / 2**20: "those are MiB; MB are 10^6 bytes here"},
        why="7 hops of k and v: 8 heads of 128, 16,384 tokens, 2 bytes.",
    ),
    Prediction(
        "cp_ulysses_mb", solution="7 / 8 * (32 + 8 + 8 + 32) * 128 * 131072 / 8 * 2 / 1e6",
        unit="MB", answer=lambda: ULYSSES / 1e6,
        hint="Four tensors are exchanged. How much of each does a rank keep?",
        mistakes={ULYSSES * 8 / 7e6: "1/8 of each tensor stays on its rank",
                  ULYSSES * 48 / 80e6: "the result is sent back as well",
                  ULYSSES * 128 / 80e6: "k and v have 8 heads, not 32",
                  8 * ULYSSES / 1e6: "a rank has 1/8 of the tokens"},
        why="7/8 of q, k, v and the result. With more ranks it shrinks; the ring's does not.",
    ),
    Prediction(
        "cp_logits_gb", solution="131072 * 128256 * 4 / 1e9", unit="GB",
        answer=lambda: LOGITS / 1e9,
        hint="Each token has a logit for each word of the vocabulary.",
        mistakes={LOGITS / 2e9: "float32 has 4 bytes, not 2",
                  2 * LOGITS / 1e9: "that is with their gradient, which is as large",
                  LOGITS / 8e9: "that is the share of one of 8 ranks",
                  LOGITS / 2**30: "those are GiB; GB are 10^9 bytes here"},
        why="131,072 tokens, 128,256 words, 4 bytes. Their gradient is as large.",
    ),
)
