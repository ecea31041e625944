"""The numbers that a learner of lab 04 predicts before running anything."""

from ranklab.checks.exercise import Prediction
from ranklab.collectives import alpha_beta_time, best_sent_bytes
from ranklab.ddp import exposed_communication, scaling_efficiency
from ranklab.meter import Event

RESNET = 25.6e6  # parameters of ResNet-50


def top_k_bytes(n, share, ranks, place=4):
    """Count the bytes that a rank sends in top-k's all-gather, as in TopK: values and places."""
    return best_sent_bytes("all_gather", ranks * share * n * (4 + place), ranks)


def _break_even():
    return next(ranks for ranks in range(2, 10_000) if top_k_bytes(RESNET, 0.01, ranks)
                >= best_sent_bytes("all_reduce", 4 * RESNET, ranks) * (1 - 1e-9))


def _step_ms():
    """Return a step's ms: backward ends at 300 ms; transfers, 160 ms in all, begin at 220 ms."""
    events = [Event("forward and backward", "compute", 0.0, 0.3, "stream 7"),
              Event("all-reduce", "communication", 0.22, 0.38, "stream 20")]
    return 1e3 * (0.3 + exposed_communication(events))


PREDICTIONS = (
    Prediction(
        "efficiency_percent", solution="100 * 0.80 / (4 * 0.25)", unit="%",
        hint="What was the speed-up, and what would the ideal speed-up have been?",
        answer=lambda: 100 * scaling_efficiency({1: 0.80, 4: 0.25}, "strong")[4],
        mistakes={320: "that is the speed-up, 3.2 times, in percent; it took 4 GPUs",
                  3.2: "that is the speed-up; efficiency is the speed-up per GPU",
                  125: "upside down: 4 GPUs did a little less than 4 times as much",
                  31.25: "that is weak scaling; here 4 GPUs share the same batch",
                  0.8: "the answer is in percent"},
        why="A fifth of four GPUs is nearly one whole GPU, paid for and lost.",
    ),
    Prediction(
        "exposed_step_ms", solution="300 + (160 - 80)", unit="ms", answer=_step_ms,
        hint="Draw a timeline: when do the transfers begin, and when do they end?",
        mistakes={460: "half of the transfers run during backward",
                  300: "only 80 of the 160 ms are hidden: then backward is over",
                  220: "that is where the transfers begin"},
        why=("Half of it is hidden. With half the bytes, nearly all of it would be. Only the last "
             "bucket is always exposed, because it isn't full until backward ends."),
    ),
    Prediction(
        "fp16_megabytes", solution="2 * 3 / 4 * 25.6 * 2", unit="MB",
        hint=("How large is the gradient now, and what multiple of its size does a rank send in a "
              "ring?"),
        answer=lambda: best_sent_bytes("all_reduce", 2 * RESNET, 4) / 1e6,
        mistakes={153.6: "that is float32, 4 bytes a number",
                  51.2: "that is the gradient's size; a ring sends 2 (R-1)/R of it",
                  38.4: "a reduce-scatter and an all-gather: twice (R-1)/R",
                  102.4: "2 (R-1)/R is 1.5 on 4 ranks, not 2", 614.4: "bits, not bytes"},
        why=("Half of what float32 sends, for any number of ranks; but the sum is computed in "
             "float16 as well."),
    ),
    Prediction(
        "top_k_megabytes", solution="3 * 0.01 * 25.6 * (4 + 4)", unit="MB",
        hint=("How many bytes do one rank's picks take? And how many ranks' picks does a rank pass "
              "on?"),
        answer=lambda: top_k_bytes(RESNET, 0.01, 4) / 1e6,
        mistakes={3.072: "that is the values alone: the ranks would not know where they belong",
                  2.048: "that is what one rank picks; a rank passes on the picks of three",
                  9.216: ("that is with int64 places; int32 counts to 2 billion, and is half as "
                          "long"),
                  1.536: ("that is 1% of an all-reduce; but places are sent as well, and picks "
                          "can't be summed"),
                  8.192: "(R-1) times: no rank has to be sent its own picks"},
        why="25 times less than 153.6 MB. It isn't 100 times, because places travel too, and "
            "nothing is summed on the way.",
    ),
    Prediction(
        "top_k_break_even", solution="1 / 0.01", unit="ranks", answer=_break_even,
        tolerance=0,
        hint=("Write down both costs for R ranks: an all-gather of the picks, and an all-reduce of "
              "everything."),
        mistakes={101: ("with 101 ranks it already sends more; with how many does it send exactly "
                        "as much?"),
                  99: ("with 99 ranks it still sends less; with how many does it send exactly as "
                       "much?"),
                  50: "2 numbers for each pick, yes; but all-reduce sends every number twice as "
                  "well",
                  25: "on 4 ranks it is 25 times less: how does that change with the ranks?",
                  200: "all-reduce sends 2 (R-1)/R of the bytes, not (R-1)/R"},
        why="(R-1) k 8 bytes against 2 (R-1)/R n 4: equal at R = n/k. Thin matrices don't have "
            "this limit, because they can be summed.",
    ),
    Prediction(
        "thin_times", solution="4096 * 1024 / (4 * (4096 + 1024))", unit="times",
        hint="What are the shapes of the two thin matrices that travel instead?",
        answer=lambda: 4096 * 1024 / (4 * (4096 + 1024)),
        mistakes={819.2: "that is rank 1",
                  1024: "that is p alone, with rank 1: the rank is 4, and q is sent as well",
                  256: "that is p alone, 4096 x 4; q is 1024 x 4",
                  0.00488: "upside down: how many times less?"},
        why=("For a 64 x 64 matrix it is only 8 times: thin matrices pay off where matrices are "
             "large."),
    ),
    Prediction(
        "local_steps", solution="9 * 2 * 7 / 8 * 4 / 0.125", unit="steps", tolerance=0.01,
        hint="How many GB does a site send in one all-reduce, and how many seconds are that?",
        answer=lambda: 9 * alpha_beta_time("ring", 4e9, 8, alpha=0, beta=1 / 0.125e9),
        mistakes={560: "a tenth of the whole time is a ninth of the computing: H = 9 * 56",
                  56: "then half of the time is communication",
                  63: "1 Gbit/s is 0.125 GB/s", 252: "an all-reduce has two halves",
                  576: "a ring sends 2 (R-1)/R of the bytes, not 2 times",
                  288: "a ring sends 2 (R-1)/R of the bytes: 7 GB, not 4"},
        why="An outer step takes 56 s, about as long as 56 steps of computing. With DDP every step "
            "takes 57 s.",
    ),
)  # fmt: skip
