"""The check of reshard_checkpoint: boxes of known tensors. It needs no ranks: nothing is sent."""

import itertools
import math
import re
from typing import NamedTuple

import torch

from ranklab.checkpoint.reshard import overlap, reshard_checkpoint
from ranklab.checks.prover import AtMost, Must, Proof, Slip, Stage, Told
from ranklab.checks.prover.slips import edited
from ranklab.checks.trial import NO_ERROR, refusal
from ranklab.trainer.parallel import Piece, flat_pieces

KINDS, OTHER = ("weight", "exp_avg"), 1000  # numbers of the second are larger by that
OLD = -1.0  # what is trained, before it is loaded


class Cut(NamedTuple):
    """A piece of a tensor, and the boxes in which the tensor was saved.

    parts  number of parts in which each dim was saved; or of elements in each ZeRO shard
    """

    name: str
    shape: tuple
    offset: tuple
    sizes: tuple
    parts: tuple | int

    def __str__(self):
        return self.name

    def whole(self, kind):
        numbers = torch.arange(1.0, 1 + math.prod(self.shape)).view(self.shape)
        return numbers + OTHER * KINDS.index(kind)

    def piece(self, kind):
        """Return (the Piece, the trained tensor), of which the piece is a part: no two dims of the
        piece can be merged.
        """
        trained = torch.full((*(n + 1 for n in self.sizes), 2), OLD)
        box = trained[(*map(slice, self.sizes), 0)]
        return Piece(self.name, kind, self.shape, self.offset, box), trained

    def boxes(self, kind):
        """Return [(offset, tensor)] of the boxes that overlap the piece, the last one first."""
        whole = self.whole(kind)
        if isinstance(self.parts, int):
            flat = whole.double().flatten()
            saved = [(each.offset, each.tensor) for at in range(0, len(flat), self.parts) for each
                     in flat_pieces("", "", self.shape, at, flat[at : at + self.parts])]
        else:
            cuts = [itertools.pairwise([n * i // parts for i in range(parts + 1)])
                    for n, parts in zip(self.shape, self.parts)]
            saved = [(tuple(start for start, _ in box), whole[tuple(slice(*pair) for pair in box)])
                     for box in itertools.product(*cuts)]
        return [(offset, tensor.clone()) for offset, tensor in saved[::-1] if all(
            a < b + m and b < a + n for a, n, b, m in
            zip(self.offset, self.sizes, offset, tensor.shape))]


BOXES = (
    Cut("Adam's step, without dims", (), (), (), ()),
    Cut("the box that was saved", (6, 8), (3, 0), (3, 8), (2, 1)),
    Cut("the first rows of a box", (6, 8), (0, 0), (2, 8), (1, 1)),
    Cut("the last columns of a box", (6, 8), (0, 5), (6, 3), (1, 1)),
    Cut("a box inside of a larger one", (6, 8), (2, 3), (2, 3), (1, 1)),
    Cut("rows from columns", (6, 8), (3, 0), (3, 8), (1, 4)),
    Cut("parts of four boxes", (7, 9), (1, 2), (5, 6), (2, 2)),
    Cut("one dim", (11,), (4,), (5,), (3,)),
    Cut("three dims", (4, 5, 6), (1, 0, 2), (3, 3, 4), (2, 3, 2)))
SHARDS = Cut("ZeRO's shards of 19 numbers, in float64", (6, 8), (3, 0), (3, 8), 19)
END = Cut("one dim", (11,), (9,), (2,), (3,))  # another piece of the same tensor


class Call(NamedTuple):
    name: str
    cuts: tuple

    def __str__(self):
        return self.name


SAVED, REFUSED = "what the saved boxes hold afterwards", "what it refuses"


def _see(fn, call):
    cuts = [(cut, kind) for cut in call.cuts for kind in KINDS]
    pieces, trained = zip(*(cut.piece(kind) for cut, kind in cuts))
    saved = [cut.boxes(kind) for cut, kind in cuts]
    text = refusal(fn, [*pieces], saved).replace("{", "{{").replace("}", "}}")
    named = len({piece.name for piece in pieces}) > 1
    yield {REFUSED: AtMost(int(text != NO_ERROR), 0, f"it raises a ValueError: {text}")} | {
        f"{piece.kind}" + f" of {piece.name}" * named + f" at {piece.offset}":
        Told(tensor, _as_it_was) for piece, tensor in zip(pieces, trained)} | {
        SAVED: torch.cat([torch.empty(0), *(x.flatten() for boxes in saved for _, x in boxes)])}


def _as_it_was(got, due):
    is_old = isinstance(got, torch.Tensor) and got.shape == due.shape and (got == OLD).all()
    return "as it was: nothing is filled" * bool(is_old)


def _see_refusal(fn, cut):
    """Look at three pieces. The one in the middle lacks a box."""
    first, last = (BOXES[7]._replace(name=name) for name in ("the piece before", "the one after"))
    cuts = first, cut, last
    pieces, trained = zip(*(each.piece(KINDS[1]) for each in cuts))
    saved = [each.boxes(KINDS[1]) for each in cuts]
    del saved[1][0]
    count = sum(overlap(pieces[1], *box)[1].numel() for box in saved[1])
    text = refusal(fn, [*pieces], saved)
    numbers, n = {*map(int, re.findall(r"\d+", text))}, pieces[1].tensor.numel()
    omissions = [fact for fact, is_there in {
        f"the piece's name, {cut.name}": cut.name in text,
        f"how many numbers it has, {n}": n in numbers,
        f"how many of them the boxes have, {count}": numbers & {count, n - count}}.items()
        if not is_there and text != NO_ERROR]
    yield {"what it raises": Must(NO_ERROR if text == NO_ERROR else "a ValueError", "a ValueError"),
           "what the error does not say": Must(", ".join(omissions) or "nothing", "nothing")} | {
        f"{piece.name}, afterwards,": tensor for piece, tensor in zip(pieces, trained)}


def by_places(pieces, saved):
    """Look up each element by its place in the whole tensor."""
    filled = []
    for piece, boxes in zip(pieces, saved):
        elements = {tuple(a + i for a, i in zip(offset, at)): tensor[at] for offset, tensor in boxes
                    for at in _places(tensor)}
        numbers = {at: elements[place] for at in _places(piece.tensor)
                   if (place := tuple(a + i for a, i in zip(piece.offset, at))) in elements}
        if len(numbers) < piece.tensor.numel():
            raise ValueError(f"{piece.name}: {len(numbers)} of {piece.tensor.numel()} numbers")
        filled.append(numbers)
    for piece, numbers in zip(pieces, filled):
        for at, number in numbers.items():
            piece.tensor[at] = number


def _places(tensor):
    return itertools.product(*map(range, tensor.shape))


# --- mistakes -------------------------------------------------------------------------------------

STARTS, STOPS = "max(pair) for pair in zip(piece.offset, offset)", "min(a + n, b + m)"
BEGINS, SLICES = "for begin in (piece.offset, offset)", "slice(i - a, j - a)"
IN_PIECE, IN_BOX = "piece.tensor[in_piece]", "tensor[in_box]"
ZIP, NUMBERS = "zip(pieces, saved, strict=True)", "sum(source.numel() for _, source in overlaps)"
COUNT, KEEP = "if numbers != piece.tensor.numel():", "copies += overlaps"
COPY = "target.copy_(source)"
NAME = "{piece.name} ({piece.kind})"
OVERLAPS = "[overlap(piece, offset, tensor) for offset, tensor in boxes]"
LAST = "\n    for target, source in copies:\n        target.copy_(source)"
UNCOUNTED = COUNT, "if False:"
WAYS = (), UNCOUNTED, (*UNCOUNTED, COPY, "target[...] = source")
AT_ONCE = "for target, source in overlaps:\n            target.copy_(source)"


def _misplaced(says, *programs):
    """Return the Slip of a wrong helper: each program consists of edits of the library's overlap();
    also without a count, and with a different way to copy.
    """
    return Slip(says, *(edited(reshard_checkpoint, edits, overlap=edited(overlap, program))
                        for program in programs for edits in WAYS))


def _by(key):
    """Return a dict that replaces the order of pieces."""
    return (f"((each, {{{key.format('p')}: boxes for p, boxes in zip(pieces, saved)}}"
            f"[{key.format('each')}]) for each in pieces)")


def rows_only(pieces, saved):
    for piece, boxes in zip(pieces, saved):
        for offset, tensor in boxes:
            if not tensor.dim():
                piece.tensor.copy_(tensor)
                continue
            first = max(piece.offset[0], offset[0])
            last = min(piece.offset[0] + len(piece.tensor), offset[0] + len(tensor))
            piece.tensor[first - piece.offset[0] : last - piece.offset[0]] = tensor[
                first - offset[0] : last - offset[0]]


def in_flat(pieces, saved):
    for piece, boxes in zip(pieces, saved):
        part = piece.tensor.flatten().view(piece.tensor.shape)  # a copy where it has strides
        for offset, tensor in boxes:
            target, source = overlap(piece._replace(tensor=part), offset, tensor)
            target.copy_(source)


RESHARD = Proof(
    reshard_checkpoint,
    Stage("boxes of 0 to 3 dims, smaller, larger, inside each other, in any order", _see,
          tuple(Call(cut.name, (cut,)) for cut in BOXES), oracle=by_places,
          note=("From every box, copy its overlap with the piece: in each dim, from the larger "
                "offset to the smaller end. Subtract a tensor's own offset to get a slice of that "
                "tensor.")),
    Stage("shards that begin in the middle of a row; the piece keeps its type and its memory", _see,
          (Call(SHARDS.name, (SHARDS,)), Call("two pieces of one tensor", (BOXES[7], END)),
           Call("all of these in one call", (*BOXES, SHARDS, END))), oracle=by_places),
    Stage("numbers that were not saved are a ValueError that names the piece, and nothing changes",
          _see_refusal, (*BOXES, SHARDS), oracle=by_places),
    mistakes=(
        # where the overlap is
        _misplaced("The overlap begins at the larger of the two offsets, in each dim.",
                   (STARTS, STARTS.replace("max", "min")),
                   (STARTS, "a for a in piece.offset"), (STARTS, "b for b in offset")),
        _misplaced("The overlap ends at the smaller of the two ends, in each dim.",
                   (STOPS, STOPS.replace("min", "max")), (STOPS, "a + n"), (STOPS, "b + m")),
        _misplaced("An end is the offset plus the size, and a slice stops exactly there.",
                   (STOPS, f"{STOPS} - 1"), (STOPS, "min(n, m)")),
        _misplaced("Both offsets refer to the whole tensor: subtract the box's own offset to get a "
                   "slice of the box.", (BEGINS, "for begin in (piece.offset, [0] * len(offset))"),
                   (IN_BOX, "tensor[in_piece]"),
                   (IN_BOX, "tensor[tuple(slice(j - i) for i, j in zip(starts, stops))]")),
        _misplaced("Both offsets refer to the whole tensor: subtract the piece's own offset to get "
                   "a slice of the piece.", (BEGINS, "for begin in ([0] * len(offset), offset)"),
                   (IN_PIECE, "piece.tensor[in_box]")),
        _misplaced("Subtract the piece's offset to slice the piece, and the box's offset to slice "
                   "the box.", (BEGINS, "for begin in (offset, piece.offset)")),
        _misplaced("A slice's start and stop both count from the tensor's own offset: subtract it "
                   "from both.", (SLICES, "slice(i - a, j)")),
        Slip("Columns are cut, too: do for every dim what you do for the first.", rows_only),
        # which numbers go where
        Slip("A piece's numbers can be in several boxes: copy from each of them.",
             (OVERLAPS, OVERLAPS.replace("in boxes", "in boxes[:1]")),
             (OVERLAPS, OVERLAPS.replace("in boxes", "in boxes[-1:]")),
             (OVERLAPS, OVERLAPS.replace("in boxes", "in boxes[:1]"), *UNCOUNTED)),
        Slip("Each box holds only part of the piece: copy from all boxes, not only from the last "
             "one.",
             (KEEP, "copies += overlaps[-1:]")),
        Slip("All pieces must be filled: collect the copies for every piece.",
             (KEEP, "copies = overlaps")),
        Slip("A tensor without dims still holds one number.",
             (ZIP, f"[both for both in {ZIP} if both[0].shape]")),
        Slip("A weight and its optimizer states have the same name and shape: go by position, "
             "because saved[i] holds the boxes of pieces[i].", (ZIP, _by("{}.name")),
             (ZIP, _by("{}.shape"))),
        Slip("A tensor can have several pieces here: go by position, because saved[i] holds the "
             "boxes of pieces[i].", (ZIP, _by("{}[:2]"))),
        Slip("piece.tensor is a view of the tensor in training. Fill it in place: "
             "piece.tensor[here].copy_(box[there]).", (COPY, "target = source.clone()"),
             (COPY, "target.data = source.to(target.dtype)"), in_flat),
        Slip("target.copy_(source) writes to `target`, the piece: here the saved box is "
             "overwritten instead.",
             (COPY, "source.copy_(target)")),
        Slip("Leave `saved` unchanged: other pieces might need its boxes.",
             (COPY, f"{COPY}\n        source.zero_()"),
             (OVERLAPS, "[overlap(piece, *boxes.pop()) for _ in [*boxes]]")),
        # numbers that no box has
        Slip("If a number is in none of the boxes, raise a ValueError: count the numbers for each "
             "piece.", UNCOUNTED, (COUNT, "if not numbers:"), (COUNT, "if not boxes:"),
             (COUNT, "if boxes and numbers != piece.tensor.numel():")),
        Slip("Count only the numbers inside the piece: a box can be larger than the overlap.",
             (NUMBERS, "sum(tensor.numel() for _, tensor in boxes)"),
             (NUMBERS, "sum(tensor.numel() for _, tensor in boxes)",
              COUNT, COUNT.replace("!=", "<"))),
        Slip("Raise ValueError(...): an assert raises AssertionError, and python -O drops it.",
             (COUNT, "assert numbers == piece.tensor.numel()\n        if False:")),
        Slip("Count all boxes first, and only then copy: an error must leave the old weights "
             "unchanged.",
             (KEEP, AT_ONCE, LAST, ""),
             ("        numbers =", f"        {AT_ONCE}\n        numbers =", LAST, "")),
        Slip("The ValueError must give the piece's name, how many numbers the piece has, and how "
             "many of them the boxes hold.", (f"{NAME} at", "a piece at"),
             ("{piece.tensor.numel()} numbers", "some numbers"), ("has {numbers}", "has fewer"),
             (f"{NAME} at", "a piece at", "{piece.tensor.numel()} numbers", "some numbers"),
             (f"{NAME} at", "a piece at", "has {numbers}", "has fewer"),
             ("{piece.tensor.numel()} numbers", "some numbers", "has {numbers}", "has fewer"),
             (f"{NAME} at", "a piece at", "{piece.tensor.numel()} numbers", "some numbers",
              "has {numbers}", "has fewer")),
    ), hints=(
        "A piece covers 3 to 6 of the whole tensor, and a box covers 0 to 4. Which numbers do they "
        "share?",
        "In each dim, they share everything from the larger offset to the smaller end. Subtract "
        "the piece's offset to slice the piece, and the box's offset to slice the box.",
        "starts = [max(a, b) ...]; stops = [min(a + n, b + m) ...]; piece.tensor[slices of start - "
        "a to stop - a].copy_(box[slices of start - b to stop - b]), after counting all of them",
    ))
