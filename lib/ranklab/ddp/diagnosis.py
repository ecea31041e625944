"""Why is a step slow? A verdict from what all ranks did, with the numbers behind it."""

from statistics import median

from ranklab.ddp.exposed import exposed_communication
from ranklab.ddp.steps import steps_of


def diagnose(timelines):
    """Say why ranks are slow, from the events of rank 0, of rank 1, ...; return (verdict, shares).

    shares: each a share of a step:
        "loader-bound"         loading while nothing is computed: the mean over ranks
        "communication-bound"  exposed communication, of the rank that has least of it: the others
                               also wait for that rank
        "straggler"            computing and loading of the busiest rank, minus the mean of the
                               other ranks
    verdict: the name of the largest share; "healthy" where that share is below a quarter.
    They are shares and not seconds, because a busy machine makes everything take longer. They are
    medians over the steps of a rank, because one slow step is no diagnosis.
    Raises: ValueError for no step in which anything was computed.
    Lab: 04
    """
    steps = [steps_of(events) for events in timelines]
    if not steps or not all(steps):
        raise ValueError(f"steps found on each rank: {[len(rank_steps) for rank_steps in steps]}; "
                         "a diagnosis needs one or more everywhere")

    def medians(measure):
        return [median(measure(step) for step in rank_steps) for rank_steps in steps]

    duration = max(medians(lambda step: max(e.end for e in step) - min(e.start for e in step)))
    loading = medians(lambda step: exposed_communication(step, kind="loader"))
    exposed = medians(exposed_communication)
    computing = medians(lambda step: sum(e.end - e.start for e in step if e.kind == "compute"))
    working = [a + b for a, b in zip(computing, loading)]
    mean_of_rest = (sum(working) - max(working)) / max(len(working) - 1, 1)
    shares = {
        "loader-bound": sum(loading) / len(loading) / duration,
        "communication-bound": min(exposed) / duration,
        "straggler": (max(working) - mean_of_rest) / duration if len(working) > 1 else 0.0,
    }
    verdict = max(shares, key=shares.get)
    return (verdict if shares[verdict] >= 0.25 else "healthy"), shares
