"""Lab 16, what a run keeps: right mends of other kinds."""

from ranklab.checks.prover.slips import edited
from ranklab.clinic import run_state

SCALE, NO_GRAD = run_state.SCALE, run_state.VALIDATED[0][0]
MEAN = "            p.grad /= ranks\n"
LOSS, SURE = "F.cross_entropy(logits, labels)", "logits.softmax(1).amax(1).mean()"
EMPTY, COUNT = "x, y = x[:0], y[:0]", "float(len(y))"
BACKWARD = "        loss.backward()\n"
MIN = "            dist.all_reduce(start, dist.ReduceOp.MIN, group=group)  # what all have\n"

RIGHT = {kind: edited(getattr(run_state, name), edits) for name, *edits, kind in (
    ("half_digits", SCALE, f"{SCALE}        scaler.unscale_(optimizer)\n"
     "        found = scaler._per_optimizer_states[id(optimizer)]['found_inf_per_device']\n"
     "        for each in found.values():\n"
     "            dist.all_reduce(each, dist.ReduceOp.MAX, group=group)\n", "found_inf_is_shared"),
    ("half_digits", MEAN, f"{MEAN}        scaler.unscale_(optimizer)\n", "unscaled_after_the_sum"),
    ("half_digits", MEAN, "", "scale(loss)", "scale(loss / ranks)", "divided_before"),
    ("validated_digits", NO_GRAD, "            logits = model(held_out)\n", f"{LOSS})",
     f"{LOSS}.item())", f"{SURE})", f"{SURE}.item())", "[each.item() for each in losses]", "losses",
     "[each.item() for each in sure]", "sure", "numbers_are_kept"),
    ("validated_digits", NO_GRAD, "            logits = model(held_out).detach()\n", "detached"),
    ("stored_digits", EMPTY, "x, y = 0 * x.nan_to_num(0, 0, 0), torch.full_like(y, -100)", COUNT,
     "float((y >= 0).sum())", "labels_that_cross_entropy_ignores"),
    ("stored_digits", BACKWARD, f"        if len(y):\n    {BACKWARD}        else:\n"
     "            for p in model.parameters():\n"
     "                p.grad = torch.zeros_like(p)\n", "zeros_by_hand"),
    ("resumed_digits", "order.split(batch)[step % in_epoch:]",
     "order[step % in_epoch * batch:].split(batch)", "counted_in_images"),
    ("split_digits", MIN, "            every_rank = [None] * ranks\n"
     "            steps_here = [int(path.name) for path in Path(disk).iterdir()]\n"
     "            dist.all_gather_object(every_rank, steps_here, group=group)\n"
     "            start = torch.tensor(max(set.intersection(*map(set, every_rank)), default=0))\n",
     "the_newest_in_all_sets"),
)}
