"""A CNN on real images: the same accuracy on 1, 2 and 4 ranks, and what each piece is for."""

from ranklab.projects.data_parallel.comparison import (
    Config, best_seconds, ranges_overlap, scale, table,
)
from ranklab.projects.data_parallel.training import run

__all__ = ["Config", "best_seconds", "ranges_overlap", "run", "scale", "table"]
