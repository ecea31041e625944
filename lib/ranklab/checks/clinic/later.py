"""The exercises and predictions of the incidents in clinic/later.py, in the order of the lab."""

from ranklab.checks.clinic.midway import (check_half_digits, check_stored_digits,
                                          check_validated_digits)
from ranklab.checks.clinic.restart import check_resumed_digits, check_split_digits
from ranklab.checks.exercise import Exercise, Prediction
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
