"""dispatch_tokens and combine_tokens, compared with loops over the tokens of all ranks."""

import torch
import torch.distributed as dist

from ranklab.checks.expert_parallel.inputs import (
    COST, EVEN, NONE, RING, C, E, Tokens, costs, error_of, of_all, sent_of, to_rank, ways,
)
from ranklab.checks.expert_parallel.ties import UnstableSorts
from ranklab.checks.handles import Waits
from ranklab.checks.prover import ALL, GROUPS, Must, Proof, Slip, Stage
from ranklab.engine import device
from ranklab.expert_parallel import combine_tokens, dispatch_tokens
from ranklab.expert_parallel.dispatch import all_to_all_rows
from ranklab.meter import Traffic

GROUP = ("Pass `group` to every collective and to get_world_size: other ranks of the world are not "
         "in it.")
PLACE = ("Index p of chosen.flatten() belongs to token p // k, where k is the second dimension of "
         "`chosen`.")

CASES = Tokens("float32", 3, EVEN), Tokens("bfloat16", 3, RING), Tokens("float32", 2, NONE)


def _backward(out, gradient):
    """Run backward on all ranks, whatever the shape of their results: others may wait."""
    if isinstance(out, torch.Tensor) and out.requires_grad:
        fits = out.shape == gradient.shape
        out.backward(gradient.to(out) if fits else torch.ones_like(out))


# --- dispatch_tokens ------------------------------------------------------------------------------

RETURNED, ROWS = "what is returned", "rows and a Sent"
UNUSABLE, ERROR, GRADIENT = "what combine_tokens can't use", "the error", "the gradient of x"
KINDS = {"order": torch.Tensor, "to": (list, tuple), "came": (list, tuple),
         "by_expert": torch.Tensor, "counts": (torch.Tensor, list, tuple)}


def _see_dispatch(fn, tokens, ranks):
    R, all_ways = ranks.size, tokens.ways(ranks.members)
    arrivals = to_rank(all_ways, ranks.index, R)
    departures = [way for way in all_ways if way.source == ranks.index]
    x, chosen, _ = tokens.of(dist.get_rank(), ranks.members)
    x.requires_grad_()
    row_bytes = C * x.element_size()
    with Traffic() as traffic, Waits() as waits, UnstableSorts():
        result = fn(x, chosen, E, **ranks.keywords)
    rows, sent = result if _kind(result) == ROWS else (None, [None] * len(KINDS))
    yield {RETURNED: _kind(result), **{
        name: torch.as_tensor(value).long() if isinstance(value, torch.Tensor | list | tuple)
        else value for name, value in zip(KINDS, sent, strict=True)}, "rows": rows,
        "do rows have a gradient?": rows is not None and (rows.requires_grad or not len(rows)),
        UNUSABLE: Must([f"{name} as a {type(value).__name__}" for (name, kind), value in zip(
            KINDS.items(), sent, strict=True) if not isinstance(value, kind)], []),
        "x afterwards": x, "chosen afterwards": chosen,
        **costs(traffic, waits, 2, 8 * E + row_bytes * len(departures))}
    experts = torch.tensor([way.expert for way in arrivals], device=device())
    with Traffic() as traffic, Waits() as waits:
        _backward(rows, (1.0 + experts)[:, None].expand(-1, C))  # known for each expert
    yield {GRADIENT: x.grad, **costs(traffic, waits, 1, row_bytes * len(arrivals), " in backward")}
    if R > 1:
        token = torch.ones(1, C, device=device()), torch.zeros(1, 1, device=device()).long()
        yield {f"{ERROR} with {R + 1} experts": error_of(
            lambda: fn(*token, R + 1, **ranks.keywords))}


def _kind(result):
    if not isinstance(result, tuple):
        return type(result).__name__
    rows, sent = result if len(result) == 2 else (None, None)
    if isinstance(rows, torch.Tensor) and isinstance(sent, tuple) and len(sent) == len(KINDS):
        return ROWS
    return ", ".join(type(each).__name__ for each in result)


def all_tokens_everywhere(x, chosen, n_experts, group=None):
    """Send all tokens to every rank, which takes its own: correct, and far too expensive."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    if n_experts % R:
        raise ValueError(f"{R} ranks, {n_experts} experts")
    (tokens, lengths), (of_tokens, _) = of_all(x, group), of_all(chosen, group)
    all_ways = ways([each.flatten().tolist() for each in of_tokens.split(lengths)])
    places = [sum(lengths[:way.source]) + way.place // chosen.shape[1]
              for way in to_rank(all_ways, rank, R, n_experts)]
    return (tokens[torch.tensor(places, dtype=torch.long, device=x.device)],
            sent_of(all_ways, rank, R, n_experts))


ORDER = "flat.argsort(stable=True)[(flat < 0).sum():]"
ASK = "dist.all_to_all_single(received, counts, group=group)"
EXPERT = "torch.arange(n_experts // R, device=x.device).repeat(R).repeat_interleave(received)"
BY_EXPERT, TRAVEL = "expert.argsort(stable=True)", "AllToAll.apply(x[order // k], to, came, group)"
SIZES = "to, came = (c.view(R, -1).sum(1).tolist() for c in (counts, received))"
SENT = "Sent(order, to, came, by_expert, received.view(R, -1).sum(0))"
DISPATCH = Proof(
    dispatch_tokens,
    Stage({"each rank has the rows that chose its experts, sorted by expert; on 4, 3, 2, 1 ranks; "
           "a rank without tokens, an expert without rows, tokens without an expert": (),
           "two all-to-alls, and one back in backward; each row gets the sum of its gradients":
           ("do rows have a gradient?", GRADIENT, *COST),
           "combine_tokens can use the Sent; ranks that do not divide the experts are a ValueError":
           (UNUSABLE, *(f"{ERROR} with {R + 1} experts" for R in (2, 3, 4)))},
          _see_dispatch, CASES, (4,), (ALL, *GROUPS),
          oracle=all_tokens_everywhere),
    mistakes=(
        Slip("Return a tuple: (rows, Sent(order, to, came, by_expert, counts)).",
             (f"return rows[by_expert], {SENT}", "return rows[by_expert]"),
             (SENT, "None"), (SENT, "Sent"), (f"return rows[by_expert], {SENT}",
                                              f"return {SENT}, rows[by_expert]")),
        Slip("A choice of -1 means no expert: leave it out of `order`, and out of what bincount "
             "counts.",
             (ORDER, "flat.argsort(stable=True)"),
             (ORDER, "flat.argsort(stable=True)",
              "flat[order].bincount", "flat[flat >= 0].bincount")),
        Slip("`chosen` is an argument: leave it as it is. flatten() may return a view of it.",
             (f"order = {ORDER}", "flat[flat < 0] = n_experts\n"
              "    order = flat.argsort(stable=True)[:(flat < n_experts).sum()]"),
             ("return rows[by", "chosen.copy_(chosen.sort(-1).values)\n    return rows[by")),
        Slip("`x` is an argument: work on a copy.",
             ("return rows[by", "x.data.zero_()\n    return rows[by")),
        Slip("Sort the choices by expert, so that the rows for one rank are together.",
             (ORDER, "(flat >= 0).nonzero().flatten()")),
        Slip("In `order`, expert 0 comes first and the last expert comes last.",
             (ORDER, "flat.argsort(descending=True, stable=True)[:(flat >= 0).sum()]")),
        Slip("Choices of the same expert must stay in sequence in `order`: use "
             "argsort(stable=True).",
             (ORDER, ORDER.replace("stable=True", ""))),
        Slip(PLACE, ("x[order // k]", "x[order % k]"), ("x[order // k]", "x[order % len(x)]"),
             ("x[order // k]", "x[order // 2]"), ("x[order // k]", "x[order]"),
             ("x[order // k]", "x[order // n_experts]")),
        Slip("Send the rows in the dtype of x: no float().",
             ("x[order // k]", "x.float()[order // k]")),
        Slip("Count all experts, even those that no token here has chosen: minlength=n_experts.",
             ("bincount(minlength=n_experts)", "bincount()")),
        Slip("Only the other ranks know how many rows they will send here: exchange the counts "
             "first, with an all-to-all.", (ASK, "received = counts.clone()")),
        Slip("Loads are uneven: count the rows that go to each rank, and find out how many come "
             "from each.",
             (SIZES, "to = came = [len(order) // R] * R")),
        Slip("`to` and `came` are swapped: to[r] rows go to rank r, and came[r] rows come from it.",
             (SENT, SENT.replace("to, came", "came, to")),
             (TRAVEL, TRAVEL.replace("to, came", "came, to"))),
        Slip("The rows arrive sorted by rank. rows[by_expert] sorts them by expert.",
             ("return rows[by_expert]", "return rows")),
        Slip("by_expert leaves the rows in rank order. Each rank's rows arrive together, sorted by "
             "expert: their experts are arange(E // R).repeat(R), each repeated as often as its "
             "count says.",
             (EXPERT, EXPERT.replace(".repeat(R)", ".repeat_interleave(R)")),
             (BY_EXPERT, "torch.arange(len(expert), device=x.device)")),
        Slip("Each rank sends E/R counts, so the received counts are for the experts arange(E // "
             "R), R times.",
             (EXPERT, EXPERT.replace("n_experts // R", "R", 1).replace("repeat(R)",
                                                                      "repeat(n_experts // R)"))),
        Slip("by_expert puts this rank's last expert first.",
             (BY_EXPERT, BY_EXPERT.replace("stable", "descending=True, stable"))),
        Slip("by_expert changes the order of rows within one expert: use "
             "expert.argsort(stable=True).",
             (BY_EXPERT, "expert.argsort()"),
             (BY_EXPERT, "(expert * len(expert) - torch.arange(len(expert))).argsort()")),
        Slip("This is the inverse. by_expert is the order that sorts the received rows by expert, "
             "as in rows[by_expert].", (SENT, SENT.replace("by_expert", "by_expert.argsort()")),
             (BY_EXPERT, f"{BY_EXPERT}.argsort()")),
        Slip("counts must count the rows that this rank's experts receive, not those that the rank "
             "sends.",
             (SENT, SENT.replace("received.view(R, -1).sum(0)", "counts")),
             (SENT, SENT.replace("received", "counts")),
             (SENT, SENT.replace("received.view(R, -1).sum(0)",
                                 "counts.view(R, -1)[dist.get_rank(group)]"))),
        Slip("counts has one number for each expert of this rank: sum over the sending ranks.",
             (SENT, SENT.replace("sum(0)", "sum(1)")),
             (SENT, SENT.replace(".view(R, -1).sum(0)", ""))),
        Slip("order and by_expert must be tensors, to and came lists of numbers, and counts a "
             "tensor or a list.", (SENT, "Sent(order.tolist(), to, came, by_expert.tolist(), "
                             "received.view(R, -1).sum(0))"),
             (SENT, "Sent(order, received.new_tensor(to), received.new_tensor(came), by_expert, "
                    "received.view(R, -1).sum(0))")),
        Slip("Autograd must know the way back: use AllToAll.apply on rows of x, without detach().",
             (TRAVEL, TRAVEL.replace("AllToAll.apply", "all_to_all_rows")),
             ("x[order // k]", "x.detach()[order // k]"), all_to_all_rows=all_to_all_rows),
        Slip("One all-to-all of counts is enough.", (ASK, f"{ASK}\n    {ASK}")),
        Slip("All tokens go to all ranks here. An all-to-all sends each row only to its expert's "
             "rank.",
             all_tokens_everywhere),
        Slip("Raise ValueError if the number of ranks does not divide the experts, before anything "
             "is sent.",
             ("if n_experts % R:", "if False:")),
        Slip(GROUP, (ASK, "dist.all_to_all_single(received, counts)"),
             ("to, came, group)", "to, came, None)"),
             ("dist.get_world_size(group)", "dist.get_world_size()")),
    ), hints=(
        "In which order must the rows be so that one all-to-all can send them? And in which order "
        "do they arrive?",
        "Sort all choices by expert, because one rank's experts are adjacent. First send the "
        "counts for each expert in a separate all-to-all, so that each rank knows what to expect.",
        "received = empty_like(counts); dist.all_to_all_single(received, counts, group=group); "
        "to, came = (c.view(R, -1).sum(1).tolist() for c in (counts, received)); expert = "
        "arange(E // R).repeat(R).repeat_interleave(received); by_expert = its stable argsort",
    ))


# --- combine_tokens -------------------------------------------------------------------------------

OUT, OF_ROWS, OF_WEIGHTS = "the result", "the gradient of rows", "the gradient of weights"


def _see_combine(fn, tokens, ranks):
    R, index, all_ways = ranks.size, ranks.index, tokens.ways(ranks.members)
    arrivals = to_rank(all_ways, index, R)
    sent = sent_of(all_ways, index, R)
    weights = tokens.of(dist.get_rank(), ranks.members)[2].requires_grad_()
    # Other numbers for each expert, rank and token, exact in 16 bits.
    values = [[way.expert + way.source + way.place // tokens.k / 4 + c for c in range(C)]
              for way in arrivals]
    rows = torch.tensor(values, device=device()).view(-1, C).to(getattr(torch, tokens.dtype))
    rows.requires_grad_()
    row_bytes = C * rows.element_size()
    with Traffic() as traffic, Waits() as waits:
        out = fn(rows, sent, weights, **ranks.keywords)
    yield {OUT: out, "rows afterwards": rows, "weights afterwards": weights,
           **costs(traffic, waits, 1, row_bytes * len(arrivals))}
    gradient = (torch.arange(len(weights) * C, device=device()) % 7 - 3.0) * (index + 1)
    with Traffic() as traffic, Waits() as waits:
        _backward(out, gradient.view(-1, C))
    yield {OF_ROWS: rows.grad, OF_WEIGHTS: weights.grad, **costs(
        traffic, waits, 1, row_bytes * len(sent.order), " in backward")}


def by_a_matrix(rows, sent, weights, group=None):
    """Take this rank's own from the rows of all ranks, and multiply by a matrix of weights."""
    rank, R = dist.get_rank(group), dist.get_world_size(group)
    (every, lengths), (by_expert, _) = of_all(rows, group), of_all(sent.by_expert, group)
    counts, _ = of_all(torch.tensor(sent.came, device=rows.device), group)
    places, counts = [], counts.view(R, R).tolist()
    for s, order in enumerate(by_expert.split(lengths)):
        start, order = sum(counts[s][:rank]), order.tolist()
        places += [sum(lengths[:s]) + order.index(i) for i in range(start, start + counts[s][rank])]
    own = every[torch.tensor(places, dtype=torch.long, device=rows.device)].float()
    N, k = weights.shape
    places = torch.arange(N * k, device=rows.device)
    shares = (sent.order[:, None] == places) * weights.flatten()
    return shares.view(len(own), N, k).sum(-1).T @ own


BACK, HOME = "rows[sent.by_expert.argsort()]", "AllToAll.apply(arrivals, sent.came, sent.to, group)"
ADD = "out.index_add(0, sent.order // k, weighted.float())"
WEIGHTED = "outputs * weights.flatten()[sent.order, None]"
COMBINE = Proof(
    combine_tokens,
    Stage({"each token's weighted sum, home again, on 4, 3, 2 and 1 ranks; zeros without an "
           "expert; bfloat16 is added up in float32": (),
           "gradients of rows and weights as in one process; one all-to-all, and one in backward":
           (OF_ROWS, OF_WEIGHTS, *COST)},
          _see_combine, (*CASES, Tokens("bfloat16", 2, NONE)), (4,), (ALL, *GROUPS),
          oracle=by_a_matrix),
    mistakes=(
        Slip("Rows must go back in the order in which they arrived. Undo the sorting by expert "
             "first: rows[sent.by_expert.argsort()].", (BACK, "rows")),
        Slip("This applies the sort by expert a second time. The argsort of by_expert undoes the "
             "sort.",
             (BACK, "rows[sent.by_expert]")),
        Slip("On the way back the sizes are swapped: sent.came[r] rows go to rank r, and "
             "sent.to[r] rows come from it.",
             (HOME, HOME.replace("came, sent.to", "to, sent.came"))),
        Slip("Nothing is sent back: this rank's tokens need the outputs of experts on other ranks.",
             (HOME, "arrivals[: len(sent.order)]")),
        Slip("Multiply each row by its weight.", (WEIGHTED, "outputs")),
        Slip("Returned row i has its weight at index sent.order[i] of the flattened weights.",
             (WEIGHTED, "outputs * weights.flatten()[: len(outputs), None]"),
             (WEIGHTED, "outputs * weights.flatten()[sent.order.argsort(), None]")),
        Slip("Each choice has its own weight, not its token's first one.",
             (WEIGHTED, "outputs * weights[sent.order // k, 0, None]")),
        Slip("Use the weights as they are: don't divide by k or by their sum.",
             (ADD, f"{ADD} / k"), (ADD, f"{ADD} / weights.sum(1, keepdim=True)")),
        Slip("The product is rounded to 16 bits: multiply and add in float32.",
             (WEIGHTED, "(outputs * weights.flatten()[sent.order, None].to(outputs.dtype))")),
        Slip("The result is float32, whatever the dtype of the rows.",
             (ADD, f"{ADD}.to(rows.dtype)")),
        Slip("Sums are rounded to 16 bits along the way: keep them in float32.",
             (ADD, f"{ADD}.to(rows.dtype).float()")),
        Slip("A token with several experts gets the sum of all their outputs: index_copy keeps "
             "only one.",
             (ADD, ADD.replace("index_add", "index_copy"))),
        Slip("Index p of weights.flatten() belongs to token p // k, where k is weights.shape[1].",
             (ADD, ADD.replace("// k", "% len(weights)")), (ADD, ADD.replace("// k", "% k")),
             (ADD, ADD.replace("// k", "// 2")), (ADD, ADD.replace(" // k", ""))),
        Slip("Every result is too large by what the sum starts from: start from zeros.",
             ("torch.zeros(", "torch.ones(")),
        Slip("The result has one row per token, (N, C), not one per row sent.",
             ("torch.zeros(len(weights)", "torch.zeros(len(sent.order)"),
             (f"return {ADD}", "return weighted.float()")),
        Slip("The last tokens may have no expert. They still get rows of zeros: (N, C).",
             ("torch.zeros(len(weights)", "torch.zeros(max(sent.order.tolist(), default=-1) // k "
              "+ 1")),
        Slip("`rows` is an argument: work on a copy.", (BACK, f"{BACK}\n    rows.data.zero_()")),
        Slip("Send the rows in their own dtype: call float() after the all-to-all.",
             (HOME, HOME.replace("arrivals,", "arrivals.float(),"))),
        Slip("No gradient reaches the weights: they are cut off, by detach(), .data or no_grad().",
             (WEIGHTED, WEIGHTED.replace("weights.", "weights.detach()."))),
        Slip("Autograd must know the way back: use AllToAll.apply, without detach().",
             (HOME, HOME.replace("AllToAll.apply", "all_to_all_rows")),
             (BACK, BACK.replace("rows[", "rows.detach()[")), all_to_all_rows=all_to_all_rows),
        Slip("One all-to-all is enough.", (HOME, f"{HOME}\n    {HOME}")),
        Slip("All rows go to all ranks here. An all-to-all sends each row only to its token's "
             "rank.",
             by_a_matrix),
        Slip(GROUP, ("sent.to, group)", "sent.to, None)")),
    ), hints=(
        "Undo everything that dispatch_tokens did, the last step first.",
        "Undo the sorting by expert, then do an all-to-all with `to` and `came` swapped. Returned "
        "row i belongs to index sent.order[i] of the flattened choices.",
        "rows[sent.by_expert.argsort()]; AllToAll.apply(arrivals, sent.came, sent.to, group); zeros"
        ".index_add(0, sent.order // k, outputs * weights.flatten()[sent.order, None])",
    ))
