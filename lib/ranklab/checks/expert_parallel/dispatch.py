"""The checks of dispatch_tokens and combine_tokens: there and back, beside one process."""

from functools import partial

import torch

from ranklab.checks.beside import beside, expect, on_groups, refused
from ranklab.engine import device
from ranklab.expert_parallel import Sent, combine_tokens, dispatch_tokens

C, E = 3, 12  # 4, 3, 2 and 1 ranks divide the experts
EMPTY = 5  # an expert that nobody chooses
FAILURES = {"RuntimeError: .*not equal to group size.*": "The sizes of an all-to-all have one "
            "number for each rank of the group that it is given."}
BACK = {**FAILURES, "RuntimeError: .*[Ss]plit sizes.*": "On the way back the sizes change places: "
        "sent.came[r] rows go to rank r, and sent.to[r] come from it."}
ADVICE = {
    "order": "Places in chosen.flatten(), sorted by expert, stably; without the ones of no expert.",
    "to": "How many rows go to each rank: its experts' counts, added up.",
    "came": "How many rows come from each rank: it tells, by an all-to-all of its counts.",
    "counts": "(E/R,): rows for each expert of this rank, from all ranks.",
    "dx": "A row that was sent twice gets the sum of both gradients.",
}


def _given(rank, turn, members):
    """(x, chosen, weights) of a rank: ranks have unequal numbers of tokens, the last of several
    none; some tokens have no expert. The first turn is bfloat16; the second has three choices.
    """
    random = torch.Generator().manual_seed(100 * turn + rank)
    n = 0 if len(members) > 1 and rank == members[-1] else 5 + 2 * (rank + turn) % 4
    x = torch.randint(-9, 10, (n, C), generator=random).to((torch.bfloat16, torch.float32)[turn])
    chosen = torch.rand(n, E, generator=random).argsort(dim=1)[:, : 2 + turn]
    chosen[chosen == EMPTY] = -1
    weights = torch.rand(n, 2 + turn, generator=random) + 0.1
    return x, chosen, weights


def _everywhere(turn, members):
    """[(rank's index, token, choice, expert)] in the order in which experts have their rows."""
    found = []
    for index, rank in enumerate(members):
        _, chosen, _ = _given(rank, turn, members)
        found += [(e, index, t, j) for t, row in enumerate(chosen.tolist())
                  for j, e in enumerate(row) if e >= 0]
    return sorted(found)


def _expected(turn, ranks):
    """What dispatch_tokens gives each member of the group, by loops."""
    members, R = ranks.members, ranks.size
    given, rows = [_given(rank, turn, members) for rank in members], _everywhere(turn, members)
    found = {name: [] for name in (*Sent._fields, "rows", "dx", "as they came", "experts")}
    for me in range(R):
        here = [row for row in rows if row[0] // (E // R) == me]
        sent = [row for row in rows if row[1] == me]  # sorted by expert
        arriving = sorted(here, key=lambda row: (row[1], row[0], row[2], row[3]))
        places = {row: i for i, row in enumerate(arriving)}
        dx = torch.zeros_like(given[me][0])
        for e, _, t, j in sent:
            dx[t] += 1 + e
        found["rows"].append(torch.stack([given[r][0][t] for _, r, t, _ in here]) if here
                             else given[me][0][:0])
        found["as they came"].append(torch.stack([given[r][0][t] for _, r, t, _ in arriving])
                                     if here else given[me][0][:0])
        found["experts"].append(torch.tensor([e for e, *_ in arriving]).long())
        found["dx"].append(dx)
        found["order"].append(torch.tensor([t * (2 + turn) + j for _, _, t, j in sent]).long())
        for name, of, at in (("to", sent, 0), ("came", here, 1)):
            owner = [row[0] // (E // R) if at == 0 else row[1] for row in of]
            found[name].append(torch.tensor([owner.count(r) for r in range(R)]))
        found["by_expert"].append(torch.tensor([places[row] for row in here]).long())
        found["counts"].append(torch.tensor([sum(row[0] == e for row in here) for e in range(
            me * E // R, (me + 1) * E // R)]))
    return found


def _dispatch(dispatch_tokens, ranks):
    calls, me = {}, ranks.index
    expected = [_expected(turn, ranks) for turn in range(2)]

    def call(turn):
        x, chosen, _ = _here(turn, ranks)
        x.requires_grad_()
        found = dispatch_tokens(x, chosen, E, ranks.group)
        if not _is_sent(found):
            return {}
        calls[turn] = rows, sent = found
        experts = torch.arange(me * E // ranks.size, (me + 1) * E // ranks.size, device=device())
        lists = {name: torch.as_tensor(value, device=device()).long()
                 for name, value in zip(Sent._fields, sent)}
        counts = lists["counts"]
        if rows.requires_grad and counts.shape == experts.shape and len(rows) == counts.sum():
            factor = 1.0 + experts.repeat_interleave(counts)  # known for each expert
            (rows * factor[:, None]).sum().backward()
        return {"rows": rows, **lists, "dx": x.grad}

    def right(turn):
        return {name: expected[turn][name] for name in (*Sent._fields, "rows", "dx")}

    def slips(name, turn):
        return {"sorted by rank, not by expert": (expected[turn]["as they came"][me], "They come "
                "in this order: by_expert sorts them.")} if name == "rows" else {}

    _, chosen, _ = _here(0, ranks)
    nbytes = 8 * E + 2 * C * (int((chosen >= 0).sum()) + len(_rows(0, ranks, me)))
    looks = list(beside(str(ranks), ranks, call, right, slips=slips,
                        advice=lambda name: ADVICE.get(name, ""), sends=(3, nbytes)))
    yield partial(expect, len(calls) == 2, f"{ranks}: not rows and a Sent",
                  f"Return rows, Sent({', '.join(Sent._fields)}).")
    for turn, (rows, sent) in calls.items():
        yield partial(_is_stable, f"{ranks}: by_expert", sent[3], expected[turn]["experts"][me])
        yield partial(expect, rows.requires_grad or not len(rows), f"{ranks}: rows have no "
                      "gradient", "Autograd must know the way there: AllToAll.apply.")
    yield from looks
    weights = _here(1, ranks)[2]
    yield partial(expect, *_goes_back(str(ranks), *calls[1], weights, ranks.group), KINDS)
    x, chosen = torch.ones(1, C, device=device()), torch.zeros(1, 1, device=device()).long()
    odd = partial(dispatch_tokens, x, chosen, ranks.size + 1, ranks.group)
    yield refused(f"{ranks}: {ranks.size + 1} experts", odd) if ranks.size > 1 else bool


def _here(turn, ranks):
    """_given, of this rank and on its device."""
    return [t.to(device()) for t in _given(ranks.members[ranks.index], turn, ranks.members)]


def _is_sent(found):
    """True for (rows, something with the fields of a Sent)."""
    return (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.Tensor)
            and isinstance(found[1], tuple) and len(found[1]) == len(Sent._fields))


def _is_stable(where, got, experts):
    """A Mistake where `got` sorts the rows by expert, and changes the order of an expert's rows."""
    got = torch.as_tensor(got).cpu()
    if got.shape != experts.shape or not torch.equal(got.sort().values, torch.arange(len(experts))):
        return
    is_sorted = torch.equal(experts[got], experts.sort().values)
    expect(not is_sorted or torch.equal(got, experts.argsort(stable=True)), f"{where} sorts by "
           "expert, but not stably: rows of one expert change places", "")


KINDS = "order and by_expert are tensors, to and came lists of numbers, counts a tensor or a list."


def _goes_back(where, rows, sent, weights, group):
    """(whether combine_tokens can use what was returned, what it says if it can't)"""
    try:
        combine_tokens(rows.detach(), Sent(*sent), weights, group)
    except (AttributeError, TypeError, IndexError) as error:
        return False, f"{where}: combine_tokens can't use this Sent: {error}".splitlines()[0]
    return True, ""


def check_dispatch_tokens(dispatch):
    on_groups(_dispatch, dispatch, at_once=True, failures=FAILURES)
    yield "each rank has the rows that chose its experts, sorted by expert; on 4, 3, 2, 1 ranks"
    yield "a rank without tokens, an expert without rows, tokens without an expert"
    yield "two all-to-alls, and one back in backward; each row gets the sum of its gradients"
    yield "combine_tokens can use the Sent"


# --- combine_tokens -------------------------------------------------------------------------------

HOME = {
    "out": "The sum of weight times output; rows that come home are in the order of sent.order.",
    "drows": "The gradient of a row is its token's, times its weight.",
    "dweights": "The gradient of a weight: what the expert made, times the token's gradient.",
}


def _rows(turn, ranks, index):
    """[(expert, rank's index, token, choice)] of what this member of the group gets, in order."""
    return [row for row in _everywhere(turn, ranks.members)
            if row[0] // (E // ranks.size) == index]


def _made(turn, ranks, index, dtype):
    """What its experts make of the rows: other numbers for each expert, exact in 16 bits."""
    numbers = [[e + r + t / 4 + c for c in range(C)] for e, r, t, _ in _rows(turn, ranks, index)]
    return torch.tensor(numbers).view(-1, C).to(dtype)


def _grad_out(index, n=12):
    return (torch.arange(n * C).view(n, C) % 7 - 3.0) * (index + 1)


def _home(turn, ranks, dtype):
    """What combine_tokens and its backward give each member, by loops; "plain" is unweighted."""
    given = [_given(rank, turn, ranks.members) for rank in ranks.members]
    found = {"out": [torch.zeros(len(x), C) for x, _, _ in given], "drows": [],
             "dweights": [torch.zeros_like(weights) for *_, weights in given],
             "plain": [torch.zeros(len(x), C) for x, _, _ in given]}
    for index in range(ranks.size):
        made = _made(turn, ranks, index, dtype)
        found["drows"].append(torch.zeros_like(made))
        for i, (_, r, t, j) in enumerate(_rows(turn, ranks, index)):
            y, w, g = made[i].float(), given[r][2][t, j], _grad_out(r)[t]
            found["out"][r][t] += w * y
            found["plain"][r][t] += y
            found["dweights"][r][t, j] = (y * g).sum()
            found["drows"][index][i] = (w * g).to(dtype)
    return found


def _combine(combine_tokens, ranks, dtype):
    me = ranks.index

    def call(turn):
        x, chosen, weights = _here(turn, ranks)
        _, sent = dispatch_tokens(x, chosen, E, ranks.group)
        rows = _made(turn, ranks, me, dtype).to(device()).requires_grad_()
        out = combine_tokens(rows, sent, weights.requires_grad_(), ranks.group)
        if out.requires_grad and out.shape == (len(x), C):
            out.backward(_grad_out(me)[: len(x)].to(out))
        return {"out": out, "drows": rows.grad, "dweights": weights.grad}

    def right(turn):
        found = _home(turn, ranks, dtype)
        del found["plain"]
        return found

    def slips(name, turn):
        if name != "out":
            return {}
        found, x = _home(turn, ranks, dtype), _given(ranks.members[me], turn, ranks.members)[0]
        out = found["out"][me]
        return {"a sum without weights": (found["plain"][me], "Each row counts by its weight."),
                "the mean over k experts": (out / (2 + turn), "The weights are a mean already."),
                "rounded to bfloat16": (out.bfloat16().float(), "Add up in float32."),
                "with the inputs": (out + x, "Add up the experts' outputs, and nothing else.")}

    mine = sum(index == me for _, index, *_ in _everywhere(0, ranks.members))
    there, back = 8 * E + 2 * C * mine, dtype.itemsize * C * (len(_rows(0, ranks, me)) + mine)
    yield from beside(f"{ranks}, {str(dtype)[6:]}", ranks, call, right, slips=slips,
                      advice=lambda name: HOME[name] if dtype == torch.float32 else
                      "In float32 it is right: multiply and add up in float32.",
                      sends=(4, there + back))


def _both_types(combine_tokens, ranks):
    yield from _combine(combine_tokens, ranks, torch.float32)
    yield from _combine(combine_tokens, ranks, torch.bfloat16)


def check_combine_tokens(combine):
    on_groups(_both_types, combine, at_once=True, failures=BACK)
    yield "each token's weighted sum, home again, on 4, 3, 2 and 1 ranks; zeros without an expert"
    yield "gradients of rows and weights as in one process; bfloat16 is added up in float32"
