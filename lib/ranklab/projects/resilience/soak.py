"""Runs under the monkey, each with its own seed; undisturbed runs; and the settings of both."""

from dataclasses import dataclass

from ranklab.basics.options import option, positive, seed
from ranklab.engine.in_place import is_started_by_another
from ranklab.hybrid import parse_layout
from ranklab.models.gpt import GPTConfig
from ranklab.projects.hybrid.config import Config as HybridConfig
from ranklab.projects.resilience.chaos import plan_faults
from ranklab.projects.resilience.survive import Survived, differing, survive
from ranklab.projects.runner import OnText
from ranklab.trainer.text import text_for

# A different layout adds in a different order. It rounds differently, by 6e-8, and AdamW amplifies
# this in each step. With the same layouts at the same steps nothing may differ.
TOLERANCE = 1e-5  # nats
SHAPE = GPTConfig(n_ctx=32, n_embd=32, n_head=4, n_layer=4)
LAYOUTS = "2x1x2,zero 1x1x3 2x1x1 1x1x1"


@dataclass(frozen=True)
class Config(HybridConfig):
    """The training settings, validated when created. The defaults suit a laptop."""

    steps: int = 24
    batch: int = 8  # sequences
    eval_batch: int = 16
    checkpoint_every: int = 4


@dataclass(frozen=True)
class Options(OnText):
    """The command's options besides Config's."""

    without = ("compare", "per_node", "checkpoint", "eval_every", "seed")
    faults: int = option(5, "in a run", least=0)
    monkey: int = option(1, "of the monkey; of the first run, with --soak", kind=seed, flag="seed")
    soak: int = option(1, "runs, each with its own seed", kind=positive)
    layouts: str = option(LAYOUTS, "dp x tp x pp and more: the first one that fits on the ranks "
                          "that are left is taken")

    def settings(self):
        return Config()

    def chosen_layouts(self):
        """Return the Layouts of the command line."""
        return [*map(parse_layout, self.layouts.split())]


@dataclass
class Trial:
    """A disturbed run, and undisturbed ones: in the first layout, and on the same path."""

    seed: int
    config: Config
    found: Survived
    usual: Survived
    replay: Survived

    def is_good(self):
        return (self.found.torn == 0 and abs(self.found.loss - self.usual.loss) <= TOLERANCE
                and self.found.loss == self.replay.loss
                and not differing(self.found.state, self.replay.state))


def soak(shape, text, config, layouts, seeds, faults, **options):
    """Yield a Trial for each seed. options: arguments of survive"""
    if is_started_by_another():
        raise ValueError("this project starts ranks itself, and again when they die: run it by "
                         "python, not by torchrun or srun")
    usual = survive(shape, text, config, layouts, **options)
    for seed in seeds:
        planned = plan_faults(seed, faults, config, layouts[0].ranks)
        disturbed = survive(shape, text, config, layouts, planned, **options)
        is_usual = disturbed.path() == usual.path()
        yield Trial(seed, config, disturbed, usual, usual if is_usual else survive(
            shape, text, config, layouts, path=disturbed.path(), **options))


def trial(faults=5, seed=1, layouts=LAYOUTS, **settings):
    """Return the Trial of one run on the text of Python's library.

    seed      the monkey's seed
    settings  fields of Config
    """
    config = Config(**settings)
    text, shape = text_for(SHAPE, config)
    layouts = [*map(parse_layout, layouts.split())]
    return next(soak(shape, text, config, layouts, [seed], faults))
