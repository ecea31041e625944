"""The check of read_nccl_log: logs that it writes itself, as NCCL would, and captured ones.

A log is of a Run: which ranks on which host, which rings. All processes' lines are mixed, with
other text between. Source of the forms: see ranklab.cluster.nccl_log.
"""

import random
from dataclasses import dataclass

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.cluster.nccl_log import NcclLog, read_log


@dataclass(frozen=True)
class Run:
    """What the ranks of a job print. Hosts have `local` ranks each; pids are the same on all."""

    hosts: tuple
    local: int
    rings: dict
    network: str = "IB"
    inside: str = "P2P/CUMEM"
    gdr: str = "/GDRDMA"
    silent: tuple = ()  # hosts whose lines are lost
    warns: tuple = ()  # (rank, text)

    def host(self, rank):
        return self.hosts[rank // self.local]

    @property
    def speaking(self):
        return [rank for rank in sorted(self.rings[0]) if self.host(rank) not in self.silent]

    def parent(self, channel, rank):
        """Trees: each rank of a ring has up to two children."""
        ring = self.rings[channel]
        return ring[(at - 1) // 2] if (at := ring.index(rank)) else -1

    def via(self, channel, source, target, is_sender=True):
        inside = self.host(source) == self.host(target)
        return self.inside if inside else f"NET/{self.network}/{channel}{self.gdr * is_sender}"

    def links(self):
        """(channel, source, target): those of rings first, then those of trees that are new."""
        rings = [(channel, *link) for channel, ring in self.rings.items()
                 for link in zip(ring, ring[1:] + ring[:1])]
        up = [(channel, rank, self.parent(channel, rank)) for channel, ring in self.rings.items()
              for rank in ring[1:]]
        return list(dict.fromkeys(rings + up + [(c, b, a) for c, a, b in up]))

    def right(self):
        """The NcclLog of this run."""
        ranks = self.speaking
        hosts = {host: tuple(rank for rank in ranks if self.host(rank) == host)
                 for host in self.hosts if host not in self.silent}
        trees = {channel: {rank: self.parent(channel, rank) for rank in ranks}
                 for channel in self.rings}
        links = {link: self.via(*link, link[1] in ranks) for link in self.links()
                 if link[1] in ranks or link[2] in ranks}
        return NcclLog(self.network, hosts, {} if self.silent else self.rings, trees, links,
                       tuple(dict.fromkeys(self.warns)))


def write(run, seed=0):
    """The text of a Run: the lines of its processes mixed, other text between, warnings last."""
    chance, own = random.Random(seed), {rank: [*_lines(run, rank)] for rank in run.speaking}
    text = ["NCCL version 2.28.9+cuda12.4", "Epoch 0:  12%|#3   | step 128, loss 3.41", ""]
    while own:
        rank = chance.choice(sorted(own))
        text.append(f"[default{rank % run.local}]:" * (seed % 2) + own[rank].pop(0))
        if not own[rank]:
            del own[rank]
    text += [_line(run, rank, said, "misc/socket.cc:49 NCCL WARN") for rank, said in run.warns]
    return "\n".join(text) + "\n"


def _line(run, rank, text, level="NCCL INFO"):
    gpu = rank % run.local
    return f"{run.host(rank)}:{4000 + gpu}:{4100 + gpu} [{gpu}] {level} {text}"


def _lines(run, rank):
    ranks, texts = len(run.rings[0]), ["NET/IB : Using [RO]; OOB eth0:10.0.0.7<0>"]
    texts += [f"Using network {run.network}",
              f"comm 0x7f{rank:04x}d0 rank {rank} nRanks {ranks} cudaDev 0 - Init START"]
    trees = ""
    for channel, ring in run.rings.items():
        listed = f"Channel {channel:02d}/{len(run.rings):02d} :" + "".join(
            f" {each:{len(str(ranks - 1))}d}" for each in ring)
        texts += [listed if len(listed) < 128 else listed[:124] + "..."] * (rank == 0)
        below = [each for each in ring if run.parent(channel, each) == rank]
        children = "/".join(map(str, (below + [-1] * 3)[:3]))
        trees += f" [{channel}] {children}->{rank}->{run.parent(channel, rank)}"
    texts.append(f"Trees{trees}")
    for channel, source, target in run.links():
        crosses = run.host(source) != run.host(target)
        arrow = (f"Channel {channel:02d}/0 : {source}[{source % run.local}] -> "
                 f"{target}[{target % run.local}]")
        if target == rank and crosses:
            texts.append(f"{arrow} [receive] via {run.via(channel, source, target, False)}")
        if source == rank:
            texts.append(f"{arrow} {'[send] ' * crosses}via {run.via(channel, source, target)}")
    return [_line(run, rank, text) for text in texts]


def turning(ranks, local, channels):
    """{channel: ring} of nodes with `local` ranks: a ring runs through a node, then leaves it; in
    each channel it begins elsewhere, in odd ones it goes down.
    """
    found = {}
    for turn in range(channels):
        order = [first + (turn + (-1)**turn * i) % local
                 for first in range(0, ranks, local) for i in range(local)]
        found[turn] = tuple(order[order.index(0):] + order[:order.index(0)])
    return found


HOSTS = tuple(f"gpu-{i:02d}.cluster" for i in range(8))
LOST = "socketProgress: Connection closed by remote peer gpu-00.cluster<43200>"
RUNS = {
    "2 nodes of 4 GPUs, InfiniBand": Run(HOSTS[:2], 4, turning(8, 4, 4)),
    "3 nodes of 2, sockets": Run(HOSTS[:3], 2, turning(6, 2, 12), "Socket", "SHM/direct/direct",
                                 ""),
    "2 nodes of 4, a plugin": Run(HOSTS[:2], 4, turning(8, 4, 2), "AWS Libfabric"),
    "8 nodes of 8: ring lists are cut": Run(HOSTS, 8, turning(64, 8, 3), inside="P2P/CUMEM/read"),
    "only the second node's lines": Run(HOSTS[:2], 4, turning(8, 4, 2), silent=HOSTS[:1]),
    "three warnings": Run(HOSTS[:2], 2, turning(4, 2, 1), warns=(
        (3, LOST), (3, LOST), (2, "Cuda failure 'out of memory'"), (3, "Net: other"))),
}
CAPTURED = {  # name: what is known of it
    "four_hosts": dict(network="Socket", rings={0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}, warnings=()),
    "forty_hosts": dict(rings={0: tuple(range(40)), 1: tuple(range(40))}, warnings=()),
    "waiting_rank": dict(network="Socket", entered={0: 4, 1: 3, 2: 4}, warnings=()),
    "killed_rank": dict(entered={0: 4, 1: 4, 3: 4}, warnings=tuple(
        (rank, f"socketProgress: Connection closed by remote peer localhost<{port}>")
        for rank, port in ((3, 40194), (3, 43200), (1, 60737)))),
    "no_infiniband": dict(network="", hosts={}, warnings=(
        (None, "Failed to initialize any NET plugin"),)),
    "same_gpu": dict(hosts={"vm": (0, 1)}, rings={}, links={}),
}
HINTS = {  # of each field of NcclLog
    "network": '"Using network" says what is used: all that follows is its name. "NET/IB : Using" '
               "is there also where no device was found.",
    "hosts": "Ranks in order, of each process that says its own in a comm line. Before the text "
             "stand its host, pid and thread; [0] is a GPU, and pids repeat on other hosts.",
    "rings": "A ring has all ranks, from 0 on, left to right. Where the list is cut take the first "
             "link that each rank opens in the channel; later ones are of trees.",
    "trees": "Each rank says its own part, of each channel one: [0], [1]. Children stand on the "
             "left, 1/3/-1, the parent on the right.",
    "links": 'The key is (channel, from, to), the transport all that follows "via". Of a network '
             "the sender's word counts; where only the receiver speaks, the receiver's.",
    "warnings": "Every NCCL WARN in the log's order, (rank, text), the same one once. The rank is "
                "that of its process, by host and pid; None where it is not known.",
    "entered": 'Of each rank the number after "last enqueued" (not "last completed"), the last '
               "time that torch says it."}


def check_read_nccl_log(read_nccl_log):
    for seed, (name, run) in enumerate(RUNS.items()):
        _is(name, read_nccl_log(write(run, seed)), run.right(), HINTS)
        yield f"{name}: hosts, rings, trees, links"
    for name, known in CAPTURED.items():
        _is(f"logs/{name}.txt", read_nccl_log(read_log(name)), NcclLog(**known), known)
        yield f"logs/{name}.txt: {', '.join(known)}"
    _is("an empty log", read_nccl_log(""), NcclLog(), HINTS)
    text = "[rank1]:[E1] [PG 0 Rank 1] last enqueued NCCL work: 7, last completed NCCL work: 6.\n"
    _is("torch's line twice", read_nccl_log(text + text.replace("7", "9")),
        NcclLog(entered={1: 9}), ["entered"])
    yield "an empty log; torch's numbers, the last of a rank"


def _is(name, got, right, fields):
    expect(isinstance(got, NcclLog), f"{name}: {got!r:.60} is returned", "Return an NcclLog.")
    for field in fields:
        theirs, known = _plain(getattr(got, field)), _plain(getattr(right, field))
        if theirs == known:
            continue
        if isinstance(known, dict) and isinstance(theirs, dict):  # the first key that differs
            keys = [*(known if field == "trees" else theirs), *known]
            key = next(key for key in keys if theirs.get(key) != known.get(key))
            field_key, theirs, known = f"{field}[{key!r}]", theirs.get(key), known.get(key)
        else:
            key, field_key = None, field
        raise Mistake(f"{name}: {field_key} is {theirs!r:.150}, not {known!r:.150}",
                      _slip(field, key, theirs, known, right) or HINTS[field])


def _slip(field, key, theirs, known, right):
    """A hint where a value proves what went wrong; "" else."""
    if field == "rings" and isinstance(theirs, tuple) and known:
        if len(theirs) < len(known) and theirs == known[:len(theirs)]:
            return ('It is a part of the ring: a list that NCCL cut ends with "...". Match the '
                    "whole line, and follow the links where it is cut.")
        return "It is turned round." * (theirs[1:] == known[:0:-1])
    if field == "links" and isinstance(key, tuple) and (*key[:1], *key[:0:-1]) in right.links:
        return ("It is turned round: an arrow goes from left to right in [receive] lines, too."
                if key not in right.links else "")
    return ""


def _plain(value):
    """Lists as tuples, and no channels without anything in them."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each not in ({}, (), [])}
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
