"""What a check sees of a call that must be refused."""

from ranklab.checks.prover import AtMost
from ranklab.checks.trial import refuses


def unrefused(fn, *args):
    """Return the AtMost of calls that should raise a ValueError, and do not."""
    return AtMost(int(not refuses(fn, *args)), 0, "raises no ValueError")
