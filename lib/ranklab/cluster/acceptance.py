"""Accept nodes before a job trains on them: every pair is measured, and slow parts are named.

Leaf switches join the nodes of a block; a block's uplinks lead to the other blocks. A job on all
nodes is as slow as its slowest part, and does not say which part that is. Pairs do.

The format is nccl-tests' own (src/common.cu); emulated_outputs() writes it.
"""

import itertools
import random
import re
import statistics
from typing import NamedTuple

SIZES = tuple(2**power for power in range(30, 35))  # -b 1G -e 16G -f 2
HEADER = (
    "# nThread 1 nGpus 1 minBytes 1073741824 maxBytes 17179869184 step: 2(factor) warmup iters: 1 "
    "iters: 20\n#\n#" + 62 * " " + "out-of-place" + 23 * " " + "in-place\n"
    "#       size         count      type   redop    root" + 2 * "     time   algbw   busbw #wrong"
    + "\n#        (B)    (elements)" + 31 * " " + "(us)  (GB/s)  (GB/s)" + 12 * " "
    + "(us)  (GB/s)  (GB/s)\n")
ROW = (r"(?m)^ *(?P<size>\d+) +\d+ +\w+ +\w+ +-?\d+ +(?P<us>[\d.]+) +(?P<algbw>[\d.]+) +"
       r"(?P<busbw>[\d.]+) +(?P<wrong>\d+|N/A)\b")  # a line of one size, out of place


class Suspects(NamedTuple):
    """What is slow, each part sorted.

    nodes   names of nodes
    blocks  blocks whose uplinks are slow
    pairs   slow pairs of nodes that neither explains: measure them again
    """

    nodes: list
    blocks: list
    pairs: list


def pair_rounds(nodes):
    """Return the rounds in which all pairs are measured: [[(node, node), ...], ...].

    Each two nodes are a pair in exactly one round, in either order. In a round each node is in one
    pair at most, so all pairs of a round run at once.
    The rounds are as few as possible: nodes - 1, and one more for an odd number of nodes, because
    one of them rests in each round. No nodes or one node have none.
    nodes: different names, not modified.
    Lab: 15
    """
    ring = [*nodes, *[None] * (len(nodes) % 2)]  # whoever is paired with None rests
    rounds = []
    for _ in ring[1:]:
        half = len(ring) // 2
        rounds.append([pair for pair in zip(ring[:half], reversed(ring[half:]))
                       if None not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]  # the first one stays, the others turn
    return [pairs for pairs in rounds if pairs]


def suspect_parts(outputs, block_of, share=0.9):
    """Return the Suspects: which nodes and which blocks' uplinks make pairs slow.

    outputs: {(node, node): the text that all_reduce_perf printed}, every pair once, in any order.
    block_of: {node: its block}.
    A pair has the busbw of its largest size, out of place; it has 0 with wrong values (in a line
    #wrong is neither 0 nor N/A), and without a line of numbers, because the test hung or died.
    It is slow below `share` times the median of all pairs. (So no pair is slow if most of them
    are: compare the median with the number that was agreed on.)
    nodes: all pairs of the node are slow.
    blocks: without these nodes, all pairs between this block and others are slow, and there is at
        least one.
    pairs: slow pairs, as in `outputs`, that have no suspect node and do not cross a suspect uplink.
    Lab: 15
    """
    busbw = {}
    for pair, text in outputs.items():
        rows = [*re.finditer(ROW, text)]
        is_right = rows and all(row["wrong"] in ("0", "N/A") for row in rows)
        largest = max(rows, key=lambda row: int(row["size"]), default=None)
        busbw[pair] = float(largest["busbw"]) if is_right else 0.0
    least = share * statistics.median(busbw.values())
    slow = {pair for pair in busbw if busbw[pair] < least}
    nodes = [node for node in block_of
             if all(pair in slow for pair in outputs if node in pair)]
    rest = [pair for pair in outputs if not {*pair} & {*nodes}]
    crossing = {block: [pair for pair in rest if [block_of[n] for n in pair].count(block) == 1]
                for block in block_of.values()}
    blocks = [block for block, pairs in crossing.items() if pairs and slow.issuperset(pairs)]
    explained = {pair for block in blocks for pair in crossing[block]}
    pairs = [pair for pair in rest if pair in slow and pair not in explained]
    return Suspects(sorted(nodes), sorted(blocks), sorted(pairs))


def crossing_pairs(blocks, each):
    """Return how many pairs cross the uplinks of one block; `each`: the nodes of a block."""
    return each * each * (blocks - 1)


def perf_text(busbw, ranks=16, wrong=0, sizes=SIZES):
    """Write the output of all_reduce_perf.

    busbw: GB/s at the largest size; it is less at smaller ones.
    """
    rows, every = [], []
    for size in sizes:
        bus = busbw * size / (size + 2**28) * (sizes[-1] + 2**28) / sizes[-1]
        alg = bus * ranks / (2 * (ranks - 1))
        us = f"{size / alg / 1e3:.0f}"
        half = f"  {us:>7}  {alg:6.2f}  {bus:6.2f}  {wrong:>5}"
        rows.append(f"  {size:10d}  {size // 4:12d}     float     sum      -1{half}{half}\n")
        every.append(bus)
    return (HEADER + "".join(rows) + f"# Out of bounds values : {wrong * len(sizes)} "
            f"{'FAILED' if wrong else 'OK'}\n# Avg bus bandwidth    : "
            f"{statistics.fmean(every):g}\n#\n")


def emulated_outputs(blocks=4, each=8, nodes=(), uplinks=(), pairs=(), lost=0.3, busbw=360.0,
                     noise=0.02, seed=0):
    """Emulate the outputs of every pair; return (outputs, block_of).

    Node 0 of block 2 is "b2n0". The parts named in `nodes`, `uplinks` (blocks) and `pairs` lose the
    share `lost` of their bandwidth. A pair has the bandwidth of its slowest part, with some noise.
    """
    chance = random.Random(seed)
    block_of = {f"b{b}n{n}": f"b{b}" for b in range(blocks) for n in range(each)}
    outputs = {}
    for pair in itertools.combinations(block_of, 2):
        ends = {block_of[node] for node in pair}
        is_slow = {*pair} & {*nodes} or (len(ends) == 2 and ends & {*uplinks}) or pair in pairs
        rate = busbw * (1 - lost * bool(is_slow)) * (1 + noise * chance.uniform(-1, 1))
        outputs[pair] = perf_text(rate, ranks=16)
    return outputs, block_of
