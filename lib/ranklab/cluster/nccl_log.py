"""read_nccl_log: what NCCL did, from the lines that ranks print with NCCL_DEBUG=INFO (lab 15).

The formats are from NCCL's own source, v2.8.3 to v2.30.7: src/debug.cc (the prefix), src/init.cc
(comm, Trees), src/graph/rings.cc (Channel lists), src/transport/*.cc (via).

logs/ holds captured logs, and one written in their format: the first line of each says which.
"""

import re
from dataclasses import dataclass, field
from importlib.resources import files

LOGS = files(__package__) / "logs"
PREFIX = re.compile(r"([\w.-]+):(\d+):\d+ \[\d+\] (?:[^\[]*? )?NCCL (INFO|WARN) (.*)")

# The lines that matter; the last one is torch's.
COMM = r".*\bcomm \w+ rank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+).*"
RING = r"Channel (?P<channel>\d+)(?:/\d+)? :(?P<order>[\d ]+)"
LINK = (r"Channel (?P<channel>\d+)(?:/\d+)? : (?P<source>\d+)\[\w+\] -> (?P<target>\d+)\[\w+\] "
        r"(?:\[(?P<side>send|receive)\] )?via (?P<via>.*)")
TREE = r"\[(\d+)\] [-\d/]+->(\d+)->(-?\d+)"  # channel, rank, its parent
ENQUEUED = r"Rank (\d+)\].*?[Ll]ast enqueued (?:NCCL )?work: (\d+)"  # rank, number

# A communicator's pointer, which names it in its process; and a process group other than the
# default one, whose ranks and work numbers are its own: the rank among all, and the number and the
# name of the group.
POINTER = r"\bcomm (\w+) rank"
GROUP = r"\[rank(\d+)\].*\[PG ID [1-9]\d* PG GUID (\w+)\(([^)]*)\) "


@dataclass(frozen=True)
class Line:
    """A line that NCCL printed: its process, and the text after NCCL INFO or NCCL WARN."""

    host: str
    pid: int
    warns: bool
    text: str


@dataclass(frozen=True)
class NcclLog:
    """The contents of a log about one communicator, which numbers the ranks. If there are
    several, it is the first of the largest: usually all ranks.

    network   what NCCL uses between nodes: "IB", "Socket" or a plugin's name
    hosts     {host: (rank, ...)}, ranks in order
    rings     {channel: (0, next rank, ...)}
    trees     {channel: {rank: its parent, -1 for the root}}
    links     {(channel, from rank, to rank): transport}: "P2P/CUMEM", "NET/IB/0/GDRDMA" ...
    warnings  ((rank or None, text), ...)
    entered   {rank: number of the last collective that it has enqueued, as torch counts}
    groups    {(number, name) of another process group: its own `entered`, by global ranks}
    """

    network: str = ""
    hosts: dict = field(default_factory=dict)
    rings: dict = field(default_factory=dict)
    trees: dict = field(default_factory=dict)
    links: dict = field(default_factory=dict)
    warnings: tuple = ()
    entered: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)


def read_log(name):
    """Return the text of logs/<name>.txt."""
    return (LOGS / f"{name}.txt").read_text()


def nccl_lines(text):
    """Return a Line for each line that NCCL itself printed, in order, whatever text precedes it.

    Lines of several ranks are mixed, but the lines of one process keep their order.
    """
    matches = (PREFIX.search(line) for line in text.splitlines())
    return [Line(match[1], int(match[2]), match[3] == "WARN", match[4].strip())
            for match in matches if match]


def read_nccl_log(text):
    """Read `text` into an NcclLog; what the log does not contain stays empty.

    `text` has the lines of all ranks, or of some, among other text. The patterns of the lines are
    given.

    network   the name after the last "Using network"
    hosts     a process logs its rank: "comm 0x.. rank 3 nranks 8", "nRanks" in newer lines
    rings     rank 0 prints "Channel 00/16 : 0 1 2 ...". NCCL cuts the list after 127 characters
              ("..."). If a channel has no whole list, start at rank 0 and follow each rank's first
              link in the channel, without [receive] lines. It is a ring only if this path visits
              all ranks once and comes back
    trees     "Trees [0] 1/-1/-1->0->-1 [1] ...": children -> rank -> parent, for each channel
    links     "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0": from 0 to 8 in channel 0. A link
              over a network has two lines, [receive] and [send]; prefer what [send] says
    warnings  (rank of its process, text) of each NCCL WARN, once, in the log's order
    entered   the number in torch's last "Rank 3] ... last enqueued work: 12" for each rank; the
              wording differs between versions
    groups    a job's log has more than one communicator: of_all_ranks(text), which is given,
              returns (the lines of the one with the most ranks, groups)
    """
    text, groups = of_all_ranks(text)
    lines, ranks_of, rings, trees, links, opened = nccl_lines(text), {}, {}, {}, {}, {}
    for line in lines:
        if match := re.search(COMM, line.text):
            ranks_of[line.host, line.pid], ranks = int(match[1]), int(match[2])
        elif match := re.fullmatch(RING, line.text):
            rings[int(match[1])] = tuple(map(int, match[2].split()))
        elif match := re.match(LINK, line.text):
            link = int(match[1]), int(match[2]), int(match[3])
            if match["side"] == "receive":
                links.setdefault(link, match["via"])
            else:
                links[link] = match["via"]
                opened.setdefault(link[:2], link[2])
        elif line.text.startswith("Trees "):
            for channel, rank, parent in re.findall(TREE, line.text):
                trees.setdefault(int(channel), {})[int(rank)] = int(parent)
    for channel in {channel for channel, _ in opened} - rings.keys():
        ring = [0]
        while (after := opened.get((channel, ring[-1]))) not in (None, *ring):
            ring.append(after)
        if ranks_of and after == 0 and len(ring) == ranks:
            rings[channel] = tuple(ring)
    hosts = {}
    for (host, _), rank in ranks_of.items():
        hosts[host] = tuple(sorted([*hosts.get(host, ()), rank]))
    warnings = [(ranks_of.get((line.host, line.pid)), line.text) for line in lines if line.warns]
    *_, network = re.findall(r"Using network (.*\S)", text) or [""]
    entered = {int(rank): int(work) for rank, work in re.findall(ENQUEUED, text)}
    warnings = tuple(dict.fromkeys(warnings))
    return NcclLog(network, hosts, rings, trees, links, warnings, entered, groups)


def of_all_ranks(text):
    """Remove the lines of smaller communicators and groups from a log.

    A line belongs to the communicator that its process named last; if that line only says that
    the communicator is complete, as before NCCL 2.18.3, so do the lines before it. (A commId would
    be the same in all processes, but communicators made by a split have none.)
    Returns: (the other lines, the collectives that the groups have entered).
    """
    entries, pending, current, sizes, groups = [], {}, {}, {}, {}
    for line in text.splitlines():
        if group := re.search(GROUP, line):
            if work := re.search(ENQUEUED, line):
                groups.setdefault(group.group(2, 3), {})[int(group[1])] = int(work[2])
            continue
        match = PREFIX.search(line)
        process = match and match.group(1, 2)
        entry = [current.get(process), line]
        entries.append(entry)
        pending.setdefault(process, []).append(entry)
        if match and (comm := re.search(COMM, match[4])):
            name = process, re.search(POINTER, match[4])[1]
            if name != current.get(process) and "Init COMPLETE" in line:
                for earlier in pending[process]:
                    earlier[0] = name
            entry[0] = current[process] = name
            sizes[name], pending[process] = int(comm["ranks"]), []
    firsts, most = {}, max(sizes.values(), default=0)
    for name, ranks in sizes.items():
        if ranks == most:
            firsts.setdefault(name[0], name)
    return "\n".join(line for name, line in entries
                     if name in (None, *firsts.values()) or "NCCL WARN" in line), groups


# --- what it means --------------------------------------------------------------------------------

def suspects(log):
    """List the problems that the log suggests, a sentence each; [] if there are none."""
    sentences, between = [], {via for via in log.links.values() if via.startswith("NET/")}
    ranks = {rank for of_host in log.hosts.values() for rank in of_host}
    tcp = {via for via in between if re.match("NET/(Fast)?Socket", via)}
    if between and tcp == between:
        sentences.append("between nodes all data goes over TCP sockets")
    if slow := {via for via in between - tcp if "GDRDMA" not in via}:
        sentences.append(f"no GPUDirect RDMA on {', '.join(sorted(slow))}: "
                         "data goes through the host")
    if any(via.startswith("SHM") for via in log.links.values()):
        sentences.append("GPUs of a node do not use P2P: data goes through the host's memory (SHM)")
    if log.entered and len(behind := _last_ranks(log.entered)) < len(log.entered):
        sentences.append(f"ranks {behind} have not enqueued what others wait for")
    if log.entered and (silent := sorted(ranks - log.entered.keys())):
        sentences.append(f"torch says nothing of ranks {silent}: they may be dead")
    for (_, name), entered in log.groups.items():
        if len(behind := _last_ranks(entered)) < len(entered):
            sentences.append(f"ranks {behind} have not enqueued what others of {name} wait for")
    for text in dict.fromkeys(text for _, text in log.warnings):
        names = sorted({"?" if rank is None else str(rank) for rank, warning in log.warnings
                        if warning == text})
        sentences.append(f"rank {', '.join(names)}: {text}")
    return sentences


def _last_ranks(entered):
    return sorted(rank for rank, work in entered.items() if work == min(entered.values()))
