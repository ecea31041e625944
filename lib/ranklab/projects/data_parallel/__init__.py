"""A CNN on real images: the same accuracy on 1, 2 and 4 ranks, and what each piece is good for."""

from ranklab.projects.data_parallel.comparing import (
    best_seconds, learning_rate_table, learning_rates, pieces, pieces_table, ranges_overlap, scale,
    scale_table,
)
from ranklab.projects.data_parallel.config import Config

__all__ = ["Config", "best_seconds", "learning_rate_table", "learning_rates", "pieces",
           "pieces_table", "ranges_overlap", "scale", "scale_table"]
