"""The planner against published runs: scores, the fit of its constants; and six orders."""

from ranklab.projects.planner.orders import grade, orders, run
from ranklab.projects.planner.own import TRAINED, errors, predicted, scores

__all__ = ["TRAINED", "errors", "grade", "orders", "predicted", "run", "scores"]
