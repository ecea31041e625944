"""The figures of the deck 00_ranks.md."""
from ranklab.plots import ranks as plots
from ranklab.ranks import shard_range


def world():
    return plots.world(8, 2, title="")


def shards():
    return plots.shards(shard_range, 50, title=""), 5.75, 2.25


def circle():
    return plots.who_waits({r: (r + 1) % 4 for r in range(4)}, 4)


def guilty():
    return plots.who_waits({0: 2, 1: 2, 3: 2}, 4)
