"""The planner against published runs: scores, and the fit of its constants."""
