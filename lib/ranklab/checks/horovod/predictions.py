"""The numbers that a learner of lab 05 predicts before running anything."""

import torch

from ranklab.checks.exercise import Prediction
from ranklab.horovod import adasum_of_two, fuse_tensors
from ranklab.horovod.compression import ranks_until_infinite
from ranklab.horovod.cost import fused_time, negotiation_bytes

# A model of 160 tensors on 64 ranks is the story of the lab; a request by name has 76 bytes, as
# ranklab.horovod's have on average.


def _all_reduces():
    tensors = [torch.empty(25 * 10**6, dtype=torch.uint8, device="meta") for _ in range(10)]
    return len(fuse_tensors(tensors, 64 * 10**6))


def _fusion_saves_ms():
    times = [fused_time([40_000] * 160, threshold, 64, alpha=10e-6, beta=1 / 10e9)
             for threshold in (0, 64 * 10**6)]
    return 1e3 * (times[0] - times[1])


def _length(a, b):
    return adasum_of_two(torch.tensor(a), torch.tensor(b)).norm().item()


PREDICTIONS = (
    Prediction(
        "fusion_saves_ms", solution="(160 - 1) * 2 * 63 * 10e-6 * 1e3", unit="ms",
        hint="The bytes stay the same. How many latencies does one all-reduce pay, and how many "
              "all-reduces are saved?",
        answer=_fusion_saves_ms, tolerance=0.003,
        mistakes={201.6: "one all-reduce is left, and pays its latency: 159 are saved, not 160",
                  100.17: "the ring goes round twice: 2(R-1) steps",
                  1.59: "alpha is paid in each of the 126 steps, not once for an all-reduce",
                  203.52: "2(R-1) steps, not 2R"},
        why="The bytes are the same 6.4 MB. What fusion saves is waiting.",
    ),
    Prediction(
        "fused_all_reduces", solution="math.ceil(10 / (64 // 25))", unit="all-reduces",
        hint="How many whole gradients fit into one buffer?",
        answer=_all_reduces, tolerance=0,
        mistakes={4: "250 / 64 rounded up would cut tensors in two; a buffer takes whole ones",
                  3.90625: "there is no fraction of an all-reduce",
                  10: "that is without fusion: two of 25 MB fit into 64",
                  1: "250 MB do not fit into one buffer of 64"},
        why="Each all-reduce takes two gradients of 25 MB, and 14 MB of the buffer stay empty.",
    ),
    Prediction(
        "coordinator_kilobytes", solution="63 * 160 * 76 / 1e3", unit="KB",
        hint="Which ranks send to rank 0, and how much does each of them send?",
        answer=lambda: negotiation_bytes(160, 64, request_bytes=76) / 1e3,
        mistakes={12.16: "that is what one rank sends", 778.24: "rank 0 sends nothing to itself",
                  778240: "give it in KB, and rank 0 sends nothing to itself",
                  766080: "that is bytes",
                  4.788: "every rank sends all 160 names"},
        why="All of it goes through one rank in every step, for names that it already knows.",
    ),
    Prediction(
        "cached_bytes", solution="math.ceil((160 + 1) / 8)", unit="bytes",
        hint="How many bits are needed, and how many whole bytes hold them?",
        answer=lambda: negotiation_bytes(160, 64), tolerance=0,
        mistakes={20: "160 bits are 20 bytes; and one more bit says whether a rank has new names",
                  160: "bits, not bytes", 161: "bits, not bytes", 20.125: "a byte is sent whole",
                  1323: "the vector is and-ed on the way round: it does not grow with the ranks"},
        why=("The bit vector is all-reduced with AND, so no rank is a bottleneck, and it does not "
             "grow with R."),
    ),
    Prediction(
        "fp16_overflow_ranks", solution="math.floor(65504 / 128) + 1", unit="ranks",
        hint="What is the largest number in float16? When does the sum exceed it?",
        answer=lambda: ranks_until_infinite(128), tolerance=0,
        mistakes={511: "511 * 128 = 65,408 still fits", 511.75: "ranks are whole",
                  65504: "that is the largest number; each rank brings 128",
                  256: "32,767 is the largest 16-bit whole number; float16 goes to 65,504",
                  1024: "1024 * 128 overflows, but so does less"},
        why=("An average sums first, so it overflows as well: divide before the sum "
             "(gradient_predivide_factor)."),
    ),
    Prediction(
        "adasum_orthogonal", solution="math.hypot(3, 4)",
        hint="What is a.b here, and what remains of the two coefficients?",
        answer=lambda: _length([3.0, 0.0], [0.0, 4.0]),
        mistakes={3.5: "that averages the lengths", 7: "they point in different directions",
                  2.5: "that is the length of the average: half of the sum",
                  3.535534: "what differs is added, not averaged"},
        why="a.b = 0, so both coefficients are 1, and it is a plain sum.",
    ),
    Prediction(
        "adasum_equal", solution="(1 - 1 / 2) * 3 + (1 - 1 / 2) * 3",
        hint="What is a.b here, for b = a? Put it into the two coefficients.",
        answer=lambda: _length([3.0, 0.0], [3.0, 0.0]),
        mistakes={6: "that is the sum: what agrees is averaged", 1.5: "both halves count",
                  0: "1 - a.b / 2|a|^2 is a half, not zero"},
        why=("Both coefficients are 1/2. Ranks that agree take the step of one rank, however many "
             "of them there are."),
    ),
)
