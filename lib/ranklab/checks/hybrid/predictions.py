"""The numbers that a learner of lab 12 predicts before running anything."""

import torch

from ranklab.baseline import model_state_bytes
from ranklab.checks.exercise import Prediction
from ranklab.checks.formula import Formula
from ranklab.formulas.overlap import cheapest_tensor_parallel
from ranklab.hybrid import Job, Layout, refit_bytes
from ranklab.mesh import Mesh
from ranklab.models.gpt import GPTConfig

PREDICTIONS = (
    Prediction(
        "mesh_next_rank", solution="21 + 2 * 8", tolerance=0,
        hint="Tensor ranks are neighbours. How far apart are two ranks that differ only in their "
              "stage?",
        answer=lambda: Mesh({"pipeline": 4, "data": 2, "tensor": 8}).ranks_along("pipeline", 21)[2],
        mistakes={22: "that rank has another part of the same layers", 29: "that rank has the same "
                  "layers, for other rows of the batch"},
        why="A stage has 2 x 8 ranks, so the same place in the next stage is 16 ranks further on.",
    ),
    Prediction(
        "mesh_micro_batches", solution="1024 / (8 * 2)", tolerance=0,
        hint="How many sequences does each of the 8 pipelines get?",
        answer=lambda: Job(GPTConfig(), 1024, micro_batch=2).micro_batches(Layout(dp=8)),
        mistakes={512: "those are the micro-batches of all pipelines together",
                  128: "those are sequences, and a micro-batch has 2"},
        why="Data ranks divide the batch; pipeline and tensor ranks do not.",
    ),
    Prediction(
        "mesh_norm_factor", solution="2 ** 0.5",
        hint=("Which ranks have the same gradient as this rank? And remember that it is the "
              "squares that add up."),
        answer=lambda: Layout(2, 2, 2).dp ** 0.5,
        mistakes={2: "the sum of squares is 2 times too large, but the norm is its root",
                  8**0.5: "only data ranks have the same numbers: the others hold other parts or "
                  "other layers", 1: "both data ranks have the same gradients and add them up"},
        why="Each number of a matrix is on one tensor rank and one stage, but on 2 data ranks.",
    ),
    Prediction(
        "mesh_tied_mb", solution="50304 * 10240 / 8 * 2 / 1e6", unit="MB",
        hint=("Each tensor rank has its own rows of the vocabulary. What does it send to the stage "
              "with the head?"),
        answer=lambda: torch.empty(50304 // 8, 10240, dtype=torch.bfloat16, device="meta").nbytes
        / 1e6,
        mistakes={50304 * 10240 * 2 / 1e6: "that is the whole matrix, but tp divides its rows",
                  50304 * 10240 / 8 / 1e6: "bf16 has 2 bytes"},
        why="It sends this once a step, however many micro-batches there are.",
    ),
    Prediction(
        "mesh_checkpoint_gb", solution="100e9 * (4 + 4 + 4) / 64 / 1e9", unit="GB",
        hint="There are three float32 numbers for each parameter; gradients are not saved.",
        answer=lambda: sum(n for name, n in model_state_bytes(100_000_000_000, "fp32").items()
                           if name != "gradients") / 64 / 1e9,
        mistakes={1200: "that is the whole checkpoint", 25: "gradients are not saved",
                  6.25: "Adam's two moments are saved as well",
                  12.5: "weights and both moments: three numbers"},
        why="Each number is written once, because replicas write nothing.",
    ),
    Prediction(
        "mesh_transfer_gb", solution="140 / 8", unit="GB", tolerance=0.02,
        hint="Which part of each matrix does a generator hold?",
        answer=lambda: refit_bytes(140, 8 * 4, 8)[1],
        mistakes={140: "that is the whole model; a generator holds an eighth of it",
                  140 / 32: "that is what a trainer holds, and sends",
                  140 * 7 / 8: "its own eighth is the part that it needs"},
        why=("It holds an eighth. Each trainer holds 140 / 32 = 4.4 GB and sends it once, so the "
             "busiest rank is a generator."),
    ),
    Formula(
        "cheapest_tensor_parallel", {"width": (1e3, 3e4), "gpus": (8, 1e5), "tokens": (1e5, 1e8)},
        cheapest_tensor_parallel,
        solution="lambda width, gpus, tokens: math.sqrt(4.5 * width * gpus / tokens)",
        hint=("Which of the two kinds of bytes grows with tp, and which shrinks? Where is the "
              "derivative of their sum 0?"),
        step="72 * width**2 / tp + 16 * width * tokens * tp / gpus is smallest where its two terms "
             "are equal.",
        mistakes={
            "lambda width, gpus, tokens: 4.5 * width * gpus / tokens":
                "where the two terms are equal, tp is squared: take the root",
            "lambda width, gpus, tokens: math.sqrt(3 * width * gpus / tokens)":
                "parameters travel three times in a step: two gathers, and a reduce-scatter",
            "lambda width, gpus, tokens: math.sqrt(9 * width * gpus / tokens)":
                "x is summed four times in a layer: twice in forward, and twice in backward",
            "lambda width, gpus, tokens: math.sqrt(1.5 * width * gpus / tokens)":
                "a layer has 12 width^2 parameters: 4 in attention, and 8 in the MLP",
            "lambda width, gpus, tokens: math.sqrt(width * gpus / tokens)":
                "the two kinds have factors of their own: 72 and 16",
        },
        why="At that tp a step spends as many bytes on weights as on activations.",
    ),
)
