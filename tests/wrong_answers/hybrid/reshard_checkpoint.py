"""Lab 12: what goes wrong when numbers come from boxes of another layout."""

from mutants import mutant

from ranklab.checkpoint.reshard import overlap, reshard_checkpoint

ZIP = "zip(pieces, saved, strict=True)"
COUNT = "if numbers != piece.tensor.numel():"
LAST = "    for target, source in copies:\n        target.copy_(source)"


def _wrong(*edits, says, **named):
    return mutant(reshard_checkpoint, *edits, says=says, **named)


WRONG = [
    _wrong(COUNT, "if False:", says="no ValueError"),
    _wrong(COUNT, "if not numbers:", says="no ValueError|it raised", called="some_are_enough"),
    _wrong("copies += overlaps",
           "for target, source in overlaps:\n            target.copy_(source)",
           LAST, "", says="after an error the old weights go on"),
    _wrong("target.copy_(source)", "target = source.clone()", says="is a view of what is trained"),
    _wrong(ZIP, "((each, {p.name: boxes for p, boxes in zip(pieces, "
           "saved)}[each.name]) for each in pieces)", says="Weights and each state",
           called="boxes_by_name"),
    _wrong(ZIP, "((each, {p[:2]: boxes for p, boxes in zip(pieces, "
           "saved)}[each[:2]]) for each in pieces)", says="saved.i. are the boxes",
           called="boxes_by_name_and_kind"),
    _wrong("{piece.name} ({piece.kind})", "a piece", says="Say which piece"),
    _wrong("{piece.tensor.numel()} numbers", "some numbers", says="of how many numbers"),
    _wrong("target.copy_(source)", "source.copy_(target)", says="is a view of what is trained",
           called="the_other_way_round"),
]


def reshard_checkpoint__the_offset_of_the_piece_alone(pieces, saved):
    """Both offsets count in the whole tensor"""
    for piece, boxes in zip(pieces, saved):
        for offset, tensor in boxes:
            at = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.tensor.shape))
            piece.tensor[:] = tensor[at] if tensor.dim() else tensor


def reshard_checkpoint__the_larger_one_is_not_cut(pieces, saved):
    """Both offsets count in the whole tensor"""
    for piece, boxes in zip(pieces, saved):
        for offset, tensor in boxes:
            at = tuple(slice(max(b - a, 0), max(b - a, 0) + n)
                       for a, b, n in zip(piece.offset, offset, tensor.shape))
            part = piece.tensor[at]
            part.copy_(tensor[tuple(slice(0, n) for n in part.shape)])


def reshard_checkpoint__the_whole_is_put_together_in_flat(pieces, saved):
    """is a view of what is trained"""
    for piece, boxes in zip(pieces, saved):
        flat = piece.tensor.flatten()  # a copy, where the piece is not contiguous
        part = flat.view(piece.tensor.shape)
        for offset, tensor in boxes:
            here, there = overlap(piece._replace(tensor=part), offset, tensor)
            here.copy_(there)


def reshard_checkpoint__rows_only(pieces, saved):
    """Both offsets count in the whole tensor|it raised"""
    for piece, boxes in zip(pieces, saved):
        for offset, tensor in boxes:
            if not tensor.dim():
                piece.tensor.copy_(tensor)
                continue
            first = max(piece.offset[0], offset[0])
            last = min(piece.offset[0] + len(piece.tensor), offset[0] + len(tensor))
            piece.tensor[first - piece.offset[0] : last - piece.offset[0]] = tensor[
                first - offset[0] : last - offset[0]]
