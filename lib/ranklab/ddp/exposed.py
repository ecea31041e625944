"""Exposed communication: the part of it that no computing hides."""


def exposed_communication(events, kind="communication"):
    """Seconds in which a rank communicates and computes nothing, on any of its lanes.

    With kind="loader" the seconds in which it loads and computes nothing. Events may overlap, and
    lie inside each other; none counts twice.

    lab    04
    """
    edges = sorted((time, change, event.kind) for event in events
                   for time, change in ((event.start, 1), (event.end, -1)))
    running, exposed, before = {kind: 0, "compute": 0}, 0.0, 0.0
    for time, change, what in edges:
        if running[kind] and not running["compute"]:
            exposed += time - before
        before = time
        if what in running:
            running[what] += change
    return exposed
