"""resume_exact: a restored run, compared with one that was never stopped."""

import copy
import pickle
import random
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ranklab.checks.prover import Must, Proof, Slip, Stage
from ranklab.resilience import Run, resume_exact

# Five steps an epoch, the last one smaller: of odd numbers numpy keeps one for the next step.
SAMPLES, BATCH, WIDTH, MORE = 39, 8, 5, 7
SAME, OTHER, LOST = "as it was", "another value", "lost"
FRESH, SAVING = "the list of losses in a fresh process", "while it saves"
PUT_BACK, LATER, TWICE = ("after it is put back",
                          "after it is put back, when the run had continued",
                          "after it is put back twice")
STATES = ("the model's state", "the optimizer's state", "the learning rate", "the scheduler's step",
          "the loader's order", "the loader's position", "the loader's generator", "steps_done",
          "Python's random state", "NumPy's random state", "torch's random state")


class Moment(NamedTuple):
    """The number of steps after which the run is saved."""

    steps: int
    seed: int

    def __str__(self):
        return f"seed {self.seed}, saved after {self.steps} steps"


def _run(seed, steps):
    random = torch.Generator().manual_seed(1)
    run = Run(torch.randn(SAMPLES, WIDTH, generator=random), torch.arange(SAMPLES) % 3, BATCH, seed)
    return run, [run.step() for _ in range(steps)]


def _state(run):
    """Return {description: current value} of everything that must be restored."""
    loader, numpys = run.loader, np.random.get_state()
    values = (run.model.state_dict(), run.optimizer.state_dict()["state"],
              run.optimizer.param_groups[0]["lr"], run.scheduler.last_epoch, loader.order,
              loader.position, loader.generator.get_state(), run.steps_done, random.getstate(),
              (*numpys[:1], numpys[1].tolist(), *numpys[2:]), torch.get_rng_state())
    return copy.deepcopy({name: _plain(value) for name, value in zip(STATES, values)})


def _plain(value):
    """Convert to lists of numbers, which can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _beside(where, state, right):
    """Return {what, where: whether it was restored}."""
    return {f"{name} {where}": Must(
        SAME if state[name] == value else LOST if state[name] in ({}, []) else OTHER, SAME)
        for name, value in right.items()}


def _names(where):
    return tuple(f"{name} {where}" for name in STATES)


def _losses(run):
    return [run.step() for _ in range(MORE)]


def _see(fn, moment, ranks):
    """Look at a resume: rank 0 has the run; rank 1, a fresh process, gets the pickled bytes."""
    shown, sent = {}, [None, None]
    if ranks.index == 0:
        run, _ = _run(moment.seed, moment.steps)
        before = _state(run)
        saved = fn(run)
        frozen = _pickled(saved)
        shown = _beside(SAVING, _state(run), before) | {"what can be pickled": Must(
            "None" if saved is None else "all" if frozen else "nothing", "all")}
        losses, end = _losses(run), _state(run)
        sent = [frozen, losses]
        second, _ = _run(5, 3)
        thawed = frozen and pickle.loads(frozen)
        for where, state in ((PUT_BACK, thawed), (LATER, saved), (TWICE, saved)) if frozen else ():
            fn(second, state)
            shown |= _beside(where, _state(second), before)
            shown[f"the list of losses {where}"] = Must(_losses(second), losses)
            shown |= _beside(f"{MORE} steps later, {where}", _state(second), end)
    dist.broadcast_object_list(sent, src=0)
    if ranks.index == 1:
        frozen, losses = sent
        run, _ = _run(9, 0)
        if frozen:
            fn(run, pickle.loads(frozen))
        shown = {FRESH: Must(_losses(run) if frozen else [], losses)}
    yield shown


def _pickled(saved):
    """Return the pickled bytes; None if it can't be pickled, or is None."""
    try:
        return None if saved is None else pickle.dumps(saved)
    except Exception:
        return None


def the_weights_alone(run, saved=None):
    if saved is None:
        return copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(saved)


# Before the first step, at an epoch's end, inside one.
MOMENTS = tuple(Moment(*each) for each in ((7, 11), (5, 0), (0, 3)))
PARTS = "parts, loader = (run.model, run.optimizer, run.scheduler)"
LOADER = "loader.order, loader.position, rng = saved"
BACK = "    saved = copy.deepcopy(saved)"
STATE_DICTS = "[part.state_dict() for part in parts]"
LOAD = "part.load_state_dict(state)"
ASKED = "    if saved is None:\n"
ALL_BACK = ("Restore everything that a step changes, not only the weights: optimizer, scheduler, "
            "loader, steps_done, and three libraries' random states.")
RESUME = Proof(
    resume_exact,
    Stage({"saving changes nothing, and what is saved can be pickled":
           ("what can be pickled", *_names(SAVING)),
           "model, optimizer, scheduler, loader, and the random numbers of three libraries are put "
           "back": _names(PUT_BACK),
           "the next steps are bit-equal: saved before the first step, inside an epoch, at its end":
           (f"the list of losses {PUT_BACK}", *_names(f"{MORE} steps later, {PUT_BACK}")),
           "what is saved never changes, and can be used twice; also in a fresh process":
           (*_names(LATER), *_names(TWICE),
            *(f"the list of losses {where}" for where in (LATER, TWICE)),
            *(name for where in (LATER, TWICE) for name in _names(f"{MORE} steps later, {where}")),
            FRESH)},
          _see, MOMENTS, (2,)),
    mistakes=(
        Slip("model.state_dict() has the weights.", (PARTS, PARTS.replace("run.model, ", ""))),
        Slip("optimizer.state_dict() holds AdamW's running means for each weight.",
             (PARTS, PARTS.replace("run.optimizer, ", ""))),
        Slip("Without scheduler.state_dict() the warm-up begins again.",
             (PARTS, PARTS.replace(", run.scheduler", ""))),
        Slip("run.steps_done is part of the state.",
             ("    run.steps_done = saved[\"steps_done\"]\n", ""),
             ("    run.steps_done = saved[\"steps_done\"]\n", "    run.steps_done = 0\n")),
        Slip("Without loader.order, some samples come twice and others never.",
             (LOADER, LOADER.replace("loader.order", "_"))),
        Slip("Without loader.position, samples come twice in this epoch.",
             (LOADER, LOADER.replace("loader.position", "_"))),
        Slip("Save and restore loader.generator.get_state(): the generator draws the next epoch's "
             "order.",
             ("    loader.generator.set_state(rng)\n", ""),
             ("    loader.generator.set_state(rng)\n", "    loader.generator.manual_seed(0)\n")),
        Slip("The loader's generator had a different seed: save its state instead of drawing "
             "again.",
             ("    loader.generator.set_state(rng)\n",
              "    loader.generator.manual_seed(0)\n    for _ in range(-(-run.steps_done * "
              "loader.batch // loader.samples)):\n        torch.randperm(loader.samples, "
              "generator=loader.generator)\n")),
        Slip("Python's random numbers set the brightness: random.getstate(), random.setstate(...).",
             ("    random.setstate(pythons)\n", ""),
             ("    random.setstate(pythons)\n", "    random.seed(0)\n")),
        Slip("NumPy's random numbers are the noise: np.random.get_state(), "
             "np.random.set_state(...).",
             ("    np.random.set_state(numpys)\n", ""),
             ("    np.random.set_state(numpys)\n", "    np.random.seed(0)\n")),
        Slip("NumPy draws normal numbers in pairs, and caches the second: keep all of "
             "np.random.get_state().", ("np.random.get_state()", "np.random.get_state()[:3]")),
        Slip("torch's random numbers decide what dropout drops: random_state(), "
             "set_random_state(...).",
             ("    set_random_state(torchs)\n", ""),
             ("    set_random_state(torchs)\n", "    torch.manual_seed(0)\n")),
        Slip("Restore the random states last: here, something draws random numbers after that.",
             ("    set_random_state(torchs)\n", "    set_random_state(torchs)\n    "
              "torch.nn.Linear(2, 2)\n")),
        Slip("state_dict returns the tensors themselves, and the next step changes them: use "
             "copy.deepcopy.", ("        return copy.deepcopy({", "        return dict({")),
        Slip("load_state_dict can keep the very tensors that it receives, and later steps then "
             "change them: copy them first.", (BACK, "    saved = saved")),
        Slip("Keep state_dicts, numbers and tensors, not the objects themselves, which can't be "
             "pickled.",
             (STATE_DICTS, "[*parts]", LOAD, "part.load_state_dict(state.state_dict())")),
        Slip("Save loader.generator.get_state(), not the generator, and copy everything: later "
             "steps change what is not copied.",
             ("loader.generator.get_state())", "loader.generator)", "set_state(rng)",
              "set_state(rng.get_state())", "        return copy.deepcopy({",
              "        return dict({")),
        Slip("Without `saved`, return everything that must be kept.",
             ("        return copy.deepcopy({", "        run.kept = copy.deepcopy({", BACK,
              "        return None\n    saved = copy.deepcopy(saved or run.kept)")),
        Slip("A save must change nothing, not even the random states.",
             (ASKED, f"{ASKED}        torch.manual_seed(run.steps_done)\n"),
             (ASKED, f"{ASKED}        torch.rand(1)\n"),
             (ASKED, f"{ASKED}        random.random()\n"),
             (ASKED, f"{ASKED}        np.random.rand()\n")),
        Slip("A save must change nothing: neither run a step nor count one.",
             (ASKED, f"{ASKED}        run.steps_done += 1\n"),
             (ASKED, f"{ASKED}        run.step()\n")),
        Slip(ALL_BACK, the_weights_alone),
    ), hints=(
        "Read Run.step line by line: what does each line use that an earlier step has changed?",
        "Three objects have a state_dict. The loader has an order, a position and a generator. "
        "Three libraries draw random numbers. Copy both when saving and when restoring: later "
        "steps must not change what is saved.",
        "copy.deepcopy({'parts': [p.state_dict() for p in parts], 'loader': (loader.order, "
        "loader.position, loader.generator.get_state()), 'random': (random.getstate(), "
        "np.random.get_state(), random_state()), ...}); and set each one again",
    ))
