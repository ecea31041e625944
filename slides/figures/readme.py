"""The figures of README.md."""
from ranklab import launch
from ranklab.collectives import ring_all_reduce
from ranklab.collectives.watch import Watch, marked
from ranklab.plots import collectives as plots
from ranklab.plots import hybrid
from ranklab.projects.hybrid import compare as layouts


def _messages():
    with Watch() as seen:
        ring_all_reduce(marked(4))
    return seen.messages


def ring():
    return plots.steps(launch(_messages, ranks=4), 4, title="Ring all-reduce")


def compare():
    """What `ranklab compare --plot FILE` draws."""
    rows = layouts.compare(dict.fromkeys(layouts.every_layout(4)), progress=False)
    return hybrid.compared(rows), 7.8, 4.3  # small, so that its letters are large on a slide
