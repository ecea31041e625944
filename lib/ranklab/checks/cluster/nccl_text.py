"""read_nccl_log: logs written here as NCCL would write them, and captured ones.

The lines of all processes are mixed, with other text between them; their formats are listed in
ranklab.cluster.nccl_log.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import NamedTuple

from ranklab.checks.prover import Proof, Slip, Stage
from ranklab.cluster.nccl_log import NcclLog, read_log, read_nccl_log


def written(hosts, local, rings, network="IB", inside="P2P/CUMEM", gdr="/GDRDMA", silent=(),
            warns=(), seed=0):  # fmt: skip
    """Write the output of a job's ranks; return (text, its NcclLog).

    local: ranks of a host; pids are the same on all hosts
    silent: hosts whose lines are lost
    warns: ((rank, text), ...), which come last
    """
    host = {rank: hosts[rank // local] for rank in sorted(rings[0])}
    own = {rank: [f"Using network {network}", f"comm 0x7f{rank:04x}d0 rank {rank} nRanks "
                  f"{len(host)} cudaDev {rank % local} - Init START"]
           for rank in host if host[rank] not in silent}
    trees, links = {}, {}
    for channel, ring in rings.items():
        line = f"Channel {channel:02d}/{len(rings):02d} :" + "".join(
            f" {each:{len(str(len(host) - 1))}d}" for each in ring)
        if 0 in own:
            own[0].append(line if len(line) < 128 else line[:124] + "...")
        parent = {rank: ring[(at - 1) // 2] if at else -1 for at, rank in enumerate(ring)}
        trees[channel] = {rank: parent[rank] for rank in own}
        up = [(rank, parent[rank]) for rank in ring[1:]]
        for link in dict.fromkeys([*zip(ring, ring[1:] + ring[:1]), *up,
                                   *((b, a) for a, b in up)]):  # those of the ring come first
            _opened(own, links, (channel, *link), host, local, (network, inside, gdr))
    for rank in own:
        own[rank].append("Trees" + "".join(
            f" [{channel}] {_children(rings[channel], rank)}->{rank}->{of[rank]}"
            for channel, of in trees.items()))
    ranks = {name: tuple(rank for rank in own if host[rank] == name) for name in hosts}
    log = NcclLog(network, ranks, {} if silent else rings, trees, links,
                  tuple(dict.fromkeys(warns)))
    return _mixed(own, host, local, warns, random.Random(seed)), log


def _children(ring, rank):
    below = ring[1:][2 * ring.index(rank):][:2]
    return "/".join(map(str, (*below, -1, -1, -1)[:3]))


def _opened(own, links, link, host, local, vias):
    """Return the lines about a link: both ends print it, each with its own card, and the sender
    prints more; a lost host prints nothing.
    """
    (channel, source, target), (network, inside, gdr) = link, vias
    crosses = host[source] != host[target]
    arrow = (f"Channel {channel:02d}/0 : {source}[{source % local}] -> "
             f"{target}[{target % local}] ")
    if target in own and crosses:
        links[link] = f"NET/{network}/{channel + 1}"
        own[target].append(f"{arrow}[receive] via {links[link]}")
    if source in own:
        links[link] = f"NET/{network}/{channel}{gdr}" if crosses else inside
        own[source].append(f"{arrow}{'[send] ' * crosses}via {links[link]}")


def _mixed(own, host, local, warns, chance):
    def line(rank, text, level="NCCL INFO"):
        gpu = rank % local
        return f"{host[rank]}:{4000 + gpu}:{4100 + gpu} [{gpu}] {level} {text}"

    turns = [rank for rank, texts in own.items() for _ in texts]
    chance.shuffle(turns)
    texts, before = {rank: iter(each) for rank, each in own.items()}, chance.choice(("", "[rank]:"))
    return "\n".join(["NCCL version 2.28.9+cuda12.4", "Epoch 0:  12%|#3   | loss 3.41", "",
                      *(line(rank, "NET/IB : Using [RO]; OOB eth0:10.0.0.7<0>") for rank in own),
                      *(before + line(rank, next(texts[rank])) for rank in turns),
                      *(line(*each, "misc/socket.cc:49 NCCL WARN") for each in warns), ""])


def turning(ranks, local, channels):
    """Make {channel: ring} of nodes with `local` ranks.

    A ring runs through a node, then leaves it. Each channel starts at a different rank; in odd
    channels ranks descend.
    """
    rings = {}
    for turn in range(channels):
        order = [first + (turn + (-1)**turn * i) % local
                 for first in range(0, ranks, local) for i in range(local)]
        rings[turn] = tuple(order[order.index(0):] + order[:order.index(0)])
    return rings


HOSTS = tuple(f"gpu-{i:02d}.cluster" for i in range(8))
LOST = "socketProgress: Connection closed by remote peer gpu-00.cluster<43200>"
RUNS = {
    "2 nodes of 4 GPUs, InfiniBand": (HOSTS[:2], 4, turning(8, 4, 4)),
    "3 nodes of 2, sockets": (HOSTS[:3], 2, turning(6, 2, 12), "Socket", "SHM/direct/direct", ""),
    "2 nodes of 4, a plugin": (HOSTS[:2], 4, turning(8, 4, 2), "AWS Libfabric"),
    "8 nodes of 8: ring lists are cut": (HOSTS, 8, turning(64, 8, 3), "IB", "P2P/CUMEM/read"),
    "only the second node's lines": (HOSTS[:2], 4, turning(8, 4, 2), "IB", "P2P/CUMEM", "",
                                     HOSTS[:1]),
    "three warnings": (HOSTS[:2], 2, turning(4, 2, 1), "IB", "P2P/CUMEM", "", (), (
        (3, LOST), (3, LOST), (2, "Cuda failure 'out of memory'"), (3, "Net: other"),
        (1, "Net: other"))),
}
ODD = [(1, "WARN early"), *((rank, f"INFO comm 0x1 rank {rank} nRanks 3") for rank in range(3)),
       *((a, f"INFO Channel 0{channel}/0 : {a}[{a}] -> {b}[{b}] via SHM") for channel, a, b in (
           (0, 0, 1), (0, 1, 2), (1, 0, 1), (1, 1, 0), (1, 2, 0))),  # neither is a ring
       *((0, f"INFO Using network {name}") for name in ("Socket", "IB"))]
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


class Case(NamedTuple):
    """A log, and its right reading.

    make    () -> (text, its NcclLog)
    fields  of NcclLog that are compared
    """

    name: str
    make: Callable
    fields: tuple = tuple(field.name for field in fields(NcclLog))

    def __str__(self):
        return self.name


@functools.cache
def _run(name):
    return written(*RUNS[name], seed=[*RUNS].index(name))


def _captured(name):
    return read_log(name), NcclLog(**CAPTURED[name])


def _odd():
    lines = [f"gpu-00:1{rank}:2{rank} [{rank}] NCCL {line}" for rank, line in ODD]
    return "\n".join(lines), NcclLog("IB", rings={}, warnings=((1, "early"),))


def _torchs_line_twice():
    line = "[rank1]:[E1] [PG 0 Rank 1] last enqueued NCCL work: {}, last completed NCCL work: 6.\n"
    return line.format(7) + line.format(9), NcclLog(entered={1: 9})


WRITTEN = tuple(Case(name, partial(_run, name)) for name in RUNS)
FROM_FILES = tuple(Case(f"logs/{name}.txt", partial(_captured, name), (*names,))
                   for name, names in CAPTURED.items())
OTHERS = (Case("paths that are not rings", _odd, ("network", "rings", "warnings")),
          Case("an empty log", lambda: ("", NcclLog())),
          Case("torch's line twice", _torchs_line_twice, ("entered",)))


def _see(fn, case):
    text, reference = case.make()
    log = fn(text)
    yield {"what is returned": type(log).__name__}
    looked_at = {}
    for field in case.fields:
        value, right = _plain(getattr(log, field)), _plain(getattr(reference, field))
        if not isinstance(right, dict) or not isinstance(value, dict):
            looked_at[field] = value
            continue
        looked_at |= {f"{field}[{key}]": value.get(key) for key in right}
        if field == "rings":
            looked_at |= {f"the ranks in rings[{key}]": len(value.get(key, ())) for key in right}
        looked_at[f"{field} that are not in the log"] = [
            each for each in value.items() if each[0] not in right][:4]
    yield looked_at


def _plain(value):
    """Return lists as tuples, keys in order, without empty channels."""
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value, key=str)
                if value[key] not in ({}, (), [])}
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def as_written(text):
    """Return the NcclLog from which the text was written."""
    logs = (case.make() for case in (*WRITTEN, *FROM_FILES, *OTHERS))
    return next(log for each, log in logs if each == text)


RANK_OF = "ranks_of[line.host, line.pid], ranks = int(match[1]), int(match[2])"
RING_OF = "re.fullmatch(RING, line.text)"
IS_RING = "if ranks_of and after == 0 and len(ring) == ranks:"
NETWORK = '"Using network (.*\\S)"'
COMPLETED = r"'Rank (\d+)\].*?[Ll]ast completed (?:NCCL )?work: (\d+)'"
LINK_OF = "link = int(match[1]), int(match[2]), int(match[3])"
RECEIVED, SENT = 'links.setdefault(link, match["via"])', 'links[link] = match["via"]'
BOTH = f"{RECEIVED}\n            else:\n                {SENT}"
OPENED = "opened.setdefault(link[:2], link[2])"
TREE_OF = "trees.setdefault(int(channel), {})[int(rank)] = int(parent)"
WARNING = "(ranks_of.get((line.host, line.pid)), line.text)"
WARNINGS = f"    warnings = [{WARNING} for line in lines if line.warns]\n"
LOOP, WARNS = "    for line in lines:\n", "tuple(dict.fromkeys(warnings))"
READ_LOG = Proof(
    read_nccl_log,
    Stage("logs of 4 to 64 ranks: hosts, rings, trees, links, warnings", _see, WRITTEN,
          oracle=as_written),
    Stage(f"logs that were captured: {', '.join(CAPTURED)}", _see, FROM_FILES, oracle=as_written),
    Stage("an empty log; paths that are not rings; torch's numbers, the last of a rank", _see,
          OTHERS, oracle=as_written),
    mistakes=(
        Slip('"Using network" says what is used. "NET/IB : Using" is printed even if no device was '
             "found.", (NETWORK, '"NET/(\\w+) : Using"')),
        Slip('The name is everything after "Using network", and may contain spaces.',
             (NETWORK, '"Using network (\\w+)"')),
        Slip('The last "Using network" counts, not the first.',
             ("*_, network =", "network, *_ =")),
        Slip("Put the ranks of a host in order: the lines come in any order.",
             ("tuple(sorted([*hosts.get(host, ()), rank]))", "(*hosts.get(host, ()), rank)")),
        Slip("List all ranks of a host, not just one.",
             ("tuple(sorted([*hosts.get(host, ()), rank]))", "(rank,)")),
        Slip("The same pid can occur on several hosts: identify a process by its host and its pid.",
             ("ranks_of[line.host, line.pid], ranks", "ranks_of[0, line.pid], ranks",
              WARNING, "(ranks_of.get((0, line.pid)), line.text)",
              "(host, _), rank in ranks_of", "(host, _), rank in {(line.host, line.pid): ranks_of"
              "[0, line.pid] for line in lines if (0, line.pid) in ranks_of}"),
             (RANK_OF, "ranks_of[line.pid], ranks = (line.host, int(match[1])), int(match[2])",
              WARNING, "(ranks_of.get(line.pid, (0, None))[1], line.text)",
              "(host, _), rank in ranks_of.items()", "host, rank in ranks_of.values()")),
        Slip('This is only part of the ring: a list that NCCL has cut ends with "...". Match the '
             "whole line, and follow the links if it is cut.",
             (RING_OF, 're.match(RING, line.text) if "via" not in line.text else None')),
        Slip("If NCCL cut the list, follow the first link that each rank opens in the channel. "
             "Ignore [receive] lines, and later links, which belong to trees.",
             ("in {channel for channel, _ in opened} - rings.keys():", "in ():"),
             (OPENED, "opened[link[:2]] = link[2]"),
             (RECEIVED, f"{RECEIVED}\n                {OPENED}")),
        Slip("It is a ring only if the path visits every rank once and comes back to 0.",
             (IS_RING, "if ranks_of:"), (IS_RING, "if ranks_of and after == 0:"),
             (IS_RING, "if ranks_of and len(ring) == ranks:")),
        Slip("A ring lists each rank once: don't repeat 0 at the end.",
             ("= tuple(ring)", "= (*ring, 0)")),
        Slip("Your ring is reversed: a ring goes from left to right, 0 first.",
             ("tuple(map(int, match[2].split()))",
              "(lambda ring: (*ring[:1], *ring[:0:-1]))([*map(int, match[2].split())])")),
        Slip("Ranks are numbers: int(...).",
             ("tuple(map(int, match[2].split()))", "tuple(match[2].split())"),
             ("ranks_of[line.host, line.pid], ranks = int(match[1])",
              "ranks_of[line.host, line.pid], ranks = match[1]"),
             (TREE_OF, TREE_OF.replace("int(rank)", "rank")),
             (TREE_OF, TREE_OF.replace("int(parent)", "parent")),
             ("{int(rank): int(work)", "{rank: int(work)")),
        Slip("Channels are numbers: int(...).", ("rings[int(match[1])]", "rings[match[1]]"),
             (TREE_OF, TREE_OF.replace("int(channel)", "channel"))),
        Slip("The children are on the left, as in 1/3/-1, and the parent is on the right.",
             (TREE_OF, TREE_OF.replace("rank", "?").replace("parent", "rank").replace(
                 "?", "parent")),
             ("re.findall(TREE, line.text)",
              "[(a, c, b) for a, b, c in re.findall(r'\\[(\\d+)\\] (-?\\d+)[-\\d/]*->(\\d+)', "
              "line.text)]")),
        Slip("The root is in the tree as well: its parent is -1.",
             (TREE_OF, f"if int(parent) >= 0:\n                    {TREE_OF}")),
        Slip("A rank prints its part of all channels in one line: [0] .. [1] ..",
             ("re.findall(TREE, line.text):", "re.findall(TREE, line.text)[:1]:")),
        Slip("Each rank prints its own part of a tree: combine all parts.",
             (TREE_OF, "trees[int(channel)] = {int(rank): int(parent)}")),
        Slip("The arrow points from left to right in all lines: the key is (channel, from, to).",
             (LINK_OF, "link = int(match[1]), int(match[3]), int(match[2])")),
        Slip("The arrow points from left to right in [receive] lines as well.",
             (LINK_OF, "link = int(match[1]), *((int(match[2]), int(match[3])) if match['side'] != "
              "'receive' else (int(match[3]), int(match[2])))")),
        Slip("For a network link the sender's line counts, even if the receiver's came first.",
             (SENT, 'links.setdefault(link, match["via"])')),
        Slip("For a network link the sender's line counts, even if the receiver's comes last.",
             (RECEIVED, SENT)),
        Slip("For a network link the sender's line counts: [send], not [receive].",
             (BOTH, f"{SENT}\n            else:\n                {RECEIVED}"),
             (SENT, 'links.update({} if match["side"] else {link: match["via"]})')),
        Slip("If only the receiver printed a link, use its line.", (RECEIVED, "pass")),
        Slip('The transport is everything after "via".',
             (SENT, 'links[link] = match["via"].rpartition("/")[0]'),
             (SENT, 'links[link] = match["via"].split("/")[0]'),
             (SENT, 'links[link] = match["via"].removesuffix("/GDRDMA")'),
             (SENT, 'links[link] = match["via"].split()[0]')),
        Slip("Return every NCCL WARN in the log, not just the first.",
             (WARNS, "tuple(warnings[:1])")),
        Slip("The same warning from the same rank counts once.", (WARNS, "tuple(warnings)")),
        Slip("Two ranks may print the same warning: list each (rank, text) once, not each text.",
             (WARNS, "tuple({text: (rank, text) for rank, text in warnings}.values())")),
        Slip("Keep warnings in the log's order: neither sort them nor put them into a set.",
             (WARNS, "tuple(sorted({*warnings}, key=str))")),
        Slip("A warning counts even if the rank of its process is not known: its rank is None.",
             ("if line.warns]", "if line.warns and (line.host, line.pid) in ranks_of]")),
        Slip("A process may warn before it prints its rank: look up ranks after reading all lines.",
             (WARNINGS, "", LOOP, f"    warnings = []\n{LOOP}        if line.warns:\n"
              f"            warnings.append({WARNING})\n")),
        Slip("torch may print a rank's line more than once: take the last number.",
             ("re.findall(ENQUEUED, text)}", "re.findall(ENQUEUED, text)[::-1]}")),
        Slip('Take the number after "last enqueued", not the one after "last completed".',
             ("re.findall(ENQUEUED, text)", f"re.findall({COMPLETED}, text)")),
        Slip('A log may have no "Using network": the network is then "".', (' or [""]', "")),
    ), hints=(
        "Each rank prints its own part. Go through all lines, and combine what belongs to the same "
        "channel.",
        "Keep a dict of (host, pid) -> rank, one of (channel, from, to) -> transport, and one of "
        "(channel, rank) -> the first rank it opens a link to. A ring list that is cut off does "
        "not fully match RING.",
        "ring = [0]; while (after := opened.get((channel, ring[-1]))) not in (None, *ring): "
        "ring.append(after)"))
