"""save_checkpoint: every rank writes its boxes to a file, then rank 0 writes the index."""

import math
import shutil
from pathlib import Path
from typing import NamedTuple

from ranklab.checkpoint.consensus import RankConsensus
from ranklab.checkpoint.files import INDEX, box_key, forget, new_folder, write_index, write_rank


def save_checkpoint(folder, parallel, model, optimizer, step, more=None, device="cpu", keep=2):
    """Save a checkpoint in a new folder inside `folder`; keep only the last `keep` checkpoints.

    Collective: call it on every rank; an error on one is raised on all.
    more: {name: object with a state_dict that JSON can represent}, the same on all ranks.
    Returns: the path of the new checkpoint.
    """
    consensus, rank = RankConsensus(parallel, device), parallel.rank
    with consensus.agreed():
        place = str(new_folder(Path(folder), step)) if rank == 0 else None
    place = Path(consensus.exchange(place)[0])
    try:
        with consensus.agreed():
            tensors = {box_of(piece): piece.tensor for piece in parallel.state(model, optimizer)}
            parts = {name: part.state_dict() for name, part in (more or {}).items()}
        writers = first_holders(consensus.exchange(list(tensors)))
        state = table(writers)
        with consensus.agreed():
            boxes = {box.key: tensor for box, tensor in tensors.items() if writers[box] == rank}
            file = write_rank(place, rank, boxes, parallel.rank_state(model))
        index = {"step": step, "ranks": parallel.ranks, "optimizer": settings(optimizer),
                 "more": parts, "files": consensus.exchange(file), "state": state}  # fmt: skip
        with consensus.agreed():
            if rank == 0:
                write_index(place, index)
    finally:
        if rank == 0 and not (place / INDEX).exists():
            shutil.rmtree(place, ignore_errors=True)
    with consensus.agreed():
        if rank == 0:
            forget(place.parent, keep)
    return place


class Box(NamedTuple):
    """The description of a Piece without its numbers: hashable, and JSON can represent it."""

    name: str
    kind: str
    shape: tuple
    dtype: str
    offset: tuple
    sizes: tuple

    @property
    def key(self):
        return box_key(self.name, self.kind, self.offset, self.sizes)


def box_of(piece):
    dtype = str(piece.tensor.dtype).removeprefix("torch.")
    return Box(piece.name, piece.kind, tuple(piece.shape), dtype, tuple(piece.offset),
               tuple(piece.tensor.shape))


def first_holders(gathered):
    """Choose the rank that writes each box, so that replicas are written once.

    gathered: the boxes of each rank, in rank order
    Returns: {Box: rank}.
    """
    writers = {}
    for rank, boxes in enumerate(gathered):
        for box in boxes:
            writers.setdefault(Box(*(tuple(x) if isinstance(x, list) else x for x in box)), rank)
    return writers


def table(writers):
    """List where each tensor is stored.

    Returns: {name: {kind: {"shape", "dtype", "boxes": [[rank, offset, sizes], ...]}}}.
    Raises: ValueError if boxes overlap, or leave out a part of their tensor.
    """
    state = {}
    for box, rank in writers.items():
        tensor = state.setdefault(box.name, {}).setdefault(
            box.kind, {"shape": list(box.shape), "dtype": box.dtype, "boxes": []})
        tensor["boxes"].append([rank, list(box.offset), list(box.sizes)])
    for name, kinds in state.items():
        for kind, tensor in kinds.items():
            expected = math.prod(tensor["shape"])
            numbers = sum(math.prod(sizes) for _, _, sizes in tensor["boxes"])
            if numbers != expected:
                raise ValueError(f"{name} ({kind}) of shape {tuple(tensor['shape'])} has "
                                 f"{expected} numbers, but the ranks hold {numbers} of them")
    return state


def settings(optimizer):
    """Return the optimizer's class and groups, without its tensors."""
    groups = [{name: value for name, value in group.items()
               if name not in ("params", "param_names")} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}
