"""The numbers that a learner of lab 14 predicts before running anything."""

import math

from ranklab.checks.exercise import Prediction
from ranklab.formulas.resilience import GPU_HOURS, NODE_RATE, goodput, optimal_interval
from ranklab.resilience.neighbour import lost_together
from ranklab.resilience.stream import windows_again
from ranklab.resilience.traces import HOUR

LLAMA = GPU_HOURS / 16384  # hours between failures
YOUNG = math.sqrt(2 * 60 * LLAMA * HOUR) / 60
DALY = optimal_interval(60, LLAMA * HOUR) / 60
RESEARCH = 24 / (2048 * NODE_RATE)  # hours between failures, by the model
SHARE = goodput(1200, 60, LLAMA * HOUR, 600)

PREDICTIONS = (
    Prediction(
        "resilience_hours_between_failures", unit="hours", tolerance=0.02,
        solution="54 * 24 / 419 * 16384 / 2048",
        answer=lambda: GPU_HOURS / 2048,
        hint="What fraction of the 16,384 GPUs do you have, and so what fraction of the failures?",
        mistakes={LLAMA: "that is Llama 3's number, on 8 times as many GPUs", LLAMA / 8: "fewer "
                  "GPUs fail less often", GPU_HOURS / 2048 / 24: "those are days",
                  54 * 24 / 466 * 8: "47 of the 466 interruptions were planned"},
        why="A single GPU is interrupted every 5.8 years, but a job on 2,048 of them once a day.",
    ),
    Prediction(
        "resilience_interval_minutes", unit="minutes", tolerance=0.05,  # 20, and Daly's
        answer=lambda: YOUNG,
        solution="math.sqrt(2 * 60 * 54 * 24 / 419 * 3600) / 60",
        hint=("There are two costs: one falls with the interval, the other grows. Where are they "
              "equal?"),
        mistakes={60 * LLAMA: "that is the time between failures", math.sqrt(60 * LLAMA): "a "
                  "failure loses half an interval on average: there is a 2 under the root",
                  60 * LLAMA / 2: "then two failures of five come before the first checkpoint, "
                                  "and lose all work since the last failure"},
        why=f"Young's formula gives {YOUNG:.1f} minutes; Daly's, which comes next, {DALY:.1f}. "
            "Both will do: the curve is flat there.",
    ),
    Prediction(
        "resilience_goodput", unit="%", tolerance=0.02, answer=lambda: 100 * SHARE,
        solution="100 * 1200 / (11135 * math.exp(600 / 11135) * (math.exp(1260 / 11135) - 1))",
        hint=("There are three losses: checkpoints, restarts, and the work since the last "
              "checkpoint."),
        mistakes={100 / 1.05: "that counts only checkpoints, or only restarts: each costs about 5%",
                  100 - 100 * SHARE: "that is what is lost"},
        why="5% for checkpoints, 5% for restarts, 5% lost work. Llama 3 had more than 90%.",
    ),
    Prediction(
        "resilience_windows_again", unit="%", tolerance=0.02,
        solution="100 * (1 - 15_000 * 48 / (15_000 * 64))",
        answer=lambda: 100 * windows_again(15_000, 64, 48) / (15_000 * 64),
        hint="How many windows do the 48 ranks skip together, and how many were trained on?",
        mistakes={0: "the 48 ranks skip 15,000 each, and 64 ranks have taken 15,000 each",
                  100 / 3: "that is a share of the windows that are skipped",
                  75: "that is the share that is skipped, and does not come again"},
        why=("48 ranks skip 720,000 windows, and 960,000 were trained on: 240,000 come again. From "
             "48 to 64 ranks, just as many would never come."),
    ),
    Prediction(
        "resilience_mttf_hours", unit="hours", tolerance=0.02, solution="24 / (1024 / 8 * 0.0065)",
        answer=lambda: 24 / (1024 / 8 * NODE_RATE),
        hint="How many nodes has the job, and how many of them fail in a day?",
        mistakes={24 / (1024 * NODE_RATE): "the rate is per node, and a node has 8 GPUs",
                  1 / (128 * NODE_RATE): "those are days",
                  24 / NODE_RATE: "that is one node: any of 128 stops the job",
                  7.9: "that was measured; the model has no such number", RESEARCH: "that is the "
                  "time on 16,384 GPUs"},
        why="128 nodes fail 0.83 times a day together.",
    ),
    Prediction(
        "resilience_restart_points", unit="points", tolerance=0.05,
        answer=lambda: 100 * (goodput(840, 60, RESEARCH * HOUR, 60)
                              - goodput(840, 60, RESEARCH * HOUR, 900)),
        solution="100 * 840 / 6490 * (math.exp(-60 / 6490) - math.exp(-900 / 6490)) "
                 "/ (math.exp(900 / 6490) - 1)",
        hint="Call your goodput twice. What changes is the seconds of a restart.",
        mistakes={100 * 840 / 6490: "that is to first order: other losses already take a part of "
                  "the time", 100 * goodput(840, 60, RESEARCH * HOUR, 60): "that is the goodput "
                  "itself", 100 * goodput(840, 60, RESEARCH * HOUR, 900): "that is the goodput "
                  "before, not the gain"},
        why="86% instead of 76%: each failure stops all GPUs for 14 minutes less.",
    ),
    Prediction(
        "resilience_neighbour_lost", unit="%", tolerance=0.02, solution="100 * 2 / 127",
        answer=lambda: 100 * lost_together(128),
        hint="One node is dead. How many of the other 127 hold its copy, or have their copy on it?",
        mistakes={100 / 127: "two nodes matter: the next node holds its copy, and it holds the "
                  "previous node's copy", 100 * 2 / 128: "the second node is one of the other 127",
                  100 / 128**2: "that is for two fixed nodes, but any two may fail"},
        why=("Then you need the last checkpoint on disk. Gemini pairs the nodes, which halves the "
             "risk."),
    ),
)
