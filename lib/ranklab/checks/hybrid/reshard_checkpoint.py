"""The check of reshard_checkpoint: boxes of known tensors. It needs no ranks: nothing is sent."""

import itertools
import math

import torch

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.checks.trial import explain, refusal
from ranklab.trainer.parallel import Piece, flat_pieces

CASES = {  # name: (shape of the whole, this rank's box, in how many parts each dim was saved)
    "rows from columns": ((6, 8), (slice(3, 6), slice(0, 8)), (1, 4)),
    "a box inside of a larger one": ((6, 8), (slice(2, 4), slice(3, 6)), (1, 1)),
    "parts of four boxes": ((7, 9), (slice(1, 6), slice(2, 8)), (2, 2)),
    "one dim": ((11,), (slice(4, 9),), (3,)),
    "one dim, its end": ((11,), (slice(9, 11),), (3,)),  # another piece of the same tensor
    "three dims": ((4, 5, 6), (slice(1, 4), slice(0, 3), slice(2, 6)), (2, 3, 2)),
    "Adam's step, without dims": ((), (), ()),
    "ZeRO's shards of 19 numbers, in float64": ((6, 8), (slice(3, 6), slice(0, 8)), 19),
}
PLACE = ("Both offsets count in the whole tensor. The overlap begins at the larger offset and ends "
         "at the smaller end. Subtract a tensor's own offset to get a slice of that tensor.")
KINDS, OTHER = ("weight", "exp_avg"), 1000  # numbers of the second are larger by that
PAIR = ("Weights and each state of the optimizer have pieces of one name, and some tensors have "
        "several pieces. So go by place: saved[i] are the boxes of pieces[i].")
FILL = "piece.tensor is a view of what is trained. Fill it: piece.tensor[here].copy_(box[there])."


def _case(name, kind, shape, box, parts):
    """(the Piece, its boxes, what is trained, and how that should be in the end)"""
    whole = torch.arange(1.0, 1 + math.prod(shape)).view(shape) + OTHER * (kind != KINDS[0])
    trained, right = torch.full((2, *shape, 2), -1.0)  # so the piece is not contiguous
    right[..., 0][box] = whole[box]
    piece = Piece(name.partition(",")[0], kind, shape, tuple(s.start for s in box),
                  trained[..., 0][box])
    if isinstance(parts, int):
        flat = whole.double().flatten()
        saved = [(each.offset, each.tensor) for start in range(0, len(flat), parts) for each in
                 flat_pieces("", "", shape, start, flat[start : start + parts])]
    else:
        cuts = [itertools.pairwise([n * i // times for i in range(times + 1)])
                for n, times in zip(shape, parts)]
        boxes = [tuple(slice(*pair) for pair in pairs) for pairs in itertools.product(*cuts)]
        saved = [(tuple(s.start for s in each), whole[each].clone()) for each in boxes]
    return piece, [(offset, tensor) for offset, tensor in saved[::-1] if all(
        max(a.start, b) < min(a.stop, b + n) for a, b, n in zip(box, offset, tensor.shape))
    ], trained, right


def check_reshard_checkpoint(reshard):
    pieces, saved, trained, right = zip(*itertools.starmap(_case, (
        (name, kind, *case) for name, case in CASES.items() for kind in KINDS)))
    before = [[tensor.clone() for _, tensor in boxes] for boxes in saved]
    try:
        reshard(list(pieces), [list(boxes) for boxes in saved])
    except (RuntimeError, ValueError) as error:
        raise Mistake(f"it raised {type(error).__name__}: {error}",
                      PAIR if isinstance(error, ValueError) else PLACE) from error
    for piece, got, new, boxes, old in zip(pieces, trained, right, saved, before):
        name, shift = f"{piece.name}, {piece.kind}", OTHER * (1 - 2 * KINDS.index(piece.kind))
        explain(f"{name}: what is trained", got, new, {
            "as it was": (torch.full_like(new, -1), FILL),
            "that of the other kind": (torch.where(new == -1, new, new + shift), PAIR)}, PLACE)
        expect(all(torch.equal(tensor, kept) for (_, tensor), kept in zip(boxes, old)),
               f"{name}: a saved box is changed", "Other pieces may need it, too.")
    yield "boxes of 0 to 3 dims, smaller, larger, inside each other, in any order"
    yield "shards that begin in the middle of a row; the piece keeps its type and its memory"
    for name, case in CASES.items():
        first, boxes, memory, _ = _case("first", KINDS[0], *CASES["one dim"])
        lost, rest, other, _ = _case(name, KINDS[1], *case)
        said = refusal(reshard, [first, lost], [boxes, rest[1:]])
        where, numbers = f"{name}, of which a box is missing", lost.tensor.numel()
        expect(lost.name in said and str(numbers) in said, f"{where}: {said}", "Say which piece "
               f"lacks numbers, and of how many numbers it is made: {lost.name}, {numbers}.")
        expect(bool((memory == -1).all() and (other == -1).all()), f"{where}: a piece is changed",
               "First count all boxes, and only then copy: after an error the old weights go on.")
    yield "numbers that were not saved are a ValueError that names the piece, and nothing changes"
