"""Links between two hosts of two ranks each: slow, then gone for two seconds, then gone for good.

Ranks take turns on the hosts, as srun --distribution=cyclic would put them, so each hop of a flat
ring crosses the link. What runs on the ranks is link_rank.py.
"""

import functools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass

from ranklab.cluster.hosts import CONTROLLER, Hosts, until
from ranklab.collectives import best_sent_bytes
from ranklab.engine.surroundings import patience
from ranklab.projects.cluster import link_rank
from ranklab.projects.cluster.link_rank import ANSWER, NODES, PER_NODE, RANKS

START = 45  # seconds, at most, until ranks take steps
STEPS = 10  # before and after the flap


@dataclass
class LinkReport:
    """What the ranks saw."""

    flat: float  # seconds, the median on the slowest rank
    hierarchical: float
    formula: float  # flat / hierarchical, by the bytes that cross
    step: float  # seconds, the median
    flapped: float  # the longest step, in which the link was gone and came back
    after: float  # the median after it
    limit: float  # of the group
    failures: list  # {"rank", "host", "seconds", "error", "silent": hosts}, of each rank

    def missing(self):
        """The hosts that don't answer, in the words of ranks that still reach the controller."""
        return sorted({host for each in self.failures if CONTROLLER not in each["silent"]
                       for host in each["silent"]})


def try_links(links):
    """A LinkReport of two fresh hosts.
    error  TimeoutError where ranks do not begin, or hang
    """
    limit = links.limit * min(2, patience())
    with Hosts(NODES) as hosts:
        for name in hosts.names:
            hosts.shape(name, links.mbit)
        logs = [start_rank(hosts, rank, [limit, links.nbytes, links.rounds, hosts.folder])
                for rank in range(RANKS)]
        said = functools.partial(read, hosts.folder)
        compared = until(lambda: said("flat"), START, "the comparison of collectives", logs[0])
        before = len(until(lambda: enough(said("step"), STEPS), START, "ten steps", logs[0]))
        hosts.cut(hosts.names[-1])
        time.sleep(links.flap)
        hosts.join(hosts.names[-1])
        steps = until(lambda: enough(said("step"), before + RANKS * STEPS), START,
                      "steps after the flap", logs[0])
        hosts.cut(hosts.names[-1])
        failures = until(lambda: enough(said("error"), 1), 3 * limit + NODES * ANSWER,
                         "an error on each rank", logs[0])
    seconds = [max(each["seconds"] for each in steps if each["step"] == step)
               for step in range(max(each["step"] for each in steps))]
    at = seconds.index(max(seconds))
    flat, hierarchical = (max(each[name] for each in compared) for name in ("flat", "hierarchical"))
    formula = PER_NODE * best_sent_bytes("all_reduce", 1, RANKS) / best_sent_bytes(
        "all_reduce", 1, NODES)
    return LinkReport(flat, hierarchical, formula, statistics.median(seconds[:at]), seconds[at],
                      statistics.median(seconds[at + 1:]), limit, failures)


def start_rank(hosts, rank, arguments):
    """The rank runs on its host; returns the file of what it prints."""
    log = hosts.folder / f"rank{rank}.log"
    variables = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": hosts.names[0],
                 "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", link_rank.__name__, *arguments]
    with open(log, "w") as out:
        hosts.popen(hosts.names[rank % NODES], command, env=os.environ | variables, stdout=out,
                    stderr=out)
    return log


def read(folder, kind):
    """All that the ranks said of this kind; nothing until each of them said some."""
    files = [folder / f"said.{rank}" for rank in range(RANKS)]
    texts = [file.read_text() if file.exists() else "" for file in files]
    lines = [[json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
             for text in texts]
    found = [[each for each in mine if kind in each] for mine in lines]
    return sum(found, []) if all(found) else []


def enough(found, count):
    """What was found, where it is at least so much from all ranks together."""
    return found if len(found) >= max(count, RANKS) else []
