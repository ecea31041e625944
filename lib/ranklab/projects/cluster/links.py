"""Links between two hosts of two ranks each: slow, then gone for two seconds, then gone for good.

Ranks take turns on the hosts, as srun --distribution=cyclic would put them, so each hop of a flat
ring crosses the link. Each rank runs rank_main.
"""

import functools
import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ranklab.cluster.hosts import CONTROLLER, Hosts, missing, until
from ranklab.collectives import (
    best_sent_bytes, hierarchical_all_reduce, node_groups, ring_all_reduce,
)
from ranklab.engine.surroundings import patience
from ranklab.projects.clock import in_turns

NODES, PER_NODE = 2, 2
RANKS = NODES * PER_NODE
MBIT = 200  # per second, of each link
NBYTES, ROUNDS = 4 << 20, 4  # bytes of the tensor that is summed; number of rounds
FLAP, LIMIT = 2.0, 6.0  # seconds without a link; seconds that a collective may take
START, STEPS = 45, 10  # seconds until ranks take steps; steps before and after the flap
PAUSE = 0.05  # seconds, instead of a step's computation
ANSWER, DISCARD = 2, 9  # seconds that a host has for an answer; a port at which nobody listens


def try_links(say):
    """Return whether the cut link is named; True, with a message, if no hosts can be created."""
    if sentence := missing():
        say(f"links: not run; {sentence}")
        return True
    return bool(measure_links(say)["missing"])


def measure_links(say):
    """Shape, flap and cut the link of two fresh hosts, and print the measurements. Returns
    {"flat", "hierarchical", "step", "flapped", "limit": seconds; "formula": the ratio by bytes that
    cross; "failures": {"rank", "host", "seconds", "error", "silent": hosts} of each rank;
    "missing": hosts that don't answer, in the words of ranks that still reach the controller}
    """
    limit = LIMIT * min(2, patience())
    with Hosts(NODES) as hosts:
        for name in hosts.names:
            hosts.shape(name, MBIT)
        log, *_ = [start_rank(hosts, rank, limit) for rank in range(RANKS)]
        lines_of = functools.partial(read, hosts.folder)
        compared = until(lambda: lines_of("flat"), START, "the comparison of collectives", log)
        before = len(until(lambda: lines_of("step", STEPS), START, "ten steps", log))
        hosts.cut(hosts.names[-1])
        time.sleep(FLAP)
        hosts.join(hosts.names[-1])
        steps = until(lambda: lines_of("step", before + RANKS * STEPS), START, "later steps", log)
        hosts.cut(hosts.names[-1])
        failures = until(lambda: lines_of("error"), 3 * limit + NODES * ANSWER,
                         "an error on each rank", log)
    results = {name: max(each[name] for each in compared) for name in ("flat", "hierarchical")}
    seconds = [each["seconds"] for each in steps]
    results |= {"formula": PER_NODE * best_sent_bytes("all_reduce", 1, RANKS)
                / best_sent_bytes("all_reduce", 1, NODES), "step": statistics.median(seconds),
                "flapped": max(seconds), "limit": limit, "failures": failures,
                "missing": sorted({host for each in failures if CONTROLLER not in each["silent"]
                                   for host in each["silent"]})}
    tell(results, say)
    return results


def tell(results, say):
    """Print the measurements."""
    ratio = results["flat"] / results["hierarchical"]
    say(f"all-reduce of {NBYTES >> 20} MiB, two hosts of two ranks, {MBIT} Mbit/s:")
    say(f"{1e3 * results['flat']:7.0f} ms  flat ring, each hop from host to host")
    say(f"{1e3 * results['hierarchical']:7.0f} ms  hierarchical")
    say(f"{ratio:7.1f} x   by the bytes that cross: {results['formula']:.1f} x")
    say(f"the link is gone for {FLAP:.0f} s: one step takes {results['flapped']:.1f} s, and it "
        f"goes on (the median step takes {1e3 * results['step']:.0f} ms)")
    say(f"the link is cut, and the group waits {results['limit']:.0f} s:")
    for each in results["failures"]:
        error = each["error"].rpartition("] ")[2][:25]
        say(f"    rank {each['rank']} on {each['host']}: {each['seconds']:.1f} s, {error}...; "
            f"no answer from {' and '.join(each['silent'])}")
    say(f"missing, for those that reach {CONTROLLER}: {' '.join(results['missing'])}")


def start_rank(hosts, rank, limit):
    """Start the rank on its host; return the file of its output."""
    variables = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": hosts.names[0],
                 "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, limit, hosts.folder / f"said.{rank}"]
    with open(hosts.folder / f"rank{rank}.log", "w") as out:
        hosts.popen(hosts.names[rank % NODES], command, env=os.environ | variables, stdout=out,
                    stderr=out)
    return out.name


def read(folder, kind, least=1):
    """Return all lines of this kind; [] until each rank has one and there are `least` in all."""
    lines = [[json.loads(line) for line in file.read_text().splitlines(True) if line[-1] == "\n"]
             for file in sorted(folder.glob("said.*"))]
    matches = [[line for line in of_rank if kind in line] for of_rank in lines]
    flat = sum(matches, [])
    return flat if sum(map(bool, matches)) == RANKS and len(flat) >= least else []


# --- on each rank ---------------------------------------------------------------------------------

def rank_main(limit, path):
    """Write this rank's measurements, until a collective fails."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
    rank, hosts = dist.get_rank(), [None] * RANKS
    dist.all_gather_object(hosts, socket.gethostname())
    x = torch.ones(NBYTES // 4)
    with open(path, "w", buffering=1) as file:
        def say(**values):
            file.write(json.dumps(values) + "\n")

        say(**compare(x))
        while True:
            start = time.perf_counter()
            try:
                dist.all_reduce(x[:1024])
            except RuntimeError as error:
                seconds = time.perf_counter() - start
                peers = sorted({CONTROLLER, *hosts} - {hosts[rank]})
                say(rank=rank, host=hosts[rank], seconds=seconds, error=str(error),
                    silent=[host for host in peers if not answers(host)])
                os._exit(1)  # leaving the group properly would wait for the others
            say(step=True, seconds=time.perf_counter() - start)
            time.sleep(PAUSE)


def compare(x):
    """Return the median seconds of both ways of summing x."""
    across, inside = node_groups(PER_NODE)  # neighbours are on different hosts
    ways = {"flat": ring_all_reduce, "hierarchical": functools.partial(
        hierarchical_all_reduce, inside=inside, across=across)}
    calls = {name: functools.partial(way, x) for name, way in ways.items()}
    seconds = in_turns(calls, ROUNDS, warm_up=1)  # the first round makes connections
    return {name: statistics.median(times) for name, times in seconds.items()}


def answers(host):
    """Return whether the host is there: even a refused connection shows that it is."""
    try:
        return not socket.create_connection((host, DISCARD), timeout=ANSWER).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)


if __name__ == "__main__":
    rank_main(float(sys.argv[1]), sys.argv[2])
