"""Runs under the monkey, each with a seed of its own, beside runs that nothing disturbs."""

from dataclasses import dataclass

from tqdm import tqdm

from ranklab.projects.resilience.chaos import plan_faults
from ranklab.projects.resilience.survive import Survived, difference, survive

# Another layout adds in another order: a rounding of 6e-8, which AdamW makes larger in each step.
# Without it nothing may differ.
TOLERANCE = 1e-5  # nats


@dataclass
class Trial:
    """A disturbed run, and what it is compared with."""

    seed: int
    found: Survived
    usual: float  # the held-out loss of a run that stays in the first layout
    differs: float  # of weights and optimizer, from a run that changes layouts at the same steps

    def is_good(self):
        same_layout = len(self.found.path()) == 1
        most = 0.0 if same_layout else TOLERANCE
        return (self.differs == 0.0 and self.found.torn == 0
                and abs(self.found.loss - self.usual) <= most)


def soak(shape, text, config, layouts, seeds, faults, progress=False, **how):
    """Yields a Trial for each seed. how: of survive, such as heartbeat."""
    usual = survive(shape, text, config, layouts, **how)
    for seed in tqdm(seeds, unit="run", disable=not progress or len(seeds) == 1):
        planned = plan_faults(seed, faults, config, layouts[0].ranks)
        found = survive(shape, text, config, layouts, planned, **how)
        path, beside = found.path(), usual
        if path != usual.path():
            beside = survive(shape, text, config, layouts, path=path, **how)
        yield Trial(seed, found, usual.loss, difference(found.state, beside.state))
