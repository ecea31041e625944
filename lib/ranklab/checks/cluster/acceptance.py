"""pair_rounds: each pair once, in as few rounds as possible; suspect_parts: emulated outputs."""

import itertools
import re
import statistics
from collections import Counter
from typing import NamedTuple

from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told
from ranklab.cluster.acceptance import (
    ROW, Suspects, emulated_outputs, pair_rounds, perf_text, suspect_parts,
)

# --- pair_rounds ----------------------------------------------------------------------------------

PAIRS, TWICE, ROUNDS = "pairs that are measured", "nodes twice in a round", "rounds"


class Nodes(NamedTuple):
    """So many nodes, whose names are not in order."""

    count: int

    def __str__(self):
        return f"{self.count} node{'s' * (self.count != 1)}"

    def names(self):
        return [f"gpu{7 * i % 67:02}" for i in range(self.count)]


def _see_rounds(fn, case):
    nodes = case.names()
    rounds = fn(nodes)
    kind = _kind(rounds)
    yield {"what it returns": Must(kind, "lists of pairs"),
           "`nodes` afterwards": Must(nodes == case.names() or "changed", True)}
    if kind == "lists of pairs":
        most = case.count - 1 + case.count % 2 if case.count > 1 else 0
        yield {PAIRS: Told(sorted(sorted(pair) for each in rounds for pair in each), _pairs_apart),
               TWICE: Must([n for each in rounds for n, times in
                            Counter(node for pair in each for node in pair).items() if times > 1],
                           []),
               ROUNDS: AtMost(len(rounds), most, "{:g} rounds; {:g} are enough")}


def _kind(rounds):
    if not isinstance(rounds, list | tuple):
        return f"a {type(rounds).__name__}"
    for each in rounds:
        if not isinstance(each, list | tuple):
            return f"a list of {type(each).__name__}"
        for pair in each:
            if not isinstance(pair, list | tuple) or [type(node) for node in pair] != [str, str]:
                return f"{pair!r} where a pair of names is due"
    return "lists of pairs"


def _pairs_apart(got, due):
    got, due = (Counter(map(tuple, pairs)) for pairs in (got, due))
    parts = [f"{sum(pairs.values())} {fault} ({', '.join('-'.join(pair) for pair in [*pairs][:2])}"
             f"{', ...' * (len(pairs) > 2)})"
             for pairs, fault in ((due - got, "are missing"), (got - due, "are too many")) if pairs]
    return "; ".join(parts)


def by_numbers(nodes):
    """Return round r: the pairs whose numbers add up to r, modulo an odd number of rounds."""
    count = len(nodes)
    most = max(0, count - 1 + count % 2)
    rounds = []
    for r in range(most):
        pairs = [(a, b) for a, b in itertools.combinations(range(most), 2) if (a + b) % most == r]
        if count > most:  # the last node is paired with the one that is left over
            pairs.append((next(a for a in range(most) if 2 * a % most == r), most))
        rounds.append([(nodes[a], nodes[b]) for a, b in pairs if max(a, b) < count])
    return [each for each in rounds if each]


def one_by_one(nodes):
    return [[pair] for pair in itertools.combinations(nodes, 2)]


def greedy(nodes):
    rounds = []
    for pair in itertools.combinations(nodes, 2):
        for each in rounds:
            if not {*pair} & {node for edge in each for node in edge}:
                each.append(pair)
                break
        else:
            rounds.append([pair])
    return rounds


def all_at_once(nodes):
    return [[*itertools.combinations(nodes, 2)]] if len(nodes) > 1 else []


def neighbours(nodes):
    """Even links of a ring, then odd ones: as in health_check."""
    return [[(nodes[i], nodes[i + 1]) for i in range(first, len(nodes) - 1, 2)]
            for first in (0, 1)]


TURN = "ring = [ring[0], ring[-1], *ring[1:-1]]"
EVEN = "ring = [*nodes, *[None] * (len(nodes) % 2)]"
PAIR_ROUNDS = Proof(
    pair_rounds,
    Stage({"each pair once, for 2 to 33 nodes": (PAIRS,),
           "no node is in two pairs of a round": (TWICE,),
           "n - 1 rounds, or n for an odd number of nodes": (ROUNDS,)},
          _see_rounds, tuple(map(Nodes, (4, 2, 6, 10, 32))), oracle=by_numbers),
    Stage("an odd number of nodes, one node, none", _see_rounds,
          tuple(map(Nodes, (3, 7, 33, 1, 0))), oracle=by_numbers,
          note="For even numbers of nodes it was right. Here one node rests in each round."),
    mistakes=(
        Slip("These pairs wait for each other. Measure all pairs that share no node in one round.",
             one_by_one),
        Slip("A node is in several pairs of a round here, and they share its links: their numbers "
             "mean nothing.", all_at_once),
        Slip("The first free round is not the best: with 6 nodes this needs 7 rounds, and 5 are "
             "enough. Let the nodes turn in a circle.", greedy),
        Slip("These are only the links of a ring: every node must meet every other node.",
             neighbours),
        Slip("If all nodes turn, the same pairs come back. One must stay where it is.",
             (TURN, "ring = [ring[-1], *ring[:-1]]")),
        Slip("If nothing turns, every round has the same pairs.", (TURN, "pass")),
        Slip("A turn is missing: n nodes need n - 1 rounds.", ("in ring[1:]:", "in ring[2:]:")),
        Slip("The first round comes again at the end: n nodes need n - 1 rounds, not n.",
             ("in ring[1:]:", "in ring:")),
        Slip("Of an odd number of nodes one rests in each round, each of them once: add an empty "
             "place to the circle.", (EVEN, "ring = [*nodes]")),
        Slip("The empty place is not a node: leave its pair out.",
             ("\n                       if None not in pair]", "]")),
        Slip("Leave out empty rounds: a single node has no pair.",
             ("return [pairs for pairs in rounds if pairs]", "return rounds")),
        Slip("`nodes` is changed: turn a copy.",
             (EVEN, "nodes += [None] * (len(nodes) % 2)\n    ring = nodes")),
        Slip("Return names, not their numbers.", (EVEN, EVEN.replace("*nodes,",
                                                                     "*range(len(nodes)),"))),
    ), hints=(
        "With 6 nodes there are 15 pairs, and 3 of them fit into a round. How do you get 5 rounds "
        "in which no pair comes twice?",
        "The circle method: write the nodes in two rows, the second one backwards; who faces each "
        "other is a pair. Keep one node in its place, and turn all others by one.",
        "ring = [ring[0], ring[-1], *ring[1:-1]] after each round; the pairs are zip(ring[:half], "
        "reversed(ring[half:])). Add None if the number of nodes is odd.",
    ))

# --- suspect_parts --------------------------------------------------------------------------------


class Cluster(NamedTuple):
    """Emulated outputs of all pairs.

    of      arguments of emulated_outputs
    texts   {a pair: the text in its place}
    options of the call
    """

    name: str
    of: dict = {}
    texts: dict = {}
    options: dict = {}

    def __str__(self):
        return self.name

    def arguments(self):
        outputs, block_of = emulated_outputs(**self.of)
        return outputs | self.texts, block_of


def _see_suspects(fn, case):
    outputs, block_of = case.arguments()
    suspects = fn(outputs, block_of, **case.options)
    yield {"what it returns": Must(type(suspects).__name__, "Suspects"),
           "its types": Must(sorted({type(each).__name__ for each in suspects})
                             if isinstance(suspects, tuple) else [], ["list"])}
    for name in Suspects._fields:
        yield {name: getattr(suspects, name, None)}


def by_counting(outputs, block_of, share=0.9):
    """Read the columns by splitting lines; count slow pairs of each node, and between blocks."""
    rates = {}
    for pair, text in outputs.items():
        rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
        rates[pair] = float(rows[-1][7]) if rows else 0.0
        if any(row[8] not in ("0", "N/A") for row in rows):
            rates[pair] = 0.0
    usual = statistics.median(rates.values())
    slow = [pair for pair, rate in rates.items() if rate < share * usual]
    counts = Counter(node for pair in slow for node in pair)
    nodes = sorted(node for node in block_of if counts[node] == len(block_of) - 1)
    across, bad = Counter(), Counter()
    rest = [pair for pair in outputs if pair[0] not in nodes and pair[1] not in nodes]
    for a, b in rest:
        if block_of[a] != block_of[b]:
            for block in (block_of[a], block_of[b]):
                across[block] += 1
                bad[block] += (a, b) in slow
    blocks = sorted(block for block in across if bad[block] == across[block])
    pairs = [(a, b) for a, b in rest if (a, b) in slow and not (
        block_of[a] != block_of[b] and (block_of[a] in blocks or block_of[b] in blocks))]
    return Suspects(nodes, blocks, sorted(pairs))


DIED = "# nThread 1 nGpus 1 minBytes 1073741824\nnode12: Test NCCL failure all_reduce.cu:45\n"
WIDE = tuple(2**power for power in range(3, 35))
TEXTS = {
    **{pair: perf_text(360, sizes=WIDE) for pair in emulated_outputs(4, 4)[0] if "b1n2" in pair},
    ("b0n0", "b3n3"): perf_text(360).replace("      0", "    N/A"),
    ("b0n1", "b2n0"): perf_text(355, wrong=3),
    ("b0n2", "b3n1"): perf_text(358).replace("      0", "      1", 1),  # in the smallest size alone
    ("b1n0", "b3n1"): DIED,
    ("b2n1", "b2n2"): perf_text(360, sizes=WIDE[-6:]),  # from 512 MiB
}
CLUSTERS = (
    Cluster("32 nodes, all healthy"),
    Cluster("a slow node", {"nodes": ("b1n3",)}),
    Cluster("two slow nodes", {"nodes": ("b3n7", "b0n2")}),
    Cluster("slow uplinks of a block", {"uplinks": ("b2",)}),
    Cluster("slow uplinks by a sixth, with noise", {"uplinks": ("b3",), "lost": 0.16, "seed": 3}),
    Cluster("a slow node, and slow uplinks of its block", {"nodes": ("b1n3",), "uplinks": ("b1",)}),
    Cluster("one slow pair", {"pairs": (("b0n4", "b2n1"),)}),
    Cluster("a slow node, slow uplinks, a slow pair", {
        "nodes": ("b0n0",), "uplinks": ("b3",), "pairs": (("b1n0", "b1n1"), ("b1n0", "b2n6"))}),
)
ODD = (
    Cluster("more sizes, no check of values, wrong values, a test that died", {"each": 4}, TEXTS),
    Cluster("both nodes of a block are slow", {"each": 2, "blocks": 6, "nodes": ("b4n0", "b4n1")}),
    Cluster("two blocks, slow uplinks", {"blocks": 2, "each": 3, "uplinks": ("b1",), "busbw": 180}),

    Cluster("one block", {"blocks": 1, "each": 6, "nodes": ("b0n5",)}),
)
SHARES = (Cluster("share=0.6, 30% lost", {"nodes": ("b1n3",)}, options={"share": 0.6}),
          Cluster("share=0.95, 8% lost", {"nodes": ("b1n3",), "lost": 0.08},
                  options={"share": 0.95}))


def average(text):
    """Return the number of the text's last line with a colon, and its wrong values."""
    return float(re.search(r"Avg bus bandwidth +: ([\d.]+)", text)[1])


BUSBW = 'float(largest["busbw"]) if is_right else 0.0'
RIGHT = 'rows and all(row["wrong"] in ("0", "N/A") for row in rows)'
NODES = "if all(pair in slow for pair in outputs if node in pair)]"
BLOCKS = "if pairs and slow.issuperset(pairs)]"
REST = "for pair in outputs if not {*pair} & {*nodes}]"
LEFT = "pair in slow and pair not in explained"
SUSPECT_PARTS = Proof(
    suspect_parts,
    Stage({"slow nodes": ("nodes",), "slow uplinks of a block": ("blocks",),
           "slow pairs that neither explains": ("pairs",)},
          _see_suspects, CLUSTERS, oracle=by_counting),
    Stage("more sizes, wrong values, a test that died; blocks of two nodes, few blocks",
          _see_suspects, ODD, oracle=by_counting),
    Stage("`share` is taken as given", _see_suspects, SHARES, oracle=by_counting),
    mistakes=(
        Slip("The average is over all sizes, and small messages pull it down. Take the busbw of "
             "the largest size.", (BUSBW, "average(text) if is_right else 0.0"), average=average),
        Slip("That is the smallest size. Large messages show the bandwidth.",
             ("largest = max(", "largest = min(")),
        Slip("Wrong values are worse than slow ones: look at #wrong.", (RIGHT, "bool(rows)")),
        Slip("A wrong value in any line counts, not only in the line of the largest size.",
             (RIGHT, 'rows and rows[-1]["wrong"] in ("0", "N/A")')),
        Slip("N/A says that values were not compared (-c 0). That is no error.",
             ('in ("0", "N/A")', '== "0"')),
        Slip("A test that died has no line with numbers. Its pair counts as slow, and is not "
             "left out.", ("        rows = [*re.finditer(ROW, text)]\n",
                      "        rows = [*re.finditer(ROW, text)]\n        if not rows:\n"
                      "            continue\n")),
        Slip("Many slow pairs pull a mean down with them. Compare with the median.",
             ("statistics.median", "statistics.fmean")),
        Slip("Noise makes half of the pairs slower than the median: slow is below `share` times "
             "it.", ("least = share * ", "least = ")),
        Slip("A slow pair has two ends, and one of them is healthy. A node is suspect if all of "
             "its pairs are slow.", (NODES, NODES.replace("all(", "any("))),
        Slip("Most pairs of a node are slow if its block's uplinks are. Only all of them make the "
             "node suspect.",
             (NODES, "if 2 * sum(pair in slow for pair in outputs if node in pair) > "
              "len(block_of)]")),
        Slip("Pairs with a block whose uplinks are slow are slow for every other block as well. A "
             "block is suspect if all of its pairs to others are slow.",
             (BLOCKS, "if slow.intersection(pairs)]")),
        Slip("Pairs inside a block don't use its uplinks: leave them out.",
             (".count(block) == 1]", ".count(block) >= 1]")),
        Slip("all() of nothing is True: a block without pairs to others says nothing about its "
             "uplinks.", (BLOCKS, "if slow.issuperset(pairs)]")),
        Slip("Slow nodes explain their pairs. Take these out before you judge the uplinks and "
             "before you list the rest.", (REST, "for pair in outputs]")),
        Slip("Pairs across a slow uplink are explained: list only the others.",
             (LEFT, "pair in slow")),
        Slip("A slow pair that nothing explains must not get lost: list it in `pairs`.",
             ("sorted(pairs))", "[])")),
        Slip("Sort the names.", ("Suspects(sorted(nodes),", "Suspects(sorted(nodes)[::-1],"),
             ("sorted(pairs))", "sorted(pairs)[::-1])")),
        Slip("Return Suspects(nodes, blocks, pairs).",
             ("Suspects(sorted(nodes), sorted(blocks), sorted(pairs))",
              "(sorted(nodes), sorted(blocks), sorted(pairs))")),
        Slip("`share` is an argument.", ("least = share * ", "least = 0.9 * ")),
    ), hints=(
        "Draw the pairs as a table of nodes by nodes. Which pairs are slow if a node is, and which "
        "if the uplinks of a block are?",
        "First a number for each pair, and the slow ones by the median. Then the nodes "
        "whose pairs are all slow. Without these nodes, the blocks whose pairs to other blocks are "
        "all slow. What is left of the slow pairs is for a second measurement.",
        "rows = [*re.finditer(ROW, text)]; row['busbw'] of the largest int(row['size']), 0.0 if "
        "there is none or a row['wrong'] is neither '0' nor 'N/A'; slow = {pair for pair in busbw "
        "if busbw[pair] < share * statistics.median(busbw.values())}",
    ))
