"""Lab 14: checks of machines that wait for ever, or blame another one."""

from mutants import mutant

from ranklab.resilience import health_check

TURN = "key=lambda link: link % 2"
CARDS = "slow_cards = {r for r in range(R) if R > 2 and {r, (r - 1) % R} <= slow_links}"

WRONG = [mutant(health_check, *edits, says=says, called=called) for *edits, says, called in (
    (TURN, "key=lambda link: link != rank", "does not end", "next_one_first"),
    (TURN, "key=lambda link: link", "come one after the other", "link_by_link"),
    ("probe.message(partner, group)", "probe.message(partner)", "another group", "no_group"),
    ("n_links = R if R > 2 else R - 1", "n_links = R", "nobody to send to", "a_link_of_one"),
    ("n_links = R if R > 2 else R - 1", "n_links = R if R > 1 else 0", "messages with",
     "two_links_of_two"),
    ("is_right and probe.memory()", "is_right", "a wrong memory", "no_memory"),
    ("is_right and probe.memory()", "probe.memory()", "a wrong product", "no_product"),
    ("max(to_next[r], from_before[(r + 1) % R])", "to_next[r]", "a slow link", "one_side"),
    ("max(to_next[r], from_before[(r + 1) % R])", "max(to_next[r], from_before[r])", "slow",
     "own_two_links"),
    (CARDS, "slow_cards = set()", "both links of rank 1 slow", "no_card"),
    (CARDS, CARDS.replace("<= slow_links", "& slow_links"), "slow is", "either_link"),
    ("in slow_cards or products[r] > slow * min(products)", "in slow_cards", "a slow product",
     "no_seconds"),
    ("slow * min(products)", "slow * sorted(products)[(R - 1) // 2]", "slow but one",
     "median_product"),
    ("max(to_next[r], from_before[(r + 1) % R])", "(to_next[r] + from_before[(r + 1) % R]) / 2",
     "a slow link", "mean_of_both_sides"),
    (CARDS, CARDS.replace("range(R)", "range(1, R)"), "both links of rank 0", "no_card_of_rank_0"),
    ("[r for r in range(R) if r in slow_cards or products[r]", "[*slow_cards] + [r for r in "
     "range(R) if products[r]", "slow is \\[1, 0\\]", "cards_first"),
    ("is_right, product = probe.product()", "is_right, product = probe.product()[0], "
     "probe.product()[1]", "product more than once", "two_products"),
    ("duration > slow * min(durations)", "duration > 3.0 * min(durations)", "slow=10",
     "own_factor"),
    ("(r, (r + 1) % R) for r in sorted(slow_links)", "(r, r + 1) for r in sorted(slow_links)",
     "links is", "no_way_round"),
    ("duration > slow * min(durations)", "duration > slow * sum(durations) / R", "links|slow",
     "mean_of_links"),
    ("dist.all_gather(rows, row, group=group)", "dist.all_gather(rows, row)", "group",
     "gathers_all"),
)]
