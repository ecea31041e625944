"""The numbers that a learner of lab 07 predicts before running anything."""

import torch

from ranklab.checks.exercise import Prediction
from ranklab.checks.formula import Formula
from ranklab.formulas.overlap import hidden_shard_tokens
from ranklab.formulas.collectives import best_sent_bytes
from ranklab.fsdp.shards import rows_of
from ranklab.zero import zero_memory, zero_traffic

PREDICTIONS = (
    Prediction(
        "fsdp_rows_last", solution="10 - 3 * math.ceil(10 / 4)", unit="rows", tolerance=0,
        hint="Each rank takes ceil(n / R) rows, as long as there are enough. What is left?",
        answer=lambda: len(range(*rows_of(10, 4, 3))),
        mistakes={2: "10 // 4 rows are too few: 4 x 2 = 8, and two rows are left over",
                  2.5: "a row can't be cut", 3: "three ranks have 3 rows; then there are fewer "
                  "left",
                  4: "what is left over does not go to the last rank: the first ones have more"},
        why="ceil(10 / 4) = 3 rows each, and 1 is left: 3 + 3 + 3 + 1.",
    ),
    Prediction(
        "fsdp_7b_gb", solution="(4 + 4 + 8) * 7 / 4", unit="GB",
        hint=("Parameters, gradients and two moments take 4 bytes each. What share does each GPU "
              "hold?"),
        answer=lambda: zero_memory(3, 7e9, 4, 4, 4, 8).total / 1e9,
        mistakes={112: "that is all of it: each of 4 GPUs holds a quarter",
                  7: "those are the parameters alone", 14: "Adam's two moments are missing, 8 "
                  "bytes",
                  21: "that is parameters and two moments: the gradients take 4 bytes as well"},
        why=("That does not fit into 24 GB, even without activations. Offloading moves it to the "
             "CPU."),
    ),
    Prediction(
        "fsdp_step_mb", solution="3 * 3 / 4 * 100", unit="MB",
        hint="How many times is a block sent in a step, and how many times are its gradients?",
        answer=lambda: zero_traffic(3, 100, 4),
        mistakes={150: "that is data parallelism: here backward gathers the parameters once more",
                  300: "each rank has its own quarter already: (R-1)/R", 75: "that is one gather"},
        why=("Two all-gathers and a reduce-scatter, each sending (R-1)/R of 100 MB, as in ZeRO "
             "stage 3."),
    ),
    Prediction(
        "fsdp_norm_bytes", solution="8", unit="bytes", tolerance=0,
        hint="Which number from each rank can be added up to get the norm over all ranks?",
        answer=lambda: torch.float64.itemsize,
        mistakes={4: "the sum of squares is kept in float64", 64: "bits, not bytes",
                  0: "no rank knows the gradients of the others"},
        why="One number, the sum of squares; the gradients stay where they are.",
    ),
    Prediction(
        "fsdp_hybrid_mb", solution="2 * 1 / 2 * 100 / 4", unit="MB",
        hint=("What does each GPU have after the reduce-scatter, and which other GPU has the same "
              "rows?"),
        answer=lambda: best_sent_bytes("all_reduce", 100 / 4, 2),
        mistakes={100: "each GPU has a quarter of the gradients by then: 25 MB",
                  50: "a ring all-reduce of 2 sends the size once: 2 (R-1)/R = 1",
                  75: "that is what the reduce-scatter sends inside the node",
                  175: "that is an all-reduce over all 8"},
        why="An all-reduce of 25 MB between 2 GPUs; the parameters never leave the node.",
    ),
    Prediction(
        "fsdp_8bit_gb", solution="7 / 8 * 70 * (2 * (1 + 1 / 32) + 2)", unit="GB", tolerance=0.005,
        hint="How many bytes does a parameter take in each of the three messages?",
        answer=lambda: 2 * best_sent_bytes("all_gather", 70 * 33 / 32, 8)
        + best_sent_bytes("reduce_scatter", 70 * 2, 8),
        mistakes={183.75: "that is half, but the gradients stay in bf16",
                  245: "the scales are missing: one byte for each 32 numbers",
                  7 / 8 * 70 * 33 / 16: "those are the gathers alone",
                  70 * (33 / 16 + 2): "each rank has its own eighth already: (R-1)/R",
                  7 / 8 * 70 * (33 / 32 + 4): "backward gathers once more, also in 8 bits",
                  367.5: "that is bf16"},
        why="2.06 + 2 bytes a parameter instead of 4 + 2: a third less, and not half.",
    ),
    Formula(
        "hidden_shard_tokens", {"flops": (1e13, 1e15), "inside": (1e11, 1e12),
                                "between": (1e9, 1e12), "gpus_per_node": (2, 72)},
        hidden_shard_tokens,
        solution="lambda flops, inside, between, gpus_per_node: flops * max(1 / inside, 1 / "
                 "(gpus_per_node * between))",
        hint=("Two kinds of links are busy at the same time. How many seconds does each need, and "
              "which of the two is hidden last?"),
        step="Inside: 2 * P * T / flops = 2 * P / inside. Between: 4 * P * T / flops = 2 * 2 * "
             "(P / gpus_per_node) / between. The larger T counts.",
        mistakes={
            "lambda flops, inside, between, gpus_per_node: flops / inside":
                "that hides the gathers in the node; the all-reduce between nodes may need more",
            "lambda flops, inside, between, gpus_per_node: flops / (gpus_per_node * between)":
                "that hides the all-reduce between nodes; the gathers in the node may need more",
            "lambda flops, inside, between, gpus_per_node: flops * max(1 / inside, 1 / between)":
                "between nodes a GPU sums up its own shard only, 1/N of the gradients",
            "lambda flops, inside, between, gpus_per_node: flops * (1 / inside + 1 / "
            "(gpus_per_node * between))":
                "the two kinds of links are busy at the same time, so the longer one counts",
        },
        why=("With eight GPUs per node, a network card can be eight times slower than NVLink at no "
             "extra cost in time."),
    ),
)
