"""The numbers that a learner of lab 06 predicts before running anything."""

import torch

from ranklab.checks.exercise import Prediction
from ranklab.zero import (
    muon_cost, newton_schulz_flops, partition_flat, zero_memory, zero_traffic,
)

WIDE, TOKENS = (4096, 4096), 2**22


def _muon_percent():
    flops = 6 * WIDE[0] * WIDE[1] * TOKENS / 64  # a GPU's share of the training, for one matrix
    return 100 * newton_schulz_flops(*WIDE) / flops


def _muon_bytes():
    nbytes = 64 * 2 * WIDE[0] * WIDE[1]
    adamw = zero_traffic(1, nbytes, 64)
    return (adamw + muon_cost([WIDE] * 64, 64, on_all=True).sent_bytes) / adamw


PREDICTIONS = (
    Prediction(
        "shard_numbers", solution="math.ceil(17 / 4)", unit="numbers", tolerance=0,
        hint="How many numbers are there in all, and what if 4 does not divide that count?",
        answer=lambda: len(partition_flat([torch.zeros(n) for n in (10, 3, 4)], 4)[1][0]),
        mistakes={4: "4 x 4 = 16, and there are 17 numbers", 4.25: "a number can't be cut",
                  6: "tensors need not be padded one by one: only the end of flat is"},
        why="Three zeros are added at the end: 4 x 5 = 20.",
    ),
    Prediction(
        "data_parallel_limit", solution="80e9 / 16", unit="parameters",
        hint="How many bytes does one parameter need, with its gradient and all that Adam keeps?",
        answer=lambda: 80e9 / zero_memory(0, 1, 1).total,
        mistakes={40e9: "2 bytes a parameter are the weights alone", 20e9: "4 bytes a parameter: "
                  "weights and gradients, and no optimizer",
                  6.6667e9: "12 bytes are the optimizer's; weights and gradients take 4 more",
                  320e9: "more GPUs do not help: each has a copy of all"},
        why=("Each parameter needs 2 + 2 + 12 bytes, with any number of GPUs. Activations are "
             "extra."),
    ),
    Prediction(
        "zero_75_total", solution="(2 + (2 + 12) / 64) * 7.5", unit="GB",
        hint="Which of the 2 + 2 + 12 bytes of each parameter does stage 2 divide by 64?",
        answer=lambda: zero_memory(2, 7.5e9, 64).total / 1e9,
        mistakes={120.0: "that is stage 0: all of it on every GPU",
                  31.40625: "that is stage 1: stage 2 divides the gradients as well",
                  1.875: "that is stage 3: stage 2 keeps the parameters whole",
                  15.0: "the shares of gradients and optimizer state are small, not 0"},
        why="Figure 1 of the ZeRO paper: 120, 31.4, 16.6 and 1.9 GB for stages 0 to 3.",
    ),
    Prediction(
        "stage1_sends", solution="2 * 3 / 4 * 100", unit="MB",
        hint="A reduce-scatter in backward, an all-gather after the step: what does each send?",
        answer=lambda: zero_traffic(1, 100, 4),
        mistakes={75: "that is the reduce-scatter; the parameters are sent as well",
                  200: "each rank has its own quarter already: (R-1)/R",
                  225: "that is stage 3"},
        why="It sends as much as plain data parallelism, so the memory you save costs nothing.",
    ),
    Prediction(
        "stage3_sends", solution="3 * 3 / 4 * 100", unit="MB",
        hint="How often are parameters sent in a step, and how often are gradients?",
        answer=lambda: zero_traffic(3, 100, 4),
        mistakes={150: "that is stages 0 to 2: here parameters are gathered for backward once more",
                  300: "each rank has its own quarter already: (R-1)/R",
                  450: "three halves of an all-reduce, not three of them"},
        why="1.5 times as much, because backward gathers again what forward has freed.",
    ),
    Prediction(
        "muon_percent", solution="100 * 30 * 4096**3 / (6 * 4096**2 * 2**22 / 64)", unit="percent",
        hint=("For one matrix: how many FLOPs does Newton-Schulz need, and how many does a GPU's "
              "part of the batch?"),
        answer=_muon_percent,
        mistakes={0.48828125: ("that would hold if the GPUs shared Newton-Schulz; each does all of "
                               "it"),
                  6.25: "that is one step of five",
                  20.833: "squaring the m x m product counts as well: 2 m^3",
                  93.75: "6 FLOPs for each parameter and token: backward takes twice as long"},
        why="5 x 4096 x 64 / 2^22: it grows with the number of GPUs, because all repeat it. Shared "
        "by 64 it would be 0.5%.",
    ),
    Prediction(
        "muon_bytes", solution="(2 + 2 + 2) / (2 + 2)", unit="times",
        hint="Which collectives does a step of stage 1 make, and which one does Muon add?",
        answer=_muon_bytes,
        mistakes={2.0: "an all-gather is half of what stage 1 sends",
                  1.25: "that is with gradients and parameters in float32, as Moonlight has it",
                  1.015625: "that is with owners: rows go to one rank, and back"},
        why=("Stage 1 makes a reduce-scatter of gradients and an all-gather of parameters; Muon "
             "adds one more all-gather."),
    ),
)
