"""A checkpoint on disk: all that a run needs to go on as if it had never stopped.

    run/step-000100-save-2/rank-00000.pt   boxes of named tensors, random state, what is one rank's
                           rank-00001.pt
                           index.json      written last: what lies where, checksums, step, settings

A folder without index.json is no checkpoint: whenever a run is killed, the last good one stays. No
two saves share a folder, not even of two jobs on one disk, for making a folder succeeds only once.

Tensors are known by name, shape and offset: what was saved on one layout is loaded on any other
(Piece in parallel.py). torch.distributed.checkpoint has the same idea, and renames its .metadata
into place last, so a new folder of its is also whole or no checkpoint. But it has no checksums,
and no shards that begin in the middle of a row, as ZeRO's do; and by default it overwrites the
files of a checkpoint in a folder that exists (filesystem.py of torch 2.13).

Read save_checkpoint, then load_checkpoint. All ranks call them; an error on one is raised on all.
"""

import contextlib
import copy
import json
import math
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from ranklab.baseline.checkpointing import random_state, set_random_state
from ranklab.checkpoint.files import (
    INDEX, Files, box_key, complete, forget, new_folder, write_index, write_rank,
)
from ranklab.checkpoint.reshard import reshard_checkpoint


def save_checkpoint(folder, parallel, model, optimizer, step, more=None, device="cpu", keep=2):
    """`folder` has one checkpoint more, and only the last `keep` of them; returns its path.
    more  {name: what has a state_dict that JSON can hold}, alike on all ranks
    """
    together, rank = RankConsensus(parallel, device), parallel.rank
    with together.agreed():
        place = str(new_folder(Path(folder), step)) if rank == 0 else None
    place = Path(together.exchange(place)[0])
    try:
        with together.agreed():
            held = {box_of(piece): piece.tensor for piece in parallel.state(model, optimizer)}
            parts = {name: part.state_dict() for name, part in (more or {}).items()}
        writers = first_holders(together.exchange(list(held)))
        state = table(writers)
        with together.agreed():
            mine = {box.key: tensor for box, tensor in held.items() if writers[box] == rank}
            file = write_rank(place, rank, mine, parallel.own_state(model))
        index = {"step": step, "ranks": parallel.ranks, "optimizer": settings(optimizer),
                 "more": parts, "files": together.exchange(file), "state": state}  # fmt: skip
        with together.agreed():
            if rank == 0:
                write_index(place, index)
    finally:
        if rank == 0 and not (place / INDEX).exists():
            shutil.rmtree(place, ignore_errors=True)
    with together.agreed():
        if rank == 0:
            forget(place.parent, keep)
    return place


def load_checkpoint(folder, parallel, model, optimizer, device="cpu", more=None,
                    reshard=None):  # fmt: skip
    """Model, optimizer and `more` are as in the last checkpoint of `folder`, saved on any layout;
    returns its step. Random numbers, and what is one rank's own, go on where there are as many
    ranks as before. Everything is read and compared with its checksum first, so an error changes
    nothing.
    reshard  reshard_checkpoint, or a learner's own, which refuses before it writes
    """
    together, more = RankConsensus(parallel, device), more or {}
    with together.agreed():  # one rank looks, because others could see another one
        found = [str(path) for path in complete(Path(folder))] if parallel.rank == 0 else []
    last = together.exchange(found[-1:])[0]
    if not last:
        raise FileNotFoundError(f"there is no checkpoint at {folder}")
    with together.agreed():
        files = Files(Path(last[0]))
        held = [box_of(piece)[:3] for piece in parallel.state(model, optimizer)]
    index, state = files.index, files.index["state"]
    same_model(state, together.exchange(held))
    with put_back_after_errors(parallel, model, optimizer, more):
        with together.agreed():
            make_state(optimizer, index["optimizer"], state)
            pieces = [piece for piece in parallel.state(model, optimizer)  # views, to be filled
                      if piece.kind in state.get(piece.name, ())]
            sources = [files.overlapping(piece) for piece in pieces]
            for name, part in more.items():
                part.load_state_dict(index["more"].get(name, {}))
            if index["ranks"] == parallel.ranks:
                mine = files.open(parallel.rank)
                set_random_state(mine["random"])
                parallel.load_own_state(model, mine["own"])
        with together.agreed():
            (reshard or reshard_checkpoint)(pieces, sources)
    parallel.loaded()
    return index["step"]


@contextlib.contextmanager
def put_back_after_errors(parallel, model, optimizer, more):
    """After an error inside, everything except the numbers in Pieces is as it was."""
    state, groups = optimizer.state, optimizer.param_groups  # make_state puts others in their place
    parts = [(part, copy.deepcopy(part.state_dict())) for part in more.values()]
    random, own = random_state(), parallel.own_state(model)
    try:
        yield
    except Exception:
        optimizer.state, optimizer.param_groups = state, groups
        for part, before in parts:
            part.load_state_dict(before)
        set_random_state(random)
        parallel.load_own_state(model, own)
        raise


class RunFingerprint:
    """Settings that must be the same as before, or step 1,000 is not the same place in the data.
    A part of the checkpoint, like the optimizer: it can be saved and loaded.
    """

    def __init__(self, **what):
        self.what = what  # name -> number

    def state_dict(self):
        return self.what

    def load_state_dict(self, saved):
        differ = [f"{name}={saved.get(name)}, this run has {value}"
                  for name, value in self.what.items() if saved.get(name) != value]
        if differ:
            raise ValueError("the checkpoint is of another run: it has " + "; ".join(differ))


class RankConsensus:
    """The ranks of a Parallel tell each other things, by its `gather` alone."""

    def __init__(self, parallel, device):
        self.parallel, self.device = parallel, device

    def exchange(self, thing):
        """[what rank 0 gives, rank 1, ...], on every rank; anything that JSON can hold."""
        mine = torch.frombuffer(bytearray(json.dumps(thing).encode()), dtype=torch.uint8)
        length = torch.tensor([len(mine)], device=self.device)
        row = torch.full((int(self.parallel.gather(length).max()),), ord(" "), dtype=torch.uint8)
        row[: len(mine)] = mine
        rows = self.parallel.gather(row.to(self.device)).cpu()
        return [json.loads(one.numpy().tobytes()) for one in rows]

    @contextlib.contextmanager
    def agreed(self):
        """An error inside on one rank is an error on all, so no rank waits for one that gave up."""
        error = None
        try:
            yield
        except Exception as mine:
            error = mine
        said = self.exchange(None if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        for rank, text in enumerate(said):
            if text is not None:
                raise RuntimeError(f"rank {rank}: {text}")


# --- what is where ------------------------------------------------------------------------------

class Box(NamedTuple):
    """A Piece in words."""

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
    """{Box: the rank that writes it}: replicas are written once."""
    writers = {}
    for rank, boxes in enumerate(gathered):
        for box in boxes:
            writers.setdefault(Box(*(tuple(x) if isinstance(x, list) else x for x in box)), rank)
    return writers


def table(writers):
    """{name: {kind: {"shape", "dtype", "boxes": [[rank, offset, sizes], ...]}}}.
    error  boxes that are not the whole tensor, or overlap
    """
    state = {}
    for box, rank in writers.items():
        whole = state.setdefault(box.name, {}).setdefault(
            box.kind, {"shape": list(box.shape), "dtype": box.dtype, "boxes": []})
        whole["boxes"].append([rank, list(box.offset), list(box.sizes)])
    for name, kinds in state.items():
        for kind, whole in kinds.items():
            wanted = math.prod(whole["shape"])
            held = sum(math.prod(sizes) for _, _, sizes in whole["boxes"])
            if held != wanted:
                raise ValueError(f"{name} ({kind}) of shape {tuple(whole['shape'])} has {wanted} "
                                 f"numbers, but the ranks hold {held} of them")
    return state


def same_model(state, gathered):
    """Returns if the ranks' weights are those of the checkpoint; else a ValueError, on all
    ranks."""
    here = {name: shape for boxes in gathered for name, kind, shape in boxes if kind == "weight"}
    there = {name: kinds["weight"]["shape"] for name, kinds in state.items() if "weight" in kinds}
    differ = [f"it has no {name}" for name in here if name not in there]
    differ += [f"this one has no {name}" for name in there if name not in here]
    differ += [f"{name} is {tuple(there[name])} in it, here {tuple(shape)}"
               for name, shape in here.items() if shape != there.get(name, shape)]
    if differ:
        more = f"; and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ValueError(f"the checkpoint is of another model: {'; '.join(differ[:3])}{more}")


# --- the optimizer ------------------------------------------------------------------------------

def settings(optimizer):
    """What the optimizer is, without its tensors."""
    groups = [{name: value for name, value in group.items()
               if name not in ("params", "param_names")} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def make_state(optimizer, saved, state):
    """The optimizer has the saved settings, and zeros for all kinds of state that were saved: torch
    makes its own in the first step only.
    """
    mine = settings(optimizer)
    if (mine["class"], len(mine["groups"])) != (saved["class"], len(saved["groups"])):
        raise ValueError(
            f"the checkpoint is of {saved['class']} with {len(saved['groups'])} groups of "
            f"parameters, this run has {mine['class']} with {len(mine['groups'])}")
    kinds = {}  # {kind: (its dtype, whether it has a number for each of the parameter)}
    for of in state.values():
        for kind, whole in of.items():
            if kind != "weight" and not kinds.get(kind, (None, False))[1]:
                kinds[kind] = getattr(torch, whole["dtype"]), whole["shape"] != []
    theirs = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    theirs["state"] = {i: {kind: torch.zeros_like(p, dtype=dtype) if wide
                           else torch.zeros((), dtype=dtype)
                           for kind, (dtype, wide) in kinds.items()}
                       for i, p in enumerate(parameters)}  # fmt: skip
    theirs["param_groups"] = [{**mine, **there} for mine, there in
                              zip(theirs["param_groups"], saved["groups"])]  # fmt: skip
    optimizer.load_state_dict(theirs)
