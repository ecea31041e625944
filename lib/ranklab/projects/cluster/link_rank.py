"""What runs on each of the four ranks of links.py: collectives, until one of them fails."""

import functools
import json
import os
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ranklab.cluster.hosts import CONTROLLER
from ranklab.collectives import hierarchical_all_reduce, node_groups, ring_all_reduce

NODES, PER_NODE = 2, 2
RANKS = NODES * PER_NODE
PAUSE = 0.05  # seconds, in the place of a step's computation
ANSWER = 2  # seconds that a host has for an answer
DISCARD = 9  # a port at which nobody listens


def main(limit, nbytes, rounds, folder):
    """Says what it sees, until a collective fails."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
    rank = dist.get_rank()
    hosts = [None] * RANKS
    dist.all_gather_object(hosts, socket.gethostname())
    x = torch.ones(nbytes // 4)
    with open(folder / f"said.{rank}", "w", buffering=1) as file:
        say(file, **compare(x, rounds))
        step, x = 0, x[:1024]
        while True:
            start = time.perf_counter()
            try:
                dist.all_reduce(x)
            except RuntimeError as error:
                seconds = time.perf_counter() - start
                others = sorted({CONTROLLER, *hosts} - {hosts[rank]})
                say(file, rank=rank, host=hosts[rank], seconds=seconds, error=str(error),
                    silent=[host for host in others if not answers(host)])
                os._exit(1)  # to leave the group would wait for the others
            say(file, step=step, seconds=time.perf_counter() - start)
            step += 1
            time.sleep(PAUSE)


def say(file, **what):
    file.write(json.dumps(what) + "\n")


def compare(x, rounds):
    """Median seconds of both ways to sum x."""
    across, inside = node_groups(PER_NODE)  # neighbours are on different hosts
    ways = {"flat": ring_all_reduce,
            "hierarchical": functools.partial(hierarchical_all_reduce, inside=inside,
                                              across=across)}
    seconds = {name: [] for name in ways}
    for _ in range(1 + rounds):  # the first one makes connections
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way(x)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def answers(host):
    """Whether there is a host: one that refuses a connection is there."""
    try:
        socket.create_connection((host, DISCARD), timeout=ANSWER).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
