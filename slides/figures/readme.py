"""The figures of README.md."""
from ranklab import launch
from ranklab.collectives import ring_all_reduce
from ranklab.collectives.watch import Watch, marked
from ranklab.hybrid import parse_layout
from ranklab.plots import collectives as plots
from ranklab.plots import hybrid
from ranklab.projects.hybrid import compare as layouts


def _messages():
    with Watch() as seen:
        ring_all_reduce(marked(4))
    return seen.messages


def ring():
    title = "Ring all-reduce: partial sums travel until every rank has all"
    return plots.steps(launch(_messages, ranks=4), 4, title=title)


def compare():
    """What `ranklab compare --layouts 4x1x1 ... --plot FILE` draws; one process is its first row.
    """
    words = ("4x1x1", "4x1x1,zero", "1x4x1", "1x1x4", "2x2x2,zero")
    rows = layouts.compare([parse_layout(word) for word in words], progress=False)
    return hybrid.compared(rows), 7.8, 3.1  # small, so that its letters are large on a slide
