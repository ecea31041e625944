"""Checkpoints: from any layout to any other, whole or not there, checked when they are read."""

import json
import math
import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranklab import launch
from ranklab.checkpoint import load_checkpoint, save_checkpoint
from ranklab.checkpoint.files import INDEX, complete
from ranklab.data import Text
from ranklab.data_parallel.training import DataParallel
from ranklab.ddp import PowerSGD, TopK
from ranklab.engine import RankError
from ranklab.models.gpt import GPT, GPTConfig
from ranklab.trainer.parallel import Parallel, Piece, flat_pieces
from ranklab.trainer.text import TextTrainer, TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(seed=0, width=6):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(width, 5), torch.nn.BatchNorm1d(5),
                               torch.nn.Linear(5, 3), torch.nn.Linear(3, width, bias=False))


def trained(seed=0, kind=torch.optim.AdamW, steps=2):
    """A model and its optimizer, after some steps: all kinds of state are there."""
    model = model_of(seed)
    optimizer = kind(model.parameters(), lr=0.1 + seed)
    for _ in range(steps):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def all_of(model, optimizer, parallel=None):
    pieces = (parallel or Parallel()).state(model, optimizer)
    return {(p.name, p.kind, p.offset): p.tensor.clone() for p in pieces}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


# --- pieces -------------------------------------------------------------------------------------

def test_any_range_of_a_flattened_tensor_is_a_few_boxes():
    for shape in ((), (7,), (4, 5), (3, 1, 4), (2, 3, 4, 2)):
        whole = torch.arange(math.prod(shape), dtype=torch.float).reshape(shape)
        for start in range(whole.numel() + 1):
            for stop in range(start, whole.numel() + 1):
                flat = whole.flatten()[start:stop]
                pieces = flat_pieces("w", "weight", shape, start, flat)
                assert len(pieces) <= max(1, 2 * len(shape) - 1)
                assert sum(piece.tensor.numel() for piece in pieces) == stop - start
                for piece in pieces:
                    at = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.tensor.shape))
                    assert torch.equal(whole[at], piece.tensor)
                    assert piece.tensor.data_ptr() >= flat.data_ptr() and piece.shape == shape


class Alone(Parallel):
    """Every tensor is whole on every rank."""

    def __init__(self):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def gather(self, values):
        return DataParallel.gather(self, values)

    group = None


class Flat(Alone):
    """As ZeRO has it: of each tensor, laid flat, every rank has a part; edges are anywhere."""

    def state(self, model, optimizer):
        pieces = []
        for piece in super().state(model, optimizer):
            n = piece.tensor.numel()
            a, b = (int(n * (r / self.ranks) ** 1.5) for r in (self.rank, self.rank + 1))
            flat = piece.tensor.view(-1)[a:b]
            pieces += flat_pieces(piece.name, piece.kind, piece.shape, a, flat)
        return pieces


class Sharded(Alone):
    """As tensor parallelism has it: matrices cut along one dimension, all else everywhere."""

    dim = 1

    def state(self, model, optimizer):
        pieces = []
        for piece in super().state(model, optimizer):
            if piece.tensor.dim() == 2:
                n = piece.shape[self.dim]
                a, b = (n * r // self.ranks for r in (self.rank, self.rank + 1))
                offset = [0, 0]
                offset[self.dim] = a
                part = piece.tensor.narrow(self.dim, a, b - a)
                piece = Piece(piece.name, piece.kind, piece.shape, tuple(offset), part)
            pieces.append(piece)
        return pieces


class Stages(Alone):
    """As a pipeline has it: every rank has some of the tensors."""

    def state(self, model, optimizer):
        return [piece for i, piece in enumerate(super().state(model, optimizer))
                if sum(map(ord, piece.name)) % self.ranks == self.rank]


LAYOUTS = {"alone": Alone, "flat": Flat, "sharded": Sharded, "stages": Stages}


def saved_by(layout, folder):
    save_checkpoint(folder, LAYOUTS[layout](), *trained(), 2)


def loaded_by(layouts, folder):
    """For each layout: whether all pieces of this rank are those of one process."""
    same = []
    for layout in layouts:
        model, optimizer = trained(1, steps=0)
        parallel = LAYOUTS[layout]()
        assert load_checkpoint(folder, parallel, model, optimizer) == 2
        held = all_of(model, optimizer, parallel)
        whole = all_of(*trained(), parallel)
        same.append(held.keys() == whole.keys()
                    and all(torch.equal(held[name], whole[name]) for name in held))
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert any(kind == "exp_avg_sq" for _, kind, _ in held)
    return same


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_layout_saved_any_other_loads(tmp_path, layout):
    launch(saved_by, layout, tmp_path, ranks=3)
    assert launch(loaded_by, list(LAYOUTS), tmp_path, ranks=2) == [[True] * 4] * 2
    model, optimizer = trained(1)
    load_checkpoint(tmp_path, Parallel(), model, optimizer)
    assert_same(all_of(model, optimizer), all_of(*trained()))
    [place] = complete(tmp_path)
    numbers = sum(t.numel() for t in all_of(*trained()).values())
    stored = [torch.load(file)["boxes"] for file in sorted(place.glob("rank-*.pt"))]
    assert len(stored) == 3 and numbers == sum(t.numel() for of in stored for t in of.values())
    assert (layout == "alone") == (not stored[1]), "replicas are written once"
    for box in (t for of in stored for t in of.values()):
        assert box.untyped_storage().nbytes() == box.nbytes, "a view brought its whole storage"


def _random_numbers(folder, resume):
    parallel, parts = Alone(), trained()
    torch.manual_seed(dist.get_rank())
    torch.rand(dist.get_rank() + 1)
    if resume:
        load_checkpoint(folder, parallel, *parts)
    else:
        save_checkpoint(folder, parallel, *parts, 1)
    return torch.rand(1).item()


def test_each_rank_has_its_own_random_numbers_again(tmp_path):
    first = launch(_random_numbers, tmp_path, False, ranks=2)
    torch.manual_seed(99)
    assert launch(_random_numbers, tmp_path, True, ranks=2) == first and first[0] != first[1]
    torch.manual_seed(2)
    torch.rand(3)
    assert launch(_random_numbers, tmp_path, True, ranks=3)[2] == torch.rand(1).item()


def test_a_layout_that_lost_numbers_is_refused(tmp_path):
    class Leaky(Flat):
        def state(self, model, optimizer):
            return super().state(model, optimizer)[self.rank :]

    with pytest.raises(RankError, match=r"0.weight \(weight\) of shape \(5, 6\) has 30 numbers, but"
                                        r" the ranks hold \d+ of them"):
        launch(lambda: save_checkpoint(tmp_path, Leaky(), *trained(), 1), ranks=2)
    assert list(tmp_path.iterdir()) == []


def compressed(make, folder=None):
    """A GPT's trainer, whose gradients travel through the hook of make()."""
    state = make()

    def wrap(model, group):
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(state, type(state).hook)
        return ddp

    tokens = np.random.default_rng(0).integers(0, 32, 400).astype(np.uint8)
    torch.manual_seed(0)
    shape = GPTConfig(vocab_size=32, n_ctx=8, n_layer=1, n_head=2, n_embd=16)
    config = TrainConfig(steps=6, batch=4, eval_batch=4, warmup=1, checkpoint=folder)
    return TextTrainer(GPT(shape), Text("noise", tokens, tokens, 32), config, progress=False,
                       parallel=DataParallel(wrap=wrap, compressor=state))


def _compressed(folder):
    """For each compressor: is a resumed run bit-equal; and is it without the compressor's state?"""
    equal = []
    for make in (lambda: TopK(0.1), lambda: PowerSGD(1, start=1, shrink=1)):
        path = f"{folder}/{type(make()).__name__}"
        straight, first = compressed(make), compressed(make, path)
        straight.fit(), first.fit(until=3)
        for remembers in (True, False):
            second = compressed(make)
            if not remembers:
                second.parallel.load_rank_state = lambda *_: None
            assert load_checkpoint(path, second.parallel, second.model, second.optimizer) == 3
            second.steps_done = 3
            second.fit()
            equal.append(all(map(torch.equal, straight.model.parameters(),
                                 second.model.parameters())))
    return equal


def test_what_compressed_gradients_left_behind_goes_on(tmp_path):
    assert launch(_compressed, tmp_path, ranks=2) == [[True, False] * 2] * 2


# --- whole or not there -------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["os.replace", "os.fsync", "torch.save", "json.dump"])
def test_a_save_that_dies_leaves_the_old_one(tmp_path, monkeypatch, name):
    save_checkpoint(tmp_path, Parallel(), *trained(), 1)
    before = complete(tmp_path)

    def die(*_, **__):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"ranklab.checkpoint.files.{name}", die)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(tmp_path, Parallel(), *trained(), 2)
    assert list(tmp_path.iterdir()) == complete(tmp_path) == before
    assert load_checkpoint(tmp_path, Parallel(), *trained()) == 1


def _one_rank_dies(folder, how):
    parallel, parts = Flat(), trained()
    save_checkpoint(folder, parallel, *parts, 1)
    import ranklab.checkpoint.files as files

    def die(*_, **__):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("No space left on device")

    if parallel.rank == 1:
        files.torch.save = die
    try:
        save_checkpoint(folder, parallel, *parts, 2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_fails_or_is_killed_leaves_the_last_good_one(tmp_path):
    said = launch(_one_rank_dies, tmp_path, "full", ranks=3)
    assert said == ["RuntimeError: rank 1: No space left on device",
                    "OSError: No space left on device",
                    "RuntimeError: rank 1: No space left on device"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001-save-1"]
    with pytest.raises(RankError):
        launch(_one_rank_dies, tmp_path, "killed", ranks=3)
    assert load_checkpoint(tmp_path, Parallel(), *trained()) == 1
    assert complete(tmp_path)[-1].name == "step-000001-save-2"


def test_the_last_two_are_kept_and_the_newest_counts(tmp_path):
    """Also where a new run begins in the folder of an old one, which had come further."""
    dead = tmp_path / "step-000007-save-1"
    dead.mkdir()  # of a run that was killed
    (tmp_path / "step-notes").mkdir()
    for step in (10, 20, 5, 5):
        save_checkpoint(tmp_path, Parallel(), *trained(), step)
    assert load_checkpoint(tmp_path, Parallel(), *trained()) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000005-save-4", "step-000005-save-5", "step-notes"]


def test_two_jobs_on_one_disk_take_different_folders(tmp_path, monkeypatch):
    """The second one looks before the first has made its folder."""
    monkeypatch.setattr("ranklab.checkpoint.files.saves", lambda folder: {})
    from ranklab.checkpoint.files import new_folder

    assert len({new_folder(tmp_path, 1) for _ in range(3)}) == 3


# --- bad input ----------------------------------------------------------------------------------

def spoil(place, how):
    file, index = place / "rank-00001.pt", (place / INDEX).read_text()
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(file.read_bytes()[:-7])
    elif how == "changed":
        data = bytearray(file.read_bytes())
        data[random.Random(0).randrange(len(data))] ^= 1
        file.write_bytes(data)
    else:
        (place / INDEX).write_text({
            "index": index[:-3], "list": "[]", "old": json.dumps({"step": 2}),
            "step": index.replace('"step": 2', '"step": 3', 1),
            "lr": index.replace('"lr": 0.1', '"lr": 0.5'),
            "key": index.replace('"files"', '"fires"')}[how])


CHANGED, NONE = "index.json has another checksum", "index.json has no checksum"
DAMAGES = {"missing": "rank-00001.pt is missing", "short": "rank-00001.pt has ",
           "changed": "rank-00001.pt has ", "index": "index.json is not whole", "list": NONE,
           "old": NONE, "step": CHANGED, "lr": CHANGED, "key": CHANGED}


class Part:
    """Such as fp16's scaler: `more` of a checkpoint."""

    def __init__(self, scale):
        self.scale = scale

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


def _refused(folder):
    """What is said of each damage; nothing that a checkpoint holds has changed."""
    said, parallel, part = [], Stages(), Part(8)
    for how in DAMAGES:
        model, optimizer = trained(1)
        before, drawn = all_of(model, optimizer), torch.get_rng_state()
        try:
            load_checkpoint(folder / how, parallel, model, optimizer, more={"part": part})
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
        assert_same(all_of(model, optimizer), before)
        assert (optimizer.param_groups[0]["lr"], part.scale) == (1.1, 8)
        assert torch.equal(drawn, torch.get_rng_state())
    return said


def _saved_with_a_part(folder):
    save_checkpoint(folder, Stages(), *trained(), 2, {"part": Part(4)})


def test_what_is_damaged_is_a_sentence_on_every_rank_and_changes_nothing(tmp_path):
    launch(_saved_with_a_part, tmp_path / "good", ranks=2)
    for how in DAMAGES:
        shutil.copytree(tmp_path / "good", tmp_path / how)
        spoil(complete(tmp_path / how)[-1], how)
    for of_rank in launch(_refused, tmp_path, ranks=2):
        for said, (how, what) in zip(of_rank, DAMAGES.items(), strict=True):
            [place] = (tmp_path / how).iterdir()
            assert f"the checkpoint {place} is damaged: {what}" in said


class Broken(Alone):
    """On rank 1 there is no state to be had."""

    def state(self, model, optimizer):
        if self.rank == 1:
            raise ValueError("the GPU is gone")
        return super().state(model, optimizer)


def _without_state(folder):
    said = []
    for call in (lambda: save_checkpoint(folder, Broken(), *trained(), 3),
                 lambda: load_checkpoint(folder, Broken(), *trained())):
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        said.append(str(error.value))
    return said


def test_a_state_that_one_rank_lacks_leaves_no_rank_waiting(tmp_path):
    launch(saved_by, "alone", tmp_path, ranks=2)
    said = launch(_without_state, tmp_path, ranks=2, timeout=30)
    assert said == [["rank 1: the GPU is gone"] * 2, ["the GPU is gone"] * 2]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002-save-1"]


def _refused_at_last(folder):
    """A part refuses, or a learner's reshard on one rank: what came before is put back."""
    found = []

    def reshard(pieces, sources):
        if dist.get_rank() == 1:
            raise ValueError("not mine")

    class Strict(Part):
        def load_state_dict(self, state):
            if state["scale"] != self.scale and dist.get_rank() == 1:
                raise ValueError("of another run")
            super().load_state_dict(state)

    for more, how in (({"part": Part(8), "strict": Strict(9)}, None), ({"part": Part(8)}, reshard)):
        model, optimizer = trained(1)
        before = all_of(model, optimizer)
        with pytest.raises((ValueError, RuntimeError)) as error:
            load_checkpoint(folder, Alone(), model, optimizer, more=more, reshard=how)
        assert_same(all_of(model, optimizer), before)
        found.append((str(error.value), optimizer.param_groups[0]["lr"], more["part"].scale))
    return found


def test_who_refuses_late_changes_nothing_either(tmp_path):
    save_checkpoint(tmp_path, Parallel(), *trained(), 2, {"part": Part(4), "strict": Part(4)})
    first, second = launch(_refused_at_last, tmp_path, ranks=2)
    assert second == [("of another run", 1.1, 8), ("not mine", 1.1, 8)]
    assert first == [(f"rank 1: {said}", *rest) for said, *rest in second]


def test_no_checkpoint_and_an_old_file_are_sentences(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        load_checkpoint(tmp_path / "none", Parallel(), *trained())
    (tmp_path / "run.pt").write_text("")
    with pytest.raises(NotADirectoryError, match="run.pt is a file, but a checkpoint is a folder"):
        save_checkpoint(tmp_path / "run.pt", Parallel(), *trained(), 1)


@pytest.mark.parametrize("other, sentence", [
    (lambda: model_of(width=7), r"0.weight is \(5, 6\) in it, here \(5, 7\); 3.weight is"),
    (lambda: model_of()[:2], "this one has no 2.weight; this one has no 2.bias; this one has no 3"),
    (lambda: torch.nn.Sequential(*model_of(), torch.nn.Linear(2, 2)),
     "it has no 4.weight; it has no 4.bias$"),
])
def test_another_model_is_refused(tmp_path, other, sentence):
    save_checkpoint(tmp_path, Parallel(), *trained(), 1)
    model = other()
    with pytest.raises(ValueError, match=f"the checkpoint is of another model: {sentence}"):
        load_checkpoint(tmp_path, Parallel(), model, torch.optim.AdamW(model.parameters()))


def test_another_optimizer_is_refused(tmp_path):
    save_checkpoint(tmp_path, Parallel(), *trained(), 1)
    with pytest.raises(ValueError, match="the checkpoint is of AdamW with 1 groups of parameters, "
                                         "this run has SGD with 1"):
        load_checkpoint(tmp_path, Parallel(), *trained(kind=torch.optim.SGD))


def test_the_index_can_be_read_by_people(tmp_path):
    place = save_checkpoint(tmp_path, Parallel(), *trained(), 3)
    index = json.loads((place / INDEX).read_text())
    assert index["step"] == 3 and index["ranks"] == 1
    assert index["state"]["0.weight"]["exp_avg"] == {
        "shape": [5, 6], "dtype": "float32", "boxes": [[0, [0, 0], [5, 6]]]}
