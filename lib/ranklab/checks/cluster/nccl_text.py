"""The check of read_nccl_log: logs that it writes itself, as NCCL would, and captured ones.

A log is of a Run: which ranks on which host, which rings. NCCL's forms since 2.4, other text
between, all processes' lines mixed. Source of the forms: see ranklab.cluster.nccl_log.
"""

import random
from dataclasses import dataclass

from ranklab.checks.beside import expect
from ranklab.checks.exercise import Mistake
from ranklab.cluster.nccl_log import NcclLog, read_log

OLD, MIDDLE, NEW = "2.4.8", "2.7.8", "2.28.9"


@dataclass(frozen=True)
class Run:
    """What the ranks of a job print. Hosts have `local` ranks each; pids are the same on all."""

    hosts: tuple
    local: int
    rings: dict
    version: str = NEW
    network: str = "IB"
    inside: str = "P2P/CUMEM"
    gdr: str = "/GDRDMA"
    silent: tuple = ()
    warns: tuple = ()  # (rank, text)

    @property
    def ranks(self):
        return range(len(self.hosts) * self.local)

    def parent(self, channel, rank):
        """Trees: a chain in each node that turns with the channel, nodes in a chain."""
        first, place = rank - rank % self.local, (rank + channel) % self.local
        before = first + (place - 1 - channel) % self.local
        return before if place else rank - self.local if first else -1

    def via(self, channel, source, target):
        inside = source // self.local == target // self.local
        return self.inside if inside else f"NET/{self.network}/{channel}{self.gdr}"

    def right(self):
        """The NcclLog of this run."""
        spoken = [rank for rank in self.ranks if self.hosts[rank // self.local] not in self.silent]
        links = {link: self.via(*link) for link in self.links() if link[1] in spoken}
        for link in self.links():  # the network's, of which only the receiver is left
            if link[1] not in spoken and link[2] in spoken:
                links[link] = self.via(*link).removesuffix("/GDRDMA")
        hosts = {host: tuple(rank for rank in spoken if self.hosts[rank // self.local] == host)
                 for host in self.hosts if host not in self.silent}
        return NcclLog(
            "" if self.version == OLD else self.network, hosts, {} if self.silent else self.rings,
            {channel: {rank: self.parent(channel, rank) for rank in spoken}
             for channel in self.rings}, links, tuple(dict.fromkeys(self.warns)))

    def links(self):
        """(channel, source, target): those of rings first, then those of trees that are new."""
        rings = [(channel, source, target) for channel, ring in self.rings.items()
                 for source, target in zip(ring, ring[1:] + ring[:1])]
        up = [(channel, rank, self.parent(channel, rank)) for channel in self.rings
              for rank in self.ranks if self.parent(channel, rank) >= 0]
        return list(dict.fromkeys(rings + up + [(c, b, a) for c, a, b in up]))


def write(run, seed=0):
    """The text of a Run: the lines of its processes mixed, and other text between."""
    chance, own = random.Random(seed), {rank: list(_lines(run, rank)) for rank in run.ranks
                                        if run.hosts[rank // run.local] not in run.silent}
    text = [f"NCCL version {run.version}+cuda12.4", "Epoch 0:  12%|#3   | step 128, loss 3.41", ""]
    while own:
        rank = chance.choice(sorted(own))
        text.append(f"[default{rank % run.local}]:" * (seed % 2) + own[rank].pop(0))
        if not own[rank]:
            del own[rank]
    return "\n".join(text) + "\n"


def _lines(run, rank):
    host, gpu = run.hosts[rank // run.local], rank % run.local
    channels, up = list(run.rings), [run.parent(channel, rank) for channel in run.rings]
    below = [[each for each in run.ranks if run.parent(channel, each) == rank]
             for channel in channels]
    below = ["/".join(map(str, (each + [-1] * 3)[:3])) for each in below]

    def line(text, level="NCCL INFO"):
        return f"{host}:{4000 + gpu}:{4100 + gpu} [{gpu}] {level} {text}"

    def name(each, crosses):
        if run.version == OLD and crosses:
            return f"{each}"
        gpu = f"{each % run.local + 10:x}000" if run.version == MIDDLE else each % run.local
        return f"{each}[{gpu}]"

    if run.version != OLD:
        yield line("NET/IB : Using [RO]; OOB eth0:10.0.0.7<0>")
        yield line(f"Using network {run.network}")
    yield line(f"comm 0x7f{rank:04x}d0 rank {rank} {'nRanks' if run.version == NEW else 'nranks'} "
               f"{len(run.ranks)} cudaDev {gpu} - Init START")
    for channel, ring in run.rings.items() if rank == 0 else ():
        listed = f"Channel {channel:02d}/{len(channels):02d} :" + "".join(
            f" {each:{len(str(len(run.ranks) - 1))}d}" for each in ring)
        yield line(listed if len(listed) < 128 else listed[:124] + "...")
    sides = {OLD: "{1}->{0}->{2}", MIDDLE: "{2}->{0}->{1}|{1}->{0}->{3}"}
    side = sides.get(run.version, "{2}->{0}->{1}")
    yield line("Trees " + " ".join(
        f"[{channel}] " + side.format(rank, parent, down, "-1/-1/-1")
        for channel, parent, down in zip(channels, up, below)))
    if run.version == NEW:
        for channel, ring in run.rings.items():
            at = ring.index(rank)
            yield line(f"Ring {channel:02d} : {ring[at - 1]} -> {rank} -> "
                       f"{ring[(at + 1) % len(ring)]}")
    for link in run.links():
        channel, source, target = link
        word = {OLD: f"Ring {channel:02d}", MIDDLE: f"Channel {channel:02d}"}.get(
            run.version, f"Channel {channel:02d}/0")
        via, crosses = run.via(*link), source // run.local != target // run.local
        arrow = f"{word} : {name(source, crosses)} -> {name(target, crosses)}"
        if target == rank and crosses:
            yield line(f"{arrow} [receive] via {via.removesuffix('/GDRDMA')}")
        if source == rank:
            yield line(f"{arrow} {'[send] ' * crosses}via {via}")
    for who, text in run.warns:
        if who == rank:
            yield line(text, "misc/socket.cc:49 NCCL WARN")


def _ring(ranks, local, turn):
    """Node after node; in each the ranks begin elsewhere and may go down. It starts at rank 0."""
    step = 1 if turn % 2 == 0 else local - 1
    order = [first + (turn + step * i) % local for first in range(0, ranks, local)
             for i in range(local)]
    return tuple(order[order.index(0):] + order[:order.index(0)])


def turning(ranks, local, channels):
    """{channel: ring} of nodes with `local` ranks: a ring runs through a node, then leaves it."""
    return {channel: _ring(ranks, local, channel) for channel in range(channels)}


HOSTS = tuple(f"gpu-{i:02d}.cluster" for i in range(8))
LOST = "socketProgress: Connection closed by remote peer gpu-00.cluster<43200>"
RUNS = {
    "2 nodes of 4 GPUs, InfiniBand": Run(HOSTS[:2], 4, turning(8, 4, 4)),
    "3 nodes of 2, sockets, 2.7.8": Run(HOSTS[:3], 2, turning(6, 2, 2), MIDDLE, "Socket",
                                       "direct shared memory", ""),
    "2 nodes of 3, RoCE, 2.4.8": Run(HOSTS[:2], 3, turning(6, 3, 12), OLD, "IB", "P2P/IPC"),
    "2 nodes of 4, a plugin": Run(HOSTS[:2], 4, turning(8, 4, 2), network="AWS Libfabric"),
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


def check_read_nccl_log(read_nccl_log):
    for seed, (name, run) in enumerate(RUNS.items()):
        _is(name, read_nccl_log(write(run, seed)), run.right(), vars(NcclLog()))
        yield f"{name}: hosts, rings, trees, links"
    for name, known in CAPTURED.items():
        _is(f"logs/{name}.txt", read_nccl_log(read_log(name)), NcclLog(**known), known)
        yield f"logs/{name}.txt: {', '.join(known)}"
    _is("an empty log", read_nccl_log(""), NcclLog(), vars(NcclLog()))
    text = "[rank1]:[E1] [PG 0 Rank 1] last enqueued NCCL work: 7, last completed NCCL work: 6.\n"
    _is("torch's lines twice", read_nccl_log(text + text.replace("7", "9")),
        NcclLog(entered={1: 9}), {"entered"})
    yield "an empty log; torch's numbers, the last of a rank"


def _is(name, got, right, fields):
    expect(isinstance(got, NcclLog), f"{name}: {got!r:.60} is returned", "Return an NcclLog.")
    for field in fields:
        theirs, known = _plain(getattr(got, field)), _plain(getattr(right, field))
        if theirs != known:
            kind = isinstance(theirs, dict) and SLIPS.get(field)
            raise Mistake(*(kind(name, theirs, known) if kind else (
                f"{name}: {field} is {theirs!r:.150}, not {known!r:.150}", HINTS[field])))


def _plain(value):
    """Lists as tuples, and no channels without anything in them."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each not in ({}, (), [])}
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _rings(name, got, right):
    size = max(map(len, right.values()), default=0)
    for channel, ring in got.items():
        known, seen = right.get(channel), f"{name}: the ring of channel {channel} is {ring!r:.50}"
        if ring != known and size and len(ring) < size:
            return f"{seen}, {len(ring)} of {size} ranks", (
                'Match the whole line: a list that NCCL cut ends with "...", and the line of a '
                "link begins alike. Follow the links where the list is cut.")
        if known is None:
            return f"{seen}, and the log has none", ("A ring has all ranks, and comes back to 0. "
                                                     "What lines do not tell is left out.")
        if ring != known:
            return f"{seen}, not {known!r:.50}", (
                "It is turned round: data goes from left to right." if known[1:] == ring[:0:-1] else
                'The ring is in "Channel 00/16 : 0 1 2". Of the links only the first that a rank '
                "opens in a channel is the ring's; others are of trees.")
    lacks = sorted(right.keys() - got.keys())
    return f"{name}: rings of channels {sorted(got)}, and not of {lacks}", (
        'Each channel has a ring of its own. Where its list is cut by "..." follow the first link '
        "that each rank opens in it.")


def _trees(name, got, right):
    for channel, known in right.items():
        own = got.get(channel, {})
        for rank in known:
            where = f"{name}: in the tree of channel {channel}"
            if rank not in own:
                return f"{where} are ranks {sorted(own)}, not {rank}", (
                    "Each rank says its own part of the tree, and of each channel one: [0], [1].")
            if own[rank] != known[rank]:
                return f"{where} the parent of {rank} is {own[rank]!r}, not {known[rank]}", (
                    "Children stand with slashes, 1/3/-1, the parent alone; before 2.8 it may "
                    "stand first.")
    return f"{name}: trees of {sorted(got.keys() - right.keys())} as well", "These are no channels."


def _links(name, got, right):
    lacks, more = right.keys() - got.keys(), got.keys() - right.keys()
    if more:
        link = min(more, key=str)
        return f"{name}: the link {link} is there, and no line has it", (
            "It is turned round: an arrow goes from left to right in [receive] lines, too."
            if isinstance(link, tuple) and (*link[:1], *link[:0:-1]) in right
            else 'A key is (channel, from rank, to rank), of a line that has "via".')
    if lacks:
        kinds = sorted({right[link].partition("/")[0] for link in lacks})
        return f"{name}: {len(lacks)} of {len(right)} links are not there, as {min(lacks)}", (
            f"What is missing is {', '.join(kinds)}. Links of all ranks, channels and transports "
            "count; a network's also where only its receiver speaks.")
    link = min(key for key in right if got[key] != right[key])
    return f"{name}: the link {link} is by {got[link]!r}, not {right[link]!r}", (
        'The transport is all that follows "via", to the end of the line. Where sender and '
        "receiver differ it is the sender's.")


SLIPS = {"rings": _rings, "trees": _trees, "links": _links}
HINTS = dict.fromkeys(SLIPS, "It is a dict: help(NcclLog) says of what.") | {
    "network": '"NET/IB : Using" is there also where no device was found. "Using network" says '
               "what is used, and all that follows is its name.",
    "hosts": "Each process says its rank in a comm line, not rank 0 alone. Before the text stand "
             "its host, pid and thread; [0] is a GPU, not a rank, and pids repeat on other hosts.",
    "warnings": "Every NCCL WARN of the log in its order, (rank, text), the same one once. The "
                "rank is that of its process, by host and pid; [0] is a GPU. None where it is not "
                "known.",
    "entered": 'Of each rank the number after "last enqueued" (not "last completed"), the last '
               "time that torch says it."}
