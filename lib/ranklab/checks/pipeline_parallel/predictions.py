"""The numbers that a learner of lab 09 predicts before running anything."""

import torch

from ranklab.checks.exercise import Prediction
from ranklab.checks.formula import Formula
from ranklab.formulas.overlap import micro_batches_for
from ranklab.pipeline_parallel import (
    bubble_fraction, gpipe_schedule, in_flight_activations, interleaved_schedule,
    one_f_one_b_schedule, pipedream_schedule, simulate,
)

PREDICTIONS = (
    Prediction(
        "pp_bubble_percent", solution="100 * 3 / (12 + 3)", unit="%",
        hint="The last of 4 stages starts after 3 forwards. How long does each rank work?",
        answer=lambda: 100 * bubble_fraction(simulate(gpipe_schedule(4, 12))),
        mistakes={100 * 3 / 11: "that is for 8 micro-batches",
                  25: "3/12 is a share of the work, but the bubble is a share of the whole time",
                  75: "that is one rank at a time: 12 micro-batches overlap"},
        why=("Each rank idles for the time of 3 micro-batches and works for 12: (P - 1) / (M + P - "
             "1)."),
    ),
    Prediction(
        "pp_in_flight", solution="8", unit="activations", tolerance=0,
        hint=("Rank 0's first backward comes when micro-batch 0 has gone through all stages and "
              "come back."),
        answer=lambda: in_flight_activations(one_f_one_b_schedule(8, 64))[0],
        mistakes={64: "that is GPipe: all forwards come before the first backward",
                  7: "that is the warm-up; one more forward comes before the first backward",
                  1: "that is the last rank"},
        why="It holds one for each stage from its own to the last; GPipe would hold all 64.",
    ),
    Prediction(
        "pp_message_mb", solution="1 * 4096 * 12288 * 2 / 1e6", unit="MB",
        hint="What does a stage pass to the next? One number for each token and channel.",
        answer=lambda: torch.empty(4096, 12288, dtype=torch.bfloat16, device="meta").nbytes / 1e6,
        mistakes={96: "those are MiB; MB are 10^6 bytes here",
                  4096 * 12288 * 4 / 1e6: "bf16 has 2 bytes",
                  4096 * 12288 / 1e6: "bf16 has 2 bytes"},
        why="On the way back, its gradient has the same size.",
    ),
    Prediction(
        "pp_interleaved_percent", solution="100 * 7 / (4 * 32 + 7)", unit="%",
        hint=("Each of a rank's 4 stages has a quarter of its layers. What gets shorter, and what "
              "does not?"),
        answer=lambda: 100 * bubble_fraction(simulate(interleaved_schedule(8, 32, 4))),
        mistakes={100 * 7 / 39: "that is 1F1B with one stage a rank",
                  100 * 7 / 128: ("that is a share of the work; the bubble is a share of the whole "
                                  "time"),
                  100 * 7 / 39 / 4: "the time gets shorter as well, not only the bubble"},
        why=("The idle ends are a quarter as long, at the price of more than 4 times as many "
             "messages."),
    ),
    Prediction(
        "pp_versions", solution="4", unit="copies", tolerance=0,
        hint=("Which weights does a backward on rank 0 use, and how many updates have there been "
              "since?"),
        answer=lambda: in_flight_activations(pipedream_schedule(4, 20))[0],
        mistakes={3: "those are the old ones; the newest counts as well",
                  1: "that is the last rank"},
        why=("It keeps one for each micro-batch in flight, and there are as many of those as "
             "stages."),
    ),
    Formula(
        "micro_batches_for", {"stages": (2, 64), "idle": (0.01, 0.5), "virtual": (1, 8)},
        micro_batches_for,
        solution="lambda stages, idle, virtual: (stages - 1) * (1 - idle) / (virtual * idle)",
        hint=("Write the bubble formula of 4.2 for `virtual` stages on each rank. Then solve it "
              "for M."),
        step="idle = (stages - 1) / (virtual * M + stages - 1)",
        mistakes={
            "lambda stages, idle, virtual: (stages - 1) / (virtual * idle)":
                "that is a share of the time without the bubble, as in Megatron's paper; `idle` is "
                "a share of the whole time",
            "lambda stages, idle, virtual: stages * (1 - idle) / (virtual * idle)":
                "the last stage waits for stages - 1 others, not for all",
            "lambda stages, idle, virtual: (stages - 1) * (1 - idle) / idle":
                "with `virtual` stages on a rank the pipeline fills that many times faster",
            "lambda stages, idle, virtual: virtual * (stages - 1) * (1 - idle) / idle":
                "more stages on a rank make the bubble smaller, so fewer micro-batches are enough",
        },
        why="A bubble of 5% needs 19 micro-batches for each additional stage.",
    ),
)
