"""load_checkpoint: first check that everything fits this run, then fill its tensors."""

import contextlib
import copy
from pathlib import Path

import torch

from ranklab.baseline.checkpointing import random_state, set_random_state
from ranklab.checkpoint.consensus import RankConsensus
from ranklab.checkpoint.files import Files, complete
from ranklab.checkpoint.reshard import reshard_checkpoint
from ranklab.checkpoint.save import settings


def load_checkpoint(folder, parallel, model, optimizer, device="cpu", more=None,
                    reshard=None):  # fmt: skip
    """Load the last checkpoint of `folder`, saved on any layout, into model, optimizer and `more`.

    Collective: call it on every rank; an error on one is raised on all.
    Everything is read and checked against its checksum first, so an error changes nothing.
    Random numbers, and the state that only one rank has, are restored if the number of ranks is the
    same as before.
    reshard: reshard_checkpoint, or a learner's version of it, which must raise before it writes.
    Returns: the step of the checkpoint.
    Raises: FileNotFoundError if there is no checkpoint; ValueError if it is damaged, or belongs to
        a different model, optimizer or run.
    """
    consensus, more = RankConsensus(parallel, device), more or {}
    with consensus.agreed():  # only one rank looks: others could see a different checkpoint
        paths = [str(path) for path in complete(Path(folder))] if parallel.rank == 0 else []
    newest = consensus.exchange(paths[-1:])[0]
    if not newest:
        raise FileNotFoundError(f"there is no checkpoint at {folder}")
    with consensus.agreed():
        files = Files(Path(newest[0]))
        shapes = [(piece.name, piece.kind, tuple(piece.shape))
                  for piece in parallel.state(model, optimizer)]
    index, state = files.index, files.index["state"]
    same_model(state, consensus.exchange(shapes))
    with restored_after_errors(parallel, model, optimizer, more):
        with consensus.agreed():
            make_state(optimizer, index["optimizer"], state)
            pieces = [piece for piece in parallel.state(model, optimizer)  # views, to be filled
                      if piece.kind in state.get(piece.name, ())]
            sources = [files.overlapping(piece) for piece in pieces]
            for name, part in more.items():
                part.load_state_dict(index["more"].get(name, {}))
            if index["ranks"] == parallel.ranks:
                rank_file = files.open(parallel.rank)
                set_random_state(rank_file["random"])
                parallel.load_rank_state(model, rank_file["own"])
        with consensus.agreed():
            (reshard or reshard_checkpoint)(pieces, sources)
    parallel.loaded()
    return index["step"]


@contextlib.contextmanager
def restored_after_errors(parallel, model, optimizer, more):
    """If the block raises, restore everything except the numbers in Pieces."""
    state, groups = optimizer.state, optimizer.param_groups  # make_state replaces both
    parts = [(part, copy.deepcopy(part.state_dict())) for part in more.values()]
    random, old_state = random_state(), parallel.rank_state(model)
    try:
        yield
    except Exception:
        optimizer.state, optimizer.param_groups = state, groups
        for part, part_state in parts:
            part.load_state_dict(part_state)
        set_random_state(random)
        parallel.load_rank_state(model, old_state)
        raise


class RunFingerprint:
    """Hold settings that must not change, or step 1,000 would be a different place in the data.

    Pass it to save_checkpoint and load_checkpoint in `more`: loading raises ValueError if a
    setting differs.
    """

    def __init__(self, **settings):
        self.settings = settings  # name -> number

    def state_dict(self):
        return self.settings

    def load_state_dict(self, saved):
        differences = [f"{name}={saved.get(name)}, this run has {value}"
                       for name, value in self.settings.items() if saved.get(name) != value]
        if differences:
            raise ValueError("the checkpoint is of another run: it has " + "; ".join(differences))


def same_model(state, gathered):
    """Raise ValueError on all ranks unless their weights have the checkpoint's names and shapes."""
    shapes = {name: shape for rows in gathered for name, kind, shape in rows if kind == "weight"}
    saved = {name: kinds["weight"]["shape"] for name, kinds in state.items() if "weight" in kinds}
    differences = [f"it has no {name}" for name in shapes if name not in saved]
    differences += [f"this one has no {name}" for name in saved if name not in shapes]
    differences += [f"{name} is {tuple(saved[name])} in it, here {tuple(shape)}"
                    for name, shape in shapes.items() if shape != saved.get(name, shape)]
    if differences:
        rest = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ValueError(f"the checkpoint is of another model: {'; '.join(differences[:3])}{rest}")


def make_state(optimizer, saved, state):
    """Give the optimizer the saved settings, and zeros for each kind of state that was saved.

    torch makes an optimizer's state only in the first step, so there would be nothing to fill.
    """
    present = settings(optimizer)
    if (present["class"], len(present["groups"])) != (saved["class"], len(saved["groups"])):
        raise ValueError(
            f"the checkpoint is of {saved['class']} with {len(saved['groups'])} groups of "
            f"parameters, this run has {present['class']} with {len(present['groups'])}")
    kinds = {}  # {kind: (its dtype, whether it has the shape of its parameter)}
    for tensors in state.values():
        for kind, tensor in tensors.items():
            if kind != "weight" and not kinds.get(kind, (None, False))[1]:
                kinds[kind] = getattr(torch, tensor["dtype"]), tensor["shape"] != []
    state_dict = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state_dict["state"] = {i: {kind: torch.zeros_like(p, dtype=dtype) if wide
                               else torch.zeros((), dtype=dtype)
                               for kind, (dtype, wide) in kinds.items()}
                           for i, p in enumerate(parameters)}  # fmt: skip
    state_dict["param_groups"] = [{**group, **saved_group} for group, saved_group in
                                  zip(state_dict["param_groups"], saved["groups"])]  # fmt: skip
    optimizer.load_state_dict(state_dict)
