"""The check of resume_exact: a run that is put back, beside one that was never stopped."""

import copy
import pickle
import random
from functools import partial

import numpy as np
import torch

from ranklab.checks.beside import expect, on_groups
from ranklab.checks.exercise import Mistake
from ranklab.resilience import Run

# Five steps an epoch, the last one smaller: of odd numbers numpy keeps one for the next step.
SAMPLES, BATCH, WIDTH, MORE = 39, 8, 5, 7
MOMENTS = {0: 3, 5: 0, 7: 11}  # steps: seed; before the first step, at an epoch's end, inside one
COPY = "state_dict gives the tensors themselves, and the next step changes them: copy.deepcopy."
TWICE = "load_state_dict may keep the very tensors that it gets, and change them: copy them first."
KEEP = {
    "the weights": "model.state_dict() has them.",
    "what AdamW remembers": "optimizer.state_dict() has its means for each weight.",
    "the learning rate": "It is in the optimizer's groups: optimizer.state_dict() has it.",
    "the scheduler's step": "scheduler.state_dict(): without it the warm-up begins again.",
    "the loader's order": "loader.order: without it some samples come twice, others never.",
    "the loader's position": "loader.position: without it samples come twice in this epoch.",
    "the loader's generator": "loader.generator.get_state(): it draws the next epoch's order.",
    "steps_done": "run.steps_done is a part of the run.",
    "python's random numbers": "random.getstate(), random.setstate(...): the brightness.",
    "numpy's random numbers": "np.random.get_state(), np.random.set_state(...): the noise.",
    "torch's random numbers": "random_state(), set_random_state(...): dropout. Put them back last.",
}
FAILURES = {"TypeError: .*NoneType.*not subscriptable.*": "Without `saved` it returns all that "
            "must be kept."}


def _run(seed, steps):
    random = torch.Generator().manual_seed(1)
    run = Run(torch.randn(SAMPLES, WIDTH, generator=random), torch.arange(SAMPLES) % 3, BATCH, seed)
    return run, [run.step() for _ in range(steps)]


def _moment(run):
    """{what: its value now}, for each thing that must be as it was."""
    loader, numpys = run.loader, np.random.get_state()
    values = (run.model.state_dict(), run.optimizer.state_dict()["state"],
              run.optimizer.param_groups[0]["lr"], run.scheduler.last_epoch, loader.order,
              loader.position, loader.generator.get_state(), run.steps_done, random.getstate(),
              (*numpys[:1], numpys[1].tolist(), *numpys[2:]), torch.get_rng_state())
    return copy.deepcopy({name: _plain(value) for name, value in zip(KEEP, values)})


def _plain(value):
    """Lists of numbers: two of them can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _same(where, found, right, hint=""):
    for name, advice in KEEP.items():
        lost = found[name] == {} or found[name] == []
        what = "lost" if lost and right[name] != found[name] else "another value"
        expect(found[name] == right[name], f"{where}: {name}: {what}", f"{hint or advice}")


def _trial(resume_exact, ranks):
    for steps, seed in MOMENTS.items():
        where = f"seed {seed}, saved after {steps} steps"
        run, _ = _run(seed, steps)
        before = _moment(run)
        saved = resume_exact(run)
        yield partial(_same, f"{where}, while it saves", _moment(run), before,
                      "A save must change nothing, and drawing a random number is a change.")
        yield partial(expect, saved is not None, "it returns None", "Without `saved` it returns "
                      "all that must be kept.")
        try:
            frozen = pickle.dumps(saved)
        except Exception as error:
            raise Mistake(f"what it returns can't be pickled: {error}", "Keep state_dicts, numbers "
                          "and tensors, not the objects themselves.") from None
        losses, end = [run.step() for _ in range(MORE)], _moment(run)
        other, _ = _run(5, 3)
        for what, given, hint in (("put back", pickle.loads(frozen), ""), ("the run went on, and "
                                  "what was saved", saved, COPY), ("put back twice", saved, TWICE)):
            resume_exact(other, given)
            yield partial(_same, f"{where}, {what}", _moment(other), before, hint)
            yield partial(_equal, where, [other.step() for _ in range(MORE)], losses)
            yield partial(_same, f"{where}, {what}, {MORE} steps later", _moment(other), end)
    yield lambda: (frozen, losses)


def _equal(where, found, right):
    at = next((i for i, (a, b) in enumerate(zip(found, right)) if a != b), None)
    expect(at is None, f"{where}: the loss of step {at} after it is {found[at or 0]!r}, not "
           f"{right[at or 0]!r}", "Put everything back, bit for bit, into the run's own objects.")


def _elsewhere(resume_exact, ranks, frozen, losses):
    run, _ = _run(9, 0)
    resume_exact(run, pickle.loads(frozen))
    yield partial(_equal, "in a fresh process", [run.step() for _ in range(MORE)], losses)


def check_resume_exact(resume_exact):
    seen = on_groups(_trial, resume_exact, ranks=1, at_once=True, failures=FAILURES)
    yield "the next steps are bit-equal: saved before the first step, inside an epoch, at its end"
    yield "model, optimizer, scheduler, loader, and the random numbers of three libraries"
    yield "what is saved can be pickled, never changes, and works twice; saving changes nothing"
    on_groups(_elsewhere, resume_exact, *seen[0][-1], ranks=1, failures=FAILURES)
    yield "also in a fresh process"
