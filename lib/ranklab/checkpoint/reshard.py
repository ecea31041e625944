"""reshard_checkpoint: fill tensors from boxes of another layout, which load.py reads.

A box is (offset, tensor): a rectangular part of a whole tensor. If rank 0 has saved rows 0 to 3,
and rank 1 rows 4 to 7, then a rank that now needs rows 2 to 5 copies two rows of each box.
"""


def reshard_checkpoint(pieces, saved):
    """Fill each of this rank's pieces from boxes that were saved in any layout.

    pieces: Pieces (trainer/parallel.py): `tensor` is filled in place; `offset` is where it begins
        in the whole tensor.
    saved: for each piece, in the same order, [(offset, tensor)]: boxes of the same whole tensor
        that overlap the piece but not each other.
    Raises: ValueError if numbers of a piece are in none of its boxes; then no piece has changed.
    Lab: 12
    """
    copies = []
    for piece, boxes in zip(pieces, saved, strict=True):
        overlaps = [overlap(piece, offset, tensor) for offset, tensor in boxes]
        numbers = sum(source.numel() for _, source in overlaps)
        if numbers != piece.tensor.numel():
            raise ValueError(f"{piece.name} ({piece.kind}) at {tuple(piece.offset)} has "
                             f"{piece.tensor.numel()} numbers, and the checkpoint has {numbers}")
        copies += overlaps
    for target, source in copies:
        target.copy_(source)


def overlap(piece, offset, tensor):
    """Slice out the numbers of the whole tensor that are in both a piece and a box.

    The box `tensor` begins at `offset`.
    Returns: (view of piece.tensor, view of `tensor`), of the same shape; empty if they share none.
    """
    starts = [max(pair) for pair in zip(piece.offset, offset)]
    stops = [max(start, min(a + n, b + m)) for start, a, n, b, m in
             zip(starts, piece.offset, piece.tensor.shape, offset, tensor.shape)]  # fmt: skip
    in_piece, in_box = (tuple(slice(i - a, j - a) for i, j, a in zip(starts, stops, begin))
                        for begin in (piece.offset, offset))
    return piece.tensor[in_piece], tensor[in_box]
