"""The numbers that lab 01 asks for before its code runs."""

from ranklab.baseline import activation_bytes, mfu, model_state_bytes, transformer_flops
from ranklab.checks.exercise import Prediction
from ranklab.hardware import H100
from ranklab.models.gpt import GPTConfig, count_parameters

MEDIUM = GPTConfig(vocab_size=50304, n_ctx=1024, n_layer=24, n_head=16, n_embd=1024)


def _blocks_gb():
    deeper = GPTConfig(**{**vars(MEDIUM), "n_layer": 48})
    both = [activation_bytes(config, 8, 1024, element=2) for config in (deeper, MEDIUM)]
    small = 8 * 1024 * 24 * (4 * 2 + 16 * 4)  # norm statistics and log-sums: left out when asked
    return (both[0] - both[1] - small) / 1e9


PREDICTIONS = (
    Prediction("days_on_one_gpu", solution="6 * 1.5e9 * 30e9 / (0.4 * 989.4e12) / 86400",
               unit="days", tolerance=0.03,
               hint=("Divide all the FLOPs of the training by the FLOPs that this GPU does in a "
                     "day."),
               answer=lambda: 6 * 1.5e9 * 30e9 / (0.4 * H100.bf16_flops) / 86400,
               mistakes={2.63: "that is forward alone; a step costs three forwards",
                         3.16: "that is the time at 100% of the peak, which no GPU reaches",
                         1.26: "you multiplied by 0.4; divide: a slower GPU takes longer",
                         189.5: "these are hours"},
               why="The whole course is about turning this week into an hour."),
    Prediction("step_tflop", solution="6 * 353.55e6 * 8 * 1024 / 1e12", unit="TFLOP",
               tolerance=0.13,  # so that the exact number, with attention, is right too
               hint="How many tokens are in a batch? The rule says what a token costs for each "
                     "parameter.",
               answer=lambda: 6 * round(count_parameters(MEDIUM), -4) * 8 * 1024 / 1e12,
               mistakes={5.8: "that is forward alone", 2.9: "that is forward alone, and a multiply "
                         "and an add are two FLOPs",
                         8.69: "a multiply and an add are two FLOPs",
                         2.17: "that is one sequence; the batch has 8"},
               why=("The rule says 17.4. With attention's own products it is 19.85, a seventh "
                    "more. You will count those next.")),
    Prediction("mfu_percent", solution="100 * 2.423e9 * 160_000 / 989.4e12", unit="%",
               tolerance=0.03,
               hint="How many FLOPs does the model need in a second, and how many could the GPU "
                     "do?",
               answer=lambda: 100 * mfu(MEDIUM, 160_000, H100.bf16_flops),
               mistakes={0.39: "that is a fraction; give it in percent",
                         3.91: "a factor of ten is lost: 2.42e9 x 1.6e5 is 3.9e14",
                         13.0: "2.423 GFLOP is forward and backward together",
                         19.5: "989 TFLOP/s is already the dense peak"},
               why="Well-tuned code gets 35% to 45%."),
    Prediction("adam_gb", solution="16 * 7", unit="GB",
               hint="Add up the row of the table: how many bytes does one parameter need in all?",
               answer=lambda: sum(model_state_bytes(7e9, "mixed").values()) / 1e9,
               mistakes={14: "those are the weights alone",
                         28: "those are the weights and gradients; Adam keeps more",
                         84: "the float32 master weights are missing, 4 bytes a parameter",
                         56: "Adam's two moments are float32 here, and there are master weights"},
               why="That is more than any 80 GB GPU holds, before the first activation."),
    Prediction("activation_gb", solution="16 * 1024 * 2 * 8 * 1024 * 24 / 1e9", unit="GB",
               hint="Count the numbers that one block keeps for one token, in multiples of C; "
                     "then multiply.",
               answer=_blocks_gb, tolerance=0.03,
               mistakes={12.9: "a bf16 number has two bytes, not four",
                         0.805: "that is one sequence; the batch has 8",
                         0.268: "that is one layer; there are 24",
                         3.22: "that is one byte a number; bf16 has two",
                         6.84: "that is 17 C a token: attention's output is also the input of "
                               "`out`, so count it once",
                         7.25: "that is 18 C a token: q, k and v read one tensor, not three"},
               why="Activation memory grows with the batch and the sequence; model states do not."),
    Prediction("ragged_factor", solution="(1 / 3) / (1 / 9)", tolerance=0.001,
               hint="What share of the final mean does the last row get, and what share should "
                     "it get?",
               answer=lambda: (1 / 3 * 1 / 1) / (1 / (4 + 4 + 1)),
               mistakes={4: ("that is right compared with a row of a full piece; what about its "
                             "true share, 1/9?"),
                         9: "its weight is 1/3, not 1: three pieces share the mean"},
               why="This bug causes no crash, and one framework shipped it for years."),
    Prediction("logits_mb", solution="1024 * 50304 * 4 / 1e6", unit="MB", tolerance=0.03,
               hint="There is one logit for each token and each entry of the vocabulary.",
               answer=lambda: MEDIUM.n_ctx * MEDIUM.vocab_size * 4 / 1e6,
               mistakes={51.5: "that counts numbers; float32 has 4 bytes",
                         103: "that is 2 bytes a number; float32 has 4",
                         0.2: "that is one token; there are 1024"},
               why=("With the softmax and the gradient it is three times as much: more than "
                    "several blocks keep.")),
    Prediction("recompute_percent", solution="100 * 1 / 3", unit="%", tolerance=0.02,
               hint=("Count in forwards: what does a step cost without checkpointing, and what "
                     "does checkpointing add?"),
               answer=lambda: 100 * transformer_flops(MEDIUM, 1, 1024, backward=False)
               / transformer_flops(MEDIUM, 1, 1024),
               mistakes={50: ("backward costs two forwards, so a step costs three; one more adds a "
                              "third"),
                         100: "only the forward is computed twice, not backward",
                         25: ("that is its share of the new step; what is it relative to the old "
                              "one?")},
               why=("That is the most it can be, because the head is in no block and runs only "
                    "once.")),
    Prediction("break_even_intensity", solution="989.4e12 / 3.35e12", unit="FLOP/byte",
               hint="When do N bytes take as long to move as their FLOPs take to compute?",
               answer=lambda: H100.balance, tolerance=0.02,
               mistakes={591: "the sparse peak is not for dense matrices",
                         20: "that is the float32 peak; bf16 has 989 TFLOP/s",
                         0.00339: "FLOPs over bytes, not bytes over FLOPs"},
               why="A bf16 number has two bytes, so each one must take part in 295 multiply-adds."),
)  # fmt: skip
