"""Which cause is it? The answers to clinic/sharded.py's incidents, and what speaks against others.

Every number was measured on the programs as they were found, with their own settings.
"""

from ranklab.checks.clinic.causes import cause_of
from ranklab.clinic.sharded import CASES

WIDE_LAYER, STAGED_GPT, GATHERED_MODEL, MOVED_GPT, FLAT_MODEL = CASES

PREDICTIONS_OF_SHARDED = (
    cause_of(
        WIDE_LAYER,
        "the losses of step 0 differ already, 5.561 and 5.577: no gradient has been averaged "
        "by then",
        "the bytes of step 0 add up to 7,513 on both ranks of the first pair",
        "y, after the all-reduce, is the same on both ranks of a pair: 1.3094 in all",
        hint="In step 0, what is the last tensor that is alike on ranks 0 and 1? Run it "
             "with p=0, too.",
        why="In step 0 y is alike on both before its dropout, and the losses are 5.561 and 5.577; "
            "with p=0 both are 5.581, and the heads stay alike for all 12 steps."),
    cause_of(
        STAGED_GPT,
        "with steps=0 token.weight and head.weight are equal bit for bit",
        "after one step all weights of the blocks are within 1e-6 of those of one rank",
        "the stages have 35 names in all: the 34 of one rank, and head.weight, the copy",
        hint="After how many steps do the two copies differ? And the other weights from "
             "those of one rank?",
        why="With steps=0 the copies are equal bit for bit. After one step token.weight is 0.02 "
            "off that of one rank, and every block is right."),
    cause_of(
        GATHERED_MODEL,
        "one rank has nothing to add up, and its losses are the same: 5.628, 5.610, 5.112",
        "the loss of step 1 is 5.610 with lr=0 and with lr=100: it is no matter of the size "
        "of a step",
        "one rank has one shard, in no order, and its losses are the same: 5.628, 5.610, "
        "5.112",
        hint="Does it diverge on one rank, too? What does the first loss "
             "depend on: change the rate to 0, to 100.",
        why="The loss of step 1 is 5.610 with lr=0, lr=1 and lr=100: step 0 is not in it."),
    cause_of(
        MOVED_GPT,
        "with lr=1 the losses are the same to the last digit: 5.470, 5.507, 5.473",
        "there are 3 reduce-scatters in each step, one for each block and one for the rest",
        "the norm of all gradients is 1.45 at the step, then 2.28 and 3.55: nothing zeroes "
        "them at all",
        hint="Which weights does the step change? Count what is there before it: "
             "gradients, and the optimizer's parameters.",
        why="With lr=1 the losses are those of lr=0.01 to the last digit, and none of the model's "
            "parameters is one of the optimizer's, by `is`."),
    cause_of(
        FLAT_MODEL,
        "the rows' own gradients have norms of 1.84, 1.70, 1.63 and 1.61 on the four ranks; "
        "the log has 0.461 on rank 0",
        "the squares of the four norms add up to 1.052 squared, as they should: nothing is "
        "divided twice",
        "the norms of step 0 differ, and momentum begins at zero",
        hint="Look at the norms of step 0 on all four ranks, and put them together to "
             "that of one rank.",
        why="0.461, 0.723, 0.520 and 0.320: the root of the sum of their squares is 1.052, the "
            "norm on one rank."),
)
