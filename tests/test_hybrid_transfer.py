"""Weights from trainers to generators: equal to the bit, and the bytes that the formulas say."""

import pytest
import torch
import torch.distributed as dist

from ranklab import launch
from ranklab.checkpoint import overlap
from ranklab.checks.hybrid.transfer_weights import Pair, Side
from ranklab.hybrid import (
    broadcast_bytes, broadcast_weights, refit_bytes, routes, transfer_bytes, transfer_weights,
)
from ranklab.meter import Traffic
from ranklab.trainer.parallel import Piece

pytestmark = pytest.mark.timeout(120)
PAIRS = (Pair(Side(2, 2), Side(1, 2)), Pair(Side(1, 2, 2), Side(2, 1)),
         Pair(Side(4, flat=12), Side(1, 1, 2), narrow=torch.bfloat16))
WAYS = (broadcast_weights, broadcast_bytes), (transfer_weights, transfer_bytes)


def moved():
    """For each pair and way: (sent, received) here, and what the pieces hold afterwards."""
    results = []
    for pair in PAIRS:
        held, wanted = pair.map()
        for way, _ in WAYS:
            pieces = pair.own(dist.get_rank())
            with Traffic() as traffic:
                way(pieces, held, wanted)
            results.append(((traffic.sent_bytes, traffic.received_bytes),
                          [piece.tensor.cpu().clone() for piece in pieces]))
    return results


def test_both_ways_give_the_same_weights_and_the_bytes_of_their_formulas():
    of_rank = launch(moved, ranks=6)
    cases = [(pair, formula) for pair in PAIRS for _, formula in WAYS]
    for number, (pair, formula) in enumerate(cases):
        counted = [results[number][0] for results in of_rank]
        assert counted == formula(*pair.map()), (str(pair), formula.__name__)
    for rank, results in enumerate(of_rank):
        for (_, whole), (_, straight) in zip(results[::2], results[1::2]):
            assert all(map(torch.equal, whole, straight)), rank
            assert rank < 4 or all((tensor != -1).all() for tensor in straight)


def matrix(rows, columns, row, column):
    sizes = 8 // rows, 16 // columns
    return [Piece("w", "weight", (8, 16), (sizes[0] * row, sizes[1] * column),
                  torch.empty(sizes, device="meta"))]


def test_the_formula_for_layouts_that_divide():
    shards = [matrix(2, 4, row, column) for row in range(2) for column in range(4)]
    engine = [matrix(1, 4, 0, column) for column in range(4)]
    held, wanted = shards * 2 + [[]] * 12, [[]] * 16 + engine * 3
    sent, received = refit_bytes(8 * 16 * 4, 8, 4, copies=2, generator_copies=3)
    assert transfer_bytes(held, wanted) == [(sent, 0)] * 16 + [(0, received)] * 12


def test_what_nobody_holds_is_a_sentence():
    held, wanted = [matrix(2, 1, 0, 0), []], [[], matrix(1, 1, 0, 0)]
    with pytest.raises(ValueError, match=r"w at \(0, 0\): rank 1 needs 128 numbers, the trainers "
                                         "hold 64"):
        routes(held, wanted)


@pytest.mark.parametrize("offset", [(5, 0), (0, 4), (2, 9), (9, 9)])
def test_boxes_that_share_nothing_have_empty_views(offset):
    piece = Piece("w", "weight", (12, 12), (1, 0), torch.zeros(4, 4))
    views = overlap(piece, offset, torch.ones(3, 3))
    assert views[0].shape == views[1].shape and not views[0].numel()
