import torch
from mutants import mutant

from ranklab.ddp import exposed_communication as answer

EVENTS = "for event in events\n"
BARE = 'running[kind] and not running["compute"]'
WRONG = [
    mutant(answer, BARE, "running[kind]", says="exposed communication, in ms, is all of it"),
    mutant(answer, EVENTS, 'for event in events if event.lane == "main" or event.kind == kind\n',
           says="Computing on other lanes"),
    mutant(answer, "+= time", '+= running[kind] * time', "- last_time",
           "- running[kind] * last_time",
           says="Too much"),
    mutant(answer, "running[edge_kind] += change", "running[edge_kind] = change > 0",
           says="Too little: a kernel that ends inside a longer one"),
    mutant(answer, "change, edge_kind in", "change, kind in", "if edge_kind in", "if kind",
           " running:\n", ":\n", "running[edge_kind]", "running[kind]",
           says="don't call the loop variable `kind`"),
    mutant(answer, "if edge_kind in running", "if edge_kind", says="Other kinds are not counted"),
    mutant(answer, "if edge_kind in running:\n            running[edge_kind]",
           'if edge_kind != "wait":\n            running[kind if edge_kind == "loader" else '
           'edge_kind]',
           says="with loader events counted as well"),
    mutant(answer, "if edge_kind in running:\n            running[edge_kind]",
           'if edge_kind:\n            running[edge_kind if edge_kind == kind else "compute"]',
           says="Waiting and loading don't count as computing"),
    mutant(answer, "edges =", 'kind = "communication"\n    edges =',
           says="`kind` says which events"),
    mutant(answer, "return exposed", "return 1000 * exposed", says="Those are milliseconds"),
    mutant(answer, "time - last_time", "float(torch.tensor(time) - torch.tensor(last_time))",
           says="float32 has not", torch=torch),
]


def exposed_communication__difference_of_sums(events, kind="communication"):
    """The difference of two sums"""
    both = [sum(e.end - e.start for e in events if e.kind == k) for k in (kind, "compute")]
    return max(0.0, both[0] - both[1])


def exposed_communication__counts_milliseconds(events, kind="communication"):
    """go from one edge to the next"""
    ticks = range(round(1000 * max((e.end for e in events), default=0)))
    running = [{e.kind for e in events if e.start <= (t + 0.5) / 1000 < e.end} for t in ticks]
    return sum(kind in kinds and "compute" not in kinds for kinds in running) / 1000
