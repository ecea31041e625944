"""The numbers that a learner of lab 13 predicts before running anything."""

from ranklab.checks.exercise import Prediction
from ranklab.formulas.pipeline_parallel import flush_bubble
from ranklab.planner.catalog import MODELS, find_node
from ranklab.planner.cost import cost_per_token
from ranklab.planner.domains import crossing_share
from ranklab.planner.memory import states
from ranklab.planner.plan import Plan

NUMBERS = MODELS["llama-70b"].parameters
GB = NUMBERS / 16 / 1e9
HOURS = 6 * 405e9 * 15.6e12 / (0.4 * find_node("h100-dgx").peak_flops) / 3600 / 1e6


PRODUCTS = 0.75
FASTER = find_node("h100-dgx").fp8 / find_node("h100-dgx").bf16


def times():
    """Return the cost of a token on A10Gs at 35%, relative to one on A100s at 50%."""
    model, prices = MODELS["llama2-13b"], (("a10-pcie", 0.35, 1.006), ("a100-40gb-dgx", 0.5, 2.74))
    a10, a100 = (cost_per_token(model, 2048, find_node(node), mfu, price)
                 for node, mfu, price in prices)
    return a10 / a100


def rack_times():
    """Return the time of 64 ranks' all-to-all at the bound of the slower link: in 8 nodes of 8
    B200s, relative to one rack of 72.
    """
    nodes, rack = find_node("b200-dgx"), find_node("gb200-nvl72")
    return (crossing_share(64, nodes.node) / nodes.network) / (crossing_share(64, 1) / rack.link)


PREDICTIONS = (
    Prediction(
        "planner_a10_times", unit="times", answer=times,
        solution="(1.006 / (0.35 * 70)) / (2.74 / (0.5 * 312))",
        hint="How many of the model's FLOPs do you get for a dollar?",
        mistakes={1.006 / 2.74: "that is the price of an hour, but how much work is done in it?",
                  (1.006 / 70) / (2.74 / 312): "each GPU has its own MFU",
                  1 / times(): "the other way round: a token costs more on the A10Gs"},
        why="An A10G does a sixth of the work for a third of the price.",
    ),
    Prediction(
        "planner_gpu_hours", unit="million", tolerance=0.03, answer=lambda: HOURS,
        solution="6 * 405e9 * 15.6e12 / (0.4 * 989e12) / 3600 / 1e6",
        hint="How many FLOPs per parameter does a token cost, forward and backward?",
        mistakes={HOURS / 3: "that is the forward alone: 2 FLOPs for each parameter, and backward "
                  "has twice as many", 0.4 * HOURS: "a GPU reaches 40% of its peak",
                  HOURS * 3600: "those are seconds", 4 / 3 * HOURS: "that counts a second forward"},
        why="The model card says 30.84 million, which by this count is 35% of the peak.",
    ),
    Prediction(
        "planner_states_gb", unit="GB", solution="(2 + 4 + 12 / 16) * 70.55 / 16",
        answer=lambda: sum(states(Plan(dp=16, zero=1), "megatron", NUMBERS / 16, 16)) / 1e9,
        hint="How many of the parameters does a GPU hold, and which of their 18 bytes are sharded?",
        mistakes={18 * GB: "the distributed optimizer divides 12 of the 18 bytes by 16",
                  18 * GB / 16: "data ranks divide only the optimizer's 12 bytes, and not "
                  "Megatron's weights and gradients",
                  (2 + 2 + 12 / 16) * GB: "Megatron's main gradients have 4 bytes",
                  16 * (6 + 12 / 16) * GB: "tensor and pipeline ranks share the parameters: 1/16"},
        why="That is 6.75 bytes for each of 4.4 billion parameters.",
    ),
    Prediction(
        "planner_bus_gb", unit="GB/s", solution="8 * 400 / 8",
        answer=lambda: 8 * find_node("h100-dgx").network / 1e9,
        hint="How many network cards does a node have, and can there be more than one ring?",
        mistakes={50.0: "that is one card: NCCL makes a ring for each card, and each ring "
                  "sends a part", 3200.0: "those are Gbit/s", 450.0: "that is NVLink inside a node",
                  400 * 127 / 128 / (15 / 16): ("that would hold if each node summed first; rings "
                                                "send all"),
                  365.0: "that is what four nodes reach: the question asks for the bound",
                  6.25: "the eight GPUs do not share a card: each has its own"},
        why="Each of the eight rings uses its own 50 GB/s card. Four nodes reached 365 GB/s.",
    ),
    Prediction(
        "planner_bubble", solution="7 / (8 + 7)", answer=lambda: flush_bubble(8, 8),
        hint="How many micro-batches are left for each pipeline?",
        mistakes={7 / 8: "that is a share of the busy time; of the whole time it is 7 / (8 + 7)",
                  7 / 519: "64 pipelines share the 512 sequences", 7 / 135: "that is with 4 data "
                  "ranks", 0.5: "it is P - 1 = 7 of M + P - 1 = 15 steps"},
        why="512 / 64 = 8 micro-batches for 8 stages. With 4 data ranks it was 5%.",
    ),
    Prediction(
        "planner_fp8_times", unit="times", solution="1 / (0.25 + 0.75 / 1.86)",
        answer=lambda: 1 / (1 - PRODUCTS + PRODUCTS / FASTER),
        hint="Let the step take 1 s. How many seconds does each part take afterwards?",
        mistakes={FASTER: "only the products are faster, not the step",
                  1 / (1 - PRODUCTS + PRODUCTS / 2): "that is with the peak, twice bf16's: no "
                  "measured product reaches it",
                  1 - PRODUCTS + PRODUCTS * FASTER: "that averages the two speeds: add up seconds",
                  1 / (PRODUCTS + (1 - PRODUCTS) / FASTER): "the products are three quarters",
                  1 - PRODUCTS + PRODUCTS / FASTER: "that is the new time: turn it round"},
        why="Of 1 s, 0.75 s become 0.40 s. However fast the products get, it stays below 4 times.",
    ),
    Prediction(
        "planner_rack_times", unit="times", solution="(56 / 64 / 50) / (63 / 64 / 900)",
        answer=rack_times,
        hint="Of the 64 rows, how many does each GPU send over the slower link, in each case?",
        mistakes={18.0: "those are the links: 56 of 64 rows leave a node, and 63 a GPU",
                  56 / 64 * 18: "in the rack each GPU keeps one row of 64",
                  9.0: "that link is an H100's",
                  8 / 9: "those are the rows alone: divide them by the links"},
        why="(7/8) / 50 against (63/64) / 900: 16. In a rack nothing takes the slow link.",
    ),
)
