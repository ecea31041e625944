"""Models that know no ranks: parallelism is applied to them from outside, by child name."""
