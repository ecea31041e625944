"""Arguments that must be refused."""

from ranklab.checks.prover.compare import Must
from ranklab.checks.trial import refuses


def must_refuse(function, *args, **keywords):
    """Call it with arguments for which a ValueError is right; return the Must of what it raises."""
    error = "a ValueError" if refuses(function, *args, **keywords) else "nothing"
    return Must(error, "a ValueError")
