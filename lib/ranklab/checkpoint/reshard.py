"""reshard_checkpoint: tensors saved in one layout are loaded in another. Nothing is sent."""


def reshard_checkpoint(pieces, saved):
    """Each of this rank's pieces has its numbers, from boxes that were saved in any layout.

    pieces  Pieces (parallel.py): `tensor` is filled in place, and `offset` is where it begins in
            the whole tensor
    saved   for each piece [(offset, tensor)]: boxes of the same whole tensor that overlap the piece
            but not each other
    error   ValueError if numbers of a piece are in none of its boxes; then no piece has changed
    lab     12
    """
    copies = []
    for piece, boxes in zip(pieces, saved, strict=True):
        found = [overlap(piece, offset, tensor) for offset, tensor in boxes]
        numbers = sum(there.numel() for _, there in found)
        if numbers != piece.tensor.numel():
            raise ValueError(f"{piece.name} ({piece.kind}) at {tuple(piece.offset)} has "
                             f"{piece.tensor.numel()} numbers, and the checkpoint has {numbers}")
        copies += found
    for here, there in copies:
        here.copy_(there)


def overlap(piece, offset, tensor):
    """(part of the piece, part of `tensor`): the numbers of the whole that both have. The box
    `tensor` begins at `offset`.
    """
    starts = [max(pair) for pair in zip(piece.offset, offset)]
    stops = [min(a + n, b + m) for a, n, b, m in
             zip(piece.offset, piece.tensor.shape, offset, tensor.shape)]  # fmt: skip
    here, there = (tuple(slice(i - a, j - a) for i, j, a in zip(starts, stops, begin))
                   for begin in (piece.offset, offset))
    return piece.tensor[here], tensor[there]
