"""The causes of the wrong trainings, chosen by number, and what was measured for and against."""

from ranklab.checks.clinic.causes import cause_of
from ranklab.clinic.wrong import CASES

CASE = {case.name: case for case in CASES}

PREDICTIONS_OF_WRONG = (
    cause_of(
        CASE["long_steps"],
        "with most=1e9 nothing is clipped at all, and the first step is still 2.81 long, not "
        "0.70",
        "the `weights` of all ranks are equal, to the bit",
        "then a clipped step would be 2 times too long on two ranks and 4 times on four; it is "
        "1.41 and 1.87 times",
        hint="Let it take a single step, without clipping, on 1, 2 and 4 ranks.",
        why="Without clipping the first step is 0.70 long on one rank, 1.40 on two, 2.81 on four: "
            "the sum of R means. And clipped steps are 1.41 and 1.87 times too long, since the "
            "largest of the parts' norms stands for the norm."),
    cause_of(
        CASE["saved_model"],
        "`weights - start` is the same on all ranks, to 1e-7; and Traffic counts four "
        "all-reduces a step, one for each parameter",
        "each rank has 60 of the 240 images of a step; and other images on rank 0 would change "
        "the averaged gradient, which all ranks use",
        "the last `weights` of rank 0 differ from the others' as well, by up to 0.34: it is not "
        "the mean",
        hint="Compare `start`, `weights` and their difference between the ranks.",
        why="`start` of rank 0 is another one, by up to 0.34; `weights - start` is the same on all "
            "ranks, to 1e-7. All move alike, so what differs at the start differs for ever."),
    cause_of(
        CASE["no_faster"],
        "Traffic counts 240 all-reduces on each rank: two parameters, 120 steps",
        "4 x 24 images are the step of one rank. But 60 steps of 24 images are a whole epoch on "
        "each rank; 15 would do",
        "the `weights` of all ranks are equal, to the bit",
        hint="What does `seen` hold on each rank, and how long is it?",
        why="`seen` is one and the same list on all four ranks: each reads all 1,437 images in an "
            "epoch. The weights are those of one rank with batch=24, to the bit."),
    cause_of(
        CASE["worse_together"],
        "one process with the same 128 images has the same gradient; a sum would be four times "
        "that. And no sum lets the rate fall to nearly 0: its last value is 0.023",
        "36 steps of 4 x 32 images are four epochs of 1,152: through the gradients each rank "
        "learns of all of them",
        "the rate never warms up: the first one, 0.03, is the largest, on one rank as on four",
        hint="Print the first and the last of `rates`, on one rank and on four.",
        why="`rates` go from 0.030 to 0.0002 on one rank, and from 0.030 to 0.023 on four, where "
            "the recipe has 0.09 after an epoch and 0.003 at the end."),
    cause_of(
        CASE["two_scores"],
        "the `weights` of all ranks are equal, to the bit",
        "images.held_out and its labels are the same on all ranks, and no rank cuts them",
        "model.eval() is called. Without it all ranks count 307: they would normalise the same "
        "360 images by themselves",
        hint="Compare all that model.state_dict() holds between the ranks, not only what is "
             "trained.",
        why="All parameters are equal, and the running statistics are not: by up to 0.08 in the "
            "variances. With rank 0's buffers all ranks count 315, which isn't one process's 322: "
            "in training, too, each rank normalised by its own 60 images."),
    cause_of(
        CASE["moving_curve"],
        "a sum of four ranks' means would be 22, and the first loss is 5.5023",
        "their targets are -100, which cross_entropy leaves out: all 24 lines together or each "
        "alone, the sum over the tokens, divided by 1,145, is 5.5052",
        "that moves 5.5 in its seventh digit; here it is the fourth",
        hint="In the first step all weights are still equal. How many tokens does each rank have?",
        why="In the first step the ranks have 160, 272, 335 and 378 targets, and each rank's mean "
            "counts a quarter. One mean over all 1,145 is 5.5052, for any number of ranks and "
            "pieces."),
)
