"""The exercises and predictions of the incidents in clinic/later.py, in the order of the lab."""

from ranklab.checks.clinic.causes import cause_of
from ranklab.checks.clinic.midway import (check_half_digits, check_stored_digits,
                                          check_validated_digits)
from ranklab.checks.clinic.restart import check_resumed_digits, check_split_digits
from ranklab.checks.exercise import Exercise
from ranklab.clinic.later import (CASES, half_digits, resumed_digits, split_digits, stored_digits,
                                  validated_digits)

LATER = (
    Exercise(half_digits, check_half_digits, hints=(
        "In which step does the first loss become NaN? Print scaler.get_scale() of each rank "
        "around it.",
        "Where in a step does GradScaler look for infinities, and what has each rank in p.grad "
        "then?",
        "Leave out scaler.unscale_: step() does it, after the sum is there. If you clip, unscale "
        "after the all-reduces.")),
    Exercise(validated_digits, check_validated_digits, hints=(
        "MemoryCurve of 4 steps and of 8, on each rank: how many bytes does a step leave?",
        "What does a tensor hold that has a grad_fn, and until when?",
        "with torch.no_grad(): logits = model(held_out). Or .item() for all that is kept.")),
    Exercise(stored_digits, check_stored_digits, hints=(
        "Which shard does which rank read in step 5, and what is x.abs().max()?",
        "Beside a shard's content stands what its content must give: hashlib.sha256(...)"
        ".hexdigest(). And a rank that leaves its shard out must not leave the others alone.",
        "x, y = x[:0], y[:0]: the sum over no images is 0, its gradients are zeros, and the count "
        "is 0.")),
    Exercise(resumed_digits, check_resumed_digits, hints=(
        "Collect `seen` of all ranks, and count how often each image comes in two epochs.",
        "How many batches of its epoch are over when the run goes on?",
        "order.split(batch)[step % in_epoch:], which is all of it where an epoch begins.")),
    Exercise(split_digits, check_split_digits, hints=(
        'Print state["step"] on every rank, after it was loaded.',
        "Two things are needed: to agree on the newest step that all have, and that every rank "
        "still has that one.",
        "A file for each step, Path(disk, str(done)); all_reduce(newest, MIN) of the ranks' newest "
        "ones; load that file, or begin anew at 0.")),
)

PREDICTIONS_OF_LATER = (
    cause_of(
        CASES[0],
        "the scale has grown to 262,144 when it happens; two ranks find infinities then, "
        "and nothing divides by a gradient",
        "replicas_agree is True at the start, and after each of the first 11 steps",
        "the loss of rank 0 falls from 2.37 to 1.93 in 11 steps, and does not rise",
        "the images of all ranks are finite, and so is each loss up to step 11",
        hint="Print `scaler.get_scale()` after each step on each rank, and "
             "`replicas_agree(model)`.",
        why="After step 11 the scale is 131,072 on ranks 2 and 3, which found infinities and "
            "skipped, and 262,144 on ranks 0 and 1, which stepped with the sum. Mended, all ranks "
            "skip the same steps and have one scale."),
    cause_of(
        CASES[1],
        "a MemoryCurve adds up what is alive, without gaps; on rank 0 it grows by 214,572 "
        "bytes a step",
        "they take 92,160 bytes and are made once; a step leaves 214,572",
        "all ranks make the same 16 all-reduces in 4 steps, and none of them gathers",
        "ranks 1 to 3 have the same optimizer, and peak at 628,288 bytes after 4 steps and "
        "after 8",
        hint="Run 4 steps and 8 in a MemoryCurve on each rank, and compare the peaks.",
        why="Rank 0 alone grows, by 214,572 bytes a step: nearly the 184,320 of the 360 x 128 "
            "activations that a graph keeps, and the logits. Mended, 7 steps take the memory of "
            "3."),
    cause_of(
        CASES[2],
        "replicas_agree is True after each step",
        "all losses are finite, the largest is 13.9, and so are the weights",
        "its largest number is 14,712; in all other shards it is 1.85",
        "with a tenth of it the loss is 2.38 in step 4, and 18.5 in step 5",
        hint="Which shard does each rank read in step 5? Look at its numbers, and at all "
             "that comes with it.",
        why="sha256 of shard 21 is not what stands beside it. Rank 1 of 4 reads it in step 5, one "
            "rank alone in step 21. Mended, the run is as if the damaged shard had no images."),
    cause_of(
        CASES[3],
        "in each step the four ranks have 120 different images",
        'state["step"] is 8, and 12 losses are there for 12 steps',
        "the norm of its momentum is 4.448 in the file, and after loading",
        "replicas_agree is True after loading",
        hint="Collect what all ranks return as `seen`, and count: twelve steps are two "
             "epochs.",
        why="In two epochs 240 images, two batches, are seen three times, and 220 once. Mended, "
            "the run is the one that was never stopped."),
    cause_of(
        CASES[4],
        "it is in the file, and comes back: its norm is 1.6 to 2.5 on the four ranks",
        "where all ranks have saved (first=4), the loss of step 8 is 0.50, as without a "
        "stop",
        "each rank has 16 columns before and after",
        "float32 is saved, and the restart with first=4 is as good as none",
        hint="Each rank has a file of its own. What does each of them hold?",
        why='state["step"] is 8, 4, 8 and 8 on the four ranks. Mended, the run goes on from the '
            "newest step that all ranks have, and nothing is lost but what came after it."),
)
