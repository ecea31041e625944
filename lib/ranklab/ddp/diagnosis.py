"""Why is a step slow? A verdict from what all ranks did, with the numbers behind it."""

from statistics import median

from ranklab.ddp.exposed import exposed_communication
from ranklab.ddp.steps import steps_of


def diagnose(timelines):
    """Find why ranks are slow, given the events of rank 0, rank 1, ...; return (verdict, shares).

    shares: each a fraction of a step:
        "loader-bound"         loading while nothing is computed: the mean over ranks
        "communication-bound"  exposed communication of the rank that has the least of it: the other
                               ranks also wait for that rank
        "straggler"            computing and loading of the busiest rank, minus the mean of the
                               other ranks
    verdict: the name of the largest share; "healthy" if that share is below a quarter.
    Fractions rather than seconds, because on a busy machine everything takes longer. Medians over
    a rank's steps, because a single slow step proves nothing.
    Raises: ValueError if a rank has no step in which anything was computed.
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
