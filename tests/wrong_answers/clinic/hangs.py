"""Lab 16: programs that are mended at one place of two, for one size, or by doing nothing."""

import textwrap

from mutants import mutant, slips_of

from ranklab.checks.clinic.hangs import SLIPS_OF_GOOD, SLIPS_OF_OWNERS
from ranklab.clinic.hangs import CASES, train_on_a_grid, train_until_good, train_with_owners
from ranklab.clinic.slowdowns import IN_A_ROW, SENT, SHARE, train_large_batch, train_on_functions


OWNERS, GRID, GOOD, *_ = CASES
SENDS = "dist.broadcast(weights[name].data, group_src=owner[name], group=group)"
REDUCE = "dist.reduce(weights[name].grad, group_dst=owner[name], group=group)"
GRADIENTS = """for part in parts:
            dist.all_reduce(part.grad, group=columns)"""
BEGIN = "[dist.all_reduce(part.grad, group=columns, async_op=True) for part in parts]"
SEEN = "seen = torch.stack([right, torch.tensor(len(held_y), device=device())])"
IN_LOOP = textwrap.indent(SENT, "    ")
SENT_ALL = f"{SENT}        dist.all_reduce(loss, group=group)\n"
ADDED = "            loss += part.detach() / ranks\n"

WRONG = slips_of(train_with_owners, SLIPS_OF_OWNERS) + slips_of(train_until_good, SLIPS_OF_GOOD)
WRONG += [mutant(program, *edits, says=says, called=called) for program, *edits, says, called in (
    (train_with_owners, *OWNERS.edits[0], "All wait in the same line", "counts_only"),
    (train_with_owners, *OWNERS.edits[1], "does not see every digit", "broadcast_only"),
    (train_with_owners, f"        for name in weights:\n            {SENDS}\n", "",
     "as its owner has it", "sends_nothing"),
    (train_with_owners, "for name in mine]", "for name in weights]", REDUCE,
     "dist.all_reduce(weights[name].grad, group=group)", f"        for name in weights:\n"
     f"            {SENDS}\n", "", "the ranks together keep .* numbers of momentum",
     "all_keep_all_momentum"),
    (train_on_a_grid, *GRID.edits[0], "for whom does it wait", "as_it_was"),
    (train_on_a_grid, "replica % tensor, []", "0, []", *GRID.edits[0], "its rank number r % tensor",
     "first_ranks_write"),
    (train_on_a_grid, GRADIENTS, f"works = [] if writes else {BEGIN}", "log.append(size)\n",
     f"log.append(size)\n            works = {BEGIN}\n        for work in works:\n            "
     "work.wait()\n", "not safe", "begun_in_two_orders"),
    (train_on_a_grid, "- 0.1 *", "- 0.0 *", "weights .*is", "learns_nothing"),
    (train_until_good, *GOOD.edits[0], "fewer calls|sum of zeros", "decides_together"),
    (train_until_good, *GOOD.edits[1], "fewer calls", "skips_together"),
    (train_until_good, "seen[0] >= good * seen[1]", "False", "decide", "never_stops"),
    (train_until_good, SEEN, "seen = (right >= good * len(held_y)).long()",
     "dist.all_reduce(seen, group=group)", "dist.broadcast(seen, group_src=0, group=group)",
     "seen[0] >= good * seen[1]", "seen", "then decide", "first_rank_decides"),
    (train_until_good, "clear = ", "clear = (x[now] != 9).all(dim=1)  # ", "sum of zeros",
     "all_scans"),
    (train_large_batch, ADDED + SENT_ALL, IN_LOOP + ADDED + "        dist.all_reduce(loss, "
     "group=group)\n", "with every micro-batch", "losses_only"),
    (train_large_batch, ADDED, "            part = part.detach()\n            dist.all_reduce(part,"
     " group=group)\n            loss += part / ranks\n", "        dist.all_reduce(loss, "
     "group=group)\n", "", "however small", "gradients_only"),
    (train_large_batch, ADDED + SENT_ALL, "            if number % accumulate == accumulate - 1:\n"
     + IN_LOOP.replace("\n    ", "\n        ").replace("    ", "        ", 1) + ADDED
     + "        dist.all_reduce(loss, group=group)\n", "second step has two", "whole_steps_only"),
    (train_large_batch, "            dist.all_reduce(parameter.grad, group=group)\n", "",
     "Compare the gradient before", "sends_nothing"),
    (train_on_functions, f"for pile in {SHARE}", f"for pile in {IN_A_ROW}", "tokens in training",
     "evaluation_only"),
    (train_on_functions, f"map(loss_of, {SHARE})", f"map(loss_of, {IN_A_ROW})",
     "tokens in evaluation", "training_only"),
    (train_on_functions, "texts = sorted(texts, key=len)", "texts = list(texts)",
     "padding included", "not_sorted"),
    (train_on_functions, "[:longest]", "[:longest // 2]", "All functions count",
     "cut_short"),
)]
