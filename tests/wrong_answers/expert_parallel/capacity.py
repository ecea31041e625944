"""Lab 11: places that are counted wrongly."""

from mutants import mutant

from ranklab.expert_parallel import capacity

FIRST = "by_choice = chosen.transpose(-1, -2).flatten(-2)"
BACK = "allowed.unflatten(-1, (k, T)).transpose(-1, -2)"
KEPT = "place <= expert_slots(T, n_experts, k, factor)"

WRONG = [mutant(capacity, *edits, says=says, called=called) for *edits, says, called in (
    (FIRST, "by_choice = chosen.flatten(-2)", BACK, "allowed.unflatten(-1, (T, k))",
     "token by token", "by_token"),
    ("place <=", "place <", "one fewer", "one_fewer"),
    (KEPT, "place <= expert_slots(T, n_experts, k, factor) + 1", "one more", "one_more"),
    (KEPT, "place <= int(T * k / n_experts * factor)", "rounded down", "rounded_down"),
    (KEPT, "place <= expert_slots(T, n_experts, 1, factor)", "without k", "without_k"),
    (KEPT, f"place <= max(2, {KEPT[9:]})", "one more", "two_at_least"),
    (KEPT, "place > 0", "as it was", "all_kept"),
    ("return ",
     "allowed = allowed.unflatten(-1, (k, T)).transpose(-1, -2)\n    "
     "allowed = allowed.where((allowed >= 0).all(-1, keepdim=True), -1)\n    return allowed or ",
     "whole tokens dropped|Boolean",
     "whole_tokens"),
    (", -1)\n", ", n_experts)\n", " is ", "an_expert_too_many"),
    (BACK, "allowed.unflatten(-1, (T, k))", " is ", "not_turned_back"),
    (".where(", ".masked_fill_(~(", KEPT, f"{KEPT})", "is changed|token by token", "in_place"),
) if called not in ("whole_tokens", "in_place")]  # fmt: skip


def capacity__whole_tokens(chosen, n_experts, factor):
    """whole tokens dropped"""
    from ranklab.expert_parallel import route

    T, k = chosen.shape[-2:]
    row = chosen.transpose(-1, -2).flatten(-2)
    place = route.torch.nn.functional.one_hot(row, n_experts).cumsum(-2).gather(
        -1, row[..., None])[..., 0]
    kept = (place <= route.expert_slots(T, n_experts, k, factor)).unflatten(-1, (k, T))
    return chosen.where(kept.all(-2)[..., None], -1)


def capacity__of_the_whole_batch(chosen, n_experts, factor):
    """all sequences together"""
    from ranklab.expert_parallel import route

    T, k = chosen.shape[-2:]
    room, taken, out = route.expert_slots(T, n_experts, k, factor), {}, chosen.clone()
    for sequence in out.view(-1, T, k):
        for j in range(k):
            for t in range(T):
                e = int(sequence[t, j])
                taken[e] = taken.get(e, 0) + 1
                if taken[e] > room:
                    sequence[t, j] = -1
    return out


def capacity__changes_its_input(chosen, n_experts, factor):
    """`chosen` is changed"""
    from ranklab.expert_parallel import route

    T, k = chosen.shape[-2:]
    for sequence in chosen.view(-1, T, k):
        taken = [0] * n_experts
        for j in range(k):
            for t in range(T):
                e = int(sequence[t, j])
                taken[e] += 1
                if taken[e] > route.expert_slots(T, n_experts, k, factor):
                    sequence[t, j] = -1
    return chosen
