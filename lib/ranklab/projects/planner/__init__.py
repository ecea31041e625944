"""The planner compared with published runs: scores, the fit of its constants; and six orders."""

from ranklab.projects.planner.orders import grade, orders, run
from ranklab.projects.planner.runs import (
    TRAINED, counted, errors, fp8_gains, predicted, racks, rough_errors, scores,
)

__all__ = ["TRAINED", "counted", "errors", "fp8_gains", "grade", "orders", "predicted", "racks",
           "rough_errors", "run", "scores"]
