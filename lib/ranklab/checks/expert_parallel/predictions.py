"""The numbers that a learner of lab 11 predicts before running anything."""

from ranklab.checks.exercise import Prediction
from ranklab.expert_parallel.once import even_crossings
from ranklab.expert_parallel.route import expert_slots
from ranklab.mesh import Mesh

# Mixtral 8x7B: its config.json. Three matrices in an expert, grouped queries, an untied head.
LAYERS, C, F, E, K = 32, 4096, 14336, 8, 2
EXPERT = 3 * C * F
OUTSIDE = LAYERS * (2 * C * C + 2 * C * 1024 + E * C + 2 * C) + 2 * 32000 * C + C
ALL = OUTSIDE + LAYERS * E * EXPERT
ROWS = 4096 * K * 7 / 8 * C * 2
EMPTY = 1 - even_crossings(8, 256, 8)[0] / 7  # the probability that a node has none of 8 experts

PREDICTIONS = (
    Prediction(
        "moe_total_billions", unit="billion", answer=lambda: ALL / 1e9,
        solution="(32 * (8 * 3 * 4096 * 14336 + 2 * 4096**2 + 2 * 4096 * 1024) + 2 * 32000 * 4096)"
                 " / 1e9",
        hint="What exists eight times, and what only once?",
        mistakes={56.0: "only the experts exist eight times: attention and embeddings are shared",
                  LAYERS * E * EXPERT / 1e9: "that is the experts alone",
                  (OUTSIDE + LAYERS * K * EXPERT) / 1e9: "that is what one token uses",
                  (OUTSIDE + LAYERS * E * EXPERT * 2 / 3) / 1e9: "an expert has three matrices: "
                  "its middle is a product of two"},
        why=("The experts count eight times, the rest once. A token uses 12.9 billion of these "
             "parameters."),
    ),
    Prediction(
        "moe_slots", solution="4096 * 2 / 8 * 1.25", unit="tokens", tolerance=0,
        answer=lambda: expert_slots(4096, 8, 2, 1.25),
        hint="How many choices are there in all, and how many would each expert get?",
        mistakes={640.0: "each token has two choices",
                  1024.0: "that is the mean: multiply it by 1.25",
                  5120.0: "an expert has 1/8 of all choices"},
        why="8,192 choices, 1,024 for each expert on average, and a quarter more.",
    ),
    Prediction(
        "moe_dispatch_mb", solution="4096 * 2 * 7 / 8 * 4096 * 2 / 1e6", unit="MB",
        answer=lambda: ROWS / 1e6,
        hint="How many rows leave the rank, and how many bytes does each have?",
        mistakes={ROWS * 8 / 7e6: "1/8 of the rows stay on their rank",
                  ROWS / 2e6: "a token goes to two experts, or a bf16 number has two bytes",
                  2 * ROWS / 1e6: "that is the way there and back", 4 * ROWS / 1e6: "that is there "
                  "and back, forward and backward", ROWS / 2**20: "those are MiB; MB are 10^6"},
        why="7,168 rows of 8,192 bytes; then they come back, and in backward all of it again.",
    ),
    Prediction(
        "moe_too_large", solution="8 / 2", unit="times", tolerance=0, answer=lambda: 4.0,
        hint=("How many ranks' tokens has an expert seen, and by what number would its gradient be "
              "divided?"),
        mistakes={2.0: "that is the number of ranks that have this expert", 1.0: "the mean of two "
                  "ranks divides by 2, but the loss is a mean over 8", 8.0: "two of the eight "
                  "ranks share the sum", 0.25: "the other way round: it is too large"},
        why="The expert has seen the tokens of eight ranks, but its gradient is divided by two.",
    ),
    Prediction(
        "moe_node_crossings", unit="times", tolerance=0.02,
        solution="7 * (1 - math.comb(224, 8) / math.comb(256, 8))",
        answer=lambda: even_crossings(8, 256, 8)[0],
        hint="How likely is it that none of the 8 experts is on a given node, which has 32 of 256?",
        mistakes={7.0: "that is once for each expert: some of them share a node",
                  4.0: "that is DeepSeek-V3's limit, and these experts are drawn without one",
                  8 * (1 - EMPTY): "the token's own node is not crossed to: 7 other nodes count",
                  7 * EMPTY: "that is how many other nodes it does not go to"},
        why="A node has none of the 8 experts with probability 0.34, and there are 7 other nodes.",
    ),
    Prediction(
        "moe_ep_nodes", unit="nodes", tolerance=0, solution="8 * 4 // 8",
        answer=lambda: len({rank // 8 for rank in
                            Mesh({"copies": 2, "ep": 8, "etp": 4}).ranks_along("ep", 0)}),
        hint="Ranks 0 to 3 have the parts of the same experts. Which rank has the next ones?",
        mistakes={1: "that needs neighbours, etp 1: here ranks 0 to 3 have the same experts, cut "
                  "into 4", 8: "ep 8 is one rank of 8 groups of 4, and two such groups are on a "
                  "node", 2: "two parts of the experts are on each node"},
        why="Its ranks are 0, 4, 8 to 28: two of them on each node.",
    ),
)
