"""The cause of an incident, chosen by its number."""

from ranklab.checks.exercise import Prediction


def cause_of(case, *against, why, hint):
    """The Prediction of the right number in case.choices.

    against  for each wrong cause, in the order of case.causes: what was measured that it can't
             explain
    """
    numbers = [case.choices.index(cause) + 1 for cause in case.causes]
    return Prediction(f"clinic_{case.name}_cause", solution=str(case.cause), tolerance=0, why=why,
                      answer=lambda: case.cause, hint=hint,
                      mistakes=dict(zip(numbers[1:], against, strict=True)))
