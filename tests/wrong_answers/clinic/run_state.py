"""Lab 16, what a run keeps: symptoms that are treated, and mends of half of a cause."""

from mutants import mutant, slips_of

from ranklab.checks.clinic.run_state import SLIPS_OF_SHARDS
from ranklab.clinic import run_state

SCALE, NO_GRAD = run_state.SCALE, run_state.VALIDATED[0][0]
UNSCALE = f"{SCALE}        scaler.unscale_(optimizer)\n"
STEP = "        scaler.step(optimizer)\n"
FINITE = ("        fine = torch.stack([p.grad.isfinite().all() for p in model.parameters()]).all()"
          ".float()\n")
CHECKSUM = "if hashlib.sha256(shard.content).hexdigest() != shard.sha256:"
ORDER = "order.split(batch)[step % in_epoch:]"
NEWEST = "dist.all_reduce(start, dist.ReduceOp.MIN, group=group)"
OWN = "state = torch.load(Path(disk, str(start.item())), map_location=device())"

WRONG = slips_of(run_state.stored_digits, SLIPS_OF_SHARDS[1:])
WRONG += [mutant(getattr(run_state, name), *edits, says=says, called=called)
          for name, *edits, says, called in (
    ("half_digits", SCALE, UNSCALE, STEP, "        for p in model.parameters():\n"
     f"            p.grad.nan_to_num_(0.0, 0.0, 0.0)\n{STEP}", "scale ends at|one process",
     "infinities_are_made_zero"),
    ("half_digits", "torch.float16", "torch.bfloat16", "the scale ends at", "another_type"),
    ("half_digits", "init_scale=scale", "init_scale=1024.0", "the scale ends at", "a_low_scale"),
    ("half_digits", SCALE, f"{UNSCALE}{FINITE}        dist.all_reduce(fine, dist.ReduceOp.MIN, "
     "group=group)\n", STEP, f"        if fine:\n    {STEP}", "the scale ends at",
     "skips_together_and_scales_alone"),
    ("half_digits", SCALE, f"{UNSCALE}        dist.barrier(group)\n", "not finite from step",
     "a_barrier"),
    ("validated_digits", NO_GRAD, "            logits = model(held_out)\n",
     "losses.append(F.cross_entropy(logits, labels))",
     "losses.append(F.cross_entropy(logits, labels).detach())", "each step leaves 2",
     "one_of_two_numbers"),
    ("validated_digits", NO_GRAD, "            model.eval()\n            logits = model(held_out)\n"
     "            model.train()\n", "each step leaves 2", "eval_alone"),
    ("validated_digits", NO_GRAD, "            del losses[:-1], sure[:-1]\n"
     "            logits = model(held_out)\n", "numbers, not", "forgets_the_earlier_ones"),
    ("validated_digits", NO_GRAD, NO_GRAD.replace("held_out", "x[at]"),
     "F.cross_entropy(logits, labels)", "F.cross_entropy(logits, y[at])",
     "losses .* in one process", "validates_on_less"),
    ("stored_digits", CHECKSUM, "if x.abs().max() > 10:", "on a shard that is not what",
     "pixels_out_of_range"),
    ("stored_digits", CHECKSUM, "if F.cross_entropy(model(x), y) > 4:",
     "A damaged shard takes no part|not what was written", "a_high_loss"),
    ("stored_digits", CHECKSUM, "if False:", "        optimizer.step()\n",
     "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()\n",
     "A damaged shard takes no part", "clips"),
    ("stored_digits", "x, y = x[:0], y[:0]", "continue",
     "All ranks that are there must make the same calls", "leaves_the_others_alone"),
    ("resumed_digits", ORDER, "order[step * batch % len(x):].split(batch)", "more often|seen",
     "a_last_batch_as_large_as_the_others"),
    ("resumed_digits", ORDER, "order.split(batch)[step % in_epoch if last == steps else 0:]",
     "two stops", "at_the_last_start_alone"),
    ("resumed_digits", "step // in_epoch", "-(-step // in_epoch)", ORDER, "order.split(batch)",
     "more often", "leaves_the_rest_of_the_epoch_out"),
    ("resumed_digits", ORDER, "(order.split(batch) if len(losses) == step and step % in_epoch == 0 "
     "else order.flip(0).split(batch)[step % in_epoch:])", "more often|another order",
     "another_order_of_the_rest"),
    ("split_digits", f"            {NEWEST}", "            dist.broadcast(start, group=group, "
     "group_src=0)", OWN, OWN.replace("start.item()", "newest"), "goes on from step 8",
     "each_its_own_newest"),
    ("split_digits", NEWEST, f"{NEWEST.replace('MIN', 'MAX')}\n"
     "            start = (start - every).clamp(min=0)", "all have saved: it goes on from step 4",
     "always_the_one_before"),
    ("split_digits", "start > 0", "start < 0", "int(start) + 1", "1", "Start from zero only where",
     "always_anew"),
    ("split_digits", f"            {NEWEST}", f"            {NEWEST}\n            newest and "
     "start.fill_(max(int(start), 0))", OWN, OWN.replace("start.item()", "newest"),
     "not with what all ranks had", "agrees_and_loads_its_own"),
)]
