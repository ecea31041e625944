"""The numbers that a learner of lab 08 predicts before running anything."""

from ranklab.checks.exercise import Prediction
from ranklab.checks.formula import Formula
from ranklab.formulas.overlap import largest_tensor_parallel
from ranklab.formulas.collectives import best_sent_bytes
from ranklab.ranks import shard_range

TIMES = 4  # all-reduces of a layer: attention and MLP, each with f and g
X_BYTES = 8 * 1024 * 4096 * 2  # 8 sequences of 1024 tokens, width 4096, bf16
LOGITS = 8192 * 128256  # targets, vocabulary
SENT, SENT_16 = (TIMES * best_sent_bytes("all_reduce", X_BYTES, R) for R in (8, 16))

PREDICTIONS = (
    Prediction(
        "tp_all_reduces", solution="2 * 2", unit="all-reduces", tolerance=0, answer=lambda: TIMES,
        hint="How many regions does a layer have, and what do f and g send, forward and backward?",
        mistakes={2: "that is forward alone: f sends in backward",
                  8: "f sends in backward alone, g in forward alone",
                  6: "x enters once for q, k and v: not three times",
                  1: "attention and MLP are one region each, and backward sends as well"},
        why="Attention and the MLP are one region each: g sends in forward, f in backward.",
    ),
    Prediction(
        "tp_layer_mb", solution="4 * 2 * 7 / 8 * 8 * 1024 * 4096 * 2 / 1e6", unit="MB",
        hint="How large is x, how many all-reduces are there, and what does a ring send for each?",
        answer=lambda: SENT / 1e6,
        mistakes={TIMES * X_BYTES / 1e6: "a ring all-reduce sends 2 (R-1)/R times its size",
                  SENT / 2e6: "that is half: forward alone, or one half of each all-reduce",
                  SENT / 2**20: "those are MiB; MB are 10^6 bytes here",
                  SENT / 4e6: "that is one all-reduce", SENT / 5e5: "bf16 has 2 bytes, not 4"},
        why="x has 67.1 MB; four all-reduces, each 2 * 7/8 of it. And a model has many layers.",
    ),
    Prediction(
        "tp_kv_heads", solution="math.ceil(8 / 16)", unit="heads", tolerance=0,
        hint="Each rank has 64 / 16 = 4 query heads. Which key heads do these need?",
        answer=lambda: len({head // (64 // 8) for head in shard_range(64, 0, 16)}),
        mistakes={0.5: "a head is not cut: two ranks hold the same one",
                  8: "those are all of them: a rank holds what its query heads need",
                  4: "those are its query heads, which share one", 2: "that is how many ranks hold "
                  "each head"},
        why=("8 query heads share a key head, and a rank has 4 of them: each key head is on 2 "
             "ranks."),
    ),
    Prediction(
        "tp_loss_kb", solution="12 * 8192 / 1e3", unit="KB", answer=lambda: (4 + 8) * 8192 / 1e3,
        hint="Which numbers must all ranks know for each target? They are float32.",
        mistakes={2 * LOGITS / 1e3: "those are the logits in bf16, which no rank gathers",
                  4 * LOGITS / 1e3: "those are the logits, which no rank gathers",
                  8 * 8192 / 1e3: "the largest logit must be sent as well, otherwise exp overflows",
                  12 * 8192 / 1024: "those are KiB; KB are 1,000 bytes here",
                  4 * 8192 / 1e3: "three numbers: largest logit, sum of exp, logit of the target"},
        why="12 bytes a target. The logits have 2.1 GB.",
    ),
    Prediction(
        "tp_fit_ms", solution="4 * 2 * 15 / 16 * 8 * 1024 * 4096 * 2 / (8 * 50e9) * 1e3", unit="ms",
        hint="How many cards carry a node's traffic, and how often does a ring leave the node?",
        answer=lambda: SENT_16 / 400e9 * 1e3,
        mistakes={SENT_16 / 50e9 * 1e3: "that is one card: NCCL runs a ring through each of the "
                  "eight",
                  SENT_16 / 450e9 * 1e3: "that is NVLink, 450 GB/s; the cards are a little slower",
                  SENT / 400e9 * 1e3: "that is what a rank of eight sends, 469.8 MB",
                  SENT_16 / 400e9: "those are seconds",
                  8e3 * SENT_16 / 400e9: "50 GB/s are bytes, not bits"},
        why="Eight cards are nearly as fast as NVLink, so bytes alone do not stop tp at 8.",
    ),
    Formula(
        "largest_tensor_parallel", {"width": (1e3, 3e4), "flops": (1e13, 1e15),
                                    "bandwidth": (1e10, 1e12)}, largest_tensor_parallel,
        solution="lambda width, flops, bandwidth: 3 * width * bandwidth / flops",
        hint="In a layer's forward: how many FLOPs does each of R ranks compute for T tokens, and "
             "how many bytes does it send in two all-reduces?",
        step="2 * 12 * width**2 * T / R / flops = 2 * 2 * 2 * T * width / bandwidth. What is R?",
        mistakes={
            "lambda width, flops, bandwidth: 1.5 * width * bandwidth / flops":
                "a product takes two FLOPs a parameter and token: it multiplies, and adds",
            "lambda width, flops, bandwidth: 6 * width * bandwidth / flops":
                "a layer has two all-reduces in forward, and each sends x twice",
            "lambda width, flops, bandwidth: 12 * width * bandwidth / flops":
                "a layer has two all-reduces in forward, each sends x twice, and a number has 2 "
                "bytes",
            "lambda width, flops, bandwidth: 2 * width * bandwidth / flops":
                "that is the MLP's 8 width^2 alone; attention has 4 width^2 more",
            "lambda width, flops, bandwidth: width * bandwidth / flops":
                "that is attention's 4 width^2 alone; the MLP has 8 width^2 more",
        },
        why="T cancels out: more tokens do not help, but a wider model does.",
    ),
)
