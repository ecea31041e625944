"""Runs under the monkey, each with its own seed, beside undisturbed runs."""

from dataclasses import dataclass

import torch

from ranklab.engine.in_place import is_started_by_another
from ranklab.hybrid import parse_layout
from ranklab.projects.resilience.chaos import plan_faults
from ranklab.projects.resilience.config import LAYOUTS, SHAPE, Config
from ranklab.projects.resilience.survive import Survived, survive
from ranklab.trainer.text import text_for

# Another layout adds in another order. It rounds differently, by 6e-8, and AdamW enlarges this in
# each step. With the same layouts at the same steps nothing may differ.
TOLERANCE = 1e-5  # nats


@dataclass
class Trial:
    """A disturbed run, beside undisturbed ones: in the first layout, and on the same path."""

    seed: int
    config: Config
    found: Survived
    usual: Survived
    replay: Survived

    def is_good(self):
        return (self.found.torn == 0 and abs(self.found.loss - self.usual.loss) <= TOLERANCE
                and self.found.loss == self.replay.loss and not self.differing())

    def differing(self):
        """Names of tensors, of weights and the optimizer, that are not equal bit for bit."""
        mine, other = self.found.state, self.replay.state
        return [name for name in mine.keys() | other.keys() if name not in mine
                or name not in other or not torch.equal(mine[name], other[name])]


def soak(shape, text, config, layouts, seeds, faults, **how):
    """Yields a Trial for each seed. how: of survive"""
    if is_started_by_another():
        raise ValueError("this project starts ranks itself, and again when they die: run it by "
                         "python, not by torchrun or srun")
    usual = survive(shape, text, config, layouts, **how)
    for seed in seeds:
        planned = plan_faults(seed, faults, config, layouts[0].ranks)
        found = survive(shape, text, config, layouts, planned, **how)
        is_usual = found.path() == usual.path()
        yield Trial(seed, config, found, usual, usual if is_usual else survive(
            shape, text, config, layouts, path=found.path(), **how))


def trial(faults=5, seed=1, layouts=LAYOUTS, **settings):
    """The Trial of one run on Python's library. seed: of the monkey; settings: of Config"""
    config = Config(**settings)
    text, shape = text_for(SHAPE, config)
    layouts = [*map(parse_layout, layouts.split())]
    return next(soak(shape, text, config, layouts, [seed], faults))
