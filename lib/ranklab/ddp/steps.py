"""A timeline, cut into training steps."""


def steps_of(events):
    """Cut a timeline into steps: [events of the first step, of the second, ...].

    Each step begins with its loader event. So loading must be marked once in each step, as torch's
    DataLoader does. What comes before the first loader event belongs to the first step; without any
    loader event, all is one step. A part without computing is not a step: a loop asks its
    DataLoader once more at the end.
    """
    steps, kinds = [[]], set()  # the kinds of events in the last step
    for event in sorted(events, key=lambda event: event.start):
        if event.kind == "loader" and kinds >= {"loader", "compute"}:
            steps.append([])
            kinds.clear()
        steps[-1].append(event)
        kinds.add(event.kind)
    return [step for step in steps if any(event.kind == "compute" for event in step)]
