"""Lab 11: ways back that end elsewhere."""

from mutants import mutant

from ranklab.expert_parallel import combine_tokens
from ranklab.expert_parallel.dispatch import all_to_all_rows

BACK, HOME = "rows[sent.by_expert.argsort()]", "AllToAll.apply(arrivals, sent.came, sent.to, group)"
ADD = "out.index_add(0, sent.order // k, weighted.float())"
WEIGHTED = "outputs * weights.flatten()[sent.order, None]"

WRONG = [mutant(combine_tokens, *edits, says=says, called=called, all_to_all_rows=all_to_all_rows)
         for *edits, says, called in (
    (BACK, "rows", "out|Rows go back", "not_undone"),
    (BACK, "rows[sent.by_expert]", "out|Rows go back", "sorted_again"),
    (HOME, HOME.replace("sent.came, sent.to", "sent.to, sent.came"), "[Ss]plit|Error|does not end",
     "there_again"),
    (WEIGHTED, "outputs", "without weights", "no_weights"),
    (WEIGHTED, "outputs * weights.flatten()[: len(outputs), None]", "out",
     "weights_in_their_order"),
    (WEIGHTED, "(outputs * weights.flatten()[sent.order, None].to(outputs.dtype))", "bfloat16",
     "in_16_bits"),
    (WEIGHTED, "outputs * weights.detach().flatten()[sent.order, None]", "dweights",
     "weights_detached"),
    (HOME, HOME.replace("AllToAll.apply", "all_to_all_rows"), "drows|gradient|dweights",
     "no_gradient"),
    (ADD, "out.index_copy(0, sent.order // k, weighted.float())", "out|index_add", "overwrites"),
    (ADD, "out.index_add(0, sent.order % len(weights), weighted.float())", "out",
     "token_by_remainder"),
    (ADD, ADD.replace("// k", "// 2"), "out|Error", "always_two_choices"),
    (ADD, f"{ADD}.to(rows.dtype)", "bfloat16", "rounded"),
    ("torch.zeros(", "torch.ones(", "out", "ones_below"),
    (HOME, HOME.replace("arrivals,", "arrivals.float(),"), "bytes", "float32_travels"),
    ("torch.zeros(len(weights)", "torch.zeros(len(sent.order)", "out|shape|Error",
     "as_many_as_rows"),
    ("sent.to, group)", "sent.to, None)", "Pass `group` on|does not end|Error", "to_all_ranks"),
)]  # fmt: skip
