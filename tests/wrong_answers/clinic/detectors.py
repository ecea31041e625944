"""Wrong detectors: each the library's with one edit."""

from mutants import mutant

from ranklab.clinic.detectors import circle_of_waits, first_difference, own_limit, steps_behind

WRONG = [
    mutant(first_difference, "range(max(map(len, calls.values()), default=0))",
           "range(min(map(len, calls.values()), default=0))", says="those that go on are compared"),
    mutant(first_difference, "if len(kinds) > 1:", "if len(kinds) > 1 and number:",
           says="it returns 1, not 0", called="zero_is_none"),
    mutant(first_difference, "kinds = {rank_calls[number] for rank_calls in "
           "calls.values() if len(rank_calls) > number}", "kinds = {rank_calls[number] if "
           "len(rank_calls) > number else None for rank_calls in calls.values()}",
           says="a list that ends is no difference"),
    mutant(first_difference, "return number", "return number + 1", says="it returns 1, not 0"),
    mutant(circle_of_waits, "            if rank > path[0] and rank not in path and (circle := "
           "walk([*path, rank])):\n                return circle\n",
           "            if rank not in path:\n                return walk([*path, rank])\n",
           says="the first way may lead nowhere", called="no_way_back"),
    mutant(circle_of_waits, "if rank == path[0]:", "if rank in path:", called="whole_path",
           says="0 only leads to the circle"),
    mutant(circle_of_waits, "sorted(waits) if", "sorted(waits, reverse=True) if",
           "if rank > path[0] and rank", "if rank", says="Two wait for one another"),
    mutant(circle_of_waits, "waits.get(path[-1], ())", "waits[path[-1]]",
           says=r"KeyError: 2.*waits=\{0: \{1\}", called="waits_for_nobody"),
    mutant(own_limit, "count >= 2", "count >= 1", says="One rank alone has"),
    mutant(own_limit, "max(2, len(norms) / 10)", "max(1, len(norms) / 10)",
           says="in one step of 5", called="once_in_a_short_run"),
    mutant(own_limit, "if math.isfinite(norm)), default=0)", "), default=0)",
           says="not finite say nothing"),
    mutant(own_limit, "max(2, len(norms) / 10)", "1", says="in one step of 5", called="once"),
    mutant(own_limit, "len(norms) / 10", "0", says="2 of 29 are no tenth", called="no_tenth"),
    mutant(own_limit, "norm >= limit * (1 - tolerance)", "norm == limit",
           says="alike up to `tolerance`"),
    mutant(steps_behind, "range(len(used) // 2)", "range(1, len(used) // 2)",
           says="the smallest number that fits"),
    mutant(steps_behind, "if misses <= len(pairs) / 10:", "if not misses:",
           says="A tenth of the steps may differ"),
    mutant(steps_behind, "rel_tol=tolerance", "rel_tol=1e-3", says="`tolerance` is small"),
    mutant(steps_behind, "zip(used[behind:], held)", "zip(used, held[behind:])",
           says="the smallest number that fits nearly all", called="the_wrong_way"),
]
