"""lemon_nodes: job logs whose lemons are known, by hand and emulated."""

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from ranklab.checks.prover import Must, Proof, Slip, Stage, Told, Traced
from ranklab.checks.resilience.edge import edge
from ranklab.resilience.lemons import JobRecord, lemon_nodes, make_job_log

NAMES, KIND = "the nodes that are named", "what it returns"


class Case(NamedTuple):
    """A log, a function without arguments, and the options of the call."""

    name: str
    log: Callable
    options: dict = {}

    def __str__(self):
        return self.name


def alone(*rows):
    """Return a log of nodes that run jobs alone: (how many nodes, days, failures, days of a job).

    The first node of the first row is a00, the first one of the second row is b00.
    """
    log = []
    for letter, (count, days, failures, length) in zip("abcdefgh", rows):
        for i in range(count):
            node, jobs = f"{letter}{i:02}", max(round(days / length), failures, 1)
            log += [JobRecord((node,), days / jobs, node if j < failures else None)
                    for j in range(jobs)]
    return log


def hidden():
    return alone((5, 10, 30, 1), (1, 10, 5, 1), (1, 10, 3, 1), (2, 10, 1, 1), (41, 10, 0, 1))


def one_hides_another():
    return alone((2, 10, 40, 1), (1, 10, 5, 1), (2, 10, 1, 1), (45, 10, 0, 1))


def half_lemons():
    return alone((20, 10, 40, 1), (1, 10, 5, 1), (19, 10, 1, 1))


def new_and_old():
    return alone((40, 10, 1, 1), (160, 10, 0, 1), (1, 1, 3, 1), (1, 600, 0, 1), (1, 150, 8, 5),
                 (1, 10, 2, 0.05))


def large_jobs():
    """Nodes in one job of 64, or alone; one in the large job has failed twice."""
    members = tuple(f"large{i:02}" for i in range(64))
    ends = [*members[:12], members[0], *[None] * 17]
    return [JobRecord(members, 1.0, node) for node in ends] + alone((10, 30, 1, 1), (26, 30, 0, 1))


@functools.cache
def emulated(*arguments):
    return make_job_log(*arguments)[0]


def backwards():
    return emulated(400, 56, 6, 40)[::-1]


def _see(fn, case):
    log = [*case.log()]
    before = [*log]
    named = fn(log, **case.options)
    names = sorted(named) if isinstance(named, set | frozenset) else named  # a set has no order
    yield {KIND: Must(_kind(named), "a list of str"),
           NAMES: Told(Traced(names, lambda got, due: _chance(fn, case, got, due)), _apart),
           "the log afterwards": Must(log == before or "changed", True)}


def _chance(fn, case, got, due):
    """Return the power of ten of the false alarms at which a wrong node is named, or not."""
    if _kind(got) != "a list of str":
        return None
    return [edge(lambda power: name in fn([*case.log()], 10**power), -30, 1, rounds=18)
            for name in sorted({*got} ^ {*due})[:1]] or None


def _kind(named):
    if not isinstance(named, list):
        return f"a {type(named).__name__}"
    return f"a list of {', '.join(sorted({type(name).__name__ for name in named} or {'str'}))}"


def _apart(got, due):
    try:
        more, fewer = sorted({*got} - {*due}), sorted({*due} - {*got})
    except TypeError:
        return ""
    parts = [f"{label}: {len(names)} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
             for names, label in ((more, "healthy nodes named"), (fewer, "lemons missing"))
             if names]
    return "; ".join(parts)


def one_after_another(log, false_alarms=0.05):
    """Take out the most significant node, and judge the others anew; sum the tail itself."""
    days, failures = Counter(), Counter(job.failed for job in log)
    for job in log:
        days.update(dict.fromkeys(job.nodes, job.days))
    nodes, lemons = len(days), []
    if not 0 < false_alarms < nodes / 2:
        raise ValueError(f"{false_alarms}")
    while True:
        rate = sum(failures[node] for node in days) / sum(days.values())
        chance, node = min((_tail(failures[node], rate * days[node]), node) for node in days)
        if chance >= false_alarms / nodes:
            return sorted(lemons)
        lemons.append(node)
        del days[node]


def _tail(count, mean):
    if not mean:
        return float(not count)
    logs = [i * math.log(mean) - mean - math.lgamma(i + 1)
            for i in range(count, count + 60 + int(4 * mean))]
    return math.fsum(map(math.exp, logs))


SIMPLE = (
    Case("new nodes and old ones, 1 to 600 days", new_and_old),
    Case("64 nodes in one job, 36 alone", large_jobs),
    Case("400 nodes, 56 days, emulated", functools.partial(emulated, 400, 56, 6, 40)),
    Case("2,000 nodes, 28 days, emulated", functools.partial(emulated, 2000, 28, 24, 40)),
    Case("400 nodes without lemons, emulated", functools.partial(emulated, 400, 28, 0)),
    Case("the log of 400 nodes backwards", backwards),
)
HIDING = (Case("2 lemons hide a third", one_hides_another),
          Case("5 lemons hide a sixth, and 6 hide a seventh", hidden),
          Case("half of 40 nodes are lemons, false_alarms=0.23", half_lemons,
               {"false_alarms": 0.23}))
OPTIONS = tuple(Case(f"false_alarms={number}", new_and_old, {"false_alarms": number})
                for number in (0.001, 1, 20))
REFUSED = tuple(Case(f"false_alarms={number}, 50 nodes", hidden, {"false_alarms": number})
                for number in (0, -1, 25, 60.0))

TAIL = "poisson_tail(failures[node], rate * days[node]) < limit"
DAYS, COUNTED = "days[node] += job.days", "failures[job.failed] += 1"
RATE = "sum(failures[node] for node in healthy) / sum(days[node] for node in healthy)"
LOOP, REFUSES = "while lemons != named:", "if not 0 < false_alarms < len(days) / 2:"
LEMONS = Proof(
    lemon_nodes,
    Stage({"each node is judged by its own days, in large jobs and alone; in logs without lemons "
           "none is named": (),
           "a sorted list; the log is unchanged": (KIND, "the log afterwards")},
          _see, SIMPLE, oracle=one_after_another),
    Stage("lemons do not hide each other", _see, HIDING, oracle=one_after_another,
          note="Where few nodes fail it was right. Here some lemons fail so often that they raise "
               "the rate of the whole log."),
    Stage("`false_alarms` is taken as given", _see, OPTIONS, oracle=one_after_another),
    Stage("a number of false alarms that makes no sense is a ValueError", _see, REFUSED,
          oracle=one_after_another),
    mistakes=(
        Slip("A node that runs for longer fails more often: expect the rate times its own days.",
             (TAIL, TAIL.replace("days[node]", "sum(days.values()) / len(days)"))),
        Slip("Count days, not jobs: a job may last for an hour or for a week.",
             (DAYS, "days[node] += 1")),
        Slip("Each node of a job runs for all of its days; don't divide them among the nodes.",
             (DAYS, f"{DAYS} / len(job.nodes)")),
        Slip("Only one node has failed. The other nodes of that job are healthy until shown "
             "otherwise.", (COUNTED, "failures.update(job.nodes)")),
        Slip("Where `failed` is None no node has failed: the job was done, or its own code failed.",
             (f"if job.failed is not None:\n            {COUNTED}",
              "failures[job.failed or job.nodes[0]] += 1")),
        Slip("Nodes that have never failed also belong in the rate. Without them the rate is too "
             "high, and lemons seem normal.",
             ("healthy = days.keys()", "healthy = failures.keys()")),
        Slip("Count node-days: the days of a job once for each of its nodes.",
             (RATE, "sum(failures[node] for node in healthy) / sum(job.days for job in log)")),
        Slip("Divide all failures by all node-days. A mean of the nodes' own rates gives one day "
             "of a new node as much weight as a year of an old one.",
             (RATE, "statistics.fmean(failures[node] / days[node] for node in healthy)"),
             statistics=statistics),
        Slip("With false_alarms as each node's limit, 2,000 healthy nodes give 100 false alarms. "
             "Divide it by the number of nodes.",
             ("false_alarms / len(days), []", "false_alarms, []")),
        Slip("Every node in the log can be a false alarm, not only those that have failed: divide "
             "by the number of all nodes.",
             ("false_alarms / len(days), []", "false_alarms / len(failures), []")),
        Slip("Divide by the number of all nodes in the log, those that are named included.",
             ("< limit", "< false_alarms / len(healthy)")),
        Slip("P(X > k) leaves out k itself. Ask for the probability of at least as many failures.",
             (TAIL, TAIL.replace("failures[node],", "failures[node] + 1,"))),
        Slip("That is the probability of exactly as many failures, which is small for every count "
             "when many are expected. Ask for at least as many.",
             (TAIL, TAIL.replace(" < limit", " - poisson_tail(failures[node] + 1, rate * "
                                 "days[node]) < limit"))),
        Slip("Three standard deviations are a rule for large counts. Where 0.2 failures are "
             "expected, two are rare for one node, and common among 2,000.",
             (TAIL, "failures[node] > rate * days[node] + 3 * math.sqrt(rate * days[node])"),
             math=math),
        Slip("One failure in a few days is many times the rate, and means nothing. How many times "
             "is too many depends on the failures expected: use the Poisson tail.",
             (TAIL, "failures[node] > 10 * rate * days[node]")),
        Slip("The lemons are still in the rate here, and hide others. Take them out, and judge all "
             "nodes again.", (LOOP, "for _ in range(1):")),
        Slip("Twice is not always enough: each lemon taken out lowers the rate. Repeat until "
             "nothing changes.", (LOOP, "for _ in range(2):")),
        Slip("There may be more than one lemon: return all of them.",
             ("return lemons", "return lemons[:1]")),
        Slip("Return a sorted list of names.",
             ("    return lemons", "    return {*lemons}"),
             ("    return lemons", "    return lemons[::-1]"),
             ("    return lemons", "    return {node: failures[node] for node in lemons}")),
        Slip("`false_alarms` is an argument.", ("= false_alarms / len", "= 0.05 / len")),
        Slip("Refuse `false_alarms` of 0 or less, or of half the nodes or more, with a ValueError.",
             (REFUSES, "if False:"), (REFUSES, "if false_alarms <= 0:"),
             (REFUSES, "if false_alarms >= len(days) / 2:"),
             (REFUSES, "if not 0 < false_alarms < len(days):")),
    ), hints=(
        "How many failures do you expect of a healthy node that has run for d days? What is the "
        "probability that it has at least as many as this node?",
        "Count days and failures by node; each node of a job runs for all of its days. The rate is "
        "all failures / all node-days. Compare each node's probability with false_alarms / nodes. "
        "Then take the named nodes out of the rate, and begin again.",
        "poisson_tail(failures[node], rate * days[node]) < false_alarms / len(days), in a loop "
        "that ends when the same nodes are named twice; rate = failures of the others / days of "
        "the others",
    ))
