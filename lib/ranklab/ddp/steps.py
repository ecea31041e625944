"""A timeline, cut into training steps."""


def steps_of(events):
    """Cut a timeline into steps: [events of the first step, events of the second step, ...].

    Each step begins with its loader event. So loading must be marked once in each step, as torch's
    DataLoader does. Events before the first loader event belong to the first step; without any
    loader event, all events are one step. A part without computation is not a step: at its end a
    loop asks its DataLoader once more.
    """
    steps, kinds = [[]], set()  # the kinds of events in the last step
    for event in sorted(events, key=lambda event: event.start):
        if event.kind == "loader" and kinds >= {"loader", "compute"}:
            steps.append([])
            kinds.clear()
        steps[-1].append(event)
        kinds.add(event.kind)
    return [step for step in steps if any(event.kind == "compute" for event in step)]
