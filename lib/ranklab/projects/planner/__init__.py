"""The planner as a command, `ranklab plan`; and against published runs: scores, and the fit."""
