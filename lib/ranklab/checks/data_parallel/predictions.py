"""The numbers that a learner of lab 03 predicts before running anything."""

from types import SimpleNamespace

from ranklab.checks.exercise import Prediction
from ranklab.checks.formula import Formula
from ranklab.formulas.overlap import largest_data_parallel
from ranklab.collectives import best_sent_bytes
from ranklab.data_parallel import (
    assign_buckets, batch_norm_bytes, scale_learning_rate, shard_sampler,
)


def _buckets():
    layer = [SimpleNamespace(nbytes=n, dtype="float32", device="cpu") for n in (4e6, 4e3)]
    return len(assign_buckets(layer * 20, 25e6))


# ResNet-50 has 25.6 million parameters. 1,797 is the number of scikit-learn's digits.
PREDICTIONS = (
    Prediction(
        "step_megabytes", solution="2 * 3 / 4 * 25.6e6 * 4 / 1e6", unit="MB",
        hint=("How large is the gradient in float32, and what multiple of its size does a rank "
              "send in a ring?"),
        answer=lambda: best_sent_bytes("all_reduce", 25.6e6 * 4, 4) / 1e6,
        mistakes={102.4: "that is the gradient's size; a ring sends 2(R-1)/R of it",
                  204.8: "2(R-1)/R with R = 4 is 1.5, not 2",
                  38.4: "float32 has four bytes a number", 307.2: "the ring sends chunks, not the "
                  "whole gradient R-1 times", 76.8: "that is one of the ring's two halves",
                  1228.8: "bits, not bytes"},
        why=("Each step sends this much, and it does not depend on the batch. So larger batches "
             "scale better."),
    ),
    Prediction(
        "samples_per_rank", solution="math.ceil(1797 / 4)", unit="samples", tolerance=0,
        hint="All ranks get the same number of images, and none may be left out.",
        answer=lambda: len(shard_sampler(1797, 0, 4)),
        mistakes={449: "that is drop_last: 4 x 449 = 1796, and one image would be left out",
                  449.25: "a sample can't be cut", 1797: "that is all of them, on every rank"},
        why="4 x 450 = 1800, so each epoch has three samples twice.",
    ),
    Prediction(
        "bucket_messages", solution="math.ceil(20 / 7)", unit="all-reduces", tolerance=0,
        hint="Fill one bucket, layer by layer: after which layer does it reach the cap?",
        answer=_buckets,
        mistakes={40: "that is one all-reduce for each parameter, without buckets",
                  20: "several layers fit into one bucket",
                  1: "the cap is 25 MB, but there are 80 MB",
                  4: "a bucket closes when it has *reached* the cap: 7 layers, 28 MB",
                  3.2: "a bucket holds whole parameters"},
        why="Two hold 28 MB each, and one holds the rest. The first is sent after 7 of 20 layers.",
    ),
    Prediction(
        "accumulated_megabytes", solution="2 * 3 / 4 * 102.4", unit="MB",
        hint="Which of the four pieces communicate, and how large is a sum of gradients?",
        answer=lambda: best_sent_bytes("all_reduce", 102.4, 4),
        mistakes={614.4: "that is one all-reduce for each of the four pieces",
                  38.4: "the sum of four gradients is as large as one",
                  460.8: "the three pieces inside no_sync send nothing",
                  102.4: "a ring sends 2(R-1)/R of the gradient"},
        why="You get four times the batch for the same bytes.",
    ),
    Prediction(
        "batch_norm_bytes", solution="8 * (2 * 64 + 1)", unit="bytes", tolerance=0,
        hint="What is added up for each channel, and what only once? In which dtype are they sent?",
        answer=lambda: batch_norm_bytes(64),
        mistakes={512: "send two sums a channel, of 8 bytes each, and the count",
                  1024: "the count must travel as well: ranks may have different batches",
                  516: "the sums travel in float64, 8 bytes each",
                  520: "that is one sum a channel"},
        why="It is tiny, but the layer waits for it twice in each step. So its cost is latency.",
    ),
    Prediction(
        "scaled_rate", solution="0.1 * 8192 / 256",
        hint="By what factor did the batch grow?",
        answer=lambda: scale_learning_rate(0.1, 8192, 256),
        mistakes={0.1: "that is the rate for a batch of 256",
                  0.566: "that is the square-root rule", 0.003125: "multiply by 32, do not divide",
                  25.6: "what counts is the batch, not the GPUs: 8192 / 256 = 32 times"},
        why="Goyal et al. 2017 trained ResNet-50 at this rate, after five epochs of warm-up.",
    ),
    Prediction(
        "agree_bytes", solution="2 * 3 / 4 * 16", unit="bytes", tolerance=0,
        hint=("How many bytes are the two numbers, and what multiple of that does a rank send in a "
              "ring?"),
        answer=lambda: best_sent_bytes("all_reduce", 16, 4),
        mistakes={153.6e6: "that is the model; a hash of it is enough",
                  102.4e6: "that is the model; a hash of it is enough",
                  16: "a ring sends 2(R-1)/R of them",
                  8: "you need both the largest hash and the smallest",
                  12: "that is only one half of the ring",
                  48: "that sends both numbers, whole, R-1 times"},
        why=("That is the average: two int64s don't divide evenly among 4 ranks, so some send 16 "
             "bytes and some 32. It is cheap enough to run every few hundred steps."),
    ),
    Formula(
        "largest_data_parallel", {"tokens": (1e5, 1e8), "flops": (1e13, 1e15),
                                  "bandwidth": (1e9, 1e12)}, largest_data_parallel,
        solution="lambda tokens, flops, bandwidth: tokens * bandwidth / flops",
        hint=("How many seconds does backward take on R ranks, and how many does the all-reduce "
              "take? When are they equal?"),
        step="4 * P * (tokens / R) / flops = 2 * 2 * P / bandwidth. What is R?",
        mistakes={
            "lambda tokens, flops, bandwidth: tokens * bandwidth / flops / 2":
                "backward takes 4 FLOPs a parameter and token: 2 are forward's",
            "lambda tokens, flops, bandwidth: tokens * bandwidth / flops * 2":
                "an all-reduce sends each gradient twice: once to be summed, once as the sum",
            "lambda tokens, flops, bandwidth: tokens * bandwidth / flops * 1.5":
                "the all-reduce waits for gradients, so it can't hide behind forward",
            "lambda tokens, flops, bandwidth: flops / bandwidth":
                "each rank needs that many tokens; how many ranks does the batch feed?",
        },
        why="P cancels out: what limits data parallelism is the batch, not the size of the model.",
    ),
)
