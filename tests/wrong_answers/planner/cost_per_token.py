"""Lab 13: a token that costs too much or too little."""

from mutants import mutant

from ranklab.planner.cost import cost_per_token

SPEED = "mfu * machine.peak_flops / model.flops_per_token(sequence)"
REFUSES = ("    if not 0 < mfu <= 1:\n"
           "        raise ValueError(f\"mfu={mfu} must be above 0 and at most 1\")\n")

WRONG = [mutant(cost_per_token, *edits, says=says, called=called) for *edits, says, called in (
    ("price / 3600 /", "price /", "3,600 times too much", "an_hours_price"),
    ("price / 3600 /", "price / 60 /", "60 times too much", "sixty_seconds"),
    (SPEED, SPEED.removeprefix("mfu * "), "as if the MFU were 100%", "no_mfu"),
    (SPEED, SPEED.replace("mfu * machine.peak_flops", "machine.peak_flops / mfu"), "Divide by the "
     "MFU", "by_the_mfu"),
    (SPEED, "mfu * machine.peak_flops / (6 * model.parameters)", "6 FLOPs for each of all", "6N"),
    (SPEED, "mfu * machine.peak_flops / (6 * model.active)", "without attention", "6_active"),
    (SPEED, "mfu * machine.peak_flops / (6 * model.parameters + 12 * model.layers * sequence * "
     "model.width)", "with all parameters", "with_embeddings"),
    (SPEED, SPEED.replace("(sequence)", "(sequence, causal=True)"), "attention halved", "causal"),
    (SPEED, SPEED.replace("(sequence)", "(sequence, forwards=2)"), "a forward more", "recompute"),
    (SPEED, SPEED.replace("machine.peak_flops", "machine.bf16"), "best matrix product", "bf16"),
    (SPEED, f"machine.node * {SPEED}", "not ", "node_shares_the_price"),
    ("price / 3600 /", "machine.node * price / 3600 /", "that of a whole node", "price_of_a_node"),
    ("price / 3600 / tokens_per_second", "3600 * tokens_per_second / price", "tokens for a dollar",
     "upside_down"),
    ("price / 3600 /", "1e6 * price / 3600 /", "Dollars of one token", "a_million"),
    ("flops_per_token(sequence)", "flops_per_token(2048)", "llama-70b.* not ", "always_2048"),
    (SPEED, "mfu * machine.peak_flops / (6 * model.active + 12 * model.layers * sequence * "
     "model.hidden)", "gpt-oss-120b.* not ", "attention_by_the_width_of_x"),
    (REFUSES, "", "mfu=.*no ValueError|ZeroDivision", "not_refused"),
    ("0 < mfu <= 1", "0 <= mfu <= 1", "ZeroDivision|mfu=0: no", "0_is_accepted"),
    ("0 < mfu <= 1", "0 < mfu <= 100", "mfu=40: no ValueError", "percent_are_accepted"),
    ("0 < mfu <= 1", "0 < mfu < 1", r"it raised ValueError.*called with gpt2-xl.* mfu=1\.0",
     "1_is_refused"),
)]  # fmt: skip


def cost_per_token__prints(model, sequence, machine, mfu, price):
    """can't be used"""
    print(price)
