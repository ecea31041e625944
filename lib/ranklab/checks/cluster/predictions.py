"""The numbers that a learner of lab 15 predicts before running anything."""

import statistics

from ranklab.checks.cluster.nccl import COMPUTE, nodes
from ranklab.checks.cluster.nccl_text import turning
from ranklab.checks.cluster.storage import LLAMA
from ranklab.checks.exercise import Prediction
from ranklab.cluster.acceptance import pair_rounds
from ranklab.cluster.nccl import Topology, node_bandwidth
from ranklab.cluster.storage import TECTONIC, storage_plan
from ranklab.cluster.stories import FLOPS, PEAK

PREDICTIONS = (
    Prediction(
        "cluster_starts", solution="(3 + 1) * (10 + 1)", unit="times", tolerance=0,
        answer=lambda: 44.0,
        hint=("How many times do ranks start in one life of the job, and how many lives does the "
              "job have?"),
        mistakes={30.0: "each count is in addition to a first start",
                  33.0: "each life begins with a start that is not a restart",
                  40.0: "the first life is not a requeue",
                  14.0: "torchrun starts its count again in each life of the job"},
        why="11 lives of 4 starts each. Neither count knows of the other.",
    ),
    Prediction(
        "cluster_pods", solution="4 * (3 + 1)", unit="pods", tolerance=0, answer=lambda: 16.0,
        hint="Which pods are recreated when one of them fails?",
        mistakes={7.0: "all pods start again, not only the failed one",
                  12.0: "the first life is not a restart",
                  128.0: "a pod has 8 GPUs: its container runs all 8 ranks"},
        why="A JobSet deletes all of its Jobs and recreates them: 4 pods in each of 4 lives.",
    ),
    Prediction(
        "cluster_save_seconds", solution="405.85e9 * 14 / 2e12", unit="seconds", tolerance=0.06,
        answer=lambda: storage_plan(LLAMA, TECTONIC).save_seconds,
        hint="How many bytes does the checkpoint have, and how many can be written per second?",
        mistakes={405.85e9 * 2 / 2e12: "those are only the weights: the optimizer has another 12 "
                                       "bytes for each",
                  405.85e9 * 14 / 7e12: "that is its peak, not sustained",
                  405.85e9 * 14 * 8 / 2e12: "2 TB/s are bytes, not bits"},
        why="5.7 TB at 2 TB/s. One rank, through one link of 25 GB/s, takes 3.8 minutes.",
    ),
    Prediction(
        "cluster_fallback_times_slower", solution="8 * 400 / 25", unit="times", tolerance=0,
        answer=lambda: (node_bandwidth(Topology(nodes(COMPUTE)), {"NCCL_NET": "IB"})
                        / node_bandwidth(Topology(nodes(())), {
                            "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eth1"})),
        hint=("How many Gb/s leave a node through all its cards, and how many through the "
              "interface?"),
        mistakes={16.0: "a node has eight of the cards; all its GPUs share the one interface",
                  1 / 128: "turn the fraction over",
                  1024.0: "both are in bits: there is no factor of 8"},
        why="A node sends 3.1 GB/s instead of 400 GB/s, and nothing fails: the run is just slow."),
    Prediction(
        "cluster_links_between_nodes", solution="4 * 2", unit="links", tolerance=0,
        answer=lambda: float(sum(source // 8 != target // 8 for ring in turning(16, 8, 4).values()
                                 for source, target in zip(ring, ring[1:] + ring[:1]))),
        hint="How many times does one ring cross from one node to the other?",
        mistakes={2.0: "that is for one ring, but there are four",
                  4.0: "a ring that goes to the other node comes back",
                  64.0: "those are all links, but most stay inside a node",
                  16.0: "count each link once, although both of its ends print it"},
        why=("Of the 4 x 16 links, 8 cross between nodes, two in each ring: a ring runs through "
             "all GPUs of a node before it leaves the node.")),
    Prediction(
        "cluster_mfu_percent", unit="%", tolerance=0.02,
        solution="100 * 100_000 * 42e9 / (16 * 989e12)",
        answer=lambda: 100 * 100_000 * FLOPS / (16 * PEAK),
        hint="How many FLOPs are done per second, and how many could be done?",
        mistakes={100 * 100_000 * 42e9 / 989e12: "16 GPUs could do 16 times as much",
                  100 * 100_000 * 7e9 / (16 * 989e12): "6 FLOPs for each parameter, not 1",
                  100_000 * 42e9 / (16 * 989e12): "that is a fraction; give it in percent"},
        why="So a rule with `< 0.3` fires."),
    Prediction(
        "cluster_deviations", unit="deviations", tolerance=0.02, solution="math.sqrt(8 - 1)",
        answer=lambda: (1 - 1 / 8) / statistics.pstdev([0] * 7 + [1]),
        hint=("Say that seven ranks take 0 and one takes 1: the mean is 1/8. What is the standard "
              "deviation?"),
        mistakes={7 / 8**0.5: "that is the sample standard deviation, but Prometheus' stddev is "
                              "the population one", 3.0: "that can't be reached: compute what can",
                  7.0: "the slow rank also counts in the mean and in the deviation"},
        why='So "three standard deviations" never fires, however slow the rank is.'),
    Prediction(
        "cluster_pair_minutes", unit="minutes", tolerance=0, solution="2 * (32 - 1)",
        answer=lambda: 2.0 * len(pair_rounds([*range(32)])),
        hint="How many pairs are there, and how many of them can run at once?",
        mistakes={2 * 496.0: "that is one pair after another",
                  2 * 16.0: "16 pairs run at once, but each node has 31 others to pair with",
                  2 * 32.0: "a node is not paired with itself",
                  31.0: "those are rounds, of 2 minutes each", 496.0: "those are pairs"},
        why="496 pairs in rounds of 16: 31 rounds. One after another they take 16.5 hours."),
)
