"""Exposed communication: the part that no computation hides.

It is the first-order cost of communication. On a GPU hidden transfers also cost something: NCCL's
kernels take multiprocessors and memory bandwidth, which slows computation by some percent.
"""


def exposed_communication(events, kind="communication"):
    """Return the seconds in which a rank communicates and does not compute, on any of its lanes.

    With kind="loader": seconds in which it loads data and does not compute. Events may overlap or
    be nested; no moment counts twice.
    Lab: 04
    """
    edges = sorted((time, change, event.kind) for event in events
                   for time, change in ((event.start, 1), (event.end, -1)))
    running, exposed, last_time = {kind: 0, "compute": 0}, 0.0, 0.0
    for time, change, edge_kind in edges:
        if running[kind] and not running["compute"]:
            exposed += time - last_time
        last_time = time
        if edge_kind in running:
            running[edge_kind] += change
    return exposed
