"""Which cause is it? The answer for each incident, and what speaks against the other causes.

Every number was measured on the programs as they were found, with their own settings.
"""

from ranklab.checks.exercise import Prediction
from ranklab.clinic.all_cases import CASE
from ranklab.clinic.flight import not_waiting, read_dumps


def _cause_of(name, *against, why, hint):
    """The Prediction of the right number in case.choices.

    against  for each wrong cause, in the order of case.causes: a measurement that it can't
             explain
    """
    case = CASE[name]
    numbers = [case.choices.index(cause) + 1 for cause in case.causes]
    return Prediction(f"clinic_{name}_cause", solution=str(case.cause), tolerance=0, why=why,
                      answer=lambda: case.cause, hint=hint,
                      mistakes=dict(zip(numbers[1:], against, strict=True)))


PREDICTIONS = (
    _cause_of(
        "train_with_owners",
        "when it hangs, each rank has made 4 reduces and is in its first broadcast",
        "the first tensors that they send differ in size because they are different tensors: name "
        "by name, the sizes are equal on all ranks",
        "there is only one group, with all ranks",
        "all ranks have slept for a second, and none of them uses its core",
        hint=("All ranks wait at the same line. Let each rank print `name` and `owner[name]` "
              "before it."),
        why=("Rank r begins with the parameter that it owns, so all four ranks send and none "
             "receives.")),
    _cause_of(
        "train_on_a_grid",
        "within each group, all ranks make the same calls in the same order; print them",
        "in a step each rank makes two calls in its row, and two in its column",
        "with width=32 each rank has 16 rows of one matrix and 16 columns of the other",
        "the report names a line for each of the four ranks, and none has returned",
        hint=("The report says where each rank waits. In which group does it wait, and for which "
              "rank?"),
        why=("Rank 0 waits in its row for 1, 1 in its column for 3, 3 in its row for 2, and 2 in "
             "its column for 0.")),
    _cause_of(
        "train_until_good",
        "there is only one call in a step, so there is no order to get wrong",
        "the missing rank has returned its weights",
        "there is only one group, with all ranks",
        "the missing rank has returned: it will not come",
        hint="Which rank has returned? Let each rank print its step and what it has called so far.",
        why=("A rank without a clear scan skips a call, and a rank whose own score is good enough "
             "leaves the loop.")),
    _cause_of(
        "train_large_batch",
        "all ranks do the same work: the same windows, calls and bytes",
        "that costs calls, not bytes; and the bytes sent are 8 times those of one gradient",
        "that would only halve the bytes, but 8 times too many are sent",
        "the bytes of a step are 8 times those of the model's gradient",
        hint=("Compare two numbers: the bytes that a rank sends in a step, and the bytes of one "
              "gradient."),
        why=("A step sends 658,464 bytes in 88 calls; one gradient and a loss need 82,308 bytes in "
             "11 calls.")),
    _cause_of(
        "train_on_functions",
        "another card changed nothing, and its time grows with its number of tokens",
        "each rank has 8 functions in a step, in 4 piles",
        "it enters each all-reduce last, and waits there the least",
        "its time goes into forward and backward: look at its timeline",
        hint="How long does each rank compute, and on how many tokens?",
        why=("The batch is sorted by length, so the last rank gets the longest functions, nearly "
             "half of all the work.")),
    _cause_of(
        "long_steps",
        "with most=1e9 nothing is clipped at all, and the first step is still 2.81 long, not "
        "0.70",
        "the `weights` of all ranks are equal, to the bit",
        "then a clipped step would be 2 times too long on two ranks and 4 times on four; it is "
        "1.41 and 1.87 times",
        hint="Run a single step, without clipping, on 1, 2 and 4 ranks.",
        why=("Without clipping, the first step's norm is 0.70 on one rank, 1.40 on two and 2.81 on "
             "four: a sum of R means. Clipped steps are 1.41 and 1.87 times too long, because the "
             "largest of the parts' norms is used as the whole norm.")),
    _cause_of(
        "saved_model",
        "`weights - start` is the same on all ranks, to 1e-7; and Traffic counts four "
        "all-reduces a step, one for each parameter",
        "each rank has 60 of the 240 images of a step; and other images on rank 0 would change "
        "the averaged gradient, which all ranks use",
        "the last `weights` of rank 0 also differ from the others', by up to 0.34: the running "
        "mean is not the cause",
        hint="Compare `start`, `weights` and their difference across the ranks.",
        why=("`start` differs on rank 0, by up to 0.34; `weights - start` is the same on all "
             "ranks, to 1e-7. All ranks make the same updates, so a difference at the start never "
             "goes away.")),
    _cause_of(
        "no_faster",
        "Traffic counts 240 all-reduces on each rank: two parameters, 120 steps",
        "24 is right: four times 24 is one step of 96. But each rank takes 60 steps of 24 in an "
        "epoch, which is every image; 15 are enough",
        "the `weights` of all ranks are equal, to the bit",
        hint="What does `seen` hold on each rank, and how long is it?",
        why=("`seen` is the same list on all four ranks: each reads all 1,437 images in an epoch. "
             "The weights are those of one rank with batch=24, to the bit.")),
    _cause_of(
        "worse_together",
        "one process with the same 128 images has the same gradient; a sum would be four times "
        "that. And a sum would not make the rate fall to nearly 0: its last value is 0.023",
        "36 steps of 4 x 32 images are four epochs of 1,152: through the gradients, each rank "
        "learns from all of them",
        "the rate never warms up: the first one, 0.03, is the largest, on one rank as on four",
        hint="Print the first and the last value of `rates`, on one rank and on four.",
        why="`rates` go from 0.030 to 0.0002 on one rank, and from 0.030 to 0.023 on four, where "
            "the recipe has 0.09 after an epoch and 0.003 at the end."),
    _cause_of(
        "two_scores",
        "the `weights` of all ranks are equal, to the bit",
        "images.held_out and its labels are the same on all ranks, and no rank takes only a part "
        "of them",
        "model.eval() is called. Without it, all ranks count 307: each would normalise over the "
        "same 360 images",
        hint="Compare everything in model.state_dict() across the ranks, not only what is trained.",
        why=("All parameters are equal, but the running statistics differ, by up to 0.08 in the "
             "variances. With rank 0's buffers all ranks count 315, not one process's 322: in "
             "training as well, each rank normalised over its own 60 images.")),
    _cause_of(
        "moving_curve",
        "a sum of four ranks' means would be 22, but the first loss is 5.5023",
        "their targets are -100, which cross_entropy ignores: with all 24 lines together or one by "
        "one, the sum over the tokens divided by 1,145 is 5.5052",
        "that changes the seventh digit of 5.5; here the fourth one changes",
        hint="In the first step all weights are still equal. How many tokens does each rank have?",
        why=("In the first step the ranks have 160, 272, 335 and 378 targets, yet each rank's mean "
             "has a weight of a quarter. The mean over all 1,145 is 5.5052, for any number of "
             "ranks and pieces.")),
    _cause_of(
        "wide_layer",
        "the losses of step 0 already differ, 5.561 and 5.577: no gradient has been averaged by "
        "then",
        "the bytes of step 0 add up to 7,513 on both ranks of the first pair",
        "y, after the all-reduce, is the same on both ranks of a pair: 1.3094 in all",
        hint=("In step 0, what is the last tensor that is equal on ranks 0 and 1? Run it with p=0 "
              "as well."),
        why=("In step 0, y is equal on both ranks before its dropout, but the losses are 5.561 and "
             "5.577. With p=0 both are 5.581, and the heads stay equal for all 12 steps.")),
    _cause_of(
        "staged_gpt",
        "with steps=0 token.weight and head.weight are equal bit for bit",
        "after one step all weights of the blocks are within 1e-6 of those of one rank",
        "the stages have 35 names in all: the 34 of one rank, and head.weight, the copy",
        hint=("After how many steps do the two copies differ? When do the other weights differ "
              "from those on one rank?"),
        why=("With steps=0 the copies are bit-for-bit equal. After one step, token.weight is off "
             "by 0.02 from the run on one rank, while every block is right.")),
    _cause_of(
        "gathered_model",
        "one rank has nothing to add up, and its losses are the same: 5.628, 5.610, 5.112",
        "the loss of step 1 is 5.610 with lr=0 and with lr=100: the size of a step does not matter",
        "one rank has a single shard, so no order, and its losses are the same: 5.628, 5.610, "
        "5.112",
        hint=("Does it diverge on one rank as well? What does the first loss depend on? Change the "
              "rate to 0, then to 100."),
        why="The loss of step 1 is 5.610 with lr=0, lr=1 and lr=100: it does not include step 0."),
    _cause_of(
        "moved_gpt",
        "with lr=1 the losses are the same to the last digit: 5.470, 5.507, 5.473",
        "there are 3 reduce-scatters in each step, one for each block and one for the rest",
        "the norm of all gradients is 1.45 at the step, then 2.28 and 3.55: nothing zeroes "
        "them at all",
        hint=("Which weights does the step change? Count what exists before it: the gradients and "
              "the optimizer's parameters."),
        why=("With lr=1 the losses equal those with lr=0.01 to the last digit, and none of the "
             "model's parameters `is` one of the optimizer's.")),
    _cause_of(
        "flat_model",
        "the rows' own gradients have norms of 1.84, 1.70, 1.63 and 1.61 on the four ranks; "
        "the log has 0.461 on rank 0",
        "the squares of the four norms add up to 1.052 squared, as they should: nothing is "
        "divided twice",
        "the norms of step 0 differ, and momentum begins at zero",
        hint=("Look at the norms of step 0 on all four ranks, and combine them into the norm on "
              "one rank."),
        why="0.461, 0.723, 0.520 and 0.320: the root of the sum of their squares is 1.052, the "
            "norm on one rank."),
    _cause_of(
        "half_digits",
        "the scale has grown to 262,144 when it happens; two ranks find infinities then, "
        "and nothing divides by a gradient",
        "replicas_agree is True at the start, and after each of the first 11 steps",
        "the loss of rank 0 falls from 2.37 to 1.93 in 11 steps, and does not rise",
        "the images of all ranks are finite, and so is each loss up to step 11",
        hint="Print `scaler.get_scale()` and `replicas_agree(model)` on each rank after each step.",
        why=("After step 11 the scale is 131,072 on ranks 2 and 3, which found infinities and "
             "skipped, and 262,144 on ranks 0 and 1, which stepped with the sum. Once fixed, all "
             "ranks skip the same steps and share one scale.")),
    _cause_of(
        "validated_digits",
        "a MemoryCurve adds up what is alive, without gaps; on rank 0 it grows by 214,572 "
        "bytes a step",
        "they take 92,160 bytes and are made once; each step leaves 214,572 behind",
        "all ranks make the same 16 all-reduces in 4 steps, and none of them gathers",
        "ranks 1 to 3 have the same optimizer, and peak at 628,288 bytes after 4 steps and "
        "after 8",
        hint="Run 4 steps, then 8, in a MemoryCurve on each rank, and compare the peaks.",
        why=("Only rank 0 grows, by 214,572 bytes a step: mostly the 184,320 of the 360 x 128 "
             "activations that a graph keeps, plus the logits. Once fixed, 7 steps take the memory "
             "of 3.")),
    _cause_of(
        "stored_digits",
        "replicas_agree is True after each step",
        "all losses are finite (the largest is 13.9), and so are the weights",
        "its largest number is 14,712; in all other shards it is 1.85",
        "with a tenth of it the loss is 2.38 in step 4, and 18.5 in step 5",
        hint=("Which shard does each rank read in step 5? Look at its numbers, and at everything "
              "that comes with it."),
        why=("The sha256 of shard 21 does not match the one stored with it. Rank 1 of 4 reads it "
             "in step 5, one rank alone in step 21. Once fixed, the run is as if the damaged shard "
             "had no images.")),
    _cause_of(
        "resumed_digits",
        "in each step the four ranks have 120 different images",
        'state["step"] is 8, and there are 12 losses for 12 steps',
        "the norm of its momentum is 4.448 in the file, and after loading",
        "replicas_agree is True after loading",
        hint=("Collect what all ranks return as `seen`, and count the images: twelve steps are two "
              "epochs."),
        why=("In two epochs, 240 images (two batches) are seen three times, and 220 only once. "
             "Once fixed, the run equals one that was never stopped.")),
    _cause_of(
        "split_digits",
        "it is in the file, and comes back: its norm is 1.6 to 2.5 on the four ranks",
        "where all ranks have saved (first=4), the loss of step 8 is 0.50, as without a "
        "stop",
        "each rank has 16 columns before and after",
        "float32 is saved, and with first=4 the result is as if there had been no restart",
        hint="Each rank has a file of its own. What does each file hold?",
        why=('state["step"] is 8, 4, 8 and 8 on the four ranks. Once fixed, the run continues from '
             "the newest step that all ranks have, and loses only what came after it.")),
)

FLIGHT = Prediction(
    "clinic_flight_rank", solution="2", tolerance=0,
    answer=lambda: float(not_waiting(read_dumps())[0]),
    hint="Who waits for whom? Follow the waits until you reach a rank that waits for nobody.",
    mistakes={0: "it waits in its column for rank 2, which has not come to that call",
              1: "it waits in its column for rank 3, which waits itself",
              3: "it is missing in a column, but waits itself, in its row, for rank 2"},
    why="Rank 2 has finished all that it has begun. 0 and 3 wait for it, and 1 waits for 3.")
