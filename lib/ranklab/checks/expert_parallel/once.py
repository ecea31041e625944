"""dispatch_once: the rows of dispatch_tokens, over the slow link once to each node."""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist

from ranklab.checks.expert_parallel.dispatch import GRADIENT
from ranklab.checks.expert_parallel.inputs import (
    EVEN, HANDLES, NONE, RING, E, Tokens, error_of, of_all,
)
from ranklab.checks.expert_parallel.ties import UnstableSorts
from ranklab.checks.handles import Waits
from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage
from ranklab.checks.trial import on_ranks
from ranklab.collectives import node_groups
from ranklab.engine import device
from ranklab.expert_parallel import crossings, dispatch_once, dispatch_tokens
from ranklab.meter import Traffic

WIDTH = 64  # of a row: its bytes must outweigh the numbers that travel with it
REFUSAL = "the error with one expert more than ranks"
RETURNED, ROWS, COUNTS = "what is returned", "the rows of each expert", "counts"
WHOLE = "whole numbers"
SLOW, FAST = "bytes over the slow link", "bytes inside the node"


class Nodes(NamedTuple):
    """Tokens of all ranks, laid out as this many nodes."""

    nodes: int
    tokens: Tokens

    def __str__(self):
        return f"{self.nodes} node{'s' * (self.nodes > 1)}, {self.tokens}"

    def of(self, rank, members):
        """Return (x, chosen) of a rank, the same on every rank that calls it."""
        x, chosen, _ = self.tokens.of(rank, members)
        random = torch.Generator().manual_seed(7 + rank)
        wide = torch.randint(-9, 10, (len(chosen), WIDTH), generator=random)
        return wide.to(x), chosen


@functools.cache
def groups_of(per_node, ranks, world):
    """Make (inside, across) of this rank, once for each launch and grouping."""
    return node_groups(per_node, ranks.group)


def _see(fn, case, ranks):
    R, M = ranks.size, min(case.nodes, ranks.size)
    L, k = R // M, case.tokens.k
    groups = groups_of(L, ranks, dist.group.WORLD)
    x, chosen = case.of(dist.get_rank(), ranks.members)
    x.requires_grad_()
    row, extra = WIDTH * x.element_size(), 8 * k
    all_chosen = [case.of(rank, ranks.members)[1].tolist() for rank in ranks.members]
    out, back, spread, gathered = _enough(all_chosen, ranks.index, M, L)
    with Traffic() as traffic, Waits() as waits, UnstableSorts():
        result = fn(x, chosen, E, *groups)
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(
        result[0], torch.Tensor)
    rows, counts = result if is_pair else (None, None)
    numbers = WHOLE
    if isinstance(counts, torch.Tensor | list | tuple):
        counts = torch.as_tensor(counts, device=device())
        numbers, counts = "floats" if counts.is_floating_point() else WHOLE, counts.long()
    yield {RETURNED: "rows, counts" if is_pair else f"a {type(result).__name__}",
           COUNTS: counts, "what counts holds": Must(numbers, WHOLE),
           ROWS: _by_expert(rows, counts),
           "the type of the rows": str(getattr(rows, "dtype", None)),
           "x afterwards": x, "chosen afterwards": chosen,
           **_bytes(traffic, waits, ranks, L, out * (row + extra) + 16 * (M - 1),
                    spread * (row + extra) + 16 * E)}
    experts = torch.arange(E, device=device()).view(R, -1)[ranks.index]
    with Traffic() as traffic, Waits() as waits:
        if isinstance(rows, torch.Tensor) and rows.requires_grad:
            gradient = torch.ones_like(rows)
            if isinstance(counts, torch.Tensor) and counts.shape == experts.shape and (
                    counts.sum() == len(rows)):
                gradient *= (1 + experts).repeat_interleave(counts)[:, None]
            rows.backward(gradient)
    yield {GRADIENT: x.grad, **_bytes(traffic, waits, ranks, L, back * row, gathered * row,
                                      " in backward")}
    if R > 1:
        token = torch.ones(1, 2, device=device()), torch.zeros(1, 1, device=device()).long()
        yield {REFUSAL: error_of(lambda: fn(*token, R + 1, *groups))}


def _enough(all_chosen, index, M, L):
    """Return how many rows this rank sends at least: (over the slow link, in backward, inside the
    node, in backward), each token once to a node, and there once for each expert.
    """
    node, number = divmod(index, L)
    out = back = spread = gathered = 0
    for source, tokens in enumerate(all_chosen):
        home, place = divmod(source, L)
        for experts in tokens:
            ranks = [e * M * L // E for e in experts if e >= 0]
            nodes = {rank // L for rank in ranks}
            out += len(nodes - {node}) * (source == index)
            if node in nodes and place == number:
                back += home != node
                spread += sum(rank // L == node and rank != index for rank in ranks)
            gathered += sum(rank == index for rank in ranks) * (place != number)
    return out, back, spread, gathered


def _bytes(traffic, waits, ranks, L, slow, fast, when=""):
    near = {ranks.members[index] for index in range(ranks.size)
            if index // L == ranks.index // L}
    inside = sum(n for peer, n in traffic.bytes_to.items() if peer in near)
    return {HANDLES + when: AtMost(waits.missing(traffic.calls.total()), 0),
            SLOW + when: AtMost(traffic.sent_bytes - inside, slow, "{:,.0f} bytes leave its node; "
                                "{:,.0f} are enough"),
            FAST + when: AtMost(inside, fast)}


def _by_expert(rows, counts):
    """Sort the rows of each expert, which may have any order, by their first numbers."""
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
        return rows
    sizes = counts.flatten().tolist() if isinstance(counts, torch.Tensor) else []
    if sum(sizes) != len(rows):
        return rows
    keys = [tuple(row) for row in rows.detach().float().tolist()]
    order, start = [], 0
    for size in sizes:
        order += sorted(range(start, start + size), key=keys.__getitem__)
        start += size
    return rows.detach()[torch.tensor(order, dtype=torch.long, device=rows.device)]


def all_tokens_everywhere(x, chosen, n_experts, inside, across):
    """Send all tokens to every rank, which takes its own: correct, and far too expensive."""
    M, L = dist.get_world_size(across), dist.get_world_size(inside)
    if n_experts % (M * L):
        raise ValueError(f"{M * L} ranks, {n_experts} experts")
    tokens, choices = (of_all(of_all(each, inside)[0], across)[0] for each in (x, chosen))
    first = (dist.get_rank(across) * L + dist.get_rank(inside)) * (n_experts // (M * L))
    places = [(choices == e).nonzero()[:, 0] for e in range(first, first + n_experts // (M * L))]
    return tokens[torch.cat(places)], [len(each) for each in places]


def once_for_each_expert(x, chosen, n_experts, inside, across):
    """Dispatch over all ranks, whichever node they are on."""
    M, L, k = dist.get_world_size(across), dist.get_world_size(inside), chosen.shape[1]
    if n_experts % (M * L):
        raise ValueError(f"{M * L} ranks, {n_experts} experts")
    each = n_experts // M
    nodes = torch.where(chosen < 0, -1, chosen // each).view(-1, 1)
    rows, sent = dispatch_tokens(x.repeat_interleave(k, 0), nodes, M, across)
    experts, _ = dispatch_tokens(chosen.view(-1, 1), nodes, M, across)
    rows, sent = dispatch_tokens(rows, experts % each, each, inside)
    return rows, sent.counts


# --- the score ------------------------------------------------------------------------------------

SCORED_TOKENS, SCORED_EXPERTS, SCORED_K, SCORED_WIDTH = 64, 32, 6, 512


def _scored(fn):
    """Return (bytes over the slow link, rows that cross once, rows that cross for each expert)."""
    inside, across = node_groups(2)
    random = torch.Generator().manual_seed(dist.get_rank())
    chosen = torch.rand(SCORED_TOKENS, SCORED_EXPERTS, generator=random).argsort(dim=1)
    chosen = chosen[:, :SCORED_K].contiguous()
    x = torch.zeros(SCORED_TOKENS, SCORED_WIDTH, dtype=torch.bfloat16, device=device())
    with Traffic() as traffic:
        fn(x, chosen.to(device()), SCORED_EXPERTS, inside, across)
    node = dist.get_rank() // 2
    slow = sum(n for peer, n in traffic.bytes_to.items() if peer // 2 != node)
    return slow, *crossings(chosen, SCORED_EXPERTS, 2, node)


class Scored(Proof):
    """A Proof that, when all stages hold, prints the bytes over the slow link."""

    def prove(self, fn):
        yield from super().prove(fn)
        slow, once, each = map(sum, zip(*on_ranks(_scored, fn, ranks=4)))
        library = sum(nbytes for nbytes, *_ in on_ranks(_scored, self.plain_answer(), ranks=4))
        row = 2 * SCORED_WIDTH
        yield (f"{SCORED_K} of {SCORED_EXPERTS} experts on 2 nodes: {slow / 1e3:.1f} kB over the "
               f"slow link (library {library / 1e3:.1f}, rows alone {once * row / 1e3:.1f}; once "
               f"for each expert {each * row / 1e3:.1f})")


# --- mistakes -------------------------------------------------------------------------------------

NODE = 'chosen.div(each, rounding_mode="floor").sort(dim=1).values'
FIRST, HOP = "node.where(is_first, -1)", "dispatch_tokens(x, node.where(is_first, -1), M, across)"
TRAVEL = "AllToAll.apply(chosen[sent.order // k], sent.to, sent.came, across)"
HERE = "here.where((here >= 0) & (here < each), -1)"
SHIFT = "choices - dist.get_rank(across) * each"
LAST = "dispatch_tokens(rows, here, each, inside)"
DONE = "return rows, sent.counts"
IN_NODES = tuple(Nodes(nodes, tokens) for nodes in (2, 4, 1) for tokens in (
    Tokens("float32", 3, NONE), Tokens("bfloat16", 3, EVEN)))
ONCE = Scored(
    dispatch_once,
    Stage({"the rows of dispatch_tokens, to the bit, on 4 ranks as 2 nodes of 2, 4 of 1, 1 of 4; "
           "an empty rank, tokens of no expert, x and chosen unchanged": (),
           "between nodes, a row once to each node that has one of its experts, and its k choices":
           (SLOW,),
           "gradients add up inside the node, and cross once": (GRADIENT, f"{SLOW} in backward"),
           "inside the node, a row once for each expert": (FAST, f"{FAST} in backward", HANDLES,
                                                          f"{HANDLES} in backward"),
           "ranks that do not divide the experts are a ValueError":
           (REFUSAL,)},
          _see, IN_NODES, (4,), oracle=all_tokens_everywhere),
    Stage("in groups of 4 and 2 of 6 ranks", _see, (Nodes(2, Tokens("float32", 3, RING)),), (6,),
          (((1, 3, 4, 5), (0, 2)),), oracle=all_tokens_everywhere,
          note="On all ranks it was right. Here are groups, whose ranks are not 0 .. n-1."),
    mistakes=(
        Slip("A token with several experts on one node crosses once for each of them. Send it to "
             "the node once.", once_for_each_expert),
        Slip("A node listed twice gets the row twice, and each copy then goes to all of the "
             "token's experts there. Keep the first entry, and set the others to -1.",
             (FIRST, "node"), (FIRST, "node.where(node >= 0, -1)")),
        Slip("A token goes only to nodes that have one of its experts.",
             (FIRST, "torch.arange(M, device=x.device).expand(len(x), M)", TRAVEL,
              TRAVEL.replace("// k", "// M")), torch=torch),
        Slip("A token goes to every node that has one of its experts, not just to one of them.",
             (FIRST, "node[:, -1:]", TRAVEL, TRAVEL.replace(" // k", ""))),
        Slip("Node 0 has the first E/M experts, node 1 the next ones: node e // (E/M).",
             (NODE, "chosen.where(chosen < 0, chosen % M).sort(dim=1).values")),
        Slip("These are the choices of this rank's own tokens. The choices of the rows that "
             "arrived must cross along with them.",
             (TRAVEL, "torch.cat([chosen, chosen.new_zeros(sum(sent.came), k)])[:sum(sent.came)]"),
             torch=torch),
        Slip("sent.order counts in the flattened matrix of nodes: with k columns, index p belongs "
             "to token p // k.", (TRAVEL, TRAVEL.replace("// k", "% max(1, len(x))"))),
        Slip("Inside the node experts are counted from 0: subtract the node's first expert, "
             "m E/M.", (SHIFT, "choices")),
        Slip("Of the choices that arrived, only the ones for this node's experts count here. Set "
             "the rest to -1.", (HERE, "here % each"), (HERE, "here.clamp(0, each - 1)")),
        Slip("The two groups are swapped: first across the nodes, then inside.",
             (HOP, HOP.replace("M, across", "L, inside"), TRAVEL, TRAVEL.replace("across",
                                                                                  "inside"),
              "each = n_experts // M", "each = n_experts // L", SHIFT,
              SHIFT.replace("across", "inside"), LAST, LAST.replace("inside", "across"))),
        Slip("After the slow link a row is only on its experts' node. A second all-to-all, inside "
             "the node, brings it to their ranks.", (LAST, "(rows, sent)")),
        Slip("counts has one number for each expert of this rank: not one for all its rows, and "
             "not one for each expert of the node.",
             (DONE, "return rows, [len(rows)]"),
             (DONE, "return rows, here[here >= 0].bincount(minlength=each)")),
        Slip("counts has a number for each expert of this rank, E/R in all. Experts of other ranks "
             "have none.",
             (DONE, "own = n_experts // (M * L)\n    first = (dist.get_rank(across) * L + "
              "dist.get_rank(inside)) * own\n    return rows, [*[0] * first, *sent.counts, "
              "*[0] * (n_experts - own - first)]")),
        Slip("-1 is no expert, and so no node. Here a token without an expert crosses to node 0.",
             ("chosen.div(", "chosen.clamp(min=0).div(")),
        Slip("counts are whole numbers.",
             (DONE, "return rows, [float(count) for count in sent.counts]")),
        Slip("Return rows, counts.", (DONE, "return rows"), (DONE, "return sent.counts, rows")),
        Slip("A row's k choices are enough to name its experts. Sending E numbers with each row "
             "costs too much.",
             (TRAVEL, "AllToAll.apply((chosen[sent.order // k][..., None] == torch.arange("
              "n_experts, device=x.device)).any(1).long(), sent.to, sent.came, across)",
              SHIFT, "torch.arange(n_experts, device=x.device).where(choices > 0, -1) - "
              "dist.get_rank(across) * each"), torch=torch),
        Slip("Rows travel in the type of x: no float().", (HOP, HOP.replace("(x,", "(x.float(),")),
             (HOP, HOP.replace("(x,", "(x.float(),"), DONE, "return rows.to(x.dtype), sent.counts")
             ),
        Slip("No gradient comes back to x: send with AllToAll.apply, without detach() or "
             "no_grad().",
             (HOP, HOP.replace("(x,", "(x.detach(),")), (LAST, LAST.replace("rows", "rows.detach()",
                                                                            1))),
        Slip("`chosen` is an argument: work on a copy.",
             (f"node = {NODE}", "node = chosen.div_(each, rounding_mode=\"floor\").sort(dim=1)"
              ".values"), (DONE, "chosen.clamp_(min=0)\n    return rows, sent.counts")),
        Slip("Ranks that do not divide the experts are a ValueError, before anything is sent.",
             ("if n_experts % (M * L):", "if False:")),
        Slip("All tokens go to all ranks. A row crosses only to a node that has one of its "
             "experts.", all_tokens_everywhere),
    ), hints=(
        "Take dispatch_tokens as a tool. If each node were one expert, which of them would a token "
        "choose, and on which rank of that node would it arrive?",
        "First dispatch over `across`, with M experts: node e // (E/M), each node once for a "
        "token, and -1 for repetitions. The choices must cross with their rows. Then dispatch "
        "inside the node, where experts are counted from 0 and those of other nodes are -1.",
        "node = chosen.div(E // M, rounding_mode=\"floor\").sort(dim=1).values; a node is new "
        "where it is larger than its left neighbour. rows, sent = dispatch_tokens(x, nodes, M, "
        "across); choices = AllToAll.apply(chosen[sent.order // k], sent.to, sent.came, across)",
    ))
