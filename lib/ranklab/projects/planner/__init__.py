"""The planner compared with published runs: scores, the fit of its constants; and six orders."""

from ranklab.projects.planner.orders import grade, orders, run
from ranklab.projects.planner.runs import TRAINED, counted, errors, predicted, rough_errors, scores

__all__ = ["TRAINED", "counted", "errors", "grade", "orders", "predicted",
           "rough_errors", "run", "scores"]
