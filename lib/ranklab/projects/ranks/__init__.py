"""Is every rank of a new cluster there, correct, and as fast as the others?"""

from ranklab.projects.ranks.inspection import run, timed

__all__ = ["run", "timed"]
