"""The target of a token that does not count in a loss."""

IGNORE = -100  # the value that cross_entropy ignores by default
