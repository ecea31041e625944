"""The numbers that a learner of lab 02 predicts before running anything."""

import torch

from ranklab.checks.exercise import Prediction
from ranklab.collectives import alpha_beta_time, best_sent_bytes, crossover_bytes


def _ring_sums(numbers):
    """Return the float32 sum of each chunk, which a ring starts at the rank after its owner."""
    sums = []
    for owner in range(len(numbers)):
        order = [*numbers[owner + 1:], *numbers[:owner + 1]]
        total = torch.tensor(order[0])
        for number in order[1:]:
            total = total + torch.tensor(number)
        sums.append(total.item())
    return sums


# 100 MB on 8 ranks in 2 nodes, and a fabric of 10 us and 100 GB/s: the stories of the lab.
PREDICTIONS = (
    Prediction(
        "server_megabytes", solution="(8 - 1) * 100", unit="MB",
        hint="To how many ranks does the server send the sum, and how large is the sum?",
        answer=lambda: alpha_beta_time("parameter_server", 100, 8, alpha=0, beta=1) / 2,
        mistakes={800: "a ninth machine would send 800; here one of the eight is the server",
                  100: "that is what a worker sends; the server answers each of them",
                  1400: "that counts what it receives as well"},
        why="It receives the same amount. One cable carries what eight should share.",
    ),
    Prediction(
        "tree_rounds", solution="math.ceil(math.log2(100))", unit="rounds",
        hint="How many ranks have the data after 1, 2, 3 rounds? Continue until all 100 have it.",
        answer=lambda: alpha_beta_time("tree_broadcast", 0, 100, alpha=1, beta=0),
        mistakes={99: "that is one rank after the other; all that have it can send at once",
                  6: "after 6 rounds 2^6 = 64 ranks have it, not yet all 100",
                  6.64: "there is no fraction of a round", 50: "it doubles, it does not add 2"},
        why="After k rounds, 2^k ranks have the data.",
    ),
    Prediction(
        "reduce_scatter_megabytes", solution="3 / 4 * 100", unit="MB",
        hint="How large is a chunk, and how many chunks does a rank send?",
        answer=lambda: best_sent_bytes("reduce_scatter", 100, 4),
        mistakes={100: "the chunk that a rank ends up owning is the one it never sends",
                  300: "one chunk a step, not the whole tensor",
                  25: "that is one step; there are R-1 of them",
                  150: "that is all of all-reduce; this is its first half"},
        why="Every rank sends one chunk in each of R-1 steps.",
    ),
    Prediction(
        "all_gather_megabytes", solution="3 * 25", unit="MB",
        hint="How much does a rank send in a step, and how many steps are there?",
        answer=lambda: best_sent_bytes("all_gather", 4 * 25, 4),
        mistakes={25: "your own shard is only the first thing that you pass on",
                  100: "R-1 shards: no rank has to send a shard back to its owner",
                  18.75: "(R-1)/R of the result, which is 100 MB, not of the shard"},
        why="Every rank sends all shards but one.",
    ),
    Prediction(
        "megabytes_sent", solution="2 * 3 / 4 * 100", unit="MB",
        hint="It is a reduce-scatter, then an all-gather. What does each of them send?",
        answer=lambda: best_sent_bytes("all_reduce", 100, 4),
        mistakes={200: "that is 2 N: you forgot the (R-1)/R",
                  300: "that is the whole tensor R-1 times; the ring passes chunks",
                  75: "that is only one of the two halves", 1200: "bits, not bytes",
                  100: "each rank sends all chunks but one, twice"},
        why="At 1000 ranks it is 199.8 MB: the cost hardly grows with the number of ranks.",
    ),
    Prediction(
        "ring_microseconds", solution="1e6 * 2 * 7 * (10e-6 + 10e6 / 8 / 100e9)", unit="us",
        hint=("How many steps does the ring take? Each step costs one latency plus the time to "
              "send one chunk."),
        answer=lambda: 1e6 * alpha_beta_time("ring", 10e6, 8, alpha=10e-6, beta=1 / 100e9),
        mistakes={175: "the 14 latencies are missing",
                  185: "you pay alpha in every one of the 14 steps, not once",
                  1540: "a step moves one chunk, 1/8 of the tensor",
                  157.5: "that is only one of the two halves",
                  22.5: "that is one step; the ring has 2(R-1) = 14 of them",
                  140: "that is the latency alone; each step also moves 1.25 MB",
                  240: ("the latency is right, but a rank sends 2(R-1)/R times the 10 MB: 175 us, "
                        "not 100"),
                  110: "that is one message of 10 MB: no ring at all"},
        why="140 us of it is latency: at 10 MB, steps and bytes cost nearly the same.",
    ),
    Prediction(
        "slow_link_megabytes", solution="2 * (2 - 1) / 2 * 100", unit="MB",
        hint="Which part of the tensor does each rank send across, and how many nodes reduce "
              "it?",
        answer=lambda: best_sent_bytes("all_reduce", 100, 2),
        mistakes={175: "that is a flat ring over all 8 ranks",
                  25: "that is one rank; all four of the node send their shards across",
                  200: "2(M-1)/M with M = 2 nodes is 1, not 2",
                  50: "that is half of it: first reduce, then gather",
                  800: "bits, not bytes"},
        why="Between nodes it is an all-reduce over M = 2, however many ranks each node has.",
    ),
    Prediction(
        "ring_right_chunks", solution="[0, 0, 1, 2].count(2)", unit="chunks",
        hint="Write down the order of additions in each chunk: it begins on the rank after its "
             "owner, and ends on its owner. In float32 a small number next to 1e8 is lost.",
        answer=lambda: _ring_sums([1e8, -1e8, 1.0, 1.0]).count(2.0),
        mistakes={4: "that is exact arithmetic; in float32 a 1 next to 1e8 is lost",
                  0: "one order adds 1e8 and -1e8 first, and then both ones",
                  2: "in one chunk only one of the two ones is lost: there the sum is 1"},
        why="The four chunks are 0, 0, 1, 2. Only chunk 3, whose sum begins on rank 0, adds 1e8 "
            "and -1e8 first.",
    ),
    Prediction(
        "crossover_megabytes", solution="1e-6 * 11 * 10e-6 / (1.25 / 100e9)", unit="MB",
        hint="How many more steps does the ring take, and how many fewer bytes does it send?",
        answer=lambda: 1e-6 * crossover_bytes(8, alpha=10e-6, beta=1 / 100e9),
        mistakes={8800: "that is kilobytes", 8.8e6: "that is bytes", 70.4: "bits, not bytes",
                  1: ("that is alpha / beta alone: the ring makes 11 more steps, but sends less by "
                      "1.25 times the tensor"),
                  3.667: ("3 swaps send the tensor 3 times, the ring 1.75 times: 1.25 tensors "
                          "more")},
        why=("Below this size fewer steps win; above it, fewer bytes do. Libraries switch there "
             "automatically."),
    ),
)
