"""The target of a token that does not count in a loss."""

IGNORE = -100  # what cross_entropy leaves out by default
