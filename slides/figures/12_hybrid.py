"""The figures of the deck 12_hybrid.md."""
from collections import Counter

import torch

from ranklab.hybrid import layout_traffic, parse_layout, routes
from ranklab.mesh import Mesh
from ranklab.pipeline_parallel import one_f_one_b_schedule, simulate
from ranklab.plots import hybrid as plots
from ranklab.plots import pipeline_parallel as lanes
from ranklab.plots.collectives import traffic_matrices
from ranklab.plots.mesh import who_talks_to_whom
from ranklab.projects.hybrid.config import JOBS
from ranklab.trainer.parallel import Piece


def cube():
    return who_talks_to_whom(Mesh({"pipeline": 2, "data": 2, "tensor": 2}), per_node=4)


def along():
    layout = parse_layout("2x8x4,sp,zero,recompute")
    return plots.along_axes(layout_traffic(JOBS["100b"], layout), layout.mesh, 8), 6.4, 1.75


def pieces():
    drawn = {f"{P} stages, {M} micro-batches: data {16 // P}":
             simulate(one_f_one_b_schedule(P, M), 8 / P, 16 / P) for P, M in ((8, 16), (4, 8))}
    unit = "time (1: a micro-batch's forward on one of 8 ranks)"
    return lanes.several(drawn, title="", xlabel=unit, numbers=False), 6.2, 2.9


def boxes():
    saved = [(0, (0, 0), (6, 4)), (1, (0, 4), (6, 4)), (2, (6, 0), (6, 4)), (3, (6, 4), (6, 4))]
    wanted = [(rank, (4 * rank, 0), (4, 8)) for rank in range(3)]
    return plots.boxes_of({"saved by 4 ranks": saved, "wanted by 3": wanted}, (12, 8)), 5.2, 2.1


def refit():
    """A matrix of 8 x 8 million numbers in bf16, from tensor 2 x FSDP 2 to tensor 2."""
    def piece(rows, row, column):
        sizes = 8000 // rows, 4000
        box = torch.empty(sizes, dtype=torch.bfloat16, device="meta")
        return [Piece("w", "weight", (8000, 8000), (sizes[0] * row, 4000 * column), box)]

    held = [piece(2, row, column) for row in range(2) for column in range(2)] + [[], []]
    wanted = [[]] * 4 + [piece(1, 0, column) for column in range(2)]
    straight = [Counter() for _ in held]
    for sender, i, receiver, j, part in routes(held, wanted):
        straight[sender][receiver] += part(wanted[receiver][j], held[sender][i])[0].nbytes
    shard = held[0][0].tensor.nbytes
    whole = [{4: 4 * shard}, {0: shard}, {0: shard}, {0: shard}, {5: 4 * shard}, {}]
    return traffic_matrices({"whole tensors": whole, "shard to shard": straight}), 8.4, 3.0
