"""The exercises and predictions of lab 02, in the order of the lab.

    inputs.py        inputs, and the observations of one call of a verb
    ring.py          reduce-scatter, all-gather, all-reduce around a ring
    tree.py          few steps: broadcast by doubling, all-reduce by doubling
    invariant.py     all-reduce in one order of additions
    groups.py        parameter server and hierarchical all-reduce
    cost.py          the alpha-beta model
    all_to_all_v.py  all_to_all_v
"""

from ranklab.checks.collectives.all_to_all_v import UNEVEN
from ranklab.checks.collectives.cost import CROSSOVER, FIT, TIME
from ranklab.checks.collectives.groups import HIERARCHICAL, SERVER
from ranklab.checks.collectives.invariant import INVARIANT
from ranklab.checks.collectives.predictions import PREDICTIONS
from ranklab.checks.collectives.ring import ALL_REDUCE, GATHER, SCATTER
from ranklab.checks.collectives.tree import BROADCAST, DOUBLING

__all__ = ["EXERCISES", "PREDICTIONS"]

EXERCISES = (
    BROADCAST,
    SCATTER, GATHER, ALL_REDUCE,
    TIME,
    UNEVEN,
    HIERARCHICAL,
    SERVER,
    DOUBLING,
    INVARIANT,
    FIT,
    CROSSOVER,
)
